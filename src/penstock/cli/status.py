"""`penstock status`: the state of a node on one screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from penstock.cli.node_api import NodeOptions, connects_to_node
from penstock.cli.options import Commands, Json, Watch, repeat
from penstock.cli.output import (
    Cell,
    escape,
    print_json,
    print_reason,
    print_table,
    shown_bytes,
    shown_duration,
    shown_rate,
    use_colour,
)

if TYPE_CHECKING:
    from penstock.console.snapshots import Hop, Overview

__all__ = ["app"]

app = Commands()


@app.add("penstock status", "penstock status --watch 5s", "penstock status --http node.example:8080 --json")
@connects_to_node
def status(
    watch: Watch = None,
    as_json: Json = False,
    *,
    node: NodeOptions,
) -> None:
    """Show the state of a node: health and what to do, listeners, load, rates and lag of each hop.

    A node on this machine is found by its data directory. The exit status is 1 if the node is not ready.
    """
    from penstock.console.snapshots import Overview
    from penstock.console.snapshots import as_json as json_of

    api = node.connect()
    ready = True

    def show(found: Overview) -> None:
        nonlocal ready
        ready = found.health.ready
        if as_json:
            row = json_of(found)
            assert isinstance(row, dict)
            print_json(row)
        else:
            _print(found, api.address)

    repeat(lambda: api.snapshot(Overview, "overview"), show, watch, as_json=as_json)
    if not ready:
        raise typer.Exit(1)


def _print(found: Overview, address: str) -> None:
    bold, red, yellow, green, plain = (
        ("\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m") if use_colour(sys.stdout) else ("",) * 5
    )
    node, health, load = found.node, found.health, found.load
    colour = green if health.ready and not health.reasons else yellow if health.ready else red
    state = health.state if health.ready or health.state != "ready" else "not ready"
    out = sys.stdout.write
    up = shown_duration(node.uptime_s)
    out(f"{bold}penstock {node.version}{plain}  {colour}{state}{plain}  {address}\n")
    for reason in health.reasons:
        print_reason(reason)
    commits = ", ".join(f"{part} {seconds * 1000:.0f} ms" for part, seconds in load.commit_s.items())
    out(
        f"\n  process pid {node.pid}, up {up}, core {node.core}\n"
        f"  data    {escape(node.data_dir)} ({node.durability})\n"
        f"  disk    {shown_bytes(load.disk_used_bytes)} used, {shown_bytes(load.disk_free_bytes)} free\n"
        f"  load    {load.cpu:.2f} CPU, {shown_bytes(load.memory_bytes)} memory, event loop delay "
        f"{load.loop_delay_s * 1000:.0f} ms\n"
        f"  commits {commits or '-'}\n\n"
    )
    listeners: list[dict[str, Cell]] = [
        {
            "listener": each.name,
            "address": f"{each.protocol}://{each.address}",
            "connections": each.connections,
            "refused": each.refused,
        }
        for each in found.listeners
    ]
    print_table(listeners, ["listener", "address", "connections", "refused"], as_json=False)
    out("\n")
    print_table([_hop_row(hop) for hop in found.hops], ["hop", "rate", "total", "waiting", "oldest", "errors"],
                as_json=False)  # fmt: skip
    for line in _advice(found.hops):
        out(f"\n{yellow}{line}{plain}\n")
    sys.stdout.flush()


def _hop_row(hop: Hop) -> dict[str, Cell]:
    waiting = None if hop.lag_records is None else f"{'' if hop.lag_exact else '≤ '}{hop.lag_records}"
    return {
        "hop": hop.title,
        "rate": shown_rate(hop.rate, hop.unit),
        "total": hop.total,
        "waiting": waiting,
        "oldest": None if hop.lag_s is None or not hop.lag_records else shown_duration(hop.lag_s),
        "errors": hop.errors,
    }


def _advice(hops: Sequence[Hop]) -> list[str]:
    """Return the next commands for hops with a backlog or errors."""
    found = []
    by_id = {hop.id: hop for hop in hops}
    groups = by_id.get("groups")
    if groups is not None and groups.lag_records and (groups.lag_s or 0) > 60:
        found.append("consumer groups are behind: penstock tube group lag")
    rules = by_id.get("rules")
    if rules is not None and rules.lag_records:
        found.append("messages wait for the log: see the reasons above, and /readyz")
    subscribers = by_id.get("subscribers")
    if subscribers is not None and subscribers.error_rate:
        found.append("messages for slow MQTT clients are dropped: penstock top, view 2, sorted by queue")
    pipelines, tables = by_id.get("pipelines"), by_id.get("tables")
    if pipelines is not None and pipelines.errors:
        found.append("pipelines have failed, were lost, or have dead letters: penstock pipeline status FILE")
    if (tables is not None and tables.lag_records and (tables.lag_s or 0) > 60) or (
        pipelines is not None and pipelines.lag_records and (pipelines.lag_s or 0) > 60
    ):
        found.append("pipelines are behind: penstock pipeline status FILE shows which sink, and how long a batch takes")
    return found
