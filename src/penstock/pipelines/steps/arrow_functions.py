"""Columns that Spark computes with Python functions over Arrow arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
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

__all__ = ["arrow_function", "arrow_schema"]


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
