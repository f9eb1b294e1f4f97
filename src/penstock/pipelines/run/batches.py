"""Process a micro-batch: write its rows to the sink, its broken rows to the dead letters, its counts to the ledger.

Spark calls it (``foreachBatch``), and calls it again with the same batch id and the same rows after a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sf

from penstock.pipelines.ledger.ledger import Entry, Ledger
from penstock.pipelines.rows import MARKS, alive, windows_as_rows
from penstock.pipelines.sinks.delivery import Delivery, Targets, marked
from penstock.pipelines.sinks.messages import identity
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.plan import SinkPlan
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets
from penstock.pipelines.steps.stages import WithLookup, into_window
from penstock.pipelines.steps.windows import last_end_ms

__all__ = ["Context", "Drained", "Finished", "Gate", "SinkBatches", "UnderWay"]


class Drained(Exception):
    """The run is stopping: this batch was not begun and is the first of the next run."""


class Gate:
    """Lets batches in until it is closed, and knows when none is inside.

    Stopping a query while Python runs inside its batch ends in a StackOverflowError of Spark's stream thread; raising
    before a batch begins does not.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        """Go in; ``Drained`` where the gate is closed."""
        with self._changed:
            if self._closed:
                raise Drained("the run is stopping")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        """Go out, and wake whoever waits for that."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait until nobody is inside; whether that came to pass in time."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)


@dataclass(frozen=True, slots=True)
class Context:
    """State shared by the queries of one run. ``report`` is called after each finished batch."""

    source: Sources
    ledger: Ledger
    gate: Gate
    report: Callable[[Finished], None]
    with_lookup: WithLookup
    targets: Targets


class _Counts(NamedTuple):
    """Number of rows of a batch in each state, among the rows for the sink."""

    out: int
    dead: int
    filtered: int


class Finished(NamedTuple):
    """A batch that went through, and how many seconds it took."""

    entry: Entry
    took_s: float


class UnderWay(NamedTuple):
    """The batch that is being carried out: since when (``time.monotonic``), and where it ends."""

    batch: int
    since: float
    end: Offsets


class SinkBatches:
    """The batches of one sink's query."""

    def __init__(self, plan: SinkPlan, checkpoint: Checkpoint, context: Context) -> None:
        self.plan = plan
        self.checkpoint = checkpoint
        self.last_finished: int | None = None
        """The last batch that went through; Spark commits it a moment later."""
        self.under_way: UnderWay | None = None
        self._context = context
        self._delivery = Delivery(plan, checkpoint, context.targets)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Carry out one batch. Everything in it is idempotent by batch id."""
        with self._context.gate:
            start, end = self._range(batch)
            began = time.monotonic()
            self.under_way = UnderWay(batch, began, end)
            try:
                entry = (
                    self._windows(rows, batch, start, end)
                    if self.plan.windowed
                    else self._rows(rows, batch, start, end)
                )
                self._context.ledger.write(entry)
                self.last_finished = batch
            finally:
                self.under_way = None
        self._context.report(Finished(entry, time.monotonic() - began))

    def _range(self, batch: int) -> tuple[Offsets, Offsets]:
        start, end = self.checkpoint.range(batch)
        # What a source had given nothing of yet begins where the query began.
        return self._context.source.start(self.plan.sink.name) | (start or {}), end

    def _read(self, start: Offsets, end: Offsets) -> int:
        return self._context.source.count(self.plan.sink.name, start, end)

    def _rows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> Entry:
        # Cached: the rows come out of stateful operators, which must run once, and are used three times.
        rows = marked(rows, self.plan.sink).persist()
        try:
            counts = _count(rows)
            out = self._delivery.rows(self.plan.sink, rows.where(alive()), batch, counts.out)
            letters = self._delivery.letters([rows] if counts.dead else [], batch)
        finally:
            rows.unpersist()
        read = self._read(start, end)
        duplicates = read - counts.out - counts.dead - counts.filtered
        return self._entry(batch, start, end, read, counts, out=out, duplicates=duplicates, letters=letters)

    def _windows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> Entry:
        plan = self.plan
        # Cached, as above: a window must not be computed once to be counted and once to be sent.
        windows = marked(windows_as_rows(rows, plan.window_name), plan.sink).persist()
        try:
            found = _count(windows)
            written = self._delivery.windows(windows.where(alive()).drop(*MARKS), batch, found.out)
            refused = [windows] if found.dead else []
            read = self._read(start, end)
            counts, late, letters = self._into_windows(rows.sparkSession, batch, start, end, refused)
        finally:
            windows.unpersist()
        counts = counts._replace(dead=counts.dead + found.dead)
        return self._entry(batch, start, end, read, counts, out=written, duplicates=None, late=late, letters=letters)

    def _into_windows(
        self, spark: SparkSession, batch: int, start: Offsets, end: Offsets, refused: list[DataFrame]
    ) -> tuple[_Counts, int, int]:
        """Count the rows that this batch added to windows, its late events, and its dead letters.

        The windows do not say, and Spark's own count is of partial aggregates, so the batch's records are read once
        more and compared with the watermark that Spark compared them with. ``refused``: windows, dead ones among them.
        """
        plan = self.plan
        streams = self._context.source.batches(spark, plan.sink.name, start, end)
        if streams is None:
            return _Counts(0, 0, 0), 0, self._delivery.letters(refused, batch)
        window = plan.window
        assert window is not None
        records = into_window(streams, plan.nodes, self._context.with_lookup)
        watermark = self.checkpoint.late_watermark_ms(batch)
        # Late copies of one event are one late event; `<=`, since an event at the watermark is dropped too.
        place = last_end_ms(window, deduped=any(step.dedupe is not None for step in plan.steps))
        is_late = alive() & (place <= sf.lit(watermark)) if watermark else sf.expr("false")
        late = sf.count_distinct(sf.when(is_late, sf.struct(*identity(records)))).alias("late")
        if plan.late_sinks or plan.dead_letters_of:
            records = records.persist()
        late_rows: list[DataFrame] = []
        try:
            row = records.agg(*_states(), late).first()
            assert row is not None
            counts = _counted(row)
            if plan.late_sinks:
                once = records.where(is_late).dropDuplicates(identity(records))
                late_rows = [marked(once, sink).persist() for sink in plan.late_sinks]
            dead = [records] if counts.dead else []
            for sink, rows in zip(plan.late_sinks, late_rows, strict=True):
                found = _count(rows)
                self._delivery.rows(sink, rows.where(alive()), batch, found.out)
                if found.dead:
                    dead.append(rows)
                    counts = counts._replace(dead=counts.dead + found.dead)
            letters = self._delivery.letters([*dead, *refused], batch)
        finally:
            for rows in (records, *late_rows):
                rows.unpersist()
        return counts, int(row["late"]), letters

    def _entry(
        self,
        batch: int,
        start: Offsets,
        end: Offsets,
        read: int,
        counts: _Counts,
        *,
        out: int,
        duplicates: int | None,
        late: int = 0,
        letters: int = 0,
    ) -> Entry:
        dead_letters = self._context.targets.dead_letters
        return Entry(
            sink=self.plan.sink.name,
            batch=batch,
            start=start,
            end=end,
            read=read,
            out=out,
            dead=counts.dead,
            filtered=counts.filtered,
            duplicates=duplicates,
            late=late,
            late_watermark_ms=self.checkpoint.late_watermark_ms(batch),
            watermark_ms=self.checkpoint.planned(batch).watermark_ms,
            fencing_token=str(self._context.targets.store.token),
            letters=letters,
            table=None if self.plan.sink.table is None else self.plan.sink.table.path,
            letters_table=None if dead_letters is None else str(dead_letters),
        )


def _states() -> list[Column]:
    return [
        sf.count_if(alive()).alias("out"),
        sf.count_if(sf.col("_dead").isNotNull()).alias("dead"),
        sf.count_if(sf.col("_dead").isNull() & sf.col("_filtered").isNotNull()).alias("filtered"),
    ]


def _count(rows: DataFrame) -> _Counts:
    found = rows.agg(*_states()).first()
    assert found is not None
    return _counted(found)


def _counted(found: Row) -> _Counts:
    return _Counts(found["out"], found["dead"], found["filtered"])
