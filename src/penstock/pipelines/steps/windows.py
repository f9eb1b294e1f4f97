"""What remembers rows: dedupe and window steps, in arrival or event time."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.model.steps import Dedupe, Window
from penstock.pipelines.model.values import REDRIVE, REDRIVE_STEP, duration_ms, sink_letter
from penstock.pipelines.rows import alive, header

__all__ = ["dedupe_step", "last_end_ms", "window_step"]


def dedupe_step(rows: DataFrame, dedupe: Dedupe, window: Window | None, sink: str | None) -> DataFrame:
    """``rows`` without copies; ``window`` is the one that follows, ``sink`` whose query this is part of."""
    # A dead letter that is driven through again, under its id, is a copy of nothing.
    again = sf.concat_ws(":", sf.lit("dead"), header("_source.headers", REDRIVE), sf.col("_id"))
    # So is a record that came through here and then could not be sent: its id is known by now.
    first = sf.lit(True)  # noqa: FBT003 - a SQL literal
    if sink is not None:
        mine = header("_source.headers", REDRIVE_STEP) == sink_letter(sink)
        first = mine.isNull() | ~mine
    own = sf.when(sf.col("_dead").isNull() & first, sf.concat(sf.lit("id:"), sf.col("_id"))).otherwise(again)
    if dedupe.key != "id":
        # A row without the key (a dead letter, say) is a copy of nothing but itself.
        key = sf.col(dedupe.key).cast("string")
        own = sf.when(alive() & first & key.isNotNull(), sf.concat(sf.lit("key:"), key)).otherwise(own)
    if "_path" in rows.columns:
        # A record that was filtered on one way is no copy of itself on the other.
        own = sf.when(sf.col("_filtered").isNotNull(), sf.concat_ws(":", sf.lit("left"), "_path", "_id")).otherwise(own)
    keyed = rows.withColumn("_copy_of", own)
    if dedupe.on == "arrival":
        assert dedupe.within is not None
        timed = keyed.withColumn("_arrived", sf.col("_source.timestamp")).withWatermark("_arrived", dedupe.within)
    else:
        assert window is not None
        timed = keyed.where(alive()).withWatermark(window.time, window.watermark)
    # A batch, as cases are run in, has no watermark within which to look.
    once = timed.dropDuplicatesWithinWatermark if rows.isStreaming else timed.dropDuplicates
    return once(["_copy_of"]).drop("_copy_of", "_arrived")


def window_step(rows: DataFrame, window: Window, *, timed: bool) -> DataFrame:
    """Windows of ``rows``; ``timed`` where a dedupe has set the watermark."""
    if not timed:
        rows = rows.where(alive()).withWatermark(window.time, window.watermark)
    aggregates = [sf.expr(expression).alias(name) for name, expression in window.aggregates.items()]
    if window.gap is not None:
        spans = sf.session_window(window.time, window.gap).alias("window")
    else:
        assert window.duration is not None
        spans = sf.window(window.time, window.duration, window.slide).alias("window")
    counted = rows.groupBy(spans, *window.by).agg(*aggregates)
    edges = [sf.col(f"window.{edge}").alias(f"window_{edge}") for edge in ("start", "end")]
    # Names the window in messages: its group and its edges, the same at every change.
    parts = [sf.unix_millis(f"window.{edge}").cast("string") for edge in ("start", "end")]
    if window.by:
        parts.append(sf.left(sf.sha2(sf.to_json(sf.struct(*window.by)), 256), sf.lit(32)))
    return counted.select(*edges, *window.by, *window.aggregates, sf.concat_ws("-", *parts).alias("_id"))


def last_end_ms(window: Window, *, deduped: bool) -> Column:
    """Milliseconds since 1970 up to which a watermark leaves an event some window; from there on it is late.

    After a dedupe in event time that is the event's own time, else the end of the last window that it belongs to: Spark
    drops windows that have ended, not events.
    """
    time = sf.unix_millis(window.time)
    if deduped:
        return time
    if window.gap is not None:
        return time + sf.lit(duration_ms(window.gap))
    assert window.duration is not None
    duration = duration_ms(window.duration)
    slide = duration if window.slide is None else duration_ms(window.slide)
    return time - sf.pmod(time, sf.lit(slide)) + sf.lit(duration)
