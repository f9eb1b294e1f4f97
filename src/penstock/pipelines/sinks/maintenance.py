"""Maintain a Delta table: combine small files, and remove files and versions that nothing needs any more.

Two compactions from the same version would both succeed and double rows. The caller holds the lease of the pipeline
that writes the table, but a process that was paused does not notice that it lost it, so a lock on the file
``_maintenance`` of the table admits one process at a time. No program without this lock may compact the table. The
modification time of this file is the time of the last maintenance.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.sinks.delta import (
    is_delta_table,
    load,
    storage_errors,
    sync_versions,
    without_bounds_of_floats,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["TableMaintenance", "maintain", "maintained_at"]

_ATTEMPTS = 5
"""Maximum number of compactions: batches of a sink with `mode: merge` may replace rows of the same files meanwhile."""
_SAFE_RETENTION_H = 168
"""Below this retention ``deltalake`` must be told that no reader or writer needs older files."""


class TableMaintenance(NamedTuple):
    """Numbers of small files that were combined, of the files that have their rows now, and of removed files."""

    combined: int
    written: int
    removed: int


def maintain(
    path: Path, *, retention_h: int, target_bytes: int, log_retention_h: int | None = None, in_use: bool = False
) -> TableMaintenance:
    """Combine files smaller than ``target_bytes``, and remove files that no version of ``retention_h`` hours names.

    Then write a checkpoint of the log, and remove its versions that are older than the table's
    ``delta.logRetentionDuration`` (30 days by default). ``log_retention_h`` sets this property, which all programs
    obey that write the table.

    ``in_use``: a run writes the table meanwhile. Otherwise files of attempts that were not committed are removed at
    once; those of a run that writes, too, are not committed yet, so its ``retention_h`` must be longer than a batch.

    Raises:
        ConfigError: there is no Delta table.
        PenstockError: another process maintains the table.
        StorageError: the table cannot be read or written.
    """
    path = path.absolute()
    if not is_delta_table(path):
        raise ConfigError(f"{str(path)!r} is not a Delta table", option="path")
    with _locked(path):
        if not in_use:
            shutil.rmtree(path / "_attempts", ignore_errors=True)
        found = _maintain(path, retention_h, target_bytes, log_retention_h)
        os.utime(path / _LOCK)
    return found


def maintained_at(path: Path) -> float:
    """Return the time of the last maintenance of the table at ``path`` in seconds since 1970; 0 before the first."""
    try:
        return (path / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


_LOCK = "_maintenance"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the table at ``path``; the system releases it if the process ends."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PenstockError(
                f"table {str(path)!r} is being maintained by another process",
                why=f"it holds the lock of {str(path / _LOCK)!r}",
                do="wait until it has finished",
            ) from error
        yield
    finally:
        os.close(lock)


def _maintain(path: Path, retention_h: int, target_bytes: int, log_retention_h: int | None) -> TableMaintenance:
    table = load(path)
    before = table.version()
    with storage_errors(path):
        if log_retention_h is not None:
            _set_log_retention(table, log_retention_h)
        metrics = _compact(table, target_bytes)
        sync_versions(path, before, files=True)
        removed = table.vacuum(
            retention_h, dry_run=False, enforce_retention_duration=retention_h >= _SAFE_RETENTION_H, full=True
        )
        table.create_checkpoint()
        sync_versions(path, before)
        table.cleanup_metadata()
    return TableMaintenance(metrics["numFilesRemoved"], metrics["numFilesAdded"], len(removed))


def _compact(table: DeltaTable, target_bytes: int) -> dict[str, Any]:
    from deltalake.exceptions import CommitFailedError

    def compact() -> dict[str, Any]:
        return table.optimize.compact(target_size=target_bytes, writer_properties=without_bounds_of_floats(table))

    for _ in range(_ATTEMPTS - 1):
        try:
            return compact()
        except CommitFailedError:
            # A merge has replaced rows of the files meanwhile.
            table.update_incremental()
    return compact()


def _set_log_retention(table: DeltaTable, hours: int) -> None:
    wanted = {"delta.logRetentionDuration": f"interval {hours} hours"}
    if wanted.items() <= table.metadata().configuration.items():
        return
    table.alter.set_table_properties(wanted)
    table.update_incremental()
