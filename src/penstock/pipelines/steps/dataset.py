"""A dataset under one key of the state store, indexed by fields: a JSON array of objects, or one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.spark.names import json_value

__all__ = ["Index", "index", "text_of"]

Index = dict[tuple[str, ...], bytes]
"""The JSON of an object by the texts of its fields."""


def index(data: bytes, fields: Sequence[str]) -> Index:
    """The objects in ``data`` by the values of ``fields``, compared as text (``text_of``).

    Of objects with equal fields the last one counts; those that lack a field, or have null there, cannot be found.

    Raises:
        ValueError: it is neither a JSON array of objects nor a JSON object a line, or an object has a name twice.
    """
    made: Index = {}
    for found, text in _objects(data):
        values = [text_of(found.get(field)) for field in fields]
        named = tuple(value for value in values if value is not None)
        if len(named) == len(fields):
            made[named] = text
    return made


def text_of(value: object) -> str | None:
    """A JSON scalar as Spark casts it to text: 5, 5.0, true; None for null, objects and arrays, which match nothing."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _objects(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    if data.lstrip()[:1] == b"[":
        for each in _object_list(data):
            yield each, json.dumps(each, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            found = json_value(line.decode())
            if not isinstance(found, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield found, line


def _object_list(data: bytes) -> list[dict[str, Any]]:
    found = json_value(data.decode())
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("it is no array of JSON objects")
    return found
