"""Dedupe and window steps on rows: stateful, by arrival time or event time.

A window cannot report single records, so ``mark_invalid_records`` marks records that it cannot aggregate: a record
without a time, a record whose time is so far ahead that it would advance the watermark past all others, and a record
on which an aggregate fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from penstock.errors import shortened
from penstock.pipelines.rows import alive, json_text, mark_dead, reference, references, rejected_after
from penstock.pipelines.spec.steps import Dedupe, Step, Window
from penstock.pipelines.spec.values import duration_ms
from penstock.pipelines.steps.expressions import FAILED, quoted_column, tried_windows, try_arguments

__all__ = [
    "AHEAD",
    "NO_TIME",
    "EventTime",
    "dedupe_step",
    "late_from_us",
    "mark_invalid_records",
    "mark_invalid_times",
    "window_step",
]

NO_TIME, AHEAD = "event.no_time", "event.ahead"


class EventTime(NamedTuple):
    """The column with the event time of a stateful step, and its bounds; ``without``: fate of a row without a time."""

    column: str
    watermark: str
    max_ahead: str
    without: str

    @classmethod
    def of(cls, window: Window) -> EventTime:
        """Return the event time of ``window``."""
        return cls(window.time, window.watermark, window.max_ahead, "so it belongs to no window")


def mark_invalid_times(rows: DataFrame, name: str, event: EventTime) -> DataFrame:
    """Mark rows without a valid time as dead in the step ``name``."""
    time = sf.col(reference(rows, event.column))
    # Apache's brokers do not return the append time of a record.
    arrived = sf.coalesce(sf.col("_source.timestamp"), sf.current_timestamp())
    is_ahead = sf.unix_millis(time) > sf.unix_millis(arrived) + sf.lit(duration_ms(event.max_ahead))
    far = sf.format_string(f"the event is dated %s, more than {event.max_ahead} after it arrived", time.cast("string"))
    return mark_dead(
        rows,
        name,
        [
            (NO_TIME, sf.when(time.isNull(), sf.lit(f"column {event.column!r} is null, {event.without}"))),
            (AHEAD, sf.when(is_ahead, far)),
        ],
    )


def mark_invalid_records(rows: DataFrame, name: str, window: Window) -> DataFrame:
    """Mark rows as dead in the window step ``name`` without a valid time, or on which an aggregate fails."""
    rows = mark_invalid_times(rows, name, EventTime.of(window))
    tried, texts = try_arguments(rows, rows.groupBy(*references(rows, window.by)).agg(*_aggregates(window)), "_attempt")
    failures = [
        (FAILED, sf.when(quoted_column(column).isNull(), sf.lit(f"aggregate {of!r} fails: {shortened(text)}")))
        for column, (of, text) in texts.items()
    ]
    return mark_dead(tried, name, failures).drop(*texts)


def dedupe_step(rows: DataFrame, dedupe: Dedupe, window: Step | None, after: Sequence[str]) -> DataFrame:
    """Drop duplicates; ``window`` is the window step that follows; ``after``: later steps, whose dead letters pass."""
    # After an explode, the parts of a record have the same id.
    parts = ["_part"] if "_part" in rows.columns else []
    row_id = sf.concat_ws("#", "_id", *parts) if parts else sf.col("_id")
    # A redriven dead letter has the id of its record, but is not a duplicate of it.
    again = sf.concat_ws(":", sf.lit("dead"), sf.col("_redrive.number"), sf.col("_redrive.parts"), row_id)
    # The same for a record that passed this step and was rejected by a later one: the state contains its id.
    first = ~rejected_after(after)
    own = sf.when(sf.col("_dead").isNull() & first, sf.concat(sf.lit("id:"), row_id)).otherwise(again)
    if dedupe.key != "id":
        # A row without the key, such as a dead row, is compared by its id.
        key = sf.col(reference(rows, dedupe.key)).cast("string")
        own = sf.when(alive() & first & key.isNotNull(), sf.concat(sf.lit("key:"), key)).otherwise(own)
    if "_path" in rows.columns:
        # A record that was filtered on one path is not a duplicate of itself on another.
        own = sf.when(
            sf.col("_filtered").isNotNull(), sf.concat_ws(":", sf.lit("left"), sf.col("_path"), row_id)
        ).otherwise(own)
    keyed = rows.withColumn("_copy_of", own)
    if dedupe.on == "arrival":
        assert dedupe.within is not None
        timed = keyed.withColumn("_arrived", sf.col("_source.timestamp")).withWatermark("_arrived", dedupe.within)
    else:
        assert window is not None
        assert window.window is not None
        placed = mark_invalid_times(keyed, window.name, EventTime.of(window.window))
        timed = placed.where(alive()).withWatermark(reference(rows, window.window.time), window.window.watermark)
    # Test cases run as a batch, which has no watermark.
    once = timed.dropDuplicatesWithinWatermark if rows.isStreaming else timed.dropDuplicates
    return once(["_copy_of"]).drop("_copy_of", "_arrived")


def window_step(rows: DataFrame, name: str, window: Window, *, timed: bool) -> DataFrame:
    """Aggregate ``rows`` in windows; ``timed``: a dedupe has already set the watermark."""
    rows = mark_invalid_records(rows, name, window).where(alive())
    time, by = reference(rows, window.time), references(rows, window.by)
    if not timed:
        rows = rows.withWatermark(time, window.watermark)
    if window.gap is not None:
        spans = sf.session_window(time, window.gap).alias("window")
    else:
        assert window.duration is not None
        spans = sf.window(time, window.duration, window.slide).alias("window")
    counted = tried_windows(rows.groupBy(spans, *by).agg(*_aggregates(window)))
    # A group by a field of a struct (`limits.zone`) has the name of the field.
    groups = [quoted_column(name) for name in counted.columns[1 : len(by) + 1]]
    edges = [sf.col(f"window.{edge}").alias(f"window_{edge}") for edge in ("start", "end")]
    # The id of the window in messages: its group, start and end. It is the same for each change.
    parts = [sf.unix_millis(f"window.{edge}").cast("string") for edge in ("start", "end")]
    if groups:
        group = json_text(sf.struct(*groups), counted.select(*groups).schema)
        parts.append(sf.left(sf.sha2(group, 256), sf.lit(32)))
    return counted.select(*edges, *groups, *window.aggregates, sf.concat_ws("-", *parts).alias("_id"))


def _aggregates(window: Window) -> list[Column]:
    return [sf.expr(expression).alias(name) for name, expression in window.aggregates.items()]


def late_from_us(rows: DataFrame, window: Window, *, deduped: bool) -> Column:
    """Return the first watermark, in microseconds since 1970, at which an event of ``rows`` is late.

    After a dedupe by event time this is the event's own time, otherwise the end of the last window that contains it:
    Spark drops windows that have ended, not events.
    """
    time = sf.unix_micros(reference(rows, window.time))
    if deduped:
        return time
    if window.gap is not None:
        return time + sf.lit(duration_ms(window.gap) * 1000)
    assert window.duration is not None
    duration = duration_ms(window.duration) * 1000
    slide = duration if window.slide is None else duration_ms(window.slide) * 1000
    return time - sf.pmod(time, sf.lit(slide)) + sf.lit(duration)
