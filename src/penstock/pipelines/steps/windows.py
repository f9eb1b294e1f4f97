"""Stateful steps: dedupe and window, by arrival time or event time.

A window has no place for a record that it cannot count, so ``countable`` marks those before: one without a time, one
that is dated so far ahead that it would move the watermark past all others, and one on which an aggregate fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.rows import alive, mark_dead
from penstock.pipelines.spec.steps import Dedupe, Step, Window
from penstock.pipelines.spec.values import duration_ms
from penstock.pipelines.steps.error_capture import FAILED, attempts, quoted_column, shortened, tried_windows

__all__ = ["AHEAD", "NO_TIME", "countable", "dated", "dedupe_step", "last_end_ms", "window_step"]

NO_TIME, AHEAD = "event.no_time", "event.ahead"


def dated(rows: DataFrame, name: str, window: Window) -> DataFrame:
    """``rows``, dead of the window step ``name`` where it cannot place them in time."""
    time = sf.col(window.time)
    # Apache's brokers do not say when they took a record.
    arrived = sf.coalesce(sf.col("_source.timestamp"), sf.current_timestamp())
    is_ahead = sf.unix_millis(time) > sf.unix_millis(arrived) + sf.lit(duration_ms(window.ahead))
    far = sf.format_string(f"the event is dated %s, more than {window.ahead} after it arrived", time.cast("string"))
    return mark_dead(
        rows,
        name,
        [
            (NO_TIME, sf.when(time.isNull(), sf.lit(f"column {window.time!r} is null, so it belongs to no window"))),
            (AHEAD, sf.when(is_ahead, far)),
        ],
    )


def countable(rows: DataFrame, name: str, window: Window) -> DataFrame:
    """``rows``, dead of the window step ``name`` where it cannot count them: not ``dated``, or an aggregate fails."""
    rows = dated(rows, name, window)
    tried, texts = attempts(rows, rows.groupBy(*window.by).agg(*_aggregates(window)), "_attempt")
    failures = [
        (FAILED, sf.when(quoted_column(column).isNull(), sf.lit(f"aggregate {of!r} fails: {shortened(text)}")))
        for column, (of, text) in texts.items()
    ]
    return mark_dead(tried, name, failures).drop(*texts)


def dedupe_step(rows: DataFrame, dedupe: Dedupe, window: Step | None, after: Sequence[str]) -> DataFrame:
    """``rows`` without copies; ``window`` is the step that follows, ``after`` where letters come from behind it."""
    # A dead letter that is driven through again, under its id, is a copy of nothing.
    again = sf.concat_ws(":", sf.lit("dead"), sf.col("_redrive.number"), sf.col("_id"))
    # So is a record that came through here and then could not be processed or sent: its id is known by now.
    first = ~sf.coalesce(sf.col("_redrive.step").isin(*after), sf.lit(False))
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
        assert window.window is not None
        placed = dated(keyed, window.name, window.window)
        timed = placed.where(alive()).withWatermark(window.window.time, window.window.watermark)
    # A batch, as cases are run in, has no watermark within which to look.
    once = timed.dropDuplicatesWithinWatermark if rows.isStreaming else timed.dropDuplicates
    return once(["_copy_of"]).drop("_copy_of", "_arrived")


def window_step(rows: DataFrame, name: str, window: Window, *, timed: bool) -> DataFrame:
    """Windows of ``rows``; ``timed`` where a dedupe has set the watermark."""
    rows = countable(rows, name, window).where(alive())
    if not timed:
        rows = rows.withWatermark(window.time, window.watermark)
    if window.gap is not None:
        spans = sf.session_window(window.time, window.gap).alias("window")
    else:
        assert window.duration is not None
        spans = sf.window(window.time, window.duration, window.slide).alias("window")
    counted = tried_windows(rows.groupBy(spans, *window.by).agg(*_aggregates(window)))
    edges = [sf.col(f"window.{edge}").alias(f"window_{edge}") for edge in ("start", "end")]
    # Names the window in messages: its group and its edges, the same at every change.
    parts = [sf.unix_millis(f"window.{edge}").cast("string") for edge in ("start", "end")]
    if window.by:
        parts.append(sf.left(sf.sha2(sf.to_json(sf.struct(*window.by)), 256), sf.lit(32)))
    return counted.select(*edges, *window.by, *window.aggregates, sf.concat_ws("-", *parts).alias("_id"))


def _aggregates(window: Window) -> list[Column]:
    return [sf.expr(expression).alias(name) for name, expression in window.aggregates.items()]


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
