"""`penstock fsck`: check a data directory or a backup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.backup import ByteProgress, shown_time
from penstock.cli.options import Commands, Json, local_data_dir
from penstock.cli.output import escape, print_json, shown_bytes
from penstock.errors import UnavailableError

__all__ = ["app"]

app = Commands()


@app.add("penstock fsck", "penstock fsck /var/lib/penstock/penstock-data", "penstock fsck /var/backups/penstock --json")
def fsck(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Data directory of a stopped node or broker; a backup, or a directory of backups. Default: "
            "PENSTOCK_DATA_DIR, otherwise data_dir of ./penstock.yaml, otherwise ./penstock-data.",
            metavar="DIRECTORY",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every checksum of a data directory or of backups. The exit status is 1 if something is damaged.

    In a data directory, commits of the write-ahead log are applied, as by a start; nothing else is changed.
    """
    from penstock.node.backup_directory import MANIFEST, list_backups

    directory = directory or local_data_dir()
    backups = [directory] if (directory / MANIFEST).is_file() else list_backups(directory)
    ok = [_check_backup(backup, as_json=as_json) for backup in backups] or [_check_data(directory, as_json=as_json)]
    if not all(ok):
        raise typer.Exit(1)


def _check_backup(backup: Path, *, as_json: bool) -> bool:
    from penstock.errors import StorageError
    from penstock.node.backup_directory import read_manifest, verify

    problems: list[str]
    point = size = None
    try:
        manifest = read_manifest(backup)
        point, size = shown_time(manifest.point_at), manifest.size
        with ByteProgress(f"{backup.name}: verified") as progress:
            problems = verify(manifest, progress=progress)
    except StorageError as error:
        problems = [f"{error.what}: {error.why}"]
    if as_json:
        print_json({"backup": str(backup), "point": point, "bytes": size, "ok": not problems, "problems": problems})
        return not problems
    state = "damaged" if problems else f"intact, {shown_bytes(size or 0)}"
    sys.stdout.write(f"{escape(str(backup))}: {state}\n")
    sys.stdout.writelines(f"  {escape(problem)}\n" for problem in problems)
    return not problems


def _check_data(directory: Path, *, as_json: bool) -> bool:
    from penstock.node.fsck import check_directory

    try:
        found = check_directory(directory)
    except UnavailableError as error:  # in use
        do = "stop the node, or check a backup of it: penstock backup DIR, then penstock fsck DIR"
        raise UnavailableError(error.what, applied=False, why=error.why, do=do) from error
    if as_json:
        print_json(
            {
                "data_dir": str(directory),
                "rows": found.rows,
                "segments": found.segments,
                "messages": found.messages,
                "bytes": found.bytes,
                "ok": found.ok,
                "problems": [problem._asdict() for problem in found.problems],
            }
        )
        return found.ok
    sys.stdout.write(
        f"{escape(str(directory))}: {'intact' if found.ok else 'damaged'}, {found.rows} rows, "
        f"{found.messages} messages in {found.segments} segments\n"
    )
    for problem in found.problems:
        sys.stdout.write(f"  {'damaged' if problem.damaged else 'note'}: {escape(problem.path)}: {problem.text}\n")
    return found.ok
