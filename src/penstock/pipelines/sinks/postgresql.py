"""Write the rows of a batch to PostgreSQL from Spark's tasks; see ``penstock.spark.postgresql.writes``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipelines.rows import data_columns, json_text, mark_dead
from penstock.pipelines.spec.sinks import PostgresqlSink, Sink
from penstock.pipelines.spec.values import sink_letter
from penstock.pipelines.steps.arrow_functions import map_in_arrow
from penstock.pipelines.steps.expressions import add_conditions, mark_failed_conditions, quoted_column
from penstock.spark.postgresql.columns import family, table_columns
from penstock.spark.postgresql.connection import connected
from penstock.spark.postgresql.writes import BatchCommit, BatchWriter, StagedPart, StagingTable, copy_rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["column_kinds", "mark_unstorable", "write_postgresql"]

_DELETE = "_delete"
_ONE_TASK = 10_000
"""Maximum number of rows that a single task copies."""


def column_kinds(columns: StructType) -> dict[str, str]:
    """Return the types of the user's ``columns`` as texts, by name."""
    return {field.name: field.dataType.simpleString().upper() for field in columns if not field.name.startswith("_")}


def mark_unstorable(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows as dead that no table of PostgreSQL can hold, or whose key is null."""
    target, name = sink.postgresql, sink_letter(sink.name)
    assert target is not None
    reasons = [
        ("sink.key", sf.when(quoted_column(key).isNull(), sf.lit(f"column {key} of the key is null")))
        for key in target.key
    ]
    unstorable = (_unstorable(column, rows.schema[column].dataType) for column in data_columns(rows))
    reasons += [("sink.value", reason) for reason in unstorable if reason is not None]
    marked = mark_dead(rows, name, reasons)
    return marked if target.delete_when is None else mark_failed_conditions(marked, name, [target.delete_when])


def _unstorable(name: str, kind: DataType) -> Column | None:
    value = quoted_column(name)
    if isinstance(kind, StringType):
        wrong = value.contains("\0") | ~sf.call_function("is_valid_utf8", value)
        return sf.when(wrong, sf.lit(f"column {name} has U+0000 or invalid UTF-8, which PostgreSQL does not store"))
    if family(kind.simpleString()) == "JSON":
        # Not an escaped backslash before the text u0000.
        wrong = sf.to_json(value).rlike(r"(?<!\\)(?:\\\\)*\\u0000")
        return sf.when(wrong, sf.lit(f"column {name} has U+0000, which PostgreSQL does not store"))
    if isinstance(kind, (DateType, TimestampType, TimestampNTZType)):
        wrong = ~sf.year(value).between(1, 9999)
        return sf.when(wrong, sf.lit(f"column {name} is not in the years 1 to 9999"))
    return None


def write_postgresql(rows: DataFrame, count: int, sink: Sink, batch: int, writer: BatchWriter) -> int:
    """Write the ``count`` ``rows`` of ``batch`` to the table of ``sink``; return their number.

    Raises:
        UnavailableError: the server does not answer, also as text in a Spark error; the batch may be repeated.
        PenstockError: the table refuses a row, or a later run has written.
    """
    target = sink.postgresql
    assert target is not None
    if not count:
        # A repeated batch may have had rows, for example if a lookup has another value now.
        return writer.written(batch)
    names = data_columns(rows)
    kinds = column_kinds(rows.select(*map(quoted_column, names)).schema)
    with connected(target.server, writer.application) as connection:
        columns = table_columns(connection, target.shape(sink.name), kinds)
    staged = writer.open(batch, kinds)
    if isinstance(staged, int):
        return staged
    if count <= _ONE_TASK:
        rows = rows.coalesce(1)
    tasks = map_in_arrow(_as_texts(rows, names, target), partial(_copy, staged), "attempt LONG, rows LONG").collect()
    parts = [StagedPart(task["attempt"], task["rows"]) for task in tasks]
    return writer.commit(batch, staged, parts, columns, BatchCommit(kinds, target.key, target.order_by))


def _copy(staged: StagingTable, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    part = copy_rows(staged, batches)
    yield pa.RecordBatch.from_pylist(
        [part._asdict()], schema=pa.schema([("attempt", pa.int64()), ("rows", pa.int64())])
    )


def _as_texts(rows: DataFrame, names: list[str], target: PostgresqlSink) -> DataFrame:
    """Return the columns that a task copies, in formats that the server parses."""
    identity = [sf.col(name) if name in rows.columns else sf.lit(None).cast("string").alias(name) for name in _IDENTITY]
    is_deleted: Column = sf.lit(False)
    if target.delete_when is not None:
        rows = add_conditions(rows, {_DELETE: target.delete_when})
        is_deleted = sf.coalesce(sf.col(_DELETE), sf.lit(False))
    kinds = rows.schema
    return rows.select(
        *identity, is_deleted.alias(_DELETE), *(_text(name, kinds[name].dataType).alias(name) for name in names)
    )


_IDENTITY = ("_id", "_part")


def _text(name: str, kind: DataType) -> Column:
    value = quoted_column(name)
    if family(kind.simpleString()) == "JSON":
        return json_text(value, kind, nulls=True)
    if isinstance(kind, BinaryType):
        return sf.concat(sf.lit("\\x"), sf.hex(value))
    if isinstance(kind, (DecimalType, FractionalType)):
        return value.cast("string")
    return value
