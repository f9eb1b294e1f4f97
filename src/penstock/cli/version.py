"""`penstock version`: the version, and whether the core is compiled."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

import penstock
from penstock import compiled
from penstock.cli.options import Commands
from penstock.cli.output import print_json

__all__ = ["app"]

app = Commands()


@app.add("penstock version --json")
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show the version, whether the core is compiled or interpreted, and the version of Python."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    why = compiled.why_interpreted()
    if as_json:
        print_json({"version": penstock.__version__, "core": compiled.form(), "why_interpreted": why, "python": python})
        return
    sys.stdout.write(f"penstock {penstock.__version__}\ncore    {compiled.form()}\npython  {python}\n")
    if why:
        sys.stdout.write(f"\nThe core is interpreted: {why}.\n")
