"""`penstock audit`: the audit trail of a node or broker."""

from __future__ import annotations

import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.node_api import data_dir_option
from penstock.cli.options import DATA_DIR, Commands, Json
from penstock.cli.output import Cell, escape, note, print_json, print_table
from penstock.errors import ConfigError

__all__ = ["app"]

_WIDE = ["time", "server", "method", "object", "user", "credential", "address", "result"]
_WIDTHS = {"time": 20, "method": 20, "object": 16, "user": 10, "result": 6}
"""Columns of 80 in all, with gaps of two, and their widths."""
_OBJECTS = ("topicName", "groupName", "topic", "group", "client_id", "filter", "key", "prefix", "pipeline", "part")
"""Parameters that name what a request concerns."""

app = Commands("Show the audit trail of a node or broker.")


@app.add("penstock audit list --limit 20", "penstock audit list --data-dir /var/lib/penstock --json", name="list")
def audit_list(
    data_dir: Annotated[Path, data_dir_option("Data directory of the node or broker.")] = DATA_DIR,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show the newest N entries.", min=1, metavar="N")] = 100,
    wide: Annotated[
        bool, typer.Option("--wide", help="Also show server, credential and address, and long names in full.")
    ] = False,
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
            hint="set the data directory of the node or broker: --data-dir DIR",
        )
    rows = list(deque(read_audit(data_dir / "audit"), maxlen=limit))
    if as_json:
        for row in rows:
            print_json(row)
        return
    if wide:
        print_table([_cells(row) for row in rows], _WIDE, as_json=False)
    else:
        _print_narrow(rows)
    if not rows:
        note(f"the audit trail of {data_dir} is empty")


def _cells(row: dict[str, Any]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {name: row.get(name) or None for name in _WIDE}
    parameters = row.get("parameters") or {}
    cells["object"] = ", ".join(str(parameters[name]) for name in _OBJECTS if parameters.get(name)) or None
    failed = "; ".join(map(str, row.get("failed") or ())) or (row.get("errMsg") if row.get("errCode") else None)
    cells["result"] = "ok" if row.get("result") else "failed" if not failed else f"failed: {failed}"
    return cells


def _print_narrow(rows: Sequence[dict[str, Any]]) -> None:
    """Print entries in 80 columns, with the reason of a failure below."""
    sys.stdout.write(_line(name.upper() for name in _WIDTHS) + "\n")
    for row in rows:
        cells = _cells(row)
        result, _, reason = str(cells["result"]).partition(": ")
        texts = {**{name: escape(str(text or "-")) for name, text in cells.items()}, "result": result}
        sys.stdout.write(_line(_shortened(texts[name], width) for name, width in _WIDTHS.items()) + "\n")
        for line in textwrap.wrap(escape(reason), 76):
            sys.stdout.write(f"    {line}\n")


def _line(cells: Iterable[str]) -> str:
    return "  ".join(map(str.ljust, cells, _WIDTHS.values())).rstrip()


def _shortened(text: str, width: int) -> str:
    """Return ``text`` with its middle replaced by an ellipsis if it is longer than ``width``."""
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"
