"""Columns as the properties of a JSON Schema: what Spark's ``to_json`` writes for each type.

No property is required, since fields that are null are left out. No others are permitted: registries accept a new
property only if objects of older schemas cannot have had it with any type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.pipelines.spec.columns import element_of, entry_of, fields_of

__all__ = ["derived_object"]

_STRING, _INSTANT = {"type": "string"}, {"type": "string", "format": "date-time"}
_INTEGER, _NUMBER = {"type": "integer"}, {"type": "number"}
_TYPES: dict[str, dict[str, Any]] = {
    "BOOLEAN": {"type": "boolean"},
    **dict.fromkeys(("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"), _INTEGER),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE", "DECIMAL", "DEC", "NUMERIC"), _NUMBER),
    # A time without a time zone is no date-time of JSON Schema.
    **dict.fromkeys(("STRING", "CHAR", "CHARACTER", "VARCHAR", "TIMESTAMP_NTZ"), _STRING),
    "TIMESTAMP": _INSTANT,
    "TIMESTAMP_LTZ": _INSTANT,
    "DATE": {"type": "string", "format": "date"},
    "BINARY": {"type": "string", "contentEncoding": "base64"},
    "VARIANT": {},
}


def derived_object(title: str, columns: Iterable[tuple[str, str]]) -> str:
    """Return the JSON Schema ``title`` of objects with ``columns``, names and types.

    Raises:
        ValueError: a column has no type of JSON; the text begins with "expected".
    """
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps({**head, **_object((), columns)}, separators=(",", ":"))


def _object(path: tuple[str, ...], fields: Iterable[tuple[str, str]]) -> dict[str, Any]:
    found = {name: _type((*path, name), kind) for name, kind in fields}
    return {"type": "object", "additionalProperties": False, "properties": found}


def _type(path: tuple[str, ...], kind: str) -> dict[str, Any]:
    if (fields := fields_of(kind)) is not None:
        return _object(path, ((field.name, field.type) for field in fields))
    # Only fields that are null are left out.
    if (element := element_of(kind)) is not None:
        return {"type": "array", "items": _or_null(_type(path, element))}
    if (entry := entry_of(kind)) is not None and entry.key == "STRING":
        return {"type": "object", "additionalProperties": _or_null(_type(path, entry.value))}
    found = _TYPES.get(kind.partition("(")[0])
    if found is None:
        raise ValueError(
            f"expected a type of {'.'.join(path)} that JSON has, found {kind}: convert it in a map step, to STRING for "
            "example"
        )
    return found


def _or_null(found: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, found]} if found else found
