"""Compile a pipeline: build one streaming query per sink, not started yet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import DataLossError
from penstock.pipelines.catalyst import make_thread_safe
from penstock.pipelines.run.batches import Context, SinkBatches
from penstock.pipelines.sinks.table import check_columns
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.plan import SinkPlan, labels, plan
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.steps.stages import flow
from penstock.runtime.backoff import Backoff

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["BuiltQuery", "RunningQuery", "build", "check_nothing_dropped"]

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

# Spark's Python side prints every error of analysis as a line of JSON with both stacks; ours says it once, as an error.
logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class BuiltQuery:
    """One sink's query: the plan of its rows, what happens to each batch, and where its checkpoint is."""

    plan: SinkPlan
    build_rows: Callable[[], DataFrame]
    batches: SinkBatches
    checkpoint: Checkpoint
    rows: DataFrame = field(init=False)
    """The rows as Spark has analyzed them; :meth:`rebuild` replaces them."""

    def __post_init__(self) -> None:
        self.rebuild()

    def rebuild(self) -> None:
        """Build a new plan of the rows: the objects of the old one may be what fails."""
        self.rows = self.build_rows()

    @property
    def name(self) -> str:
        """The sink's name."""
        return self.plan.sink.name

    def start(self, trigger_ms: int, *, available_now: bool) -> StreamingQuery:
        """Start it, or go on where its checkpoint ends."""
        writer = (
            self.rows.writeStream.queryName(self.name)
            # Windows are brought out whenever they change, the last one too, unless only closed ones are wanted.
            .outputMode("update" if self.plan.changes_windows else "append")
            .option("checkpointLocation", str(self.checkpoint.path))
            .foreachBatch(self.batches)
        )
        if available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{trigger_ms} milliseconds").start()


def build(pipeline: Pipeline, spark: SparkSession, state: Path, context: Context) -> list[BuiltQuery]:
    """The queries of ``pipeline``, in the order of its sinks. Spark has checked every column by then.

    Raises:
        ConfigError: a step cannot be built (see ``stages.flow``), or a table has columns of other types.
    """
    built = []
    for sink_plan in plan(pipeline):
        sink = sink_plan.sink
        checkpoint = Checkpoint(layout.checkpoint(state, sink.name), labels(sink_plan.ways))
        query = BuiltQuery(
            sink_plan,
            partial(_build_rows, spark, sink_plan, context),
            SinkBatches(sink_plan, checkpoint, context),
            checkpoint,
        )
        if sink.table is not None and sink.table.format == "parquet":
            check_columns(Path(sink.table.path), sink.name, query.rows.schema)
        if sink.messages is not None:
            make_thread_safe(spark, "mqtt" if sink.tubemq is None else "tubemq")
        built.append(query)
    return built


def _build_rows(spark: SparkSession, sink_plan: SinkPlan, context: Context) -> DataFrame:
    name = sink_plan.sink.name
    return flow(context.source.streams(spark, name), sink_plan.nodes, sink_plan.reads, context.with_lookup, sink=name)


@dataclass(slots=True)
class RunningQuery:
    """One query and how it fares."""

    built: BuiltQuery
    query: StreamingQuery | None = None
    failing_since: float | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    restart_at: float = 0.0
    rebuild: bool = False
    """True if the next start needs a new plan, because nothing says that the failure was of something outside it."""
    restarts: int = 0
    strange: int = 0
    ended: bool = False

    def progressed(self) -> None:
        """A batch went through: what failed before counts no more."""
        self.failing_since = None
        self.strange = 0
        self.backoff.reset()


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
