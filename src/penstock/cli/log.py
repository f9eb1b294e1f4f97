"""`penstock log`: log levels of a running node."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Annotated

import typer

from penstock.cli.node_api import NodeOptions, connects_to_node
from penstock.cli.options import COMPLETION_S, Commands, Json
from penstock.cli.output import print_table
from penstock.cli.parameters import completes, source_of
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.observability.logs import LogLevel

__all__ = ["app"]

app = Commands("Show and change the log levels of a running node.")


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the parts of the node's log whose names begin with ``incomplete``."""
    given = {field.name: ctx.params[field.name] for field in fields(NodeOptions) if ctx.params.get(field.name)}
    if "http" not in given and source_of(ctx, "data_dir") != "COMMANDLINE":  # a given directory names a node
        # Completion parses the line without environment variables and defaults.
        given["http"] = os.environ.get("PENSTOCK_HTTP") or ctx.lookup_default("http")
    try:
        levels = NodeOptions(**given).connect().get("log-levels", timeout_s=COMPLETION_S)["levels"]
    except PenstockError:  # no node to ask
        return []
    return sorted(part for part in levels if part.startswith(incomplete))


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
            help="Part of the log, as in its lines; all: the parts without a level of their own.",
            metavar="[PART]",
            autocompletion=complete_part,
        ),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[LEVEL]",
            help="debug, info, warning or error; inherit: the level of the part above it.",
            autocompletion=completes((*LogLevel, "inherit")),
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
        raise ConfigError(f"there is no part {part!r} of the log", hint=f"use one of {', '.join(found)}")
    rows = [{"part": name, "level": text} for name, text in found.items() if part in (None, name)]
    print_table(rows, ["part", "level"], as_json=as_json)
