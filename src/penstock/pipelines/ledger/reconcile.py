"""Reconcile a pipeline: compare its ledger with the log, the tables and the checkpoints.

Counts reported by the run are verified: the brokers count the records of a range, and the rows of a table are counted
in its files. The unfinished batch of an active run is ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DataLossError, PenstockError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry, QueryCounts
from penstock.pipelines.sinks.parquet import read_footer
from penstock.pipelines.sinks.table import commits
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, plan
from penstock.pipelines.spec.sinks import Sink, stored_format
from penstock.pipelines.spec.values import transaction_id
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import StoragePath, storage_path
from penstock.spark.kafka import writes as kafka
from penstock.spark.postgresql.writes import written_batches
from penstock.spark.written_batches import WrittenBatches

__all__ = [
    "COMPARISONS",
    "Count",
    "Differences",
    "QueryEntries",
    "QueryReconciliation",
    "each_reconciled",
    "reconcile",
    "source_count",
]

Count = Callable[[str, Offsets, Offsets], int]
"""Counts the records of a query's sources in ``[start, end)``."""


class QueryReconciliation(NamedTuple):
    """Sums of one query, with differences (``off``) and values that cannot be checked (``unknown``)."""

    sink: str
    counts: QueryCounts
    off: tuple[str, ...]
    unknown: tuple[str, ...]


def source_count(pipeline: Pipeline, state: StoragePath) -> Count:
    """Return a function that counts records at the sources of ``pipeline``: TubeMQ brokers, files."""
    from penstock.pipelines.sources.sources import Sources

    return Sources(pipeline, state).count


def reconcile(pipeline: Pipeline, state: StoragePath, count: Count) -> list[QueryReconciliation]:
    """Return all results of :func:`each_reconciled`."""
    return list(each_reconciled(pipeline, state, count))


def each_reconciled(pipeline: Pipeline, state: StoragePath, count: Count) -> Iterator[QueryReconciliation]:
    """Reconcile the query of each sink, in the order of the file, and yield its result: each may take minutes.

    Raises:
        UnavailableError: TubeMQ does not answer.
        StorageError: a file of the ledger or of a table cannot be read.
    """
    ledger = Ledger(layout.ledger(state))
    dead = None if pipeline.dead_letters is None else pipeline.dead_letters.location
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        # Read before the ledger, which has a batch before it is committed: a run may be active.
        committed = Checkpoint(layout.checkpoint(state, name)).last_committed()
        entries = ledger.entries(name)
        counts = QueryCounts.of(entries)
        off = [*_chain(entries, committed), *_balance(sink_plan, entries)]
        unknown: list[str] = []
        for sink in (sink_plan.sink, *sink_plan.late_sinks):
            compare = COMPARISONS[sink.kind]
            if compare is not None:
                found = compare(sink, QueryEntries(pipeline.name, state, sink_plan, entries))
                off += found.off
                unknown += found.unknown
        off += _dead_letters(name, entries, counts, dead)
        if entries:
            try:
                off += _read(sink_plan, entries, counts, count)
            except DataLossError as error:
                unknown.append(f"the source cannot be counted from the first batch: {error.what}")
        yield QueryReconciliation(name, counts, tuple(off), tuple(unknown))


def _chain(entries: list[LedgerEntry], committed: int | None) -> Iterator[str]:
    """Check that each batch begins at the end of the previous one, and that none is missing from the first one to the
    last one that was ``committed`` in the checkpoint."""
    if entries and entries[0].batch:
        yield f"the ledger begins with batch {entries[0].batch}"
    last = entries[-1].batch if entries else None
    if committed is not None and (last is None or last < committed):
        ends = "has no batch" if last is None else f"ends with batch {last}"
        yield f"the checkpoint has committed batch {committed}, the ledger {ends}"
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
    """Check that every record read, and every row that explode steps made of it, has an outcome."""
    if sink_plan.windowed:
        return
    for entry in entries:
        if not entry.is_balanced:
            exploded = f" and {entry.exploded} rows added by explode" if entry.exploded else ""
            of_join = ", ".join(f"{count} {name}" for name, count in entry.join.items())
            join = f", {entry.late} late; join: {of_join}" if entry.join else ""
            yield (
                f"batch {entry.batch}: {entry.read} read{exploded}, but {entry.out} out, {entry.dead} dead, "
                f"{entry.filtered} filtered, {entry.duplicates} duplicates{join}"
            )


def _read(sink_plan: SinkPlan, entries: list[LedgerEntry], counts: QueryCounts, count: Count) -> Iterator[str]:
    _check_one_log(entries)
    held = count(sink_plan.sink.name, *_whole(entries))
    if held != counts.read:
        yield f"the source has {held} records in the range of the batches, {counts.read} were read"


def _check_one_log(entries: list[LedgerEntry]) -> None:
    """Check that no batch went back to the first offset of another log, as the source does with failOnDataLoss=false.

    Raises:
        DataLossError: one did, so the records before it cannot be counted any more.
    """
    for entry in entries:
        for stream, places in entry.end.items():
            for name, place in places.items():
                if "@" not in name and place < entry.start.get(stream, {}).get(name, place):
                    raise DataLossError(
                        f"the log of topic {stream!r} partition {name} was replaced before batch {entry.batch}"
                    )


def _whole(entries: list[LedgerEntry]) -> tuple[Offsets, Offsets]:
    """Return the start and end offsets of all batches together.

    A topic or partition that was added later begins at its first offset in the ledger; one that is no longer read ends
    at its last.
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


class QueryEntries(NamedTuple):
    """Ledger entries of the query ``sink_plan`` of ``pipeline``, whose checkpoint is in the state directory."""

    pipeline: str
    state: StoragePath
    sink_plan: SinkPlan
    entries: list[LedgerEntry]

    def written(self, sink: Sink) -> Iterator[tuple[LedgerEntry, int]]:
        """Yield entries with the number of rows their batch wrote to ``sink``, which may be a sink of late records."""
        for entry in self.entries:
            yield entry, entry.out if sink is self.sink_plan.sink else entry.late


class Differences(NamedTuple):
    """Differences between the ledger and a target, and values that cannot be checked."""

    off: list[str]
    unknown: list[str]


def _compare_table(sink: Sink, query: QueryEntries) -> Differences:
    table = sink.table
    assert table is not None
    late = sink is not query.sink_plan.sink
    written: dict[str, dict[int, int]] = {table.path: {}}
    for entry, rows in query.written(sink):
        # The sink may have had another table when the batch was written. The ledger has no tables of late rows.
        path = table.path if late else entry.table or table.path
        written.setdefault(path, {})[entry.batch] = rows
    found = Differences([], [])
    for path, batches in written.items():
        if (stored_format(path) or table.format) == "parquet":
            found.off.extend(_parquet(Path(path), sink.name, sum(batches.values()), "late" if late else "out"))
        elif query.entries:
            checkpoint = Checkpoint(layout.checkpoint(query.state, query.sink_plan.sink.name))
            location = table.location_of(path)
            stored = commits(location) if isinstance(location, Path) else []
            before = {commit.batch: commit.rows for commit in stored if commit.writer == sink.name}
            compared = _delta(location, table.mode, transaction_id(sink.name, checkpoint.query_id()), batches, before)
            found.off.extend(compared.off)
            found.unknown.extend(compared.unknown)
    return found


def _compare_postgresql(sink: Sink, query: QueryEntries) -> Differences:
    target = sink.postgresql
    assert target is not None
    names = query.pipeline, sink.name
    return _compare_batches(
        sink, query, target.server.shown, partial(written_batches, target.server, target.own_schema, *names)
    )


def _compare_kafka(sink: Sink, query: QueryEntries) -> Differences:
    assert sink.kafka is not None
    topic = sink.kafka.target
    read = partial(kafka.written_batches, topic, query.pipeline, sink.name)
    return _compare_batches(sink, query, topic.shown, read, expires=True)


def _compare_batches(
    sink: Sink,
    query: QueryEntries,
    shown: str,
    read: Callable[[str], WrittenBatches | None],
    *,
    expires: bool = False,
) -> Differences:
    """Compare the batches that a server has of the query with the ledger: the last one, and the rows of all.

    ``read`` returns the batches of the query with an id. ``expires``: the server may have removed the numbers.
    """
    written = {entry.batch: rows for entry, rows in query.written(sink) if rows}
    if not written:
        return Differences([], [])
    checkpoint = Checkpoint(layout.checkpoint(query.state, query.sink_plan.sink.name))
    try:
        found = read(checkpoint.query_id())
    except PenstockError as error:
        return Differences([], [f"{error.what}: {error.why}"])
    last, rows = max(written), sum(written.values())
    if found is None:
        lacks = f"{shown} has no batch of this query, the ledger has {len(written)}"
        return Differences([], [lacks]) if expires else Differences([lacks], [])
    earlier = [batch for batch in written if batch < found.first]
    unknown = [f"{shown} has no number of {len(earlier)} batches before batch {found.first}"] if earlier else []
    rows -= sum(written[batch] for batch in earlier)
    if found.batch > max(entry.batch for entry in query.entries):
        # The batch in progress of an active run, or of one that was killed.
        if found.total - found.rows != rows:
            yielded = f"{shown} has {found.total - found.rows} rows before batch {found.batch}"
            return Differences([f"{yielded}, the ledger has {rows}"], unknown)
        return Differences([], unknown)
    off = []
    if found.batch != last:
        off.append(f"{shown} has batch {found.batch} as the last one, the ledger has {last}")
    if found.total != rows:
        off.append(f"{shown} has written {found.total} rows, the ledger has {rows} out")
    return Differences(off, unknown)


COMPARISONS: Mapping[str, Callable[[Sink, QueryEntries], Differences] | None] = {
    "table": _compare_table,
    # These targets have no rows to count: a key has its newest value only, a topic has records of other producers and
    # deletes old ones, a broker deletes delivered messages, and programs take files away.
    "statestore": None,
    "tubemq": None,
    "mqtt": None,
    "kafka": _compare_kafka,
    "postgresql": _compare_postgresql,
    "files": None,
    "console": None,
}
"""Comparison with the ledger for each kind in ``SINK_KINDS``; None if the target has no rows to count."""


def _dead_letters(
    name: str, entries: list[LedgerEntry], counts: QueryCounts, dead: StoragePath | None
) -> Iterator[str]:
    if dead is None or counts.letters is None:
        return
    expected = {str(dead): 0}
    for entry in entries:
        path = entry.letters_table or str(dead)
        expected[path] = expected.get(path, 0) + (entry.letters or 0)
    for path, rows in expected.items():
        yield from _parquet(storage_path(path), name, rows, "dead letters")


def _delta(
    path: StoragePath, mode: str, writer: str, written: Mapping[int, int], migrated: Mapping[int, int]
) -> Differences:
    """Compare the batches ``written`` by ``writer``, with their number of rows, with the log of a Delta table.

    Appended rows are counted; for a merge, the log only shows that it was performed. ``migrated`` has the rows of the
    batches that were committed to the Parquet table before it became a Delta table.
    """
    try:
        log = DeltaLog(path)
        first = log.first
        found: dict[int, list[int]] = {}
        for version in log.versions(first - 1) if first is not None else ():
            if (number := version.transactions.get(writer)) is not None:
                found.setdefault(number, []).append(sum(file.records or 0 for file in version.added))
    except PenstockError as error:
        return Differences([], [error.what])
    off, older = [], 0
    for batch, count in written.items():
        versions = found.get(batch, [])
        if len(versions) > 1:
            off.append(f"{path} has batch {batch} in {len(versions)} versions")
        held = migrated.get(batch, sum(versions) if versions else None)
        if held is None:
            if not count:
                continue
            if first and batch < min(found, default=batch + 1):
                older += 1
            else:
                off.append(f"{path} lacks batch {batch}, which has {count} rows in the ledger")
        elif (mode == "append" or batch in migrated or not count) and held != count:
            off.append(f"{path} has {held} rows of batch {batch}, the ledger has {count}")
    unknown = [f"the log of {path} starts at version {first}: {older} batches are older"] if older else []
    return Differences(off, unknown)


def _parquet(path: StoragePath, writer: str, expected: int, what: str) -> Iterator[str]:
    """Compare the rows that ``writer`` committed to a Parquet table with its commit log, its files and the ledger."""
    mine = [commit for commit in commits(path) if commit.writer == writer]
    missing = [name for commit in mine for name in commit.files if not (path / name).exists()]
    for name in missing:
        yield f"{path} lacks its file {name}"
    committed = sum(commit.rows for commit in mine)
    if committed != expected:
        yield f"{path} has {committed} rows committed, the ledger has {expected} {what}"
    if not missing:
        held = sum(read_footer(path / name).num_rows for commit in mine for name in commit.files)
        held += sum(commit.deleted for commit in mine)
        if held != committed:
            yield f"{path} has {held} rows, {committed} were committed"
