"""Interface of a source while a pipeline runs: a stream, any range read again, and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import PenstockError
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition, from_json
from penstock.spark.tube.tube_client import TubeClient

__all__ = ["Lag", "LagMeter", "QueryInput", "SourceMeter", "SourceReader", "measure", "planned", "query_of"]


class QueryInput(NamedTuple):
    """Input of the query ``query`` from the source ``name``.

    ``directory`` is where the source may store what it needs to read a range of this input again.
    """

    query: str
    name: str
    directory: Path


class SourceMeter(Protocol):
    """Lag of the queries, measured on request."""

    def start(self) -> None:
        """Begin; ``end`` ends it."""

    def ask(self, ends: Mapping[str, Offsets]) -> None:
        """Request the lag of queries at the offsets ``ends``, by name; ``of`` returns it a little later."""

    def of(self, sink: str) -> Lag | None:
        """Return the newest lag under that name; None if unknown."""

    def end(self, ends: Mapping[str, Offsets]) -> None:
        """Measure for the last time, in the calling thread."""


class SourceReader(Protocol):
    """One source. Offsets are its own: stream -> partition -> position. ``doubts``: what a replay may lack."""

    doubts: list[str]

    def check(self) -> None:
        """Check that the source can be read, before Spark is started."""

    def start(self, input_: QueryInput) -> Offsets:
        """Offsets at which a new query begins."""

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """The rows (``rows.rows_of``) from ``start`` on; a query with a checkpoint continues from there."""

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """The rows in ``[start, end)``, the same each time; None where there are none."""

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Number of records in ``[start, end)``, counted by the source."""

    def meter(self, clock: Callable[[], int]) -> SourceMeter:
        """Measures how far queries are behind this source; ``clock`` gives ms since 1970."""


TIMEOUT_MS = 1_000
"""Lag is for people: a node that is restarting must not delay anything."""


_PLANNED = "/planned"


class Lag(NamedTuple):
    """``records`` in TubeMQ are not processed by the query yet; the oldest was appended ``seconds`` ago.

    Apache's brokers count whole stores, and are not asked for the oldest record, since that means to register: there
    ``seconds`` is None while there is a lag.
    """

    records: int
    seconds: float | None


def planned(sink: str) -> str:
    """Return the name under which a meter keeps the lag after the current batch; no sink can have it."""
    return f"{sink}{_PLANNED}"


def query_of(name: str) -> str:
    """Return the sink whose lag is measured under ``name``."""
    return name.removesuffix(_PLANNED)


def measure(tube: TubeClient, bounds: Mapping[TopicPartition, Bounds], end: Offsets, now_ms: int) -> Lag:
    """Measure the records in TubeMQ after ``end``, up to ``bounds``.

    A partition that ``end`` does not name is new to the query, which will read it from its oldest record.

    Raises:
        UnavailableError, DataLossError: raised by ``tube``.
    """
    reached = from_json(end)
    records, oldest_ms, is_dated = 0, now_ms, True
    for partition, bound in bounds.items():
        position = max(reached.get(partition, bound.oldest), bound.oldest)
        if position >= bound.end:
            continue
        count = tube.weigh(Slice(partition, position, bound.end))
        if not count:
            # Positions are of a store, which partitions share: what is left there belongs to another one.
            continue
        records += count
        if not tube.has_ranges(partition):
            is_dated = False
            continue
        first, _ = tube.plan(Slice(partition, position, bound.end), 1)
        for batch in tube.read(Slice(partition, position, first)):
            oldest_ms = min(oldest_ms, *map(int, batch.append_times))
    return Lag(records, max(now_ms - oldest_ms, 0) / 1000 if is_dated else None)


class LagMeter:
    """Measures lag in a thread of its own, on request and never twice at once.

    ``open_tube`` opens a client, ``bounds`` returns the readable ranges, ``clock`` returns ms since 1970.
    """

    def __init__(
        self,
        open_tube: Callable[[], TubeClient],
        bounds: Callable[[TubeClient], Mapping[TopicPartition, Bounds]],
        clock: Callable[[], int],
    ) -> None:
        self._open = open_tube
        self._bounds = bounds
        self._clock = clock
        self._asked = threading.Event()
        self._closed = False
        self._ends: Mapping[str, Offsets] = {}
        self._found: Mapping[str, Lag] = {}
        self._thread = threading.Thread(target=self._work, name="penstock-lag", daemon=True)

    def start(self) -> None:
        """Start the thread; ``end`` ends it."""
        self._thread.start()

    def ask(self, ends: Mapping[str, Offsets]) -> None:
        """Request the lag of queries at the offsets ``ends``, by sink; ``of`` returns it a little later."""
        self._ends = dict(ends)
        self._asked.set()

    def of(self, sink: str) -> Lag | None:
        """The newest lag of ``sink``; None if it is unknown or TubeMQ did not answer in time."""
        return self._found.get(sink)

    def end(self, ends: Mapping[str, Offsets]) -> None:
        """End the thread, and measure once more in the calling thread; a request in progress ends with its timeout."""
        self._closed = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(2 * TIMEOUT_MS / 1000)
            with self._open() as tube:
                self._found = self._measure(tube, ends)

    def _work(self) -> None:
        with self._open() as tube:
            while True:
                self._asked.wait()
                self._asked.clear()
                if self._closed:
                    return
                self._found = self._measure(tube, self._ends)

    def _measure(self, tube: TubeClient, ends: Mapping[str, Offsets]) -> dict[str, Lag]:
        try:
            bounds = self._bounds(tube)
            now_ms = self._clock()
            return {sink: measure(tube, bounds, end, now_ms) for sink, end in ends.items()}
        except PenstockError:
            return {}
