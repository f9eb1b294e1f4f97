"""`penstock statestore-repair`: versions that a wrong clock put into the future."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import escape, print_json

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def statestore_repair(
    data_dir: Annotated[
        Path, typer.Option(help="Data directory of a node that is stopped.", envvar="PENSTOCK_DATA_DIR", metavar="PATH")
    ] = Path("penstock-data"),
    apply: Annotated[bool, typer.Option("--apply", help="Renumber them; without this nothing is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Renumber state store versions that are ahead of the system clock.

    Use it if the clock was wrong for a while, is right now, and /readyz says that versions are ahead of it. The
    versions that are ahead get new ones at the present time: in the same order, greater than all others, and lower
    than all later ones. Restart the clients that hold old versions: their fencing tokens are refused, and whatever
    compares versions takes the old ones for newer. Back up the data directory first.

    Examples:

        penstock statestore-repair --data-dir /var/lib/penstock

        penstock statestore-repair --data-dir /var/lib/penstock --apply
    """
    from penstock.errors import StorageError
    from penstock.node.data_dir import DataDirectory
    from penstock.runtime.io.clock import wall_clock_ms
    from penstock.runtime.io.stepped_clock import CLOCK_IS_SET_MS, utc
    from penstock.statestore.service.repair import repair_versions

    now_ms = wall_clock_ms()
    if now_ms < CLOCK_IS_SET_MS:
        raise StorageError(
            f"statestore: the system clock shows {utc(now_ms)}",
            why="versions are compared with it, and it has not been set",
            do="set the clock, then run this again",
        )
    if not (data_dir / "format.json").is_file():
        raise StorageError(
            f"{data_dir} is not a data directory of penstock: it has no format.json",
            path=str(data_dir),
            do="name the directory that the node was started with: --data-dir PATH",
        )
    with DataDirectory(data_dir) as directory:
        found = repair_versions(directory.statestore, now_ms, apply=apply)
    row = {
        "event": "repair",
        "data_dir": str(data_dir.absolute()),
        "now": utc(now_ms),
        "newest": str(found.newest),
        "newest_after": str(found.clock),
        "versions": found.versions,
        "keys": found.keys,
        "fences": found.fences,
        "changes": found.changes,
        "applied": apply and found.versions > 0,
    }
    if as_json:
        print_json(row)
        return
    if not found.versions:
        sys.stdout.write(f"no version is more than 60 s ahead of the clock ({utc(now_ms)}): nothing to repair\n")
        return
    done = "renumbered" if apply else "ahead of the clock"
    sys.stdout.write(
        f"{escape(str(data_dir))}: {found.versions} versions {done} ({found.keys} keys, {found.fences} prefix fences,"
        f" {found.changes} logged changes)\n"
        f"  clock now       {utc(now_ms)}\n"
        f"  newest version  {found.newest} ({utc(found.newest.wall_ms)})\n"
        f"  {'now         ' if apply else 'would become'}    {found.clock} ({utc(found.clock.wall_ms)})\n"
    )
    if not apply:
        sys.stdout.write("nothing was written: repeat with --apply\n")
