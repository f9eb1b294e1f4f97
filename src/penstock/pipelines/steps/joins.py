"""The join step: an interval join of two streams, which keeps both in Spark's state until the watermark passes.

Spark runs a full outer join whatever the ``kind``: each row of the state that was never joined comes out once, when
the watermark has passed its interval, so that unmatched rows of both streams can be counted. Those that the step leaves
out are marked as filtered. The column ``_join`` has the outcome of each row.

A joined row has the id ``<left>|<right>``, and the coordinates of the left record without its key, headers and value,
which would be in the state; an unmatched row has those of its own record. Spark drops late rows silently: they are
counted in the records of the batch, which are read a second time (``mark_late``).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import NumericType, TimestampType

from penstock.errors import ConfigError
from penstock.pipelines.rows import (
    NO_HEADERS,
    added_rows,
    alive,
    data_columns,
    mark_dead,
    record_identity,
    reference,
    row_json,
    unmarked,
)
from penstock.pipelines.spec.pipeline import SinkPlan
from penstock.pipelines.spec.steps import JOIN_OUTCOMES, JOIN_SIDES, Join
from penstock.pipelines.steps.expressions import quoted_column
from penstock.pipelines.steps.windows import EventTime, mark_invalid_times

__all__ = [
    "LATE",
    "OUTCOME",
    "event_times",
    "join_counts",
    "join_step",
    "late_counts",
    "mark_late",
    "with_values",
]

OUTCOME = "_join"
"""Column with the outcome of each row, one of ``JOIN_OUTCOMES``."""
_LATE = "_late"
LATE = "event.late"
"""Code of the dead letters of late rows."""
_COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")


def event_times(join: Join) -> tuple[EventTime, EventTime]:
    """Return the event times of the left and the right stream."""
    left, right = (
        EventTime(time, join.watermark, join.max_ahead, "so it is joined with none")
        for time in (join.left_time, join.right_time)
    )
    return left, right


def join_step(left: DataFrame, right: DataFrame, name: str, join: Join) -> DataFrame:
    """Join the live rows of ``left`` and ``right``.

    Raises:
        ConfigError: columns of the two streams cannot be compared, or the new column exists.
    """
    _check_types(left, right, name, join)
    sides = [
        _side(mark_invalid_times(rows, name, time).where(alive()), which, join.on, time)
        for rows, which, time in zip((left, right), JOIN_SIDES, event_times(join), strict=True)
    ]
    # A null never equals another one. Without this Spark compares the bytes of keys, in which nulls are equal; with it,
    # a row without a key is not kept, but comes out at once as unmatched.
    keys = [
        (sf.col(f"_left_{n}") == sf.col(f"_right_{n}"))
        & sf.col(f"_left_{n}").isNotNull()
        & sf.col(f"_right_{n}").isNotNull()
        for n in range(len(join.on))
    ]
    left_time, right_time = (sf.col(f"_{side}_time") for side in JOIN_SIDES)
    condition = (right_time >= left_time - _interval(join.within.before_ms)) & (
        right_time <= left_time + _interval(join.within.after_ms)
    )
    for key in keys:
        condition = key & condition
    joined = sides[0].join(sides[1], condition, "full_outer")
    has_left, has_right = (sf.col(f"_{side}_id").isNotNull() for side in JOIN_SIDES)
    outcome = (
        sf.when(has_left & has_right, sf.lit("joined"))
        .when(has_left, sf.lit("unmatched_left"))
        .otherwise(sf.lit("unmatched_right"))
    )
    left_out = ~has_left if join.kind == "left" else ~(has_left & has_right)
    source = sf.struct(
        sf.lit(name).alias("source"),
        *(
            sf.when(has_left, sf.col(f"_left_at.{field}")).otherwise(sf.col(f"_right_at.{field}")).alias(field)
            for field in _COORDINATES
        ),
        sf.expr(NO_HEADERS).alias("headers"),
        *(sf.lit(None).cast("binary").alias(field) for field in ("key", "value")),
    )
    dead, _ = unmarked()
    return joined.select(
        sf.concat_ws("|", "_left_id", "_right_id").alias("_id"),
        source.alias("_source"),
        dead,
        sf.when(left_out, sf.lit(name)).cast("string").alias("_filtered"),
        sf.expr("CAST(NULL AS STRUCT<number: STRING, step: STRING, parts: STRING>)").alias("_redrive"),
        outcome.alias(OUTCOME),
        *(sf.col("_left")[column].alias(column) for column in data_columns(left)),
        sf.col("_right").alias(join.into),
    )


def _side(rows: DataFrame, side: str, on: Sequence[str], time: EventTime) -> DataFrame:
    """Return the columns of one stream that the join needs, with names of their own."""
    return rows.select(
        sf.struct(*(quoted_column(name) for name in data_columns(rows))).alias(f"_{side}"),
        sf.concat_ws("#", *record_identity(rows)).alias(f"_{side}_id"),
        sf.struct(*(sf.col(f"_source.{field}").alias(field) for field in _COORDINATES)).alias(f"_{side}_at"),
        *(quoted_column(name).alias(f"_{side}_{n}") for n, name in enumerate(on)),
        sf.col(reference(rows, time.column)).alias(f"_{side}_time"),
    ).withWatermark(f"_{side}_time", time.watermark)


def _interval(ms: int) -> Column:
    return sf.expr(f"INTERVAL '{ms // 1000}.{ms % 1000:03}' SECOND")


def _check_types(left: DataFrame, right: DataFrame, name: str, join: Join) -> None:
    """Refuse columns of other types before Spark converts one of them, and fails on its values."""
    if join.into.lower() in (column.lower() for column in data_columns(left)):
        raise ConfigError(
            f"step {name!r}: the left stream has a column {join.into!r} already",
            option="as",
            hint="choose another name",
        )
    for column in join.on:
        kinds = [rows.select(quoted_column(column)).schema[0].dataType for rows in (left, right)]
        if kinds[0] != kinds[1] and not all(isinstance(kind, NumericType) for kind in kinds):
            raise ConfigError(
                f"step {name!r}: column {column!r} is {kinds[0].simpleString()} in the left stream and "
                f"{kinds[1].simpleString()} in the right one",
                option="on",
                hint="cast one of them in a map or sql step",
            )
    for rows, option, time in ((left, "left_time", join.left_time), (right, "right_time", join.right_time)):
        kind = rows.select(reference(rows, time)).schema[0].dataType
        if not isinstance(kind, TimestampType):
            raise ConfigError(
                f"step {name!r}: column {time!r} is {kind.simpleString()}, which is no event time",
                option=option,
                hint="cast it to TIMESTAMP in a map or sql step",
            )


def mark_late(rows: DataFrame, plan: SinkPlan, side: str, watermark_ms: int) -> DataFrame:
    """Add the column ``_late`` to ``rows`` of one side of the join: True for live rows that Spark drops as late.

    With ``late: dead_letter`` they are marked as dead. Spark also drops a row that is dated at the watermark.
    """
    step = next(step for step in plan.steps if step.join is not None)
    assert step.join is not None
    time = step.join.left_time if side == "left" else step.join.right_time
    # Before the first watermark Spark compares with 0, and drops what a device dates 1970 that does not know the time.
    is_late = alive() & (sf.unix_micros(reference(rows, time)) <= sf.lit(watermark_ms * 1000))
    marked = rows.withColumn(_LATE, sf.coalesce(is_late, sf.lit(False)))
    if step.join.late == "count":
        return marked
    said = sf.format_string(
        "the event is dated %s, and the watermark was %s",
        sf.col(reference(rows, time)).cast("string"),
        sf.timestamp_millis(sf.lit(watermark_ms)).cast("string"),
    )
    return mark_dead(marked, step.name, [(LATE, sf.when(sf.col(_LATE), said))])


def late_counts() -> list[Column]:
    """Return aggregates of rows of :func:`mark_late`: ``late_rows``, and of these ``late``, those that are not dead."""
    return [sf.count_if(_LATE).alias("late_rows"), sf.count_if(sf.col(_LATE) & alive()).alias("late")]


def join_counts(rows: DataFrame) -> list[Column]:
    """Return aggregates that count the rows of a join by outcome, as before later explode steps."""
    return [
        (
            sf.count_if(sf.col(OUTCOME) == name)
            - sf.coalesce(sf.sum(sf.when(sf.col(OUTCOME) == name, added_rows(rows))), sf.lit(0))
        ).alias(name)
        for name in JOIN_OUTCOMES
    ]


def with_values(rows: DataFrame) -> DataFrame:
    """Add the values of dead ``rows`` of a join, as JSON, for their dead letters: they have no record."""
    if OUTCOME not in rows.columns:
        return rows
    filled = sf.col("_source").withField("value", row_json(rows, nulls=True).cast("binary"))
    return rows.withColumn("_source", sf.when(sf.col("_dead").isNotNull(), filled).otherwise(sf.col("_source")))
