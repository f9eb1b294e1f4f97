"""Values of messages as Avro, Protobuf or JSON with the id of their schema in a registry.

Rows are encoded as Avro and Protobuf by an Arrow function, as JSON by Spark: once to find those that cannot be sent,
before the batch is written, and once when they are sent. The driver looks up the id of the schema, or registers it,
before it starts the task that sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError, RefusedError, shortened
from penstock.payloads.avro_encoding import record_encoder
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.confluent import encoded_id
from penstock.payloads.errors import TIME_OUT_OF_RANGE, time_limits
from penstock.payloads.protobuf_encoding import message_encoder
from penstock.payloads.protobuf_schema import ProtobufSchema
from penstock.pipelines.rows import data_columns, row_json
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.registered_values import JsonValue, ProtobufValue, RegisteredValue
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.value_schemas import planned_schema, value_fields, value_schema
from penstock.pipelines.spec.values import quoted_name
from penstock.pipelines.steps.arrow_functions import arrow_function
from penstock.pipelines.steps.expressions import quoted_column
from penstock.runtime.kafka.schema_registry import (
    ImportedSchema,
    NewSchema,
    check_compatible,
    check_registry,
    find_schema,
    register_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ENCODED",
    "check_value_schema",
    "encoded_value",
    "framed_value",
    "schema_id",
    "schema_of_rows",
]

ENCODED = "_encoded"
"""Column with a struct: ``value``, or the ``reason`` why the row cannot be encoded."""
_NOT_UTF_8 = "it has a text that is not UTF-8"
_REASON = "it cannot be written as {}: "
_DAY_US = 86_400_000_000
_RESULT = StructType([StructField("value", BinaryType()), StructField("reason", StringType())])


def check_value_schema(pipeline: Pipeline, sink: Sink) -> None:
    """Check that the registry accepts the schema of the values of ``sink``, without registering it.

    Raises:
        RefusedError: it does not, or lacks the schema.
        UnavailableError, ConfigError: see ``schema_by_id``.
    """
    given = sink.registered
    if given is None:
        return
    text = planned_schema(pipeline, sink)
    if text is None:
        check_registry(given.registry)
        return
    schema = _new_schema(given, text)
    if find_schema(given.registry, sink.subject, schema) is None:
        if not given.auto_register:
            raise _unregistered(sink, given)
        check_compatible(given.registry, sink.subject, schema)


def schema_id(sink: Sink, text: str) -> int:
    """Return the id of the schema ``text`` of the values of ``sink``, which is registered unless the sink forbids it.

    Raises:
        RefusedError: the registry refuses it, or lacks it.
        UnavailableError, ConfigError: see ``schema_by_id``.
    """
    given = sink.registered
    assert given is not None
    schema = _new_schema(given, text)
    if given.auto_register:
        return register_schema(given.registry, sink.subject, schema)
    found = find_schema(given.registry, sink.subject, schema)
    if found is None:
        raise _unregistered(sink, given)
    return found


def _new_schema(given: RegisteredValue, text: str) -> NewSchema:
    if not given.files:
        return NewSchema(text, given.schema_type)
    *imported, own = given.files
    return NewSchema(text, given.schema_type, own.imports, tuple(ImportedSchema(*each) for each in imported))


def _unregistered(sink: Sink, given: RegisteredValue) -> RefusedError:
    named = "" if isinstance(given, JsonValue) else "name the registered one as schema_file, "
    return RefusedError(
        f"the schema registry {given.registry.url} does not have the schema of the sink in the subject "
        f"{sink.subject!r}",
        peer=given.registry.url,
        why="auto_register is false",
        hint=f"register the schema that penstock pipeline plan --json shows, {named}or set auto_register: true",
    )


def schema_of_rows(rows: DataFrame, sink: Sink) -> str:
    """Return the schema of the values of ``sink`` for the columns of ``rows``.

    Raises:
        ConfigError: a column does not exist, or has a type that the format or the given schema lacks.
    """
    registered = sink.registered
    assert sink.kafka is not None
    assert registered is not None
    names = data_columns(rows)
    lacking = {name.lower() for name in value_fields(sink.kafka, names)} - {name.lower() for name in names}
    try:
        if lacking:
            raise ValueError(f"expected a column for each field of the value, found none for {', '.join(lacking)}")
        ddl = ", ".join(f"{quoted_name(f.name)} {_ddl(f.dataType)}" for f in rows.schema.fields if f.name in names)
        return value_schema(sink.kafka, {column.name: column.type for column in parse_ddl(ddl)})
    except ValueError as error:
        raise ConfigError(
            f"sink {sink.name!r} cannot write its columns as {registered.shown}",
            option=f"sinks.{sink.name}.kafka.{registered.option}",
            why=str(error),
            hint="change the columns in a map step",
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

    It has all bytes after the id of the schema.

    Raises:
        ConfigError: see :func:`schema_of_rows`.
    """
    registered = sink.registered
    assert sink.kafka is not None
    assert registered is not None
    schema: str | ProtobufSchema = schema_of_rows(rows, sink)
    names = value_fields(sink.kafka, data_columns(rows))
    if isinstance(registered, JsonValue):
        return sf.when(wanted, _json(rows, names))
    if isinstance(registered, ProtobufValue):
        schema = registered.message_schema
    columns = sf.struct(*(quoted_column(name).alias(name) for name in names))

    def encode(values: pa.Array[Any]) -> pa.Array[Any]:
        return _encoded(values, schema)

    return arrow_function(encode, _RESULT)(sf.when(wanted, columns))


def framed_value(rows: DataFrame, sink: Sink, number: int) -> Column:
    """Return the encoded values of ``rows``, all of which can be encoded, after the id ``number`` of their schema."""
    prefix = sf.lit(bytearray(encoded_id(number)))
    return sf.concat(prefix, encoded_value(rows, sink, sf.expr("true")).getField("value"))


def _json(rows: DataFrame, names: Sequence[str]) -> Column:
    """Return the column ``ENCODED`` for JSON objects of the columns ``names``, without fields that are null.

    Spark writes NaN and infinite numbers as texts, other characters for bytes that are not UTF-8, and years of five
    digits, which are no date or date-time of JSON Schema.
    """
    kinds = {field.name.lower(): field.dataType for field in rows.schema.fields}
    columns = {name: quoted_column(name) for name in names}
    checks = [
        sf.when(found, sf.lit(f"{_REASON.format('JSON')}{name}: {reason}"))
        for name, column in columns.items()
        for is_wrong, reason in (
            (_is_no_number, "it is NaN or infinite"),
            (_is_no_text, _NOT_UTF_8),
            (_is_no_time, TIME_OUT_OF_RANGE),
        )
        if (found := _has(column, kinds[name.lower()], is_wrong)) is not None
    ]
    text = row_json(rows, names)
    reason = sf.coalesce(*checks, sf.lit(None).cast("string"))
    return sf.struct(text.cast("binary").alias("value"), reason.alias("reason"))


_IsWrong = Callable[[Column, DataType], Column | None]
"""Function that returns whether a value of a type is wrong, or null; None if the type has no such values."""


def _is_no_number(value: Column, kind: DataType) -> Column | None:
    if not isinstance(kind, FloatType | DoubleType):
        return None
    return sf.isnan(value) | (sf.abs(value) == sf.lit(float("inf")))


def _is_no_text(value: Column, kind: DataType) -> Column | None:
    return ~sf.is_valid_utf8(value) if isinstance(kind, StringType) else None


def _is_no_time(value: Column, kind: DataType) -> Column | None:
    if isinstance(kind, DateType):
        return ~sf.unix_date(value).between(*time_limits(_DAY_US))
    return ~sf.unix_micros(value).between(*time_limits(1)) if isinstance(kind, TimestampType) else None


def _has(value: Column, kind: DataType, is_wrong: _IsWrong) -> Column | None:
    """Return whether ``value``, or a value in it, is wrong, or null; None if its type has no such values."""
    if isinstance(kind, StructType):
        found = [_has(value.getField(each.name), each.dataType, is_wrong) for each in kind.fields]
    elif isinstance(kind, ArrayType):
        found = [_any_has(value, kind.elementType, is_wrong)]
    elif isinstance(kind, MapType):
        found = [
            _any_has(sf.map_keys(value), kind.keyType, is_wrong),
            _any_has(sf.map_values(value), kind.valueType, is_wrong),
        ]
    else:
        return is_wrong(value, kind)
    known = [sf.coalesce(each, sf.lit(False)) for each in found if each is not None]
    return reduce(Column.__or__, known) if known else None


def _any_has(values: Column, kind: DataType, is_wrong: _IsWrong) -> Column | None:
    if _has(sf.lit(None).cast(kind), kind, is_wrong) is None:
        return None

    def check(each: Column) -> Column:
        found = _has(each, kind, is_wrong)
        assert found is not None
        return sf.coalesce(found, sf.lit(False))

    return sf.exists(values, check)


@lru_cache(maxsize=64)
def _encoder(schema: str | ProtobufSchema) -> Callable[[Mapping[str, Any]], bytes]:
    if isinstance(schema, ProtobufSchema):
        return message_encoder(schema)
    return record_encoder(parse_avro_schema(schema).record)


def _encoded(values: pa.Array[Any], schema: str | ProtobufSchema) -> pa.Array[Any]:
    """Return ``values``, structs of the columns, as messages of an Avro schema or of a Protobuf message."""
    import pyarrow as pa

    encode = _encoder(schema)
    cannot = _REASON.format("Protobuf" if isinstance(schema, ProtobufSchema) else "Avro")
    found: list[bytes | None] = []
    reasons: list[str | None] = []
    for row in _rows(values.cast(_numeric_type(values.type))):
        made = reason = None
        if isinstance(row, str):
            reason = f"{cannot}{row}: {_NOT_UTF_8}"
        elif row is not None:
            try:
                made = encode(row)
            except ValueError as error:
                reason = shortened(f"{cannot}{error}")
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


def _numeric_type(kind: Any) -> Any:
    """Return an Arrow type with numbers instead of times and dates: Python has no times beyond the year 9999."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return pa.int64()
    if types.is_date32(kind):
        return pa.int32()
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _numeric_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_numeric_type(kind.key_type), _numeric_type(kind.item_type))
    if types.is_list(kind):
        return pa.list_(_numeric_type(kind.value_type))
    return kind
