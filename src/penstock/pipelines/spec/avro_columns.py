"""Columns as the fields of an Avro record: the schema that is derived from them, or the check against a given one.

All derived fields may be null, and have null as default, so that a registry accepts a schema with a column more or less
as compatible, also if Spark finds that a column cannot be null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.payloads.avro_schema import AvroType, is_avro_name, parse_avro_schema
from penstock.pipelines.spec.columns import element_of, fields_of, sink_columns
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import KafkaSink, Sink

__all__ = ["planned_schema", "value_fields", "value_problem", "value_schema"]

_INSTANT = {"type": "long", "logicalType": "timestamp-micros"}
_SIMPLE: dict[str, object] = {
    "BOOLEAN": "boolean",
    **dict.fromkeys(("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER"), "int"),
    **dict.fromkeys(("BIGINT", "LONG"), "long"),
    **dict.fromkeys(("FLOAT", "REAL"), "float"),
    "DOUBLE": "double",
    **dict.fromkeys(("STRING", "CHAR", "CHARACTER", "VARCHAR"), "string"),
    "BINARY": "bytes",
    "DATE": {"type": "int", "logicalType": "date"},
    "TIMESTAMP": _INSTANT,
    "TIMESTAMP_LTZ": _INSTANT,
    "TIMESTAMP_NTZ": {"type": "long", "logicalType": "local-timestamp-micros"},
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
_TEXT_MAP = "MAP<STRING, "
_ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "boolean": ("boolean",),
    "int": ("int", "long"),
    "long": ("int", "long"),
    "float": ("float",),
    "double": ("float", "double", "int"),
    "bytes": ("bytes",),
    "fixed": ("bytes",),
    "string": ("string",),
    "enum": ("string",),
}
"""Types of columns, as ``_SIMPLE`` has them, that each type of Avro without a logical type accepts."""
_LOGICAL = {
    "date": "date",
    "uuid": "string",
    **dict.fromkeys(("timestamp-millis", "timestamp-micros"), "timestamp-micros"),
    **dict.fromkeys(("local-timestamp-millis", "local-timestamp-micros"), "local-timestamp-micros"),
}
"""The type of columns that each logical type but decimal accepts, in the same way."""


def value_schema(kafka: KafkaSink, columns: Mapping[str, str]) -> str:
    """Return the schema of the values of ``kafka`` for a stream with ``columns``, their types by name.

    Raises:
        ValueError: a column has no type of Avro, or not that of the given schema; the text begins with "expected".
    """
    avro = kafka.avro
    assert avro is not None
    found = {name.lower(): kind for name, kind in columns.items()}
    if avro.text is not None:
        for field in parse_avro_schema(avro.text).record.fields:
            _check(found[field.name.lower()], field.type, field.name)
        return avro.text
    chosen = {name: found[name.lower()] for name in (kafka.value or columns)}
    record = _record((), chosen.items(), avro.record_of(kafka.topic))
    return json.dumps(record, separators=(",", ":"))


def value_fields(kafka: KafkaSink, columns: Iterable[str]) -> list[str]:
    """Return the names of the fields of the values of ``kafka`` for a stream with ``columns``."""
    assert kafka.avro is not None
    if kafka.avro.text is not None:
        return [field.name for field in parse_avro_schema(kafka.avro.text).record.fields]
    return list(kafka.value or columns)


def planned_schema(pipeline: Pipeline, sink: Sink) -> str | None:
    """Return the schema of the values of ``sink``, which has one; None if only Spark knows the types of its columns."""
    assert sink.kafka is not None
    assert sink.avro is not None
    if sink.avro.text is not None:
        return sink.avro.text
    columns = sink_columns(pipeline, sink)
    if columns is None:
        return None
    types = {column.name: column.type for column in columns}
    chosen = {name.lower() for name in sink.kafka.value or types}
    known = {name: kind for name, kind in types.items() if kind is not None and name.lower() in chosen}
    return value_schema(sink.kafka, known) if len(known) == len(chosen) else None


def value_problem(pipeline: Pipeline, sink: Sink) -> str | None:
    """Return what is wrong with the columns that ``sink`` writes as Avro, as far as the file determines them."""
    assert sink.kafka is not None
    columns = sink_columns(pipeline, sink)
    if columns is None:
        return None
    types = {column.name.lower(): column.type for column in columns}
    avro = sink.kafka.avro
    assert avro is not None
    try:
        if avro.text is not None:
            for field in parse_avro_schema(avro.text).record.fields:
                if field.name.lower() not in types:
                    shown = ", ".join(column.name for column in columns)
                    raise ValueError(f"expected a column for the field {field.name!r} of the schema, found {shown}")
                if (kind := types[field.name.lower()]) is not None:
                    _check(kind, field.type, field.name)
            return None
        for name in sink.kafka.value or [column.name for column in columns]:
            if not is_avro_name(name) or "." in name:
                raise ValueError(_name_expected(name))
            if (kind := types.get(name.lower())) is not None:
                _type((name,), kind, "record")
    except ValueError as error:
        return str(error)
    return None


def _name_expected(name: str) -> str:
    return f"expected a column with a name of Avro (letters, digits, _), found {name!r}: rename it in a map step"


def _record(path: tuple[str, ...], fields: Iterable[tuple[str, str]], name: str) -> dict[str, Any]:
    """Return the record ``name`` of ``fields``, names and types, of the column at ``path``."""
    made = []
    for field, kind in fields:
        if not is_avro_name(field) or "." in field:
            raise ValueError(_name_expected(".".join((*path, field))))
        made.append({"name": field, "type": ["null", _type((*path, field), kind, name)], "default": None})
    space, _, short = name.rpartition(".")
    return {"type": "record", "name": short, **({"namespace": space} if space else {}), "fields": made}


def _type(path: tuple[str, ...], kind: str, record: str) -> object:
    """Return the type of Avro for a column of the type ``kind``; its records are in the namespace ``record``."""
    if (fields := fields_of(kind)) is not None:
        if not fields:
            raise ValueError(f"expected fields of the struct {'.'.join(path)}")
        return _record(path, ((field.name, field.type) for field in fields), f"{record}.{path[-1]}")
    if (element := element_of(kind)) is not None:
        return {"type": "array", "items": ["null", _type(path, element, record)]}
    if kind.startswith(_TEXT_MAP):
        return {"type": "map", "values": ["null", _type(path, kind[len(_TEXT_MAP) : -1], record)]}
    if (digits := _decimal(kind)) is not None:
        return {"type": "bytes", "logicalType": "decimal", "precision": digits[0], "scale": digits[1]}
    if (simple := _SIMPLE.get(kind.partition("(")[0])) is None:
        raise ValueError(
            f"expected a type of {'.'.join(path)} that Avro has, found {kind}: convert it in a map step, to STRING for "
            "example"
        )
    return simple


def _decimal(kind: str) -> tuple[int, int] | None:
    """Return precision and scale if ``kind`` is a decimal."""
    name, _, numbers = kind.rstrip(")").partition("(")
    if name not in _DECIMALS:
        return None
    found = [int(each) for each in numbers.split(",")] if numbers else [10]
    return found[0], found[1] if len(found) > 1 else 0


def _check(kind: str, avro: AvroType, path: str) -> None:
    """Raise ValueError if values of the column type ``kind`` are not written as ``avro``."""
    accepted = False
    if avro.kind == "record":
        if (fields := fields_of(kind)) is not None:
            types = {field.name: field.type for field in fields}
            for field in avro.fields:
                if field.name not in types:
                    raise ValueError(f"expected a field {field.name!r} of {path}, as in the schema, found {kind}")
                _check(types[field.name], field.type, f"{path}.{field.name}")
            return None
    elif avro.kind == "array":
        if (element := element_of(kind)) is not None:
            assert avro.items is not None
            return _check(element, avro.items, f"elements of {path}")
    elif avro.kind == "map":
        if kind.startswith(_TEXT_MAP):
            assert avro.items is not None
            return _check(kind[len(_TEXT_MAP) : -1], avro.items, f"values of {path}")
    elif avro.logical == "decimal":
        digits = _decimal(kind)
        accepted = digits is not None and digits[1] <= avro.scale
    else:
        found = _SIMPLE.get(kind.partition("(")[0])
        logical = found["logicalType"] if isinstance(found, dict) else None
        if avro.logical:
            accepted = (logical or found) == _LOGICAL[avro.logical]
        else:
            accepted = logical is None and found in _ACCEPTED[avro.kind]
    if not accepted:
        shown = f"{avro.kind} ({avro.logical})" if avro.logical else avro.kind
        wanted = f"a type of {path} that can be written as {shown} of the schema"
        raise ValueError(f"expected {wanted}, found {kind}: convert it to {avro.ddl} in a map step")
    return None
