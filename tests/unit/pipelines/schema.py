"""As much of JSON Schema (2020-12) as the schema of the pipeline file uses; anything else in it is an error here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["errors_of"]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_NOTES = {"title", "description", "default", "$defs", "$schema", "discriminator", "propertyNames"}


def errors_of(value: object, schema: dict[str, Any], root: dict[str, Any], place: str = "$") -> Iterator[str]:
    """What in ``value`` is not as ``schema`` says; ``root`` holds the definitions."""
    for keyword, wanted in schema.items():
        if keyword not in _NOTES:
            yield from _CHECKS[keyword](value, wanted, schema, root, place)


def _ref(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    yield from errors_of(value, root["$defs"][wanted.rpartition("/")[2]], root, place)


def _type(value: Any, wanted: Any, _schema: Any, _root: Any, place: str) -> Iterator[str]:
    if not isinstance(value, _TYPES[wanted]) or (wanted == "integer" and isinstance(value, bool)):
        yield f"{place} is no {wanted}"


def _properties(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    for name, inner in wanted.items():
        if isinstance(value, dict) and name in value:
            yield from errors_of(value[name], inner, root, f"{place}.{name}")


def _pattern_properties(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, dict) else ():
        for pattern, inner in wanted.items():
            if re.search(pattern, name):
                yield from errors_of(item, inner, root, f"{place}.{name}")


def _additional(value: Any, wanted: Any, schema: Any, root: Any, place: str) -> Iterator[str]:
    patterns = schema.get("patternProperties", ())
    for name, item in value.items() if isinstance(value, dict) else ():
        if name in schema.get("properties", ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield f"{place}.{name} is not known"
        elif wanted is not True:
            yield from errors_of(item, wanted, root, f"{place}.{name}")


def _required(value: Any, wanted: Any, _schema: Any, _root: Any, place: str) -> Iterator[str]:
    yield from (f"{place}.{name} is missing" for name in wanted if isinstance(value, dict) and name not in value)


def _items(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from errors_of(item, wanted, root, f"{place}[{number}]")


def _any(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    if all(any(errors_of(value, branch, root, place)) for branch in wanted):
        yield f"{place} is none of them"


def _one(value: Any, wanted: Any, _schema: Any, root: Any, place: str) -> Iterator[str]:
    fitting = sum(not any(errors_of(value, branch, root, place)) for branch in wanted)
    if fitting != 1:
        yield f"{place} is {fitting} of them"


def _test(fails: Any) -> Any:
    def check(value: Any, wanted: Any, _schema: Any, _root: Any, place: str) -> Iterator[str]:
        if fails(value, wanted):
            yield f"{place}: {value!r} is not {wanted!r}"

    return check


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CHECKS: dict[str, Any] = {
    "$ref": _ref,
    "type": _type,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "required": _required,
    "items": _items,
    "anyOf": _any,
    "oneOf": _one,
    "const": _test(lambda value, wanted: value != wanted),
    "enum": _test(lambda value, wanted: value not in wanted),
    "pattern": _test(lambda value, wanted: isinstance(value, str) and not re.search(wanted, value)),
    "minLength": _test(lambda value, wanted: isinstance(value, str) and len(value) < wanted),
    "maxLength": _test(lambda value, wanted: isinstance(value, str) and len(value) > wanted),
    "minItems": _test(lambda value, wanted: isinstance(value, list) and len(value) < wanted),
    "minProperties": _test(lambda value, wanted: isinstance(value, dict) and len(value) < wanted),
    "minimum": _test(lambda value, wanted: _is_number(value) and value < wanted),
    "maximum": _test(lambda value, wanted: _is_number(value) and value > wanted),
}
