"""Metadata columns of a row in a pipeline: its origin, and whether it is alive, filtered or dead.

In columns that start with ``_``:

    _id        the record's id (header ``id``; its place where it has none)
    _source    struct: source (its name in the file), topic, broker, partition, offset, timestamp (when the source took
               it), headers, key, value. Of a file: topic is its path, offset the byte (or row) where the record starts
    _dead      struct: step, code, reason, and again where another way of the same record tells it; null while alive
    _filtered  the name of the filter that left it out; null while the row is alive
    _path      only after a concat of ways that part behind one source: which ways the row took
    _redrive   struct: number, step; of a dead letter that was sent again, null for other rows

Rows are marked, never removed, so that every record read can be counted. Windows are the exception: only rows that
are alive go into them. A window itself has its ``_id`` alone, and the other columns where a sink may refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import TimestampType

from penstock.errors import ConfigError
from penstock.pipelines.spec.sources import SOURCE
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP, pieces
from penstock.spark.tube.options import HEADER_PREFIX

__all__ = [
    "INTERNAL",
    "MARKS",
    "alive",
    "data_columns",
    "header",
    "internal_columns",
    "key_column",
    "mark_dead",
    "refuse_internal",
    "rows_of",
    "too_large",
    "windows_as_rows",
]

INTERNAL = ("_id", "_source", "_dead", "_filtered", "_path", "_redrive")
MARKS = ("_source", "_dead", "_filtered")
"""Columns that :func:`windows_as_rows` adds."""
_FIRST_FIELDS = ("topic", "broker", "partition", "offset", "timestamp")
"""Columns of all sources, besides headers, key and value."""
_NO_HEADERS = "CAST(NULL AS ARRAY<STRUCT<key: STRING, value: BINARY>>)"


def rows_of(source: DataFrame, name: str = SOURCE, *extra: Column) -> DataFrame:
    """The rows as the source ``name`` gives them (columns of the ``tubemq`` source), with ``extra`` data.

    Without the column headers, those of ``_source`` are null. The place that identifies a record without an id holds
    the name of the source, unless it is the only one.
    """
    place = sf.format_string("%s/%d:%d@%d", "topic", "broker", "partition", "offset")
    if name != SOURCE:
        place = sf.concat(sf.lit(f"{name}/"), place)
    headers = sf.col("headers") if "headers" in source.columns else sf.expr(_NO_HEADERS).alias("headers")
    number, step = header(source, REDRIVE), header(source, REDRIVE_STEP)
    redrive = sf.struct(number.alias("number"), step.alias("step"))
    return source.select(
        sf.coalesce(header(source, "id"), place).alias("_id"),
        sf.struct(sf.lit(name).alias("source"), *_FIRST_FIELDS, headers, "key", "value").alias("_source"),
        *_unmarked(),
        sf.when(number.isNotNull() | step.isNotNull(), redrive).alias("_redrive"),
        *extra,
    )


def windows_as_rows(windows: DataFrame, name: str) -> DataFrame:
    """Add the metadata columns of rows to ``windows`` of the step ``name``, for windows that become dead letters.

    Source and topic are the name of the step, the place is the instant (ms since 1970) at which the window starts, the
    timestamp that of its end, and the value the window as JSON.
    """
    edges = [sf.split_part("_id", sf.lit("-"), sf.lit(n)).try_cast("bigint") for n in (1, 2)]
    value = sf.to_json(sf.struct(*data_columns(windows)), {"ignoreNullFields": "false"})
    fields = [
        sf.lit(name).alias("source"),
        sf.lit(name).alias("topic"),
        sf.lit(0).alias("broker"),
        sf.lit(0).alias("partition"),
        sf.coalesce(edges[0], sf.lit(0)).cast("bigint").alias("offset"),
        sf.timestamp_millis(edges[1]).alias("timestamp"),
        sf.expr(_NO_HEADERS).alias("headers"),
        sf.lit(None).cast("binary").alias("key"),
        value.cast("binary").alias("value"),
    ]
    return windows.select("*", sf.struct(*fields).alias("_source"), *_unmarked())


def _unmarked() -> list[Column]:
    """The marks of a row that is alive."""
    nothing = "CAST(NULL AS STRUCT<step: STRING, code: STRING, reason: STRING, again: BOOLEAN>)"
    return [sf.expr(nothing).alias("_dead"), sf.lit(None).cast("string").alias("_filtered")]


def header(records: DataFrame, name: str) -> Column:
    """Text of the first header ``name``; null if there is none.

    Read from the column ``header.NAME`` if the source of ``records`` has one, else from the array of headers, which
    costs Spark more than all other work on a row.
    """
    if f"{HEADER_PREFIX}{name}" in records.columns:
        return sf.col(f"`{HEADER_PREFIX}{name}`")
    found = sf.filter("headers", lambda each: each["key"] == sf.lit(name))
    return sf.try_element_at(found, sf.lit(1))["value"].cast("string")


def alive() -> Column:
    """True for a row that is neither dead nor filtered."""
    return sf.col("_dead").isNull() & sf.col("_filtered").isNull()


def internal_columns(rows: DataFrame) -> list[str]:
    """The internal columns of ``rows``."""
    return [column for column in INTERNAL if column in rows.columns]


def data_columns(rows: DataFrame) -> list[str]:
    """The columns that are the user's."""
    return [column for column in rows.columns if column not in INTERNAL]


def mark_dead(rows: DataFrame, step: str, failures: Sequence[tuple[str, Column]]) -> DataFrame:
    """Mark rows that are alive as dead by the first of ``failures``, pairs of code and reason, with a reason."""
    causes = [
        sf.when(
            reason.isNotNull(),
            sf.struct(
                sf.lit(step).alias("step"),
                sf.lit(code).alias("code"),
                reason.alias("reason"),
                sf.lit(False).alias("again"),
            ),
        )
        for code, reason in failures
    ]
    if not causes:
        return rows
    return rows.withColumn("_dead", sf.when(alive(), sf.coalesce(*causes)).otherwise(sf.col("_dead")))


def too_large(size: Column, most: int) -> Column:
    """Reason why a value of ``size`` bytes is not sent; null if it is."""
    return sf.when(size > most, sf.format_string(f"the value has %d bytes, at most {most} are sent", size))


def key_column(rows: DataFrame, template: str) -> Column:
    """Key of a row by ``template``; null if one of its columns is null. Timestamps are in ISO 8601, UTC."""
    return sf.concat(*(_key_text(rows, text) if column else sf.lit(text) for text, column in pieces(template)))


def _key_text(rows: DataFrame, column: str) -> Column:
    if isinstance(rows.select(column).schema.fields[0].dataType, TimestampType):
        return sf.date_format(column, "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return sf.col(column).cast("string")


def refuse_internal(name: str, columns: Sequence[str]) -> None:
    """Refuse columns of step ``name`` with names that are reserved for the pipeline."""
    bad = [column for column in columns if column.startswith("_")]
    if bad:
        raise ConfigError(
            f"step {name!r} makes a column {bad[0]!r}",
            why="names that start with '_' belong to the pipeline",
            do="give it another name",
        )
