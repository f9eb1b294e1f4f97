"""`penstock reload`: have a running node read its configuration again."""

from __future__ import annotations

from penstock.cli.node_api import NodeOptions, connects_to_node
from penstock.cli.options import Commands, Json
from penstock.cli.output import escape, note, print_json

__all__ = ["app"]

app = Commands()


@app.add("penstock reload", "penstock reload --data-dir /var/lib/penstock/penstock-data")
@connects_to_node
def reload(as_json: Json = False, *, node: NodeOptions) -> None:
    """Have a running node read users, tokens, policies, certificates and mqtt.limits again, as SIGHUP does.

    Returns when the node uses them. If a file is invalid, nothing changes, and the command fails with the reason. Other
    changed settings need a restart and are named. Clients whose access was withdrawn are disconnected, all others stay
    connected. In a cluster the active node reloads; send SIGHUP to a standby.
    """
    result = node.connect().post("reload")
    if as_json:
        print_json(result)
        return
    count = result["disconnected"]
    note("reloaded" + (f", {count} client{'s' * (count != 1)} disconnected" if count else ""))
    for warning in result["warnings"]:
        note(f"warning: {escape(warning)}")
