"""`penstock version`: the version, the commit of a checkout, and whether the core is compiled."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock import compiled
from penstock.cli.options import Commands
from penstock.cli.output import print_json

__all__ = ["app", "commit_of"]

app = Commands()


@app.add("penstock version --json")
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show the version, whether the core is compiled or interpreted, and the version of Python.

    In a checkout, the commit is shown as well, with "-dirty" if files were changed since.
    """
    python = f"{platform.python_implementation()} {platform.python_version()}"
    why = compiled.why_interpreted()
    commit = commit_of(Path(penstock.__file__).resolve().parents[2])
    if as_json:
        print_json(
            {
                "version": penstock.__version__,
                "commit": commit,
                "core": compiled.form(),
                "why_interpreted": why,
                "python": python,
            }
        )
        return
    sys.stdout.write(f"penstock {penstock.__version__}\n")
    if commit is not None:
        sys.stdout.write(f"commit  {commit}\n")
    sys.stdout.write(f"core    {compiled.form()}\npython  {python}\n")
    if why:
        sys.stdout.write(f"\nThe core is interpreted: {why}.\n")


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` if tracked files were changed; None if it is not a checkout.

    None also without git, or if git refuses the directory, for example because another user owns it.
    """
    if not (checkout / ".git").exists():  # a file in a worktree
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 - a constant, and the path of this package
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
