"""`penstock fsck`: check a data directory or a backup."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.backup import ByteProgress, IdentityFile, shown_time
from penstock.cli.options import Commands, Json, local_data_dir
from penstock.cli.output import escape, fold, print_json, shown_bytes
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.node.backup_encryption import Identity

__all__ = ["app"]

app = Commands()

_BACKUP_HINT: Final = "restore another backup, and make a new one: `penstock backup DIR`"
_DATA_HINT: Final = (
    "copy the directory, and restore a backup to a new one: `penstock restore BACKUP DIR`; without a backup see "
    "`penstock tube broker fsck DIR --repair`, which repairs the files of a broker (tube/broker-N)"
)


@app.add(
    "penstock fsck",
    "penstock fsck /var/lib/penstock/penstock-data",
    "penstock fsck /var/backups/penstock --json",
    "penstock fsck backups --identity-file backup.key",
)
def fsck(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Data directory of a stopped node or broker; a backup, or a directory of backups. Default: "
            "PENSTOCK_DATA_DIR, otherwise data_dir of ./penstock.yaml, otherwise ./penstock-data.",
            metavar="DIRECTORY",
            readable=False,  # the error of the check says more
        ),
    ] = None,
    identity_file: IdentityFile = None,
    as_json: Json = False,
) -> None:
    """Check every checksum of a data directory or of backups. The exit status is 1 if something is damaged.

    In a data directory, commits of the write-ahead log are applied, as by a start; nothing else is changed. Encrypted
    backups are verified without their key; --identity-file also checks that the key decrypts them.
    """
    from penstock.node.backup_directory import MANIFEST, list_backups
    from penstock.node.backup_encryption import read_identities

    identities = [] if identity_file is None else read_identities(identity_file)

    directory = directory or local_data_dir()
    backups = [directory] if (directory / MANIFEST).is_file() else list_backups(directory)
    ok = [_check_backup(backup, identities, as_json=as_json) for backup in backups] or [
        _check_data(directory, as_json=as_json)
    ]
    if not all(ok):
        raise typer.Exit(1)


def _check_backup(backup: Path, identities: Sequence[Identity], *, as_json: bool) -> bool:
    from penstock.errors import StorageError
    from penstock.node.backup_directory import check_identities, read_manifest, verify

    wrong_key: list[str] = []
    point = size = encrypted = None
    try:
        manifest = read_manifest(backup)
        point, size, encrypted = shown_time(manifest.point_at), manifest.size, bool(manifest.recipients)
        if identities:
            try:
                check_identities(manifest, identities)
            except StorageError as error:
                wrong_key = [f"{error.what}: {error.why}"]
        with ByteProgress(f"{backup.name}: verified") as progress:
            damaged = verify(manifest, progress=progress)
    except StorageError as error:
        damaged = [f"{error.what}: {error.why}"]
    problems = wrong_key + damaged
    if as_json:
        row = {"backup": str(backup), "point": point, "bytes": size, "encrypted": encrypted}
        print_json({**row, "ok": not problems, "problems": problems})
        return not problems
    state = "damaged" if damaged else f"intact, {shown_bytes(size or 0)}{', encrypted' if encrypted else ''}"
    sys.stdout.write(f"{escape(str(backup))}: {state}\n")
    sys.stdout.writelines(f"  {escape(problem)}\n" for problem in problems)
    if damaged:
        sys.stdout.write(fold("  hint: ", _BACKUP_HINT) + "\n")
    return not problems


def _check_data(directory: Path, *, as_json: bool) -> bool:
    from penstock.node.fsck import check_directory

    try:
        found = check_directory(directory)
    except UnavailableError as error:  # in use
        hint = "stop the node, or check a backup of it: penstock backup DIR, then penstock fsck DIR"
        raise UnavailableError(error.what, applied=False, why=error.why, hint=hint) from error
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
    if not found.ok:
        sys.stdout.write(fold("  hint: ", _DATA_HINT) + "\n")
    return found.ok
