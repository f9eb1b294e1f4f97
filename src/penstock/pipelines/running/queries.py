"""A query of a pipeline while it runs: how it fares, and what it must not have left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import DataLossError
from penstock.pipelines.running.build import BuiltQuery

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["RunningQuery", "check_nothing_dropped"]


@dataclass(slots=True)
class RunningQuery:
    """One query and how it fares."""

    built: BuiltQuery
    query: StreamingQuery | None = None
    failing_since: float | None = None
    pause_s: float = 0.25
    restart_at: float = 0.0
    restarts: int = 0
    strange: int = 0
    ended: bool = False

    def progressed(self) -> None:
        """A batch went through: what failed before counts no more."""
        self.failing_since = None
        self.strange = 0
        self.pause_s = 0.25


def check_nothing_dropped(running: RunningQuery) -> None:
    """Spark drops a record whose arrival lies before the dedupe's watermark; for a lake that is a loss.

    It can happen where partitions are read far apart: one that is read from days ago while another, up to date, has
    moved the watermark on. It is told by the batch after, or at the end; the records are still in the log.
    """
    if running.built.plan.windowed or running.query is None:
        return
    dropped = sum(
        operator.numRowsDroppedByWatermark
        for progress in running.query.recentProgress
        for operator in progress.stateOperators
    )
    if dropped:
        raise DataLossError(
            f"sink {running.built.name!r}: {dropped} records arrived longer than `within` before others already read",
            why="one partition is read far behind another, and the dedupe took its records for too old",
            do="raise the dedupe's `within` above that distance, and run again with a new state directory and table",
        )
