"""`penstock log`: log levels of a running node."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.node_api import NodeOptions, connects_to_node
from penstock.cli.options import Commands, Json
from penstock.cli.output import print_table
from penstock.errors import ConfigError

__all__ = ["app"]

app = Commands("Show and change the log levels of a running node.")


@app.add(
    "penstock log level",
    "penstock log level mqtt debug",
    "penstock log level all warning",
    "penstock log level mqtt inherit",
    name="level",
)
@connects_to_node
def level(
    part: Annotated[
        str | None,
        typer.Argument(
            help="Part of the log, as in its lines; all: the parts without a level of their own.", metavar="[PART]"
        ),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[LEVEL]", help="debug, info, warning or error; inherit: the level of the part above it."
        ),
    ] = None,
    as_json: Json = False,
    *,
    node: NodeOptions,
) -> None:
    """Show the log levels of a running node, or set that of a part.

    A change applies at once, also to the parts below (mqtt: mqtt.bridge), lasts until the node stops, and has an entry
    in the audit trail. Without LEVEL nothing is changed. The setting log_level is the level at the start.
    """
    api = node.connect()
    if part is not None and value is not None:
        found = api.put(f"log-levels/{part}", {"level": value})["levels"]
    else:
        found = api.get("log-levels")["levels"]
    if part is not None and part not in found:
        raise ConfigError(f"there is no part {part!r} of the log", do=f"use one of {', '.join(found)}")
    rows = [{"part": name, "level": text} for name, text in found.items() if part in (None, name)]
    print_table(rows, ["part", "level"], as_json=as_json)
