"""Progress of a run: per sink rows per second, lag in records and seconds, batch time, state size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.pipelines.ledger.ledger import Counts, Entry
from penstock.pipelines.sources.reader import Lag
from penstock.runtime.observability.metrics import CONTENT_TYPE, page_at

__all__ = ["COUNTERS", "MEANINGS", "Progress", "SinkProgress", "figures", "of_spark", "render", "serve"]

RATE_S: Final = 10.0
"""Rates are over the last so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress(Counts):
    """One sink's query at one moment. Counts are of this run; None is what is not known (yet).

    ``lag_*``: all that the tube has and the query has not finished; of that ``waiting_*`` is in no batch yet, and
    ``in_batch_*`` in the one under way. Seconds of ``lag`` and ``waiting`` are the age of the oldest record, by the
    time at which the tube took it; those of ``in_batch`` are since the batch began. ``behind_s``: how far the
    watermark is behind the clock. ``state_*``: rows and bytes that Spark keeps for dedupes and windows.
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
        self._last: dict[str, Entry] = {}
        self._read: dict[str, deque[tuple[float, int]]] = {sink: deque() for sink in sinks}
        self._started = now
        self.latest: Mapping[str, SinkProgress] = {sink: SinkProgress() for sink in sinks}
        """The newest snapshot. Replaced as a whole, so that other threads may read it."""

    def finished(self, entry: Entry, now: float) -> None:
        """A batch is done."""
        self._counts[entry.sink] = self._counts[entry.sink].plus(entry)
        self._last[entry.sink] = entry
        self._read[entry.sink].append((now, entry.read))

    def restarted(self, sink: str) -> None:
        """A query was started again after an error."""
        self._restarts[sink] += 1

    def take(
        self,
        now: float,
        wall_ms: int,
        *,
        lags: Mapping[str, Lag | None],
        waiting: Mapping[str, Lag | None],
        under_way: Mapping[str, float],
        queries: Mapping[str, Mapping[str, Any]],
    ) -> Mapping[str, SinkProgress]:
        """A new snapshot.

        ``lags`` is what each query has not finished, ``waiting`` what of that is in no batch, ``under_way`` since when
        (on the clock of ``now``) a batch runs, ``queries`` what Spark says of the last one (:func:`of_spark`).
        """
        self.latest = {
            sink: self._sink(sink, now, wall_ms, lags.get(sink), waiting.get(sink), under_way.get(sink), queries)
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
    with page_at(address, lambda: render(pipeline, read), CONTENT_TYPE) as bound:
        yield bound
