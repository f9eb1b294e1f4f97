"""Find tables that a pipeline has written and that do not exist any more: removed, or on a volume that is not mounted.

A run would create a new table and continue with the next batch, so the table would lack all earlier rows.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import RefusedError
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.sinks.table import has_table
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.values import place_of
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.spark.files.object_storage import StoragePath

__all__ = ["MissingTable", "check_missing_tables", "missing_table", "missing_tables"]


class MissingTable(NamedTuple):
    """A table that does not exist, the batches with rows that the ledger has in it, and the number of these rows."""

    sink: str
    path: str
    batches: int
    rows: int

    def error(self) -> RefusedError:
        """Return the error of a run that does not create the table again; it does not name the sink."""
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return RefusedError(
            f"table {self.path!r} does not exist, and the ledger has {batches} with {rows} in it",
            why="it was removed, or its volume is not mounted; a new table would begin with the next batch, without "
            "these rows",
            hint="mount the volume, or restore the table; if it was removed on purpose, add --yes, which creates a new "
            "table",
        )


def missing_tables(pipeline: Pipeline, state: StoragePath) -> dict[str, MissingTable]:
    """Return the missing tables of ``pipeline`` by sink.

    Raises:
        StorageError: a table, the ledger or a checkpoint cannot be read.
        UnavailableError: the storage of a table does not answer.
    """
    found = {sink.name: missing_table(sink, state) for sink in pipeline.sinks}
    return {name: table for name, table in found.items() if table is not None}


def missing_table(sink: Sink, state: StoragePath) -> MissingTable | None:
    """Return the table of ``sink`` if it does not exist, and batches that its checkpoint has committed have rows in it.

    A batch that is not committed is repeated. The ledger has no tables of late rows, and only Spark can access a table
    at a URI that is not in a bucket: they are not missing.
    """
    table = sink.table
    if table is None or table.is_remote:
        return None
    committed = Checkpoint(layout.checkpoint(state, sink.name)).last_committed()
    if committed is None or has_table(table.location):
        return None
    # The sink may have had another path before.
    rows = [
        entry.out
        for entry in Ledger(layout.ledger(state)).entries(sink.name)
        if entry.batch <= committed and entry.out and entry.table and place_of(entry.table) == place_of(table.path)
    ]
    return MissingTable(sink.name, table.path, len(rows), sum(rows)) if rows else None


def check_missing_tables(pipeline: Pipeline, state: StoragePath) -> None:
    """Check that the tables that sinks of ``pipeline`` have written exist.

    Raises:
        RefusedError: one does not; and see :func:`missing_tables`.
    """
    for found in missing_tables(pipeline, state).values():
        error = found.error()
        raise RefusedError(f"sink {found.sink!r}: {error.what}", why=error.why, hint=error.hint)
