"""Maintain a Delta table: combine small files, and remove files and versions that nothing needs any more.

Two compactions from the same version would both succeed and double rows, so the caller holds the lease of the pipeline
that writes the table, and no other program may compact it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError
from penstock.pipelines.sinks.delta import (
    is_delta_table,
    load,
    storage_errors,
    sync_versions,
    without_bounds_of_floats,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["TableMaintenance", "maintain"]

_SAFE_RETENTION_H = 168
"""Below this retention ``deltalake`` must be told that no reader or writer needs older files."""


class TableMaintenance(NamedTuple):
    """Numbers of small files that were combined, of the files that have their rows now, and of removed files."""

    combined: int
    written: int
    removed: int


def maintain(
    path: Path, *, retention_h: int, target_bytes: int, log_retention_h: int | None = None
) -> TableMaintenance:
    """Combine files smaller than ``target_bytes``, and remove files that no version of ``retention_h`` hours names.

    Then write a checkpoint of the log, and remove its versions that are older than the table's
    ``delta.logRetentionDuration`` (30 days by default). ``log_retention_h`` sets this property, which all programs
    obey that write the table.

    Files of attempts that were not committed are removed at once: no run may write the table meanwhile.

    Raises:
        ConfigError: there is no Delta table.
        StorageError: the table cannot be read or written.
    """
    path = path.absolute()
    if not is_delta_table(path):
        raise ConfigError(f"{str(path)!r} is not a Delta table", option="path")
    shutil.rmtree(path / "_attempts", ignore_errors=True)
    table = load(path)
    before = table.version()
    with storage_errors(path):
        if log_retention_h is not None:
            _set_log_retention(table, log_retention_h)
        metrics = table.optimize.compact(target_size=target_bytes, writer_properties=without_bounds_of_floats(table))
        sync_versions(path, before, files=True)
        removed = table.vacuum(
            retention_h, dry_run=False, enforce_retention_duration=retention_h >= _SAFE_RETENTION_H, full=True
        )
        table.create_checkpoint()
        sync_versions(path, before)
        table.cleanup_metadata()
    return TableMaintenance(metrics["numFilesRemoved"], metrics["numFilesAdded"], len(removed))


def _set_log_retention(table: DeltaTable, hours: int) -> None:
    wanted = {"delta.logRetentionDuration": f"interval {hours} hours"}
    if wanted.items() <= table.metadata().configuration.items():
        return
    table.alter.set_table_properties(wanted)
    table.update_incremental()
