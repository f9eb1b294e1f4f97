"""A pipeline compiled: one streaming query for each sink, built but not started."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.pipelines.model import Pipeline
from penstock.pipelines.model.plan import SinkPlan, labels, plan
from penstock.pipelines.running.batches import Context, SinkBatches
from penstock.pipelines.sinks.table import check_columns
from penstock.pipelines.state import layout
from penstock.pipelines.state.checkpoint import Checkpoint
from penstock.pipelines.steps.stages import flow

__all__ = ["BuiltQuery", "build"]

# Spark's Python side prints every error of analysis as a line of JSON with both stacks; ours says it once, as an error.
logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class BuiltQuery:
    """One sink's query: its rows, what happens to each batch, and where its checkpoint is."""

    plan: SinkPlan
    rows: DataFrame
    batches: SinkBatches
    checkpoint: Checkpoint

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
        name = sink_plan.sink.name
        checkpoint = Checkpoint(layout.checkpoint(state, name), labels(sink_plan.ways))
        streams = context.source.streams(spark, name)
        rows = flow(streams, sink_plan.nodes, sink_plan.reads, context.with_lookup, sink=name)
        table = sink_plan.sink.table
        if table is not None and table.format == "parquet":
            check_columns(Path(table.path), name, rows.schema)
        built.append(BuiltQuery(sink_plan, rows, SinkBatches(sink_plan, checkpoint, context), checkpoint))
    return built
