"""`penstock restore`: create a data directory from a backup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.backup import ByteProgress, IdentityFile, shown_time
from penstock.cli.options import Commands, Json
from penstock.cli.output import escape, print_json, shown_bytes

__all__ = ["app"]

app = Commands()


@app.add(
    "penstock restore /var/backups/penstock /var/lib/penstock/penstock-data",
    "penstock restore /var/backups/penstock/2026-11-26T21-30-00Z penstock-data",
    "penstock restore backups penstock-data --identity-file backup.key",
)
def restore(
    backup: Annotated[
        Path, typer.Argument(help="A backup, or a directory of backups: its newest one.", metavar="BACKUP")
    ],
    data_dir: Annotated[Path, typer.Argument(metavar="DIR", help="New data directory: empty, or it does not exist.")],
    identity_file: IdentityFile = None,
    as_json: Json = False,
) -> None:
    """Create the data directory DIR from a backup. Every file is verified before anything is written.

    The files belong to the user who runs the command: run it as the user of the node.
    """
    from penstock.node.backup_directory import find_backup, read_manifest
    from penstock.node.backup_directory import restore as restore_backup
    from penstock.node.backup_encryption import read_identities

    identities = [] if identity_file is None else read_identities(identity_file)
    manifest = read_manifest(find_backup(backup))
    with ByteProgress("verified and restored") as progress:
        restore_backup(manifest, data_dir, identities=identities, progress=progress)
    if as_json:
        print_json(
            {
                "backup": str(manifest.path),
                "point": shown_time(manifest.point_at),
                "data_dir": str(data_dir),
                "files": len(manifest.files),
                "bytes": manifest.size,
            }
        )
        return
    sys.stdout.write(
        f"restored {shown_bytes(manifest.size)}\n"
        f"from     {escape(str(manifest.path))}\n"
        f"to       {escape(str(data_dir))}\n"
        f"point    {shown_time(manifest.point_at)}: later changes are lost\n"
        f"start    penstock up --data-dir {escape(str(data_dir))}\n"
    )
