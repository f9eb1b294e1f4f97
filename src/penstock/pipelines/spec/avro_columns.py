"""Columns as the fields of an Avro record: the schema that is derived from them, or the check against a given one.

All derived fields may be null, and have null as default, so that a registry accepts a schema with a column more or less
as compatible, also if Spark finds that a column cannot be null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.payloads.avro_schema import AvroType, is_avro_name, parse_avro_schema
from penstock.pipelines.spec.columns import element_of, entry_of, fields_of

__all__ = ["check_record", "derived_record"]

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


def derived_record(name: str, columns: Iterable[tuple[str, str]]) -> str:
    """Return the schema of the record ``name`` with the fields ``columns``, names and types.

    Raises:
        ValueError: a column has no type of Avro, or no name of it; the text begins with "expected".
    """
    return json.dumps(_record((), columns, name), separators=(",", ":"))


def check_record(schema: str, columns: Mapping[str, str]) -> None:
    """Check that ``columns``, types by field, can be written as the fields of ``schema``; others are not checked.

    Raises:
        ValueError: a column has another type; the text begins with "expected".
    """
    for field in parse_avro_schema(schema).record.fields:
        if field.name in columns:
            _check(columns[field.name], field.type, field.name)


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
    if (entry := entry_of(kind)) is not None and entry.key == "STRING":
        return {"type": "map", "values": ["null", _type(path, entry.value, record)]}
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
        if (entry := entry_of(kind)) is not None and entry.key == "STRING":
            assert avro.items is not None
            return _check(entry.value, avro.items, f"values of {path}")
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
