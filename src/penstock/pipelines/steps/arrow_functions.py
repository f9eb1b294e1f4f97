"""Columns that Spark computes with Python functions over Arrow arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrowMap", "arrow_function", "arrow_schema", "map_in_arrow"]

ArrowMap = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
"""Function of the Arrow batches of a task."""


def arrow_function(function: Callable[..., pa.Array[Any]], kind: DataType) -> Callable[..., Column]:
    """Return a function of columns that Spark computes with ``function``, from arrays to one array of type ``kind``.

    The annotations of ``function`` are replaced.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf

    # Spark derives the kind of function from annotations, and cannot resolve string annotations.
    names = inspect.signature(function).parameters
    function.__annotations__ = {**dict.fromkeys(names, pa.Array), "return": pa.Array}
    # Not deterministic, so that Spark neither runs it twice for two uses of the column nor moves it over a filter.
    made: Callable[..., Column] = arrow_udf(function, kind).asNondeterministic()  # type: ignore[call-overload]  # needs no kind
    return made


def map_in_arrow(rows: DataFrame, function: ArrowMap, schema: StructType | str) -> DataFrame:
    """Return the rows that ``function`` makes of ``rows``; as ``mapInArrow``, and for all names of columns.

    PySpark takes a dot in a name for a field of a struct.
    """
    names = rows.columns
    if not any("." in name or "`" in name for name in names):
        return rows.mapInArrow(function, schema)
    numbered = rows.toDF(*(f"c{number}" for number in range(len(names))))
    return numbered.mapInArrow(partial(_with_names, names, function), schema)


def _with_names(names: list[str], function: ArrowMap, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return function(batch.rename_columns(names) for batch in batches)


def arrow_schema(columns: StructType) -> pa.Schema:
    """Return the Arrow types of ``columns``. PySpark has a function for it, whose arguments depend on the version."""
    import pyarrow as pa

    simple: dict[type[DataType], pa.DataType] = {
        BooleanType: pa.bool_(),
        ByteType: pa.int8(),
        ShortType: pa.int16(),
        IntegerType: pa.int32(),
        LongType: pa.int64(),
        FloatType: pa.float32(),
        DoubleType: pa.float64(),
        BinaryType: pa.binary(),
        DateType: pa.date32(),
        TimestampType: pa.timestamp("us", "UTC"),
        TimestampNTZType: pa.timestamp("us"),
    }

    def arrow_type(kind: DataType) -> pa.DataType:
        if isinstance(kind, StructType):
            return pa.struct([pa.field(field.name, arrow_type(field.dataType)) for field in kind.fields])
        if isinstance(kind, ArrayType):
            return pa.list_(pa.field("element", arrow_type(kind.elementType)))
        if isinstance(kind, MapType):
            return pa.map_(arrow_type(kind.keyType), arrow_type(kind.valueType))
        if isinstance(kind, DecimalType):
            return pa.decimal128(kind.precision, kind.scale)
        # CHAR and VARCHAR are strings in rows.
        return simple.get(type(kind), pa.string())

    return pa.schema([pa.field(field.name, arrow_type(field.dataType)) for field in columns.fields])
