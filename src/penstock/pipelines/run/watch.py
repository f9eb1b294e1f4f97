"""Monitor a run: measure it once a second and report to the state store and to observers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.pipelines.ledger.ledger import Entry
from penstock.pipelines.run.lease import RunRecord
from penstock.pipelines.run.progress import Progress, SinkProgress, of_spark
from penstock.pipelines.sources.reader import Meter, planned
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.runtime.io.clock import wall_clock_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.pipelines.run.batches import UnderWay

__all__ = ["Watch", "now_text"]

MEASURE_S = 1.0
ANSWER_S = 0.3
"""Seconds to wait for answers about the log; after that the previous values are shown."""
TELL_S = 5.0
"""Seconds between writes of the status in the state store."""


def now_text() -> str:
    """The time now, ISO 8601, UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Watch:
    """The progress of one run, all in the run's own thread; ``latest`` may be read from others.

    ``tell`` puts a record where others see it, ``show`` is given the fields of a ``progress`` event every
    ``progress_s`` seconds (0: never).
    """

    def __init__(
        self,
        meter: Meter,
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
        self._asked: dict[str, UnderWay] = {}
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

    def finished(self, entry: Entry) -> None:
        """A batch is done."""
        self._progress.finished(entry, time.monotonic())
        self._ends[entry.sink] = entry.end

    def restarted(self, sink: str) -> None:
        """A query failed and is started again."""
        self._progress.restarted(sink)

    def look(self, queries: Mapping[str, StreamingQuery | None], under_way: Mapping[str, UnderWay | None]) -> None:
        """Measure, where it is time to; called as often as one likes."""
        now = time.monotonic()
        if now >= self._next_ask:
            self._next_ask = now + MEASURE_S
            self._asked = {name: batch for name, batch in under_way.items() if batch is not None}
            self._meter.ask(self._ends | {planned(name): batch.end for name, batch in self._asked.items()})
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

    def end(self, queries: Mapping[str, StreamingQuery | None], state: str, why: str) -> RunRecord:
        """Measure for the last time; the run's last record."""
        self._hear(queries)
        self._meter.end(self._ends)
        if self._ends:
            self._take(time.monotonic(), {})
            if self._progress_s:
                self._show({"at": now_text(), **_as_data(self.latest)})
        return replace(self.record, at=now_text(), state=state, why=why, progress=_as_data(self.latest))

    def _hear(self, queries: Mapping[str, StreamingQuery | None]) -> None:
        """Spark's current progress, completed with the last known values that it omits."""
        self._said |= {name: self._said.get(name, {}) | _said_by_spark(query) for name, query in queries.items()}

    def _take(self, now: float, under_way: Mapping[str, UnderWay]) -> Mapping[str, SinkProgress]:
        return self._progress.take(
            now,
            wall_clock_ms(),
            lags={name: self._meter.of(name) for name in self._ends},
            waiting={name: self._meter.of(planned(name)) for name in under_way},
            under_way={name: batch.since for name, batch in under_way.items()},
            queries=self._said,
        )


def _as_data(snapshot: Mapping[str, SinkProgress]) -> dict[str, Any]:
    return {"sinks": {name: asdict(sink) for name, sink in snapshot.items()}}


def _said_by_spark(query: StreamingQuery | None) -> dict[str, Any]:
    progress = None if query is None else query.lastProgress
    return {} if progress is None else of_spark(progress)
