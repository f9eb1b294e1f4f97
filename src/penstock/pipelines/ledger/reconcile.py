"""Reconcile a pipeline: compare its ledger with the log, the tables and the checkpoints.

Nothing is taken from what a run reported: how many records a range holds is asked of the brokers, how many rows a table
has is read from its files. A run that is under way is between two batches somewhere; what it has not finished is not
looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DataLossError, PenstockError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry, Sums
from penstock.pipelines.sinks.table import commits
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.plan import SinkPlan, plan
from penstock.pipelines.spec.sinks import Sink, TableSink
from penstock.pipelines.spec.values import transaction_id
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets
from penstock.spark.files.delta_log import DeltaLog

__all__ = ["Account", "Count", "reconcile", "source_count"]

Count = Callable[[str, Offsets, Offsets], int]
"""Counts the records of a query's sources in ``[start, end)``."""


class Account(NamedTuple):
    """Sums of one query, with the differences (``off``) and what cannot be checked (``unknown``)."""

    sink: str
    sums: Sums
    off: tuple[str, ...]
    unknown: tuple[str, ...]


def source_count(pipeline: Pipeline, state: Path) -> Count:
    """Asks the sources of ``pipeline``: the brokers of tubes, the files themselves."""
    from penstock.pipelines.sources.sources import Sources

    return Sources(pipeline, state).count


def reconcile(pipeline: Pipeline, state: Path, count: Count) -> list[Account]:
    """The account of each sink, in the order of the file.

    Raises:
        UnavailableError: TubeMQ does not answer.
        StorageError: a file of the ledger or of a table cannot be read.
    """
    ledger = Ledger(layout.ledger(state))
    dead = None if pipeline.dead_letters is None else Path(pipeline.dead_letters.path)
    accounts = []
    for sink_plan in plan(pipeline):
        entries = ledger.entries(sink_plan.sink.name)
        sums = ledger.sums(sink_plan.sink.name)
        off = [*_chain(entries), *_balance(sink_plan, entries), *_tables(sink_plan, entries, sums, dead)]
        unknown: list[str] = []
        for sink in (sink_plan.sink, *sink_plan.late_sinks):
            if entries and sink.table is not None and sink.table.format == "delta":
                query = Checkpoint(layout.checkpoint(state, sink_plan.sink.name)).query_id()
                wrong, untold = _delta(sink.table, transaction_id(sink.name, query), _written(sink_plan, sink, entries))
                off += wrong
                unknown += untold
        if entries:
            try:
                off += _read(sink_plan, entries, sums, count)
            except DataLossError as error:
                unknown.append(f"the source cannot be counted from the first batch on: {error.what}")
        accounts.append(Account(sink_plan.sink.name, sums, tuple(off), tuple(unknown)))
    return accounts


def _chain(entries: list[LedgerEntry]) -> Iterator[str]:
    """Each batch begins where the one before it ended."""
    for before, entry in itertools.pairwise(entries):
        if entry.batch != before.batch + 1:
            yield f"after batch {before.batch} comes batch {entry.batch}"
        elif any(
            entry.start.get(topic, {}).get(name) != place
            for topic, named in before.end.items()
            for name, place in named.items()
        ):
            yield f"batch {entry.batch} does not begin where batch {before.batch} ended"


def _balance(sink_plan: SinkPlan, entries: list[LedgerEntry]) -> Iterator[str]:
    """Check that every record read has an outcome."""
    if sink_plan.windowed:
        return
    for entry in entries:
        accounted = entry.out + entry.dead + entry.filtered + (entry.duplicates or 0)
        if accounted != entry.read or (entry.duplicates or 0) < 0:
            yield (
                f"batch {entry.batch}: {entry.read} read, but {entry.out} out, {entry.dead} dead, "
                f"{entry.filtered} filtered, {entry.duplicates} duplicates"
            )


def _read(sink_plan: SinkPlan, entries: list[LedgerEntry], sums: Sums, count: Count) -> Iterator[str]:
    held = count(sink_plan.sink.name, *_whole(entries))
    if held != sums.read:
        yield f"the source has {held} records in the range of the batches, {sums.read} were read"


def _whole(entries: list[LedgerEntry]) -> tuple[Offsets, Offsets]:
    """Return the start and end offsets of all batches together.

    A topic or partition that was added later begins at its first named offset; one that is no longer read ends at its
    last.
    """
    start: Offsets = {}
    end: Offsets = {}
    for entry in entries:
        for named in (entry.start, entry.end):
            for stream, places in named.items():
                start[stream] = places | start.get(stream, {})
        for stream, places in entry.end.items():
            end[stream] = end.get(stream, {}) | places
    return start, end


def _tables(sink_plan: SinkPlan, entries: list[LedgerEntry], sums: Sums, dead: Path | None) -> Iterator[str]:
    """Each table against what the ledger says of it: a sink may have been given another one since."""
    name, table = sink_plan.sink.name, sink_plan.sink.table
    if table is not None and table.format == "parquet":
        rows = dict.fromkeys([table.path], 0)
        for entry in entries:
            path = entry.table or table.path
            rows[path] = rows.get(path, 0) + entry.out
        for path, count in rows.items():
            yield from _table(Path(path), name, count, "out")
    for late in sink_plan.late_sinks:
        if late.table is not None and late.table.format == "parquet":
            yield from _table(Path(late.table.path), late.name, sums.late, "late")
    if dead is not None and sums.letters is not None:
        letters = dict.fromkeys([str(dead)], 0)
        for entry in entries:
            path = entry.letters_table or str(dead)
            letters[path] = letters.get(path, 0) + (entry.letters or 0)
        for path, count in letters.items():
            yield from _table(Path(path), name, count, "dead letters")


def _written(sink_plan: SinkPlan, sink: Sink, entries: list[LedgerEntry]) -> dict[int, int]:
    """Rows that each batch wrote to ``sink``, according to the ledger."""
    rows = {entry.batch: entry.out if sink is sink_plan.sink else entry.late for entry in entries}
    return {batch: count for batch, count in rows.items() if count}


def _delta(table: TableSink, writer: str, written: dict[int, int]) -> tuple[list[str], list[str]]:
    """Compare the batches ``written`` by ``writer`` with a Delta table's log: differences, and what it cannot check.

    Appended rows are counted; for a merge, the log only shows that it was performed.
    """
    log = DeltaLog(table.path)
    first = log.first
    try:
        found = {
            version.transactions[writer]: sum(file.records or 0 for file in version.added)
            for version in (log.versions(first - 1) if first is not None else ())
            if writer in version.transactions
        }
    except PenstockError as error:
        return [], [error.what]
    off, untold = [], 0
    for batch, count in written.items():
        if batch not in found:
            if first and batch < min(found, default=batch + 1):
                untold += 1
            else:
                off.append(f"{table.path} lacks batch {batch}, the ledger has {count} rows of it")
        elif table.mode == "append" and found[batch] != count:
            off.append(f"{table.path} got {found[batch]} rows of batch {batch}, the ledger has {count}")
    unknown = [f"the log of {table.path} begins at version {first}: {untold} batches are older"] if untold else []
    return off, unknown


def _table(path: Path, writer: str, expected: int, what: str) -> Iterator[str]:
    import pyarrow.parquet as pq

    mine = [commit for commit in commits(path) if commit.writer == writer]
    missing = [name for commit in mine for name in commit.files if not (path / name).is_file()]
    for name in missing:
        yield f"{path} lacks its file {name}"
    committed = sum(commit.rows for commit in mine)
    if committed != expected:
        yield f"{path} has {committed} rows committed, the ledger has {expected} {what}"
    if not missing:
        held = sum(pq.ParquetFile(path / name).metadata.num_rows for commit in mine for name in commit.files)
        if held != committed:
            yield f"{path} holds {held} rows, {committed} were committed"
