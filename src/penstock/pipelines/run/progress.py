"""Progress of a run: lag and metrics of each sink, for events, the run's record in the state store and Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.pipelines.ledger.ledger import Counts, LedgerEntry
from penstock.pipelines.run.lease import RunRecord
from penstock.pipelines.sources.readers import Lag, SourceMeter, planned
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.observability.metrics import CONTENT_TYPE, serve_page

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


__all__ = [
    "COUNTERS",
    "MEANINGS",
    "Progress",
    "RunningBatch",
    "SinkProgress",
    "Watch",
    "figures",
    "now_text",
    "of_spark",
    "render",
    "serve",
]

RATE_S: Final = 10.0
"""Rates are over the last so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress(Counts):
    """State of one sink's query. Counts are those of this run; None is an unknown value.

    ``lag_*``: all records that the query has not finished: ``waiting_*`` are not in a batch yet, ``in_batch_*`` are in
    the active batch. ``lag_s`` and ``waiting_s`` are the age of the oldest record since it was appended to TubeMQ,
    ``in_batch_s`` is the time since the batch began, ``behind_s`` the difference between the clock and the watermark.
    ``state_*``: rows and bytes that Spark keeps for dedupes and windows.
    """

    batch: int | None = None
    restarts: int = 0
    rows_per_s: float = 0.0
    batch_s: float | None = None
    lag_records: int | None = None
    lag_s: float | None = None
    waiting_records: int | None = None
    waiting_s: float | None = None
    in_batch_records: int | None = None
    in_batch_s: float | None = None
    behind_s: float | None = None
    state_rows: int | None = None
    state_bytes: int | None = None


COUNTERS: Final = (*(f.name for f in fields(Counts)), "restarts")

MEANINGS: Final = {
    "batches": "Micro-batches that this run has carried out.",
    "read": "Records of the sources that these batches read; a record that comes on several ways counts on each.",
    "out": "Rows, messages or, for windows in the state store, requests that went into the sink.",
    "dead": "Records that a step or the sink could not process.",
    "filtered": "Records that a filter, a source or the sink's condition left out.",
    "duplicates": "Copies that a dedupe left out; 0 where windows hide how many went into them.",
    "late": "Events that came too late for the window.",
    "restarts": "How often the sink's query was started again after an error.",
    "batch": "Number of the last batch that was carried out.",
    "rows_per_second": f"Records read a second, over the last {RATE_S:g} s.",
    "batch_seconds": "How long the last batch took from end to end.",
    "lag_records": "Records that the sources have and the sink has not.",
    "lag_seconds": "Age of the oldest of them, by the time at which the source took it.",
    "waiting_records": "Records of the lag that are in no batch yet.",
    "waiting_seconds": "Age of the oldest of them.",
    "in_batch_records": "Records of the lag that are in the batch under way; 0 between batches.",
    "in_batch_seconds": "How long the batch under way has been running; 0 between batches.",
    "behind_seconds": "How far the watermark is behind the clock: closed windows come that late.",
    "state_rows": "Rows that Spark keeps for dedupes and windows.",
    "state_bytes": "Memory that these rows take.",
}
"""Help text of each metric."""


def figures(sink: SinkProgress) -> dict[str, int | float]:
    """The numbers of ``sink`` as metrics: what is not known is left out, ``_s`` is written out."""
    named = {name.removesuffix("_s") + "_seconds" if _is_seconds(name) else name: v for name, v in asdict(sink).items()}
    return {name.replace("rows_per_s", "rows_per_second"): v for name, v in named.items() if v is not None}


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and name != "rows_per_s"


class Progress:
    """Adds up what the batches of a run report. ``now`` is a clock in seconds that never jumps."""

    def __init__(self, sinks: list[str], now: float) -> None:
        self._counts = dict.fromkeys(sinks, Counts())
        self._restarts = dict.fromkeys(sinks, 0)
        self._last: dict[str, LedgerEntry] = {}
        self._read: dict[str, deque[tuple[float, int]]] = {sink: deque() for sink in sinks}
        self._started = now
        self.latest: Mapping[str, SinkProgress] = {sink: SinkProgress() for sink in sinks}
        """The newest snapshot. Replaced as a whole, so that other threads may read it."""

    def finished(self, entry: LedgerEntry, now: float) -> None:
        """A batch is done."""
        self._counts[entry.sink] = self._counts[entry.sink].plus(entry)
        self._last[entry.sink] = entry
        self._read[entry.sink].append((now, entry.read))

    def restarted(self, sink: str) -> None:
        """A query was started again after an error."""
        self._restarts[sink] += 1

    def measure(
        self,
        now: float,
        wall_ms: int,
        *,
        lags: Mapping[str, Lag | None],
        waiting: Mapping[str, Lag | None],
        running_batch: Mapping[str, float],
        queries: Mapping[str, Mapping[str, Any]],
    ) -> Mapping[str, SinkProgress]:
        """A new snapshot.

        ``lags`` is what each query has not finished, ``waiting`` what of that is in no batch, ``running_batch`` since
        when (on the clock of ``now``) a batch runs, ``queries`` what Spark says of the last one (:func:`of_spark`).
        """
        self.latest = {
            sink: self._sink(sink, now, wall_ms, lags.get(sink), waiting.get(sink), running_batch.get(sink), queries)
            for sink in self._counts
        }
        return self.latest

    def _sink(
        self,
        sink: str,
        now: float,
        wall_ms: int,
        lag: Lag | None,
        waiting: Lag | None,
        began: float | None,
        queries: Mapping[str, Mapping[str, Any]],
    ) -> SinkProgress:
        entry = self._last.get(sink)
        waits = lag if began is None else waiting
        in_batch = None if lag is None or waits is None else max(lag.records - waits.records, 0)
        return SinkProgress(
            **asdict(self._counts[sink]),
            restarts=self._restarts[sink],
            batch=None if entry is None else entry.batch,
            rows_per_s=round(self._rate(sink, now), 1),
            lag_records=None if lag is None else lag.records,
            lag_s=_seconds(lag),
            waiting_records=None if waits is None else waits.records,
            waiting_s=_seconds(waits),
            in_batch_records=0 if began is None else in_batch,
            in_batch_s=0.0 if began is None else round(now - began, 3),
            behind_s=None
            if entry is None or not entry.watermark_ms
            else round((wall_ms - entry.watermark_ms) / 1000, 3),
            **queries.get(sink, {}),
        )

    def _rate(self, sink: str, now: float) -> float:
        samples = self._read[sink]
        while samples and samples[0][0] < now - RATE_S:
            samples.popleft()
        return sum(read for _, read in samples) / max(min(now - self._started, RATE_S), 0.001)


def _seconds(lag: Lag | None) -> float | None:
    return None if lag is None or lag.seconds is None else round(lag.seconds, 3)


def of_spark(progress: Mapping[str, Any]) -> dict[str, int | float]:
    """Batch time and state size out of a ``StreamingQueryProgress``; of a trigger that found nothing no time."""
    operators = progress.get("stateOperators") or []
    took = progress["durationMs"]
    return {
        **({"batch_s": took.get("triggerExecution", 0) / 1000} if "addBatch" in took else {}),
        "state_rows": sum(operator["numRowsTotal"] for operator in operators),
        "state_bytes": sum(operator["memoryUsedBytes"] for operator in operators),
    }


Read = Callable[[], Mapping[str, SinkProgress]]


class _Collector:
    def __init__(self, pipeline: str, read: Read) -> None:
        self._pipeline = pipeline
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sink, progress in self._read().items():
            for name, value in figures(progress).items():
                full = f"penstock_pipeline_{name}"
                if full not in families:
                    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                    families[full] = kind(full, MEANINGS[name], labels=["pipeline", "sink"])
                families[full].add_metric([self._pipeline, sink], value)
        yield from families.values()


def render(pipeline: str, read: Read) -> bytes:
    """The page of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(pipeline, read))
    return generate_latest(registry)


@contextmanager
def serve(address: tuple[str, int] | None, pipeline: str, read: Read) -> Iterator[str | None]:
    """Serve ``/metrics`` at ``address`` inside the block; gives ``HOST:PORT`` as bound, or None without an address.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if address is None:
        yield None
        return
    with serve_page(address, lambda: render(pipeline, read), CONTENT_TYPE) as bound:
        yield bound


MEASURE_S = 1.0
ANSWER_S = 0.3
"""Seconds to wait for answers about the log; after that the previous values are shown."""
TELL_S = 5.0
"""Seconds between writes of the status in the state store."""


def now_text() -> str:
    """The time now, ISO 8601, UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class RunningBatch(NamedTuple):
    """Batch in progress: its start (``time.monotonic``) and its end offsets."""

    batch: int
    since: float
    end: Offsets


class Watch:
    """The progress of one run, all in the run's own thread; ``latest`` may be read from others.

    ``tell`` puts a record where others see it, ``show`` is given the fields of a ``progress`` event every
    ``progress_s`` seconds (0: never).
    """

    def __init__(
        self,
        meter: SourceMeter,
        record: RunRecord,
        *,
        tell: Callable[[RunRecord], None],
        show: Callable[[dict[str, Any]], None],
        progress_s: float,
    ) -> None:
        self.record = record
        self._meter = meter
        self._tell = tell
        self._show = show
        self._progress_s = progress_s
        self._progress = Progress([], 0.0)
        self._ends: dict[str, Offsets] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, RunningBatch] = {}
        self._next_ask = self._next_look = self._next_tell = self._next_show = 0.0

    @property
    def latest(self) -> Mapping[str, SinkProgress]:
        """The newest snapshot, by sink."""
        return self._progress.latest

    def start(self, ends: Mapping[str, Offsets]) -> None:
        """The queries run; ``ends`` is where each of them has come to."""
        now = time.monotonic()
        self._ends = dict(ends)
        self._progress = Progress(list(ends), now)
        self._next_show = now + self._progress_s
        self._meter.start()

    def finished(self, entry: LedgerEntry) -> None:
        """A batch is done."""
        self._progress.finished(entry, time.monotonic())
        self._ends[entry.sink] = entry.end

    def restarted(self, sink: str) -> None:
        """A query failed and is started again."""
        self._progress.restarted(sink)

    def look(
        self, queries: Mapping[str, StreamingQuery | None], running_batch: Mapping[str, RunningBatch | None]
    ) -> None:
        """Measure, where it is time to; called as often as one likes."""
        now = time.monotonic()
        if now >= self._next_ask:
            self._next_ask = now + MEASURE_S
            self._asked = {name: batch for name, batch in running_batch.items() if batch is not None}
            self._meter.request(self._ends | {planned(name): batch.end for name, batch in self._asked.items()})
            self._next_look = now + ANSWER_S
        if now < self._next_look:
            return
        # Of the moment of the question: what has been finished since would be taken for waiting.
        self._next_look = self._next_ask + ANSWER_S
        self._hear(queries)
        snapshot = self._take(now, self._asked)
        progress = _as_data(snapshot)
        if now >= self._next_tell:
            self._next_tell = now + TELL_S
            self._tell(replace(self.record, at=now_text(), progress=progress))
        if self._progress_s and now >= self._next_show:
            self._next_show = now + self._progress_s
            self._show({"at": now_text(), **progress})

    def close(self, queries: Mapping[str, StreamingQuery | None], state: str, why: str) -> RunRecord:
        """Measure for the last time; the run's last record."""
        self._hear(queries)
        self._meter.close(self._ends)
        if self._ends:
            self._take(time.monotonic(), {})
            if self._progress_s:
                self._show({"at": now_text(), **_as_data(self.latest)})
        return replace(self.record, at=now_text(), state=state, why=why, progress=_as_data(self.latest))

    def _hear(self, queries: Mapping[str, StreamingQuery | None]) -> None:
        """Spark's current progress, completed with the last known values that it omits."""
        self._said |= {name: self._said.get(name, {}) | _said_by_spark(query) for name, query in queries.items()}

    def _take(self, now: float, running_batch: Mapping[str, RunningBatch]) -> Mapping[str, SinkProgress]:
        return self._progress.measure(
            now,
            wall_clock_ms(),
            lags={name: self._meter.lag_of(name) for name in self._ends},
            waiting={name: self._meter.lag_of(planned(name)) for name in running_batch},
            running_batch={name: batch.since for name, batch in running_batch.items()},
            queries=self._said,
        )


def _as_data(snapshot: Mapping[str, SinkProgress]) -> dict[str, Any]:
    return {"sinks": {name: asdict(sink) for name, sink in snapshot.items()}}


def _said_by_spark(query: StreamingQuery | None) -> dict[str, Any]:
    progress = None if query is None else query.lastProgress
    return {} if progress is None else of_spark(progress)
