"""`penstock audit`: the audit trail of a node or broker."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import Cell, note, print_json, print_table
from penstock.errors import ConfigError

__all__ = ["app"]

_COLUMNS = ["time", "server", "method", "object", "user", "credential", "address", "result"]
_OBJECTS = ("topicName", "groupName", "topic", "group", "client_id", "filter", "key", "prefix", "pipeline")
"""Parameters that name what a request concerns."""

app = Commands("Show the audit trail of a node or broker.")


@app.add("penstock audit list --limit 20", "penstock audit list --data-dir /var/lib/penstock --json", name="list")
def audit_list(
    data_dir: Annotated[
        Path,
        typer.Option(help="Data directory of the node or broker.", envvar="PENSTOCK_DATA_DIR", metavar="DIR"),
    ] = Path("penstock-data"),
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show the newest N entries.", min=1, metavar="N")] = 100,
    as_json: Json = False,
) -> None:
    """List changes through the HTTP administration, and reads of message bodies, oldest first.

    The files of the data directory are read, so the node need not run. --json includes the parameters of requests.
    """
    from penstock.runtime.observability.audit import read_audit

    if not data_dir.is_dir():
        raise ConfigError(
            f"--data-dir: {data_dir} is not a directory",
            option="--data-dir",
            do="set the data directory of the node or broker: --data-dir DIR",
        )
    rows = list(deque(read_audit(data_dir / "audit"), maxlen=limit))
    if as_json:
        for row in rows:
            print_json(row)
        return
    shown: list[dict[str, Cell]] = [_cells(row) for row in rows]
    print_table(shown, _COLUMNS, as_json=False)
    if not rows:
        note(f"the audit trail of {data_dir} is empty")


def _cells(row: dict[str, Any]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {name: row.get(name) or None for name in _COLUMNS}
    parameters = row.get("parameters") or {}
    cells["object"] = ", ".join(str(parameters[name]) for name in _OBJECTS if parameters.get(name)) or None
    failed = "; ".join(map(str, row.get("failed") or ())) or (row.get("errMsg") if row.get("errCode") else None)
    cells["result"] = "ok" if row.get("result") else "failed" if not failed else f"failed: {failed}"
    return cells
