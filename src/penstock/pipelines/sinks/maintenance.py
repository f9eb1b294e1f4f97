"""Maintain a Delta table: combine small files, and remove files and versions that nothing needs any more.

Two compactions from the same version would both succeed and double rows. The caller holds the lease of the pipeline
that writes the table, but a process that was paused does not notice that it lost it, so a lock on the file
``_maintenance`` of the table admits one process at a time. No program without this lock may compact the table. The
modification time of this file is the time of the last maintenance.

A table in a bucket has no such lock. There each maintenance first sets the property ``penstock.maintenance`` of the
table, to its time and a random number: a change of the metadata, after which Delta refuses a compaction or a vacuum
that began with an earlier version. Of two processes, the one that set the property last has both changes in its
version, so only its compaction can be committed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.sinks.delta import (
    certain_bounds,
    is_delta_table,
    load,
    storage_errors,
    sync_versions,
)
from penstock.pipelines.state_dir.layout import locked
from penstock.spark.files.object_storage import ObjectPath, StoragePath, absolute_path

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
    path: StoragePath, *, retention_h: int, target_bytes: int, log_retention_h: int | None = None, in_use: bool = False
) -> TableMaintenance:
    """Combine files smaller than ``target_bytes``, and remove files that no version of ``retention_h`` hours names.

    Then write a checkpoint of the log, and remove its versions that are older than the table's
    ``delta.logRetentionDuration`` (30 days by default). ``log_retention_h`` sets this property, which all programs
    obey that write the table.

    Each checkpoint names the files that were removed within ``delta.deletedFileRetentionDuration`` (a week by default),
    which readers need as long as the files exist. This property is therefore set to ``retention_h`` if it is shorter,
    and if it is longer, too, when ``in_use`` or ``log_retention_h`` is given: otherwise the log of a table with many
    commits is large although the files do not exist any more.

    ``in_use``: a run writes the table meanwhile. Otherwise files of attempts that were not committed are removed at
    once; those of a run that writes, too, are not committed yet, so its ``retention_h`` must be longer than a batch.

    Raises:
        ConfigError: there is no Delta table.
        PenstockError: another process maintains the table.
        StorageError: the table cannot be read or written.
    """
    path = absolute_path(path)
    if not is_delta_table(path):
        raise ConfigError(f"{str(path)!r} is not a Delta table", option="path")
    with nullcontext() if isinstance(path, ObjectPath) else _locked(path):
        if not in_use and isinstance(path, Path):
            shutil.rmtree(path / "_attempts", ignore_errors=True)
        found = _maintain(path, retention_h, target_bytes, log_retention_h, may_shorten=in_use)
        if isinstance(path, Path):
            os.utime(path / _LOCK)
    return found


def maintained_at(path: StoragePath) -> float:
    """Return the time of the last maintenance of the table at ``path`` in seconds since 1970; 0 before the first."""
    if isinstance(path, ObjectPath):
        stored = load(path).metadata().configuration.get(_PROPERTY, "") if is_delta_table(path) else ""
        return int(stored.partition("-")[0] or 0) / 1000
    try:
        return (path / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


_LOCK = "_maintenance"
_PROPERTY = "penstock.maintenance"


def _locked(path: Path) -> AbstractContextManager[int]:
    """Return the lock of the table at ``path``."""
    lock = path / _LOCK
    return locked(
        lock,
        lambda _: PenstockError(
            f"table {str(path)!r} is being maintained by another process",
            why=f"it holds the lock of {str(lock)!r}",
            hint="wait until it has finished",
        ),
    )


def _maintain(
    path: StoragePath, retention_h: int, target_bytes: int, log_retention_h: int | None, *, may_shorten: bool
) -> TableMaintenance:
    table = load(path)
    before = table.version()
    with storage_errors(path):
        _set_retention(table, retention_h, log_retention_h, may_shorten=may_shorten)
        metrics = _compact(table, target_bytes, _claim(table) if isinstance(path, ObjectPath) else None)
        sync_versions(path, before, files=True)
        removed = table.vacuum(
            retention_h, dry_run=False, enforce_retention_duration=retention_h >= _SAFE_RETENTION_H, full=True
        )
        table.create_checkpoint()
        sync_versions(path, before)
        table.cleanup_metadata()
    return TableMaintenance(metrics["numFilesRemoved"], metrics["numFilesAdded"], len(removed))


def _claim(table: DeltaTable) -> str:
    """Set the property that refuses changes of any other maintenance; return its value."""
    value = f"{time.time_ns() // 1_000_000}-{uuid.uuid4().hex}"
    table.alter.set_table_properties({_PROPERTY: value}, raise_if_not_exists=False)
    table.update_incremental()
    return value


def _check_claim(table: DeltaTable, claim: str) -> None:
    if table.metadata().configuration.get(_PROPERTY) != claim:
        raise PenstockError(
            f"table {table.table_uri!r} is being maintained by another process",
            why=f"it has set the property {_PROPERTY} of the table",
            hint="wait until it has finished",
        )


def _compact(table: DeltaTable, target_bytes: int, claim: str | None) -> dict[str, Any]:
    """Combine small files. ``claim``: stop if the property of the table has another value.

    Another process may set it after the check, too: its change refuses the compaction, which is then repeated.
    """
    from deltalake.exceptions import CommitFailedError

    def compact() -> dict[str, Any]:
        return table.optimize.compact(target_size=target_bytes, writer_properties=certain_bounds(table))

    for _ in range(_ATTEMPTS - 1):
        try:
            return compact()
        except CommitFailedError:
            # A merge has replaced rows of the files meanwhile, or the schema has changed.
            table.update_incremental()
            if claim is not None:
                _check_claim(table, claim)
    return compact()


def _set_retention(table: DeltaTable, retention_h: int, log_retention_h: int | None, *, may_shorten: bool) -> None:
    """Set the properties of the table for removed files and for the log; see :func:`maintain`."""
    properties = table.metadata().configuration
    wanted: dict[str, str] = {}
    if log_retention_h is not None:
        wanted["delta.logRetentionDuration"] = f"interval {log_retention_h} hours"
    # Not shorter: a VACUUM of delta-spark obeys it, and would remove files that a batch is about to commit.
    removed_h = max(retention_h, _SHORTEST_H)
    stored_h = _interval_h(properties.get(_REMOVED_FILES, _WEEK))
    if removed_h > stored_h or (removed_h < stored_h and (may_shorten or log_retention_h is not None)):
        wanted[_REMOVED_FILES] = f"interval {removed_h} hours"
    if wanted.items() <= properties.items():
        return
    table.alter.set_table_properties(wanted)
    table.update_incremental()


_REMOVED_FILES = "delta.deletedFileRetentionDuration"
_WEEK = "interval 1 week"
_SHORTEST_H = 1
_INTERVAL = re.compile(r"(\d+)\s+(second|minute|hour|day|week)", re.IGNORECASE)
_UNIT_H = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1, "day": 24, "week": 168}


def _interval_h(text: str) -> float:
    """Return the hours of a property such as ``interval 1 week 2 days``, without units shorter than a second."""
    return sum(int(count) * _UNIT_H[unit.lower()] for count, unit in _INTERVAL.findall(text))
