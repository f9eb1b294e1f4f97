"""`penstock version`: the version, and the form in which the core runs."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

import penstock
from penstock import compiled
from penstock.cli.output import print_json

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show the version, the form in which the core runs (compiled or interpreted), and the Python that runs it."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    why = compiled.why_interpreted()
    if as_json:
        print_json({"version": penstock.__version__, "core": compiled.form(), "why_interpreted": why, "python": python})
        return
    sys.stdout.write(f"penstock {penstock.__version__}\ncore    {compiled.form()}\npython  {python}\n")
    if why:
        sys.stdout.write(f"\nThe core is interpreted: {why}.\n")
