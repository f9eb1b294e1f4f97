"""`penstock tube audit`: who changed what by the administration."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import Cell, note, print_json, print_table
from penstock.cli.tube.access import Json
from penstock.errors import ConfigError

__all__ = ["audit"]

_COLUMNS = ["time", "server", "method", "user", "credential", "address", "result"]


def audit(
    data_dir: Annotated[
        Path,
        typer.Option(help="Data directory of the node or broker.", envvar="PENSTOCK_DATA_DIR", metavar="PATH"),
    ] = Path("penstock-data"),
    count: Annotated[int, typer.Option("--count", "-n", help="The newest of them.", min=1, metavar="N")] = 100,
    as_json: Json = False,
) -> None:
    """Show the audit trail: changes by the HTTP administration, and who has read message bodies; oldest first.

    It reads the files in the data directory, whether the node runs or not. `--json` has the parameters too.
    """
    from penstock.runtime.observability.audit import read_audit

    if not data_dir.is_dir():
        raise ConfigError(
            f"--data-dir: {data_dir} is not a directory",
            option="--data-dir",
            do="name the data directory of the node or broker: --data-dir PATH",
        )
    rows = list(deque(read_audit(data_dir / "audit"), maxlen=count))
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
    return {**cells, "result": "ok" if row.get("result") else "failed"}
