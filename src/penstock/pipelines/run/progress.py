"""Progress of a run: lag and metrics of each sink, for events, the run's record in the state store and Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.pipelines.ledger.ledger import LedgerEntry, QueryCounts
from penstock.pipelines.run.lease import RunRecord
from penstock.pipelines.sources.lag import Lag, SourceMeter, planned
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.deadbands import StateSize
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.observability.metrics import CONTENT_TYPE, serve_page

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


__all__ = [
    "COUNTERS",
    "MEANINGS",
    "Progress",
    "ProgressMonitor",
    "Read",
    "RunningBatch",
    "SinkProgress",
    "metric_values",
    "now_text",
    "of_spark",
    "render",
    "serve",
]

RATE_S: Final = 10.0
"""Seconds after its end for which a batch is included in the rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress(QueryCounts):
    """State of one sink's query. Counts are those of this run; None is an unknown value.

    ``lag_*``: all records that the query has not finished: ``waiting_*`` are not in a batch yet, ``in_batch_*`` are in
    the active batch. ``lag_s`` and ``waiting_s`` are the age of the oldest record since it was appended to TubeMQ,
    ``in_batch_s`` is the time since the batch began, ``behind_s`` the difference between the clock and the watermark.
    ``failing_s``: time since the first of the failures after the last finished batch, 0 if there is none.
    ``state_*``: rows that Spark keeps for dedupes, windows and joins, and their bytes in memory and, with RocksDB, on
    disk, and keys of deadbands, and the bytes of their files; ``state_by_kind``: of these ``rows`` and ``bytes`` for
    each kind of step, ``dedupe``, ``deadband``, ``window`` and ``join``.
    """

    batch: int | None = None
    restarts: int = 0
    failing_s: float = 0.0
    rows_per_s: float = 0.0
    written_per_s: float = 0.0
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
    state_disk_bytes: int | None = None
    state_by_kind: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


_LABELLED = ("expectations", "letters_by_step", "state_by_kind", "join")
"""Fields of a sink that are no metric with only the labels of the sink."""
COUNTERS: Final = (*(f.name for f in fields(QueryCounts) if f.name not in _LABELLED), "restarts")

MEANINGS: Final = {
    "batches": "Micro-batches that this run has completed.",
    "read": "Source records that these batches read; a record read on several paths counts once for each.",
    "out": "Rows, messages or, for windows in the state store, requests written to the sink.",
    "dead": "Records that a step or the sink could not process; those of a shared step count in each of its sinks.",
    "letters": "Dead letters that the sink's query wrote; one query writes those of a shared step.",
    "filtered": "Records that a filter, a source or the sink's condition excluded.",
    "duplicates": "Duplicates that a dedupe dropped; 0 if they are unknown because of windows.",
    "late": "Events that were too late for the window or the join.",
    "exploded": "Rows that explode steps added to those of the records.",
    "restarts": "Restarts of the sink's query after an error.",
    "failing_seconds": "Time since the first failure after the last completed batch; 0 without a failure.",
    "batch": "Number of the last completed batch.",
    "rows_per_second": f"Records read per second of batch time, over the batches of the last {RATE_S:g} s.",
    "written_per_second": f"Rows, messages or requests written per second, over the last {RATE_S:g} s.",
    "batch_seconds": "Duration of the last batch.",
    "lag_records": "Records in the sources that the sink has not finished.",
    "lag_seconds": "Age of the oldest of these records since the source received it.",
    "waiting_records": "Records of the lag that are not in a batch yet.",
    "waiting_seconds": "Age of the oldest of these records.",
    "in_batch_records": "Records of the lag that are in the active batch; 0 between batches.",
    "in_batch_seconds": "Time since the active batch started; 0 between batches.",
    "behind_seconds": "Delay of the watermark behind the clock, and so of closed windows.",
    "state_rows": "Rows in Spark's state for dedupes, windows and joins, and keys of deadbands.",
    "state_bytes": "Memory that these rows use, with RocksDB that of its caches and buffers; of deadbands their files.",
    "state_disk_bytes": "Size of RocksDB's files with these rows, on the disks of the workers.",
}
"""Help text of each metric."""
EXPECTATION_MEANINGS: Final = {
    "rows": "Rows that the expectation's step checked in these batches.",
    "violations": "Rows of these that violate the expectation.",
}


JOIN_ROWS: Final = (
    "Rows of a join: added to it from the left and the right stream, joined pairs and rows without a partner that came "
    "out of it, and late rows of both streams."
)
STEP_LETTERS: Final = "Dead letters of the step that the sink's query wrote."


def metric_values(sink: SinkProgress) -> dict[str, int | float]:
    """Return the metrics of ``sink`` by name, without unknown values; the suffix ``_s`` becomes ``_seconds``.

    Metrics of expectations and by step are not included: they have another label. Those by kind of step are parts of
    others.
    """
    values = {each.name: getattr(sink, each.name) for each in fields(sink) if each.name not in _LABELLED}
    named = {name.removesuffix("_s") + "_seconds" if _is_seconds(name) else name: v for name, v in values.items()}
    return {name.replace("_per_s", "_per_second"): v for name, v in named.items() if v is not None}


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


class _Sample(NamedTuple):
    """One finished batch: its end, the records that it read, the rows that it wrote, and its duration in seconds."""

    ended: float
    read: int
    out: int
    took_s: float


class Progress:
    """Sums over the batches of a run. ``now`` is the time of a monotonic clock in seconds."""

    def __init__(self, sinks: list[str]) -> None:
        self._counts = dict.fromkeys(sinks, QueryCounts())
        self._restarts = dict.fromkeys(sinks, 0)
        self._failing: dict[str, float] = {}
        self._last: dict[str, LedgerEntry] = {}
        self._deadbands: dict[str, StateSize] = {}
        self._samples: dict[str, deque[_Sample]] = {sink: deque() for sink in sinks}
        self._counted_until: dict[str, float] = {}
        """End of the newest batch before those in the samples, by sink."""
        self.latest: Mapping[str, SinkProgress] = {sink: SinkProgress() for sink in sinks}
        """The newest snapshot; replaced atomically, so that other threads may read it."""

    def replace_sinks(self, sinks: list[str]) -> None:
        """Count the batches of ``sinks`` from now on; those that exist keep their counts."""
        self._counts = {sink: self._counts.get(sink, QueryCounts()) for sink in sinks}
        self._restarts = {sink: self._restarts.get(sink, 0) for sink in sinks}
        self._samples = {sink: self._samples.get(sink, deque()) for sink in sinks}
        self._counted_until = {sink: ended for sink, ended in self._counted_until.items() if sink in sinks}
        self._last = {sink: entry for sink, entry in self._last.items() if sink in sinks}
        self._failing = {}
        self.latest = {sink: self.latest.get(sink, SinkProgress()) for sink in sinks}

    def finished(self, entry: LedgerEntry, now: float, took_s: float, deadbands: StateSize | None = None) -> None:
        """Add a finished batch, its duration, and the size of the state of deadbands after it."""
        if deadbands is not None:
            self._deadbands[entry.sink] = deadbands
        self._counts[entry.sink] = self._counts[entry.sink].plus(entry)
        self._last[entry.sink] = entry
        self._failing.pop(entry.sink, None)
        self._samples[entry.sink].append(_Sample(now, entry.read, entry.out, took_s))

    def restarted(self, sink: str, failing_since: float) -> None:
        """Count a restart of the query of ``sink``, which has failed since ``failing_since``."""
        self._restarts[sink] += 1
        self._failing[sink] = failing_since

    def failed(self, sink: str, now: float) -> None:
        """``sink`` has failed, and is not started again."""
        self._failing.setdefault(sink, now)

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
        """Take a new snapshot.

        ``lags``: unfinished records of each query; ``waiting``: those of them that are not in a batch;
        ``running_batch``: start of the active batch, on the clock of ``now``; ``queries``: Spark's values for the last
        batch (:func:`of_spark`).
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
            **{each.name: getattr(self._counts[sink], each.name) for each in fields(QueryCounts)},
            restarts=self._restarts[sink],
            failing_s=round(now - self._failing[sink], 3) if sink in self._failing else 0.0,
            batch=None if entry is None else entry.batch,
            rows_per_s=round(self._rate(sink, now, runs=began is not None), 1),
            written_per_s=round(self._written_rate(sink, now, runs=began is not None), 1),
            lag_records=None if lag is None else lag.records,
            lag_s=_seconds(lag),
            waiting_records=None if waits is None else waits.records,
            waiting_s=_seconds(waits),
            in_batch_records=0 if began is None else in_batch,
            in_batch_s=0.0 if began is None else round(now - began, 3),
            behind_s=None
            if entry is None or not entry.watermark_ms
            else round((wall_ms - entry.watermark_ms) / 1000, 3),
            **_with_deadbands(queries.get(sink, {}), self._deadbands.get(sink)),
        )

    def _rate(self, sink: str, now: float, *, runs: bool) -> float:
        """Return the rate of the last batches; while a batch runs, at least that of the one before it."""
        samples = self._samples[sink]
        while len(samples) > runs and samples[0].ended < now - RATE_S:
            self._counted_until[sink] = samples.popleft().ended
        return sum(each.read for each in samples) / max(sum(each.took_s for each in samples), 0.001)

    def _written_rate(self, sink: str, now: float, *, runs: bool) -> float:
        """Return the increase of ``out`` per second over the samples, and the time between batches.

        A batch that runs for longer than the batches before it has written nothing since.
        """
        samples = self._samples[sink]
        if not samples:
            return 0.0
        first = samples[0]
        # A batch after a long pause is not divided by the pause.
        began = max(first.ended - max(first.took_s, RATE_S), self._counted_until.get(sink, float("-inf")))
        ended = samples[-1].ended
        return sum(each.out for each in samples) / max(ended - began, now - ended if runs else 0.0, 0.001)


def _seconds(lag: Lag | None) -> float | None:
    return None if lag is None or lag.seconds is None else round(lag.seconds, 3)


def _with_deadbands(found: Mapping[str, Any], deadbands: StateSize | None) -> Mapping[str, Any]:
    """Add the state of ``deadbands``, which Spark does not know, to the values of :func:`of_spark`."""
    if deadbands is None:
        return found
    return {
        **found,
        "state_rows": found.get("state_rows", 0) + deadbands.rows,
        "state_bytes": found.get("state_bytes", 0) + deadbands.bytes,
        "state_by_kind": {**found.get("state_by_kind", {}), "deadband": deadbands._asdict()},
    }


_FILES = "rocksdbSstFileSize"
_STATEFUL = {"dedupe": "dedupe", "symmetricHashJoin": "join"}
"""Kinds of steps by the beginning of the names of Spark's operators; the others belong to windows."""


def of_spark(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Extract batch time and state size from a ``StreamingQueryProgress``.

    There is no time for a trigger without data, and no size on disk without RocksDB.
    """
    operators = progress.get("stateOperators") or []
    took = progress["durationMs"]
    files = [size for operator in operators if (size := operator.get("customMetrics", {}).get(_FILES)) is not None]
    by_kind: dict[str, dict[str, int]] = {}
    for operator in operators:
        kind = next(
            (kind for prefix, kind in _STATEFUL.items() if operator["operatorName"].startswith(prefix)), "window"
        )
        sums = by_kind.setdefault(kind, {"rows": 0, "bytes": 0})
        sums["rows"] += operator["numRowsTotal"]
        sums["bytes"] += operator["memoryUsedBytes"]
    return {
        **({"batch_s": took.get("triggerExecution", 0) / 1000} if "addBatch" in took else {}),
        "state_rows": sum(sums["rows"] for sums in by_kind.values()),
        "state_bytes": sum(sums["bytes"] for sums in by_kind.values()),
        **({"state_disk_bytes": sum(files)} if files else {}),
        "state_by_kind": by_kind,
    }


Read = Callable[[], Mapping[str, SinkProgress]]


class _Collector:
    def __init__(self, pipelines: Mapping[str, Read]) -> None:
        self._pipelines = pipelines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        found = [(name, sink, each) for name, read in dict(self._pipelines).items() for sink, each in read().items()]
        for pipeline, sink, progress in found:
            for name, value in metric_values(progress).items():
                full = f"penstock_pipeline_{name}"
                if full not in families:
                    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                    families[full] = kind(full, MEANINGS[name], labels=["pipeline", "sink"])
                families[full].add_metric([pipeline, sink], value)
            for step, letters in progress.letters_by_step.items():
                full = "penstock_pipeline_step_letters"
                if full not in families:
                    families[full] = CounterMetricFamily(full, STEP_LETTERS, labels=["pipeline", "sink", "step"])
                families[full].add_metric([pipeline, sink, step], letters)
            for outcome, rows in progress.join.items():
                full = "penstock_pipeline_join_rows"
                if full not in families:
                    families[full] = CounterMetricFamily(full, JOIN_ROWS, labels=["pipeline", "sink", "rows"])
                families[full].add_metric([pipeline, sink, outcome], rows)
            for expectation, counts in progress.expectations.items():
                for name, value in asdict(counts).items():
                    full = f"penstock_pipeline_expectation_{name}"
                    if full not in families:
                        labels = ["pipeline", "sink", "expectation"]
                        families[full] = CounterMetricFamily(full, EXPECTATION_MEANINGS[name], labels=labels)
                    families[full].add_metric([pipeline, sink, expectation], value)
        yield from families.values()


def render(pipelines: Mapping[str, Read]) -> bytes:
    """Render the metrics of ``pipelines`` in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(pipelines))
    return generate_latest(registry)


@contextmanager
def serve(address: tuple[str, int] | None, pipelines: Mapping[str, Read]) -> Iterator[str | None]:
    """Serve ``/metrics`` at ``address`` inside the block; yields the bound ``HOST:PORT``, or None without an address.

    ``pipelines``: functions that return the progress of each pipeline, by its name; more may be added later.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    if address is None:
        yield None
        return
    with serve_page(address, lambda: render(pipelines), CONTENT_TYPE) as bound:
        yield bound


MEASURE_S = 1.0
ANSWER_S = 0.3
"""Seconds to wait for the lag of the sources; after that the previous values are used."""
PUBLISH_S = 5.0
"""Seconds between writes of the status in the state store."""


def now_text() -> str:
    """Return the current time, ISO 8601, UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class RunningBatch(NamedTuple):
    """Batch in progress: its start (``time.monotonic``) and its end offsets."""

    batch: int
    since: float
    end: Offsets


class ProgressMonitor:
    """Monitors the progress of one run in the run's thread; only ``latest`` may be read from other threads.

    ``publish`` publishes the status of the run; ``show`` is called with the fields of a ``progress`` event every
    ``progress_s`` seconds (0: never).
    """

    def __init__(
        self,
        meter: SourceMeter,
        record: RunRecord,
        *,
        publish: Callable[[RunRecord], None],
        show: Callable[[dict[str, Any]], None],
        progress_s: float,
    ) -> None:
        self.record = record
        self._meter = meter
        self._publish = publish
        self._show = show
        self._progress_s = progress_s
        self._progress = Progress([])
        self._ends: dict[str, Offsets] = {}
        self._by_query: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, RunningBatch] = {}
        self._next_ask = self._next_look = self._next_publish = self._next_show = 0.0

    @property
    def latest(self) -> Mapping[str, SinkProgress]:
        """The newest snapshot, by sink."""
        return self._progress.latest

    def lag_of(self, sink: str) -> Lag | None:
        """Return the newest lag of ``sink``; None if unknown."""
        return self._meter.lag_of(sink)

    def start(self, ends: Mapping[str, Offsets]) -> None:
        """Start to measure; ``ends`` are the current offsets of the queries."""
        now = time.monotonic()
        self._ends = dict(ends)
        self._progress = Progress(list(ends))
        self._next_show = now + self._progress_s
        self._meter.start()

    def replace_sinks(self, meter: SourceMeter, record: RunRecord, ends: Mapping[str, Offsets]) -> None:
        """Measure the sinks in ``ends`` from now on, with another ``meter``; those that exist keep their counts."""
        self._meter.close(self._ends)
        self._meter, self.record, self._ends = meter, record, dict(ends)
        self._by_query = {name: found for name, found in self._by_query.items() if name in ends}
        self._asked = {}
        self._next_ask = self._next_look = self._next_publish = 0.0
        self._progress.replace_sinks(list(ends))
        self._meter.start()

    def finished(self, entry: LedgerEntry, took_s: float, deadbands: StateSize | None = None) -> None:
        """Add a finished batch, its duration, and the size of the state of deadbands after it."""
        self._progress.finished(entry, time.monotonic(), took_s, deadbands)
        self._ends[entry.sink] = entry.end

    def restarted(self, sink: str, failing_since: float) -> None:
        """Count a restart of the query of ``sink``, which has failed since ``failing_since`` (``time.monotonic``)."""
        self._progress.restarted(sink, failing_since)

    def failed(self, sink: str) -> None:
        """Show ``sink`` as failing, if it does not already; publish the status without delay."""
        self._progress.failed(sink, time.monotonic())
        self._next_publish = 0.0

    def poll(
        self, queries: Mapping[str, StreamingQuery | None], running_batch: Mapping[str, RunningBatch | None]
    ) -> None:
        """Measure, publish and report when they are due; may be called at any rate."""
        now = time.monotonic()
        if now >= self._next_ask:
            self._next_ask = now + MEASURE_S
            self._asked = {name: batch for name, batch in running_batch.items() if batch is not None}
            self._meter.request(self._ends | {planned(name): batch.end for name, batch in self._asked.items()})
            self._next_look = now + ANSWER_S
        if now < self._next_look:
            return
        # Use the batches that ran at the time of the request: batches finished since would be counted as waiting.
        self._next_look = self._next_ask + ANSWER_S
        self._update_spark_progress(queries)
        snapshot = self._snapshot(now, self._asked)
        progress = _as_data(snapshot)
        if now >= self._next_publish:
            self._next_publish = now + PUBLISH_S
            self._publish(replace(self.record, at=now_text(), progress=progress))
        if self._progress_s and now >= self._next_show:
            self._next_show = now + self._progress_s
            self._show({"at": now_text(), **progress})

    def close(self, queries: Mapping[str, StreamingQuery | None], state: str, why: str) -> RunRecord:
        """Measure for the last time, and return the final status of the run."""
        self._update_spark_progress(queries)
        self._meter.close(self._ends)
        if self._ends:
            self._snapshot(time.monotonic(), {})
            if self._progress_s:
                self._show({"at": now_text(), **_as_data(self.latest)})
        return replace(self.record, at=now_text(), state=state, why=why, progress=_as_data(self.latest))

    def _update_spark_progress(self, queries: Mapping[str, StreamingQuery | None]) -> None:
        """Read Spark's current progress; values that it omits keep their last known value."""
        self._by_query |= {
            name: self._by_query.get(name, {}) | _spark_progress(query) for name, query in queries.items()
        }

    def _snapshot(self, now: float, running_batch: Mapping[str, RunningBatch]) -> Mapping[str, SinkProgress]:
        return self._progress.measure(
            now,
            wall_clock_ms(),
            lags={name: self._meter.lag_of(name) for name in self._ends},
            waiting={name: self._meter.lag_of(planned(name)) for name in running_batch},
            running_batch={name: batch.since for name, batch in running_batch.items()},
            queries=self._by_query,
        )


def _as_data(snapshot: Mapping[str, SinkProgress]) -> dict[str, Any]:
    return {"sinks": {name: asdict(sink) for name, sink in snapshot.items()}}


def _spark_progress(query: StreamingQuery | None) -> dict[str, Any]:
    progress = None if query is None else query.lastProgress
    return {} if progress is None else of_spark(progress)
