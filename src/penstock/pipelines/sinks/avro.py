"""Values of messages as Avro with the id of their schema in a registry.

Rows are encoded by an Arrow function, once to find those that cannot be sent, before the batch is written, and once
when they are sent. The driver looks up the id of the schema, or registers it, before it starts the task that sends
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructField, StructType

from penstock.errors import ConfigError, RefusedError, shortened
from penstock.payloads.avro_encoding import record_encoder
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.pipelines.rows import data_columns
from penstock.pipelines.spec.avro_columns import planned_schema, value_fields, value_schema
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.values import quoted_name
from penstock.pipelines.steps.arrow_functions import arrow_function
from penstock.pipelines.steps.expressions import quoted_column
from penstock.runtime.kafka.schema_registry import check_compatible, check_registry, find_schema, register_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

__all__ = [
    "ENCODED",
    "ID_BYTES",
    "check_value_schema",
    "encoded_value",
    "framed_value",
    "schema_id",
    "schema_of_rows",
]

ENCODED = "_encoded"
"""Column with a struct: ``value``, or the ``reason`` why the row cannot be encoded."""
ID_BYTES = 5
"""Size of a byte 0 and the id, which precede the record."""
_RESULT = StructType([StructField("value", BinaryType()), StructField("reason", StringType())])


def check_value_schema(pipeline: Pipeline, sink: Sink) -> None:
    """Check that the registry accepts the schema of the values of ``sink``, without registering it.

    Raises:
        RefusedError: it does not, or lacks the schema.
        UnavailableError, ConfigError: see ``schema_by_id``.
    """
    avro = sink.avro
    if avro is None:
        return
    text = planned_schema(pipeline, sink)
    if text is None:
        check_registry(avro.registry)
        return
    if find_schema(avro.registry, sink.subject, text) is None:
        if not avro.auto_register:
            raise _unregistered(sink)
        check_compatible(avro.registry, sink.subject, text)


def schema_id(sink: Sink, text: str) -> int:
    """Return the id of the schema ``text`` of the values of ``sink``, which is registered unless the sink forbids it.

    Raises:
        RefusedError: the registry refuses it, or lacks it.
        UnavailableError, ConfigError: see ``schema_by_id``.
    """
    avro = sink.avro
    assert avro is not None
    if avro.auto_register:
        return register_schema(avro.registry, sink.subject, text)
    found = find_schema(avro.registry, sink.subject, text)
    if found is None:
        raise _unregistered(sink)
    return found


def _unregistered(sink: Sink) -> RefusedError:
    avro = sink.avro
    assert avro is not None
    return RefusedError(
        f"the schema registry {avro.registry.url} does not have the schema of the sink in the subject {sink.subject!r}",
        peer=avro.registry.url,
        why="auto_register is false",
        do="register the schema that penstock pipeline plan --json shows, name the registered one as schema_file, or "
        "set auto_register: true",
    )


def schema_of_rows(rows: DataFrame, sink: Sink) -> str:
    """Return the schema of the values of ``sink`` for the columns of ``rows``.

    Raises:
        ConfigError: a column does not exist, or has a type that Avro or the given schema lacks.
    """
    assert sink.kafka is not None
    names = data_columns(rows)
    lacking = {name.lower() for name in value_fields(sink.kafka, names)} - {name.lower() for name in names}
    try:
        if lacking:
            raise ValueError(f"expected a column for each field of the value, found none for {', '.join(lacking)}")
        ddl = ", ".join(f"{quoted_name(f.name)} {_ddl(f.dataType)}" for f in rows.schema.fields if f.name in names)
        return value_schema(sink.kafka, {column.name: column.type for column in parse_ddl(ddl)})
    except ValueError as error:
        raise ConfigError(
            f"sink {sink.name!r} cannot write its columns as Avro",
            option=f"sinks.{sink.name}.kafka.avro",
            why=str(error),
            do="change the columns in a map step",
        ) from error


def _ddl(kind: DataType) -> str:
    """Return a type as DDL, with quoted names of fields."""
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quoted_name(each.name)}: {_ddl(each.dataType)}' for each in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{_ddl(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{_ddl(kind.keyType)}, {_ddl(kind.valueType)}>"
    return kind.simpleString().upper()


def encoded_value(rows: DataFrame, sink: Sink, wanted: Column) -> Column:
    """Return the column ``ENCODED`` of ``rows``, null for those that are not ``wanted``.

    Raises:
        ConfigError: see :func:`schema_of_rows`.
    """
    assert sink.kafka is not None
    text = schema_of_rows(rows, sink)
    names = value_fields(sink.kafka, data_columns(rows))
    columns = sf.struct(*(quoted_column(name).alias(name) for name in names))

    def encode(values: pa.Array[Any]) -> pa.Array[Any]:
        return _encoded(values, text)

    return arrow_function(encode, _RESULT)(sf.when(wanted, columns))


def framed_value(rows: DataFrame, sink: Sink, number: int) -> Column:
    """Return the encoded values of ``rows``, all of which can be encoded, after the id ``number`` of their schema."""
    prefix = sf.lit(bytearray((0, *number.to_bytes(4, "big"))))
    return sf.concat(prefix, encoded_value(rows, sink, sf.expr("true")).getField("value"))


@lru_cache(maxsize=64)
def _encoder(text: str) -> Callable[[Mapping[str, Any]], bytes]:
    return record_encoder(parse_avro_schema(text).record)


def _encoded(values: pa.Array[Any], text: str) -> pa.Array[Any]:
    import pyarrow as pa

    encode = _encoder(text)
    found: list[bytes | None] = []
    reasons: list[str | None] = []
    for row in _rows(values.cast(_plain(values.type))):
        made = reason = None
        if isinstance(row, str):
            reason = f"it cannot be written as Avro: {row}: it has a text that is not UTF-8"
        elif row is not None:
            try:
                made = encode(row)
            except ValueError as error:
                reason = shortened(f"it cannot be written as Avro: {error}")
        found.append(made)
        reasons.append(reason)
    return pa.StructArray.from_arrays(
        [pa.array(found, pa.binary()), pa.array(reasons, pa.string())], names=["value", "reason"]
    )


def _rows(values: pa.Array[Any]) -> list[dict[str, Any] | str | None]:
    """Return the fields of each row by name; of a row with a text that is not UTF-8, the name of the field.

    Spark has such texts, for example of a CAST from BINARY.
    """
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(row) for row in values]


def _decoded(row: Any) -> dict[str, Any] | str | None:
    if not row.is_valid:
        return None
    found = {}
    for name, value in row.items():
        try:
            found[name] = value.as_py()
        except UnicodeDecodeError:
            return str(name)
    return found


def _plain(kind: Any) -> Any:
    """Return an Arrow type with numbers instead of times and dates: Python has no times beyond the year 9999."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return pa.int64()
    if types.is_date32(kind):
        return pa.int32()
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind
