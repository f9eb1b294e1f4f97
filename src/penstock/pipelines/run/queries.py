"""Streaming queries of a pipeline for a single sink each, and the processing of their micro-batches; see ``shared``.

Spark calls ``SinkBatches`` for each batch (``foreachBatch``), and again after a failure, with the same batch id and the
same rows. It writes valid rows to the sink, dead rows to the dead letter table, and counts to the ledger.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from penstock.errors import DataLossError, PenstockError, UnavailableError
from penstock.pipelines.catalyst import make_thread_safe
from penstock.pipelines.ledger.ledger import NO_JOIN, Ledger, LedgerEntry
from penstock.pipelines.rows import MARKS, added_rows, alive, record_identity, windows_as_rows
from penstock.pipelines.run.progress import RunningBatch
from penstock.pipelines.sinks.delivery import (
    NO_LETTERS,
    DeadLetterCounts,
    SinkBatch,
    SinkWriter,
    Targets,
    letter_condition,
    mark_unwritable,
)
from penstock.pipelines.sinks.delta import check_fields, check_partitions
from penstock.pipelines.sinks.files import check_flat
from penstock.pipelines.sinks.partitions import check_partition_columns
from penstock.pipelines.sinks.postgresql import column_kinds
from penstock.pipelines.sinks.table import check_columns
from penstock.pipelines.sources.changes import AsOfJoins
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.expectations import check_limits, expectation_counts
from penstock.pipelines.spec.pipeline import SinkPlan
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.steps import JOIN_COUNTS, JOIN_OUTCOMES, JOIN_SIDES, registries_of
from penstock.pipelines.state_dir.births import birth_directory
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets
from penstock.pipelines.state_dir.deadbands import StateSize, deadband_directory, state_size
from penstock.pipelines.state_dir.schemas import SCHEMAS, BatchSchemas, remove_old_decisions
from penstock.pipelines.steps.expectations import check_counts, checks_of
from penstock.pipelines.steps.graph import build_stream, join_inputs, window_input
from penstock.pipelines.steps.joins import join_counts, late_counts, mark_late, with_values
from penstock.pipelines.steps.lookups import WithLookup
from penstock.pipelines.steps.windows import late_from_us
from penstock.runtime.backoff import Backoff
from penstock.spark.files.object_storage import spark_path
from penstock.spark.postgresql.columns import table_columns
from penstock.spark.postgresql.connection import connected

__all__ = [
    "BatchBarrier",
    "BatchCounts",
    "BuiltQuery",
    "FinishedBatch",
    "Query",
    "QueryBatches",
    "RunContext",
    "RunStopping",
    "RunningQuery",
    "SinkBatches",
    "build_query",
    "check_nothing_dropped",
    "check_target",
    "is_small",
    "ledger_entry",
    "start_query",
]


class RunStopping(Exception):
    """The run is stopping: this batch was not started and is the first of the next run."""


class BatchBarrier:
    """Admits batches until it is closed, and waits for the admitted ones.

    Stopping a query while Python runs inside its batch ends with a StackOverflowError in Spark's stream thread; raising
    an exception before a batch begins does not.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        """Enter; raise ``RunStopping`` if the barrier is closed."""
        with self._changed:
            if self._closed:
                raise RunStopping("the run is stopping")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        """Leave, and wake the thread that waits for it."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """True if no more batches are admitted."""
        return self._closed

    @property
    def is_empty(self) -> bool:
        """True if no batch is running."""
        return self._inside == 0

    def open(self) -> None:
        """Admit batches again."""
        with self._changed:
            self._closed = False

    def close(self, timeout_s: float) -> bool:
        """Admit no more batches and wait for the admitted ones; returns False on timeout."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)


@dataclass(frozen=True, slots=True)
class RunContext:
    """State shared by the queries of one run. ``report`` is called after each finished batch."""

    source: Sources
    ledger: Ledger
    barrier: BatchBarrier
    report: Callable[[FinishedBatch], None]
    with_lookup: WithLookup
    targets: Targets
    as_of: AsOfJoins

    def begin(self, spark: SparkSession, plans: Sequence[SinkPlan], batches: Sequence[tuple[Checkpoint, int]]) -> None:
        """Tell the jobs of this thread what the begun ``batches``, which are computed together, know.

        ``plans`` are all sinks of their query. See ``AsOfJoins.begin`` and ``state_dir.schemas``.

        Raises:
            PenstockError: see ``AsOfJoins.begin``.
        """
        self.as_of.begin(spark, {name: join for each in plans for name, join in each.as_of_joins.items()}, batches)
        if registries := registries_of(step for each in plans for step in each.steps):
            known = BatchSchemas.begin(
                self.targets.state, registries, [(checkpoint.path, batch) for checkpoint, batch in batches]
            )
            for checkpoint, batch in batches:
                remove_old_decisions(checkpoint.path, batch)
            spark.sparkContext.setLocalProperty(SCHEMAS, known.as_text())


class BatchCounts(NamedTuple):
    """Number of rows of a batch in each state; ``exploded``: how many of them explode steps added."""

    out: int
    dead: int
    filtered: int
    exploded: int = 0

    def plus(self, other: BatchCounts) -> BatchCounts:
        """Return the sums."""
        return BatchCounts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def duplicates(self, read: int) -> int:
        """Return how many of the ``read`` records have no row."""
        return read + self.exploded - self.out - self.dead - self.filtered


class FinishedBatch(NamedTuple):
    """A finished batch, its duration in seconds, and the size of the state of deadbands after it."""

    entry: LedgerEntry
    took_s: float
    deadbands: StateSize | None = None


class SinkBatches:
    """The batches of one sink's query."""

    def __init__(self, plan: SinkPlan, checkpoint: Checkpoint, context: RunContext) -> None:
        self.plan = plan
        self.checkpoint = checkpoint
        self.last_finished: int | None = None
        """The last finished batch; Spark commits it a moment later."""
        self.running: Mapping[str, RunningBatch] = {}
        """The batch in progress, by sink."""
        self.gate = BatchBarrier()
        """Closed to stop this query between two batches."""
        self._context = context
        self._writer = SinkWriter(plan, checkpoint, context.targets)
        self._entry = partial(ledger_entry, plan, checkpoint, context.targets)
        self._last = context.ledger.last(plan.sink.name)
        self._names: tuple[str, ...] | None = None
        """The columns of the table, if its rows are written in one pass."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sink while its batch is in progress."""
        return tuple(self.running)

    def prepare(self, rows: DataFrame) -> DataFrame:
        """Return the rows of the query as its batches need them: what is the same for all is planned once."""
        if self.plan.windowed:
            return rows
        if self.plan.join is not None:
            return with_values(mark_unwritable(rows, self.plan.sink))
        prepared, self._names = self._writer.prepare(mark_unwritable(rows, self.plan.sink))
        return prepared

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Process one batch. All writes are idempotent by batch id."""
        with self._context.barrier, self.gate:
            start, end = self._range(batch)
            began = time.monotonic()
            self.running = {self.plan.sink.name: RunningBatch(batch, began, end)}
            try:
                self._context.begin(rows.sparkSession, [self.plan], [(self.checkpoint, batch)])
                entry = self._process(rows, batch, start, end)
                self._context.ledger.write(entry)
                self.last_finished = batch
                self._last = entry
            finally:
                self.running = {}
        self._context.report(FinishedBatch(entry, time.monotonic() - began, self._deadbands()))

    def _deadbands(self) -> StateSize | None:
        steps = [step.name for step in self.plan.steps if step.deadband is not None]
        return state_size(deadband_directory(self.checkpoint.path), steps) if steps else None

    def _process(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> LedgerEntry:
        if self.plan.windowed:
            return self._windows(rows, batch, start, end)
        if self.plan.join is not None:
            return self._joined(rows, batch, start, end)
        return self._rows(rows, batch, start, end)

    def _range(self, batch: int) -> tuple[Offsets, Offsets]:
        start, end = self.checkpoint.range(batch)
        # A source without data before this batch begins at the start of the query.
        return self._context.source.start(self.plan.sink.name) | (start or {}), end

    def _read(self, start: Offsets, end: Offsets) -> int:
        return self._context.source.count(self.plan.sink.name, start, end)

    def _rows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> LedgerEntry:
        if self._names is not None:
            return self._rows_in_one_pass(rows, batch, start, end, self._names)
        # Cached: the rows are used three times, but the stateful operators that produce them must run once.
        rows = rows.persist()
        try:
            counts, checks = self._counted(rows)
            check_limits(self.plan.expectations, batch, checks)
            out = self._writer.write(self.plan.sink, SinkBatch(batch, rows.where(alive()), counts.out))
            letters = self._writer.write_dead_letters([rows] if counts.dead else [], batch)
        finally:
            rows.unpersist()
        read = self._read(start, end)
        return self._entry(batch, start, end, read, counts, out=out, letters=letters, checks=checks)

    def _counted(self, rows: DataFrame) -> tuple[BatchCounts, dict[str, int]]:
        """Count ``rows`` by state, and by name in ``_checks``."""
        aggregates = check_counts(rows, self.plan)
        found = rows.agg(*_states(rows), *aggregates).first()
        assert found is not None
        return _counted(found), checks_of(found)

    def _rows_in_one_pass(
        self, rows: DataFrame, batch: int, start: Offsets, end: Offsets, names: tuple[str, ...]
    ) -> LedgerEntry:
        read = self._read(start, end)
        if is_small(read, self._last) and not self.plan.has_dedupe:
            # One file and one task: more would not make a small batch faster.
            rows = rows.coalesce(1)
        found = self._writer.write_once(rows, batch, names)
        counts = BatchCounts(found.out, found.dead, found.filtered, found.exploded)
        return self._entry(
            batch,
            start,
            end,
            read,
            counts,
            out=found.written,
            letters=found.letters,
            checks=found.checks,
        )

    def _windows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> LedgerEntry:
        plan = self.plan
        self._check_limits_of_records(rows.sparkSession, batch, start, end)
        # Cached as well: counting and sending must not compute the windows twice.
        windows = mark_unwritable(windows_as_rows(rows, plan.window_name), plan.sink).persist()
        try:
            found = _count(windows)
            written = self._writer.write(
                plan.sink, SinkBatch(batch, windows.where(alive()).drop(*MARKS), found.out, windows=True)
            )
            refused = [windows] if found.dead else []
            read = self._read(start, end)
            counts, checks, late, letters = self._into_windows(rows.sparkSession, batch, start, end, refused)
        finally:
            windows.unpersist()
        counts = counts._replace(dead=counts.dead + found.dead)
        return self._entry(batch, start, end, read, counts, out=written, late=late, letters=letters, checks=checks)

    def _check_limits_of_records(self, spark: SparkSession, batch: int, start: Offsets, end: Offsets) -> None:
        """Check the limits of expectations before the windows of a batch are written."""
        if all(each.limit is None for each in self.plan.expectations.values()):
            return
        streams = self._context.source.batches(spark, self.plan.sink.name, start, end)
        if streams is not None:
            _, checks = self._counted(self._window_input(streams))
            check_limits(self.plan.expectations, batch, checks)

    def _joined(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> LedgerEntry:
        """Write the rows that a join returned, and count what the records of the batch added to it.

        The rows do not contain these numbers, so the batch's records are read again and compared with the watermark
        that Spark used, as for windows.
        """
        plan = self.plan
        # Cached, and first of all: the join must run once.
        rows = rows.persist()
        sides: list[DataFrame] = []
        try:
            found = rows.agg(*_states(rows), *join_counts(rows), *check_counts(rows, plan)).first()
            assert found is not None
            counts, checks = _counted(found), Counter(checks_of(found))
            join = Counter({name: int(found[name]) for name in JOIN_OUTCOMES})
            sides += self._join_inputs(rows.sparkSession, batch, start, end)
            late = 0
            for name, records in zip(JOIN_SIDES, sides, strict=bool(sides)):
                row = records.agg(*_states(records), *late_counts(), *check_counts(records, plan)).first()
                assert row is not None
                into = _counted(row)
                join += Counter({name: into.out - int(row["late"]), f"late_{name}": int(row["late_rows"])})
                counts = counts.plus(into._replace(out=0))
                checks += Counter(checks_of(row))
                late += int(row["late"])
            check_limits(plan.expectations, batch, checks)
            out = self._writer.write(plan.sink, SinkBatch(batch, rows.where(alive()), counts.out))
            letters = self._writer.write_dead_letters([rows, *sides] if counts.dead else [], batch)
        finally:
            for each in (rows, *sides):
                each.unpersist()
        read = self._read(start, end)
        made = {name: join[name] for name in JOIN_COUNTS}
        return self._entry(
            batch, start, end, read, counts, out=out, late=late, letters=letters, checks=checks, join=made
        )

    def _join_inputs(self, spark: SparkSession, batch: int, start: Offsets, end: Offsets) -> list[DataFrame]:
        """Return the records of the batch as both inputs of the join, with late ones marked; empty without records."""
        plan = self.plan
        streams = self._context.source.batches(spark, plan.sink.name, start, end)
        if streams is None:
            return []
        births = [birth_directory(self.checkpoint.path)]
        watermark_ms = self.checkpoint.late_watermark_ms(batch)
        inputs = join_inputs(streams, plan.nodes, self._context.with_lookup, births)
        marked = [mark_late(rows, plan, side, watermark_ms) for side, rows in zip(JOIN_SIDES, inputs, strict=True)]
        return [rows.persist() for rows in marked] if letter_condition(plan) is not None else marked

    def _window_input(self, streams: Callable[[str], DataFrame]) -> DataFrame:
        births = [birth_directory(self.checkpoint.path)]
        return window_input(streams, self.plan.nodes, self._context.with_lookup, births)

    def _into_windows(
        self, spark: SparkSession, batch: int, start: Offsets, end: Offsets, refused: list[DataFrame]
    ) -> tuple[BatchCounts, dict[str, int], int, DeadLetterCounts]:
        """Count the rows that this batch added to windows, its late events, and its dead letters.

        The windows do not contain these numbers, and Spark counts partial aggregates, so the batch's records are read
        again and compared with the watermark that Spark used. ``refused``: windows, some of which are dead.
        """
        plan = self.plan
        streams = self._context.source.batches(spark, plan.sink.name, start, end)
        if streams is None:
            return BatchCounts(0, 0, 0), {}, 0, self._writer.write_dead_letters(refused, batch)
        window = plan.window
        assert window is not None
        records = self._window_input(streams)
        watermark = self.checkpoint.late_watermark_ms(batch)
        # Late duplicates of an event count once; `<=`, since an event at the watermark is dropped too. Before the first
        # watermark Spark compares with 0, and drops windows that ended before 1970.
        place = late_from_us(records, window, deduped=plan.has_dedupe)
        is_late = alive() & (place <= sf.lit(watermark * 1000))
        late = sf.count_distinct(sf.when(is_late, sf.struct(*record_identity(records)))).alias("late")
        if plan.late_sinks or plan.dead_letters_of:
            records = records.persist()
        late_rows: list[DataFrame] = []
        try:
            row = records.agg(*_states(records), late, *check_counts(records, plan)).first()
            assert row is not None
            counts, checks = _counted(row), checks_of(row)
            if plan.late_sinks:
                once = records.where(is_late).dropDuplicates(record_identity(records))
                late_rows = [mark_unwritable(once, sink).persist() for sink in plan.late_sinks]
            dead = [records] if counts.dead else []
            for sink, rows in zip(plan.late_sinks, late_rows, strict=True):
                found = _count(rows)
                self._writer.write(sink, SinkBatch(batch, rows.where(alive()), found.out))
                if found.dead:
                    dead.append(rows)
                    counts = counts._replace(dead=counts.dead + found.dead)
            letters = self._writer.write_dead_letters([*dead, *refused], batch)
        finally:
            for rows in (records, *late_rows):
                rows.unpersist()
        return counts, checks, int(row["late"]), letters


def ledger_entry(
    plan: SinkPlan,
    checkpoint: Checkpoint,
    targets: Targets,
    batch: int,
    start: Offsets,
    end: Offsets,
    read: int,
    counts: BatchCounts,
    *,
    out: int,
    late: int = 0,
    letters: DeadLetterCounts = NO_LETTERS,
    checks: Mapping[str, int],
    join: Mapping[str, int] = NO_JOIN,
) -> LedgerEntry:
    """Return the ledger entry of a batch of the sink of ``plan``; ``checks``: rows by name in ``_checks``.

    Records without a row are duplicates only if the plan has a dedupe; otherwise ``reconcile`` reports them.
    """
    duplicates = counts.duplicates(read) if plan.has_dedupe else 0
    return LedgerEntry(
        sink=plan.sink.name,
        batch=batch,
        start=start,
        end=end,
        read=read,
        out=out,
        dead=counts.dead,
        filtered=counts.filtered,
        exploded=counts.exploded,
        duplicates=None if plan.windowed else 0 if join else duplicates,
        late=late,
        late_watermark_ms=checkpoint.late_watermark_ms(batch),
        watermark_ms=checkpoint.planned(batch).watermark_ms,
        fencing_token=str(targets.store.token),
        letters=letters.written,
        letters_by_step=dict(letters.by_step),
        table=plan.sink.path,
        letters_table=None if targets.dead_letters is None else str(targets.dead_letters),
        expectations=expectation_counts(plan.expectations, checks),
        join=dict(join),
        version=targets.version,
    )


def _states(rows: DataFrame) -> list[Column]:
    return [
        sf.count_if(alive()).alias("out"),
        sf.count_if(sf.col("_dead").isNotNull()).alias("dead"),
        sf.count_if(sf.col("_dead").isNull() & sf.col("_filtered").isNotNull()).alias("filtered"),
        sf.coalesce(sf.sum(added_rows(rows)), sf.lit(0)).alias("exploded"),
    ]


def _count(rows: DataFrame) -> BatchCounts:
    found = rows.agg(*_states(rows)).first()
    assert found is not None
    return _counted(found)


def _counted(found: Row) -> BatchCounts:
    return BatchCounts(found["out"], found["dead"], found["filtered"], found["exploded"])


ONE_FILE = 10_000
"""Maximum number of rows of a batch that are written to a table as one file, by one task."""


def is_small(read: int, last: LedgerEntry | None) -> bool:
    """Return True if ``read`` records have few rows: as many per record as in ``last``, the batch before.

    Explode steps make several rows of a record; how many is known only after the batch was computed.
    """
    rows = read if last is None or not last.read else read * (last.read + last.exploded) / last.read
    return rows <= ONE_FILE


FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

# PySpark logs every analysis error as a line of JSON with both stacks; the run reports it once, as an error.
for _kind in ("SQL", "DataFrame"):
    logging.getLogger(f"{_kind}QueryContextLogger").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class BuiltQuery:
    """Query of one sink: the plan of its rows, the processing of its batches, and its checkpoint."""

    plan: SinkPlan
    build_rows: Callable[[], DataFrame]
    batches: SinkBatches
    checkpoint: Checkpoint
    columns: StructType = field(init=False)
    """The columns of the rows behind the steps."""
    rows: DataFrame = field(init=False)
    """Analyzed rows as the batches need them; :meth:`rebuild` replaces them."""

    def __post_init__(self) -> None:
        self.rebuild()

    def rebuild(self) -> None:
        """Build a new plan of the rows: an object of the old one may be the cause of a failure."""
        rows = self.build_rows()
        self.columns = rows.schema
        self.rows = self.batches.prepare(rows)

    @property
    def name(self) -> str:
        """The sink's name."""
        return self.plan.sink.name

    @property
    def sinks(self) -> tuple[str, ...]:
        """The sinks of the query: one."""
        return (self.name,)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sinks whose batch failed if the query fails."""
        return self.sinks

    def start(self, trigger_ms: int, *, available_now: bool) -> StreamingQuery:
        """Start the query, from the end of its checkpoint if it has one."""
        self.checkpoint.sync()
        return start_query(self, trigger_ms, available_now=available_now)


class Query(Protocol):
    """A query of one sink or several. ``checkpoint`` is the query's own, ``plan`` that of its only or first sink."""

    plan: SinkPlan
    checkpoint: Checkpoint
    rows: DataFrame

    @property
    def name(self) -> str:
        """The name of its first sink."""

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names of its sinks."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sinks whose batch failed if the query fails."""

    @property
    def batches(self) -> QueryBatches:
        """The processing of its batches."""

    def rebuild(self) -> None:
        """Build a new plan of the rows."""

    def start(self, trigger_ms: int, *, available_now: bool) -> StreamingQuery:
        """Start the query where its sinks are."""


class QueryBatches(Protocol):
    """The processing of the batches of a query; see :class:`SinkBatches`."""

    last_finished: int | None
    running: Mapping[str, RunningBatch]
    gate: BatchBarrier

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sinks that have begun a batch and not finished it."""

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Process one batch."""


def start_query(query: Query, trigger_ms: int, *, available_now: bool) -> StreamingQuery:
    """Start ``query`` at its checkpoint."""
    writer = (
        query.rows.writeStream.queryName(query.name)
        # Update mode emits windows whenever they change, also the last one; append mode only closed windows.
        .outputMode("update" if query.plan.changes_windows else "append")
        .option("checkpointLocation", spark_path(query.checkpoint.path))
        .foreachBatch(query.batches)
    )
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{trigger_ms} milliseconds").start()


def build_query(sink_plan: SinkPlan, checkpoint: Checkpoint, spark: SparkSession, context: RunContext) -> BuiltQuery:
    """Build the query of one sink; Spark checks every column.

    Raises:
        ConfigError: a step cannot be built (see ``graph.build_stream``), or the table has columns of other types.
    """
    query = BuiltQuery(
        sink_plan,
        partial(_build_rows, spark, sink_plan, checkpoint, context),
        SinkBatches(sink_plan, checkpoint, context),
        checkpoint,
    )
    check_target(spark, sink_plan.sink, query.columns)
    if sink_plan.sink.table is not None:
        check_partition_columns(sink_plan.sink, query.columns)
    return query


def check_target(spark: SparkSession, sink: Sink, columns: StructType) -> None:
    """Check that a table has columns of types that hold those of the stream, and prepare the format of messages.

    Raises:
        ConfigError: a column has another type, or cannot be a column of a Delta table.
    """
    if sink.table is not None and not sink.table.is_remote:
        path = sink.table.location
        check_columns(path, sink.name, columns)
        if sink.table.format == "delta":
            check_partitions(path, sink.name, sink.table.partitions)
            check_fields(path, sink.name, [columns[name].jsonValue() for name in columns.names if name[0] != "_"])
    if sink.postgresql is not None:
        # A server that is not available now is checked by the first batch.
        with suppress(UnavailableError), connected(sink.postgresql.server, f"penstock {sink.name}") as connection:
            table_columns(connection, sink.postgresql.shape(sink.name), column_kinds(columns))
    if sink.files is not None:
        check_flat(sink.name, sink.files, columns)
    if sink.tubemq is not None or sink.mqtt is not None:
        make_thread_safe(spark, "mqtt" if sink.tubemq is None else "tubemq")


def _build_rows(spark: SparkSession, sink_plan: SinkPlan, checkpoint: Checkpoint, context: RunContext) -> DataFrame:
    name = sink_plan.sink.name
    return build_stream(
        context.source.streams(spark, name),
        sink_plan.nodes,
        sink_plan.reads,
        context.with_lookup,
        sink=name,
        births=[birth_directory(checkpoint.path)],
        deadbands=deadband_directory(checkpoint.path),
    )


@dataclass(slots=True, eq=False)
class RunningQuery:
    """State of one query: its restarts and failures."""

    built: Query
    query: StreamingQuery | None = None
    failing_since: float | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    restart_at: float = 0.0
    rebuild: bool = False
    """True if the next start needs a new plan, because the failure may have been inside the old one."""
    restarts: int = 0
    warned: bool = False
    """True after the warning that it has failed for long."""
    warned_of_loss: bool = False
    """True after the warning that retention will delete records that its sinks have not read."""
    strange: int = 0
    error: PenstockError | None = None
    """The error after which the run continues without its sinks."""
    ended: bool = False
    stopping: bool = False
    """True while the query is stopped to join another one."""
    stopped: bool = False
    """True after that, until its sinks have another query."""
    is_up: bool = False
    """True once it has finished a batch, or waits for records: no batch of an earlier run is left to be repeated."""
    family: tuple[str, ...] = ()
    """Sinks that can share a query with those of this query, see ``query_groups``."""

    @property
    def is_shared(self) -> bool:
        """True if its sinks can share a query; then the query of a restart is built for their positions."""
        return len(self.family) > 1

    @property
    def is_over(self) -> bool:
        """True if the query has ended and is not started again."""
        return self.ended or self.error is not None

    @property
    def is_healthy(self) -> bool:
        """True if the query runs and its last batch was finished."""
        return self.query is not None and self.failing_since is None and not (self.ended or self.stopping)

    def check_up(self) -> bool:
        """Return ``is_up``, after asking Spark."""
        if not self.is_up and self.query is not None and self.query.isActive:
            # "Waiting for data to arrive", "Waiting for next trigger".
            self.is_up = str(self.query.status["message"]).startswith("Waiting")
        return self.is_up

    def continue_failure(self, failed: RunningQuery) -> None:
        """Take over the count of failures of the query ``failed``, whose batch this query repeats."""
        # Set in any case: a sink that failed does not join the others before it has finished a batch.
        self.failing_since, self.strange = failed.failing_since or time.monotonic(), failed.strange
        self.backoff, self.restarts, self.warned = failed.backoff, failed.restarts, failed.warned
        self.warned_of_loss = failed.warned_of_loss

    def progressed(self) -> None:
        """Reset the failure counters after a finished batch."""
        self.is_up = True
        self.failing_since = None
        self.warned = self.warned_of_loss = False
        self.strange = 0
        self.backoff.reset()


def check_nothing_dropped(running: RunningQuery) -> None:
    """Fail if Spark dropped records that arrived before the dedupe's watermark, which would be lost for the table.

    It happens if partitions are read far apart: one is days behind while another one that is up to date has advanced
    the watermark. The next batch or the end of the run reports it; the records are still in the log.
    """
    plan = running.built.plan
    if plan.windowed or plan.join is not None or running.query is None:
        return
    dropped = sum(
        operator.numRowsDroppedByWatermark
        for progress in running.query.recentProgress
        for operator in progress.stateOperators
    )
    if dropped:
        raise DataLossError(
            f"sink {running.built.name!r}: {dropped} records arrived longer than `within` before others already read",
            why="one partition is read far behind another, so the dedupe dropped its records as too old",
            hint="raise the dedupe's `within` above that distance, and run again with a new state directory and table",
        )
