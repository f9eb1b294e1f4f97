"""What happens to each micro-batch: its rows into the sink, its broken ones into the dead letters, its counts into
the ledger. Called by Spark (``foreachBatch``), again with the same batch id and the same rows after a failure.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf

from penstock.pipelines.checkpoint import Checkpoint, Offsets
from penstock.pipelines.ledger import Entry, Ledger
from penstock.pipelines.messages import Write, marked, send, sendable
from penstock.pipelines.model import Pipeline, StateStoreSink
from penstock.pipelines.plan import SinkPlan
from penstock.pipelines.source import TubeSource
from penstock.pipelines.stages import INTERNAL, WithLookup, alive, apply, key_column, last_end_ms, rows_of
from penstock.pipelines.table import Table
from penstock.pipelines.writeback import Change

__all__ = ["Context", "Drained", "FencedStore", "Gate", "SinkBatches", "UnderWay", "changes_of"]

COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")
"""Fields of ``_source`` that a table keeps of every row, as ``_topic`` and so on, beside ``_id``."""


class Drained(Exception):  # noqa: N818 - not an error: how a query is told to stop before a batch
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
        with self._changed:
            if self._closed:
                raise Drained("the run is stopping")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait until nobody is inside; whether that came to pass in time."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)


class FencedStore(Protocol):
    """The state store under the run's fencing token."""

    @property
    def token(self) -> object: ...
    def write(self, changes: Sequence[Change]) -> int: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What the queries of one run share.

    ``report`` is told the entry of each finished batch, ``show`` the rows of console sinks: sink, batch, lines of JSON.
    """

    pipeline: Pipeline
    source: TubeSource
    ledger: Ledger
    gate: Gate
    report: Callable[[Entry], None]
    show: Callable[[str, int, list[str]], None]
    with_lookup: WithLookup
    store: FencedStore
    dead_letters: Path | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many rows of a batch are in which state, in the rows that the sink gets."""

    out: int
    dead: int
    filtered: int


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

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Carry out one batch. Everything in it is idempotent by batch id."""
        with self._context.gate:
            start, end = self._range(batch)
            self.under_way = UnderWay(batch, time.monotonic(), end)
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
        self._context.report(entry)

    def _range(self, batch: int) -> tuple[Offsets, Offsets]:
        start, end = self.checkpoint.range(batch)
        return (self._context.source.start(self.plan.sink.name) if start is None else start), end

    def _rows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> Entry:
        # Cached: the rows come out of stateful operators, which must run once, and are used three times.
        rows = marked(rows, self.plan.sink).persist()
        try:
            counts = _count(rows)
            out = self._write_rows(rows, batch, counts.out)
            self._write_dead(rows, batch, counts.dead)
        finally:
            rows.unpersist()
        read = self._context.source.count(start, end)
        duplicates = read - counts.out - counts.dead - counts.filtered
        return self._entry(batch, start, end, read, counts, out=out, duplicates=duplicates)

    def _windows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> Entry:
        # Cached, as above: a window must not be computed once to be counted and once to be sent.
        chosen = (rows if self.plan.sink.messages is None else sendable(rows, self.plan.sink)).persist()
        try:
            written = self._write_windows(chosen, batch)
        finally:
            chosen.unpersist()
        read = self._context.source.count(start, end)
        counts, late = self._into_windows(rows, batch, start, end) if read else (_Counts(0, 0, 0), 0)
        return self._entry(batch, start, end, read, counts, out=written, duplicates=None, late=late)

    def _into_windows(self, rows: DataFrame, batch: int, start: Offsets, end: Offsets) -> tuple[_Counts, int]:
        """What this batch put into the windows, and how many of its events were too late for them.

        The windows do not say, and Spark's own count is of partial aggregates, so the batch's records are read once
        more and compared with the watermark that Spark compared them with.
        """
        records = self._context.source.batch(rows.sparkSession, start, end)
        if records is None:
            return _Counts(0, 0, 0), 0
        window = self.plan.window
        assert window is not None
        before = itertools.takewhile(lambda step: step.kind != "window", self.plan.steps)
        earlier = list(before)
        single = [step for step in earlier if step.kind != "dedupe"]
        records_in = apply(rows_of(records), single, self._context.with_lookup)
        watermark = self.checkpoint.late_watermark_ms(batch)
        # Late copies of one event are one late event; `<=`, since an event at the watermark is dropped too.
        place = last_end_ms(window, deduped=len(single) < len(earlier))
        is_late = alive() & (place <= sf.lit(watermark)) if watermark else sf.expr("false")
        found = records_in.agg(*_states(), sf.count_distinct(sf.when(is_late, sf.col("_id"))).alias("late")).first()
        assert found is not None
        return _Counts(found["out"], found["dead"], found["filtered"]), int(found["late"])

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
    ) -> Entry:
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
            fencing_token=str(self._context.store.token),
        )

    def _write_rows(self, rows: DataFrame, batch: int, count: int) -> int:
        live = rows.where(alive())
        sink = self.plan.sink
        if sink.statestore is not None:
            self._write_back(live, sink.statestore)
        elif sink.messages is not None:
            send(live, sink, self._context.pipeline, count, self._named(batch))
        elif sink.table is not None:
            coordinates = [sf.col(f"_source.{name}").alias(f"_{name}") for name in COORDINATES]
            return self._table(sink.table.path).write(batch, live.select(*_data(rows), "_id", *coordinates), count)
        else:
            self._show(live, batch)
        return count

    def _write_windows(self, rows: DataFrame, batch: int) -> int:
        """Windows into the sink; how many, or for the state store how many requests that took."""
        sink = self.plan.sink
        if sink.statestore is not None:
            return self._write_back(rows, sink.statestore)
        count = rows.count()
        if sink.messages is not None:
            send(rows, sink, self._context.pipeline, count, self._named(batch), windows=True)
        elif sink.table is not None:
            return self._table(sink.table.path).write(batch, rows, count)
        else:
            self._show(rows, batch)
        return count

    def _named(self, batch: int) -> Write:
        return Write(self.checkpoint.query_id(), batch, str(self._context.store.token))

    def _table(self, path: str) -> Table:
        return Table(Path(path), self.plan.sink.name, self.checkpoint.query_id())

    def _show(self, rows: DataFrame, batch: int) -> None:
        assert self.plan.sink.console is not None
        lines = rows.select(sf.to_json(sf.struct(*_data(rows)), {"ignoreNullFields": "false"}).alias("line"))
        shown = [row["line"] for row in lines.limit(self.plan.sink.console.rows).collect()]
        self._context.show(self.plan.sink.name, batch, shown)

    def _write_dead(self, rows: DataFrame, batch: int, count: int) -> None:
        path = self._context.dead_letters
        if path is None or not count or not self.plan.dead_letters_of:
            return
        mine = rows.where(sf.col("_dead.step").isin(*sorted(self.plan.dead_letters_of)))
        table = self._table(str(path))
        letters = mine.select("_dead.step", "_dead.reason", sf.col("_id").alias("id"), "_source.*")
        table.write(batch, letters, mine.count())

    def _write_back(self, rows: DataFrame, sink: StateStoreSink) -> int:
        return self._context.store.write(changes_of(rows, sink))


def changes_of(rows: DataFrame, sink: StateStoreSink) -> list[Change]:
    """What ``rows`` do in the state store, in order."""
    if sink.order_by is not None:
        rows = rows.orderBy(sink.order_by)
    columns = _data(rows)
    made: list[Column] = []
    for index, entry in enumerate(sink.entries):
        value = sf.to_json(sf.struct(*(entry.value or columns)))
        holds = sf.coalesce(sf.expr(entry.when), sf.expr("false"))
        made += [key_column(rows, entry.key).alias(f"key{index}"), sf.when(holds, value).alias(f"value{index}")]
    return list(_changes(rows.select(*made).collect(), len(sink.entries)))


def _changes(rows: list[Row], entries: int) -> Iterator[Change]:
    for row in rows:
        for index in range(entries):
            key: str | None = row[f"key{index}"]
            value: str | None = row[f"value{index}"]
            # A key with a null in it names nothing.
            if key is not None:
                yield Change(key, None if value is None else value.encode())


def _data(rows: DataFrame) -> list[str]:
    return [column for column in rows.columns if column not in INTERNAL]


def _states() -> list[Column]:
    return [
        sf.count_if(alive()).alias("out"),
        sf.count_if(sf.col("_dead").isNotNull()).alias("dead"),
        sf.count_if(sf.col("_dead").isNull() & sf.col("_filtered").isNotNull()).alias("filtered"),
    ]


def _count(rows: DataFrame) -> _Counts:
    found = rows.agg(*_states()).first()
    assert found is not None
    return _Counts(found["out"], found["dead"], found["filtered"])
