"""Lag of queries: the records of a source that a query has not processed, and the age of the oldest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, Protocol, TypeVar

from penstock.errors import PenstockError
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.spark.files import source as files
from penstock.spark.files.source import FileLog
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition, epochs_of, from_json
from penstock.spark.tube.tube_client import TubeClient

__all__ = [
    "LAG_TIMEOUT_MS",
    "FileMeter",
    "Lag",
    "NoMeter",
    "PollingMeter",
    "SourceMeter",
    "measure",
    "planned",
    "query_of",
    "unread_share",
]

LAG_TIMEOUT_MS = 1_000
"""Timeout of lag requests. The lag is for information only: a restarting node must not delay the run."""

_PLANNED = "/planned"


class Lag(NamedTuple):
    """``records`` of the source are not processed by the query yet; the oldest was written ``seconds`` ago.

    ``seconds`` is None if there is a lag and its age is not known, as with Kafka and with Apache's TubeMQ brokers:
    reading the oldest record there requires a registration, and the counts of these brokers cover whole stores.
    ``unread``: see :func:`unread_share`; the largest of the partitions.
    """

    records: int
    seconds: float | None
    unread: float = 0.0


def planned(sink: str) -> str:
    """Return the name under which a meter stores the lag after the current batch; no sink can have this name."""
    return f"{sink}{_PLANNED}"


def query_of(name: str) -> str:
    """Return the sink whose lag is measured under ``name``."""
    return name.removesuffix(_PLANNED)


def unread_share(oldest: int, position: int, end: int) -> float:
    """Return the share, from 0 to 1, of the stored offsets of a partition that were not read.

    At 1 the next record to read is the oldest one, which retention deletes first, or it is deleted. A partition of
    which nothing was deleted yet has 0: its retention is not known.
    """
    return min((end - position) / (end - oldest), 1.0) if 0 < oldest < end else 0.0


def measure(tube: TubeClient, bounds: Mapping[TopicPartition, Bounds], end: Offsets, now_ms: int) -> Lag:
    """Measure the records in TubeMQ after ``end``, up to ``bounds``.

    A partition that is not in ``end`` is new to the query, which reads it from its oldest record.

    Raises:
        UnavailableError, DataLossError: raised by ``tube``.
    """
    reached = from_json(end)
    reached |= tube.replaced(reached, epochs_of(end), bounds)
    records, oldest_ms, is_dated, unread = 0, now_ms, True, 0.0
    for partition, bound in bounds.items():
        position = max(reached.get(partition, bound.oldest), bound.oldest)
        if position >= bound.end:
            continue
        count = tube.weigh(Slice(partition, position, bound.end))
        if not count:
            # Partitions share a store and its offsets: the remaining records belong to another partition.
            continue
        records += count
        unread = max(unread, unread_share(bound.oldest, position, bound.end))
        if not tube.has_ranges(partition):
            is_dated = False
            continue
        first, _ = tube.plan(Slice(partition, position, bound.end), 1)
        for batch in tube.read(Slice(partition, position, first)):
            oldest_ms = min(oldest_ms, *map(int, batch.append_times))
    return Lag(records, max(now_ms - oldest_ms, 0) / 1000 if is_dated else None, unread)


class SourceMeter(Protocol):
    """Lag of the queries, measured on request."""

    def start(self) -> None:
        """Start to measure, until ``close``."""

    def request(self, ends: Mapping[str, Offsets]) -> None:
        """Request the lag of queries at the offsets ``ends``, by name; ``lag_of`` returns it a little later."""

    def lag_of(self, sink: str) -> Lag | None:
        """Return the newest lag under that name; None if unknown."""

    def close(self, ends: Mapping[str, Offsets]) -> None:
        """Measure for the last time, in the calling thread."""


class NoMeter:
    """Meter of a source that has no lag."""

    def start(self) -> None:
        """Do nothing."""

    def request(self, ends: Mapping[str, Offsets]) -> None:
        """Do nothing."""

    def lag_of(self, sink: str) -> Lag | None:
        return Lag(0, 0.0)

    def close(self, ends: Mapping[str, Offsets]) -> None:
        """Do nothing."""


class FileMeter(NoMeter):
    """Counts the records of files that were found and not read; ``seconds`` is the age of the oldest of these files."""

    def __init__(self, log_of: Callable[[str], FileLog], clock: Callable[[], int]) -> None:
        self._log_of = log_of
        self._clock = clock
        self._found: dict[str, Lag] = {}

    def request(self, ends: Mapping[str, Offsets]) -> None:
        for name, end in ends.items():
            waiting = self._log_of(query_of(name)).entries(end.get(files.STREAM, {}).get("0", 0))
            oldest_ms = min((entry.mtime_ns // 1_000_000 for entry in waiting), default=self._clock())
            records = sum(entry.records for entry in waiting)
            self._found[name] = Lag(records, max(self._clock() - oldest_ms, 0) / 1000)

    def lag_of(self, sink: str) -> Lag | None:
        return self._found.get(sink)

    def close(self, ends: Mapping[str, Offsets]) -> None:
        self.request(ends)


Log = TypeVar("Log")


class PollingMeter(NoMeter, Generic[Log]):
    """Measures the lag of queries in a separate thread, one request at a time, with a client that ``connect`` opens.

    ``measure`` is called with the client and the offsets of each query by its name. Queries have no lag while it fails.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[Log]],
        measure: Callable[[Log, Mapping[str, Offsets]], dict[str, Lag]],
    ) -> None:
        self._connect = connect
        self._measure_all = measure
        self._asked = threading.Event()
        self._closed = False
        self._ends: Mapping[str, Offsets] = {}
        self._found: Mapping[str, Lag] = {}
        self._thread = threading.Thread(target=self._work, name="penstock-lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self, ends: Mapping[str, Offsets]) -> None:
        self._ends = dict(ends)
        self._asked.set()

    def lag_of(self, sink: str) -> Lag | None:
        return self._found.get(sink)

    def close(self, ends: Mapping[str, Offsets]) -> None:
        was_started = self._thread.is_alive()  # the thread may end before the next line
        self._closed = True
        self._asked.set()
        if was_started:
            self._thread.join(2 * LAG_TIMEOUT_MS / 1000)  # a request in progress ends with its timeout
            with self._connect() as log:
                self._found = self._measure(log, ends)

    def _work(self) -> None:
        with self._connect() as log:
            while True:
                self._asked.wait()
                self._asked.clear()
                if self._closed:
                    return
                self._found = self._measure(log, self._ends)

    def _measure(self, log: Log, ends: Mapping[str, Offsets]) -> dict[str, Lag]:
        try:
            return self._measure_all(log, ends)
        except (PenstockError, OSError):  # OSError: of files of a table on a shared file system
            return {}
