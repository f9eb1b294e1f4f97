"""Avro schemas: types, columns and fingerprint of the JSON in a schema file (Avro 1.12, "Schema Declaration").

A schema is a record whose fields have one type each, or null and one type. Refused are schemas that no column can hold
(other unions, recursive types), and arrays of elements without bytes, since a message of a few bytes could have any
number of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["AvroField", "AvroSchema", "AvroType", "inlined", "is_avro_name", "parse_avro_schema", "record_name"]

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_COMPLEX = ("record", "enum", "array", "map", "fixed")
_SIMPLE_DDL = {
    "boolean": "BOOLEAN",
    "int": "INT",
    "long": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "bytes": "BINARY",
    "fixed": "BINARY",
    "string": "STRING",
    "enum": "STRING",
}
_LOGICAL_DDL = {
    ("int", "date"): "DATE",
    ("long", "timestamp-millis"): "TIMESTAMP",
    ("long", "timestamp-micros"): "TIMESTAMP",
    ("long", "local-timestamp-millis"): "TIMESTAMP_NTZ",
    ("long", "local-timestamp-micros"): "TIMESTAMP_NTZ",
    ("string", "uuid"): "STRING",
    ("fixed", "uuid"): "STRING",
}
"""Logical types with a column type of their own, besides decimal; all others are read as the type that they annotate,
as the specification requires of unknown ones."""
_MAX_PRECISION = 38
_UUID_BYTES = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class AvroType:
    """A type. ``branches`` is the number of types of its union (0: no union), ``null`` the index of null in it."""

    kind: str
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = 0
    symbols: tuple[str, ...] = ()
    fields: tuple[AvroField, ...] = ()
    items: AvroType | None = None
    branches: int = 0
    null: int | None = None
    symbol: str | None = None
    """Default symbol of an enum."""

    @property
    def ddl(self) -> str:
        """Type of the column."""
        if self.logical == "decimal":
            return f"DECIMAL({self.precision}, {self.scale})"
        if self.kind == "record":
            return f"STRUCT<{', '.join(f'{field.name}: {field.type.ddl}' for field in self.fields)}>"
        if self.kind == "array":
            assert self.items is not None
            return f"ARRAY<{self.items.ddl}>"
        if self.kind == "map":
            assert self.items is not None
            return f"MAP<STRING, {self.items.ddl}>"
        return _LOGICAL_DDL.get((self.kind, self.logical)) or _SIMPLE_DDL[self.kind]

    @property
    def is_empty(self) -> bool:
        """True if a value has no bytes."""
        if self.branches:
            return False
        if self.kind == "record":
            return all(field.type.is_empty for field in self.fields)
        return self.kind == "fixed" and self.size == 0


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record. ``default``: in JSON; None without one. ``aliases``: other names that it may have."""

    name: str
    type: AvroType
    default: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A record, and the CRC-64-AVRO fingerprint of its canonical form, as in the header of single-object encoding."""

    record: AvroType
    fingerprint: bytes

    @property
    def ddl(self) -> str:
        """The columns: one for each field of the record."""
        return ", ".join(f"{field.name} {field.type.ddl}" for field in self.record.fields)


def parse_avro_schema(text: str, references: Sequence[str] = ()) -> AvroSchema:
    """Parse the JSON of a schema. ``references``: schemas with the types that it uses by name, in order.

    Raises:
        ValueError: it is not a schema, or one that cannot be read into columns; the text begins with "expected".
    """
    try:
        given, *others = map(json.loads, (text, *references))
    except ValueError as error:
        raise ValueError(f"expected an Avro schema in JSON: {error}") from None
    except RecursionError:
        raise ValueError("expected an Avro schema in JSON: it is nested too deeply") from None
    parser = _Parser()
    try:
        for other in others:
            parser.type_of(other, "", "a schema that it refers to")
        found = parser.type_of(given, "", "the schema")
        canonical = _canonical(given, "")
    except RecursionError:
        raise ValueError("expected an Avro schema that is not nested so deeply") from None
    if found.kind != "record" or found.branches:
        raise ValueError(f"expected an Avro schema of a record, not of {_shown(found)}")
    if not found.fields:
        raise ValueError("expected an Avro schema of a record with fields")
    return AvroSchema(found, _fingerprint(canonical.encode()))


def record_name(text: str) -> str:
    """Return the full name of the record ``text``, a valid schema."""
    given = json.loads(text)
    while not isinstance(given["type"], str):
        given = given["type"]
    return _full_name(given["name"], given.get("namespace"), "") or ""


def inlined(text: str, references: Sequence[str]) -> str:
    """Return the valid schema ``text`` in JSON with the types of ``references`` in it, each where it is first used."""
    types: dict[str, dict[str, Any]] = {}
    for reference in references:
        _add_types(json.loads(reference), "", types)
    return json.dumps(_inlined(json.loads(text), "", types, set()), indent=2, ensure_ascii=False)


def _add_types(given: Any, namespace: str, types: dict[str, dict[str, Any]]) -> None:
    """Add the named types in ``given`` to ``types``, by full name."""
    if isinstance(given, list):
        for each in given:
            _add_types(each, namespace, types)
    elif isinstance(given, dict):
        kind = given["type"]
        inner = namespace
        if kind in ("record", "error", "enum", "fixed"):
            name = _full_name(given["name"], given.get("namespace"), namespace) or ""
            inner = name.rpartition(".")[0]
            types[name] = given | {"name": name.rpartition(".")[2], "namespace": inner}
        for each in (given.get("items"), given.get("values"), *(f["type"] for f in given.get("fields", ())), kind):
            _add_types(each, inner, types)


def _inlined(given: Any, namespace: str, types: Mapping[str, dict[str, Any]], defined: set[str]) -> Any:
    """Return ``given`` with the definition of each of ``types`` where it is first used, and its name elsewhere.

    ``defined``: the names of types whose definition precedes.
    """
    if isinstance(given, list):
        return [_inlined(each, namespace, types, defined) for each in given]
    if isinstance(given, str):
        name = _full_name(given, None, namespace)
        if given in _PRIMITIVES or name is None or name in defined or name not in types:
            return given
        return _inlined(types[name], "", types, defined)
    kind = given["type"]
    if not isinstance(kind, str) or kind not in (*_PRIMITIVES, *_COMPLEX, "error"):
        return _inlined(kind, namespace, types, defined)
    inner = namespace
    if kind in ("record", "error", "enum", "fixed"):
        name = _full_name(given["name"], given.get("namespace"), namespace) or ""
        if name in defined:
            # One of ``types`` contains it, and was not used before.
            return name
        inner = name.rpartition(".")[0]
        defined.add(name)
    made = dict(given)
    for key in ("items", "values"):
        if key in given:
            made[key] = _inlined(given[key], inner, types, defined)
    if "fields" in given:
        made["fields"] = [each | {"type": _inlined(each["type"], inner, types, defined)} for each in given["fields"]]
    return made


def is_avro_name(text: str) -> bool:
    """Return True for a name of Avro, or several with dots between them."""
    return _NAME.fullmatch(text) is not None


def _shown(found: AvroType) -> str:
    return "a union" if found.branches else found.kind


class _Parser:
    """Resolves names while types are read, in the order of the file."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType | None] = {}
        """Named types; None while the type is read, since only a recursive type uses it there."""

    def type_of(self, given: Any, namespace: str, where: str) -> AvroType:
        """Return the type ``given`` in the JSON; ``where`` names the place for errors."""
        if isinstance(given, list):
            return self._union(given, namespace, where)
        if isinstance(given, str):
            return self._by_name(given, namespace, where)
        if not isinstance(given, dict) or "type" not in given:
            raise ValueError(f"expected a type in {where} of the Avro schema, not {json.dumps(given)[:60]}")
        kind = given["type"]
        if isinstance(kind, dict | list):
            return self.type_of(kind, namespace, where)
        if kind == "error":
            kind = "record"
        if kind in _PRIMITIVES:
            return _logical(self._by_name(kind, namespace, where), given, where)
        if kind not in _COMPLEX:
            return self._by_name(kind, namespace, where)
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in given:
                raise ValueError(f"expected {key!r} of the {kind} in {where} of the Avro schema")
            items = self._value_type(given[key], namespace, where)
            if kind == "array" and items.is_empty:
                raise ValueError(f"expected elements with a value in the array in {where} of the Avro schema")
            return AvroType(kind, items=items)
        return self._new_type(kind, given, namespace, where)

    def _value_type(self, given: Any, namespace: str, where: str) -> AvroType:
        """Return the type of a field or an element, which is not null alone."""
        found = self.type_of(given, namespace, where)
        if found.kind == "null":
            raise ValueError(f"expected a type other than null in {where} of the Avro schema")
        return found

    def _new_type(self, kind: str, given: Mapping[str, Any], namespace: str, where: str) -> AvroType:
        name = _full_name(given.get("name"), given.get("namespace"), namespace)
        if name is None:
            raise ValueError(f"expected a name of the {kind} in {where} of the Avro schema")
        if name in self._named:
            raise ValueError(f"expected one type {name!r} in the Avro schema, found two")
        self._named[name] = None
        if kind == "record":
            made = AvroType(kind, fields=self._fields(given.get("fields"), name.rpartition(".")[0], name))
        elif kind == "enum":
            symbols = given.get("symbols")
            if not isinstance(symbols, list) or not symbols or not all(isinstance(each, str) for each in symbols):
                raise ValueError(f"expected symbols of the enum {name!r} in the Avro schema")
            symbol = given.get("default")
            made = AvroType(kind, symbols=tuple(symbols), symbol=symbol if symbol in symbols else None)
        else:
            size = given.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"expected a size of the fixed type {name!r} in the Avro schema")
            made = _logical(AvroType(kind, size=size), given, name)
        self._named[name] = made
        return made

    def _fields(self, given: Any, namespace: str, record: str) -> tuple[AvroField, ...]:
        if not isinstance(given, list):
            raise ValueError(f"expected fields of the record {record!r} in the Avro schema")
        found: dict[str, AvroField] = {}
        for each in given:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or not _NAME.fullmatch(name) or "." in name or "type" not in each:
                raise ValueError(f"expected a name and a type of each field of {record!r} in the Avro schema")
            # Spark compares names of columns and of fields of structs case-insensitively.
            if name.lower() in found:
                raise ValueError(
                    f"expected different names of fields, in any case, of {record!r}, found {name!r} twice"
                )
            kind = self._value_type(each["type"], namespace, f"the field {record}.{name}")
            default = json.dumps(each["default"]) if "default" in each else None
            aliases = each.get("aliases")
            others = tuple(map(str, aliases)) if isinstance(aliases, list) else ()
            found[name.lower()] = AvroField(name, kind, default, others)
        return tuple(found.values())

    def _by_name(self, given: Any, namespace: str, where: str) -> AvroType:
        if isinstance(given, str) and given in _PRIMITIVES:
            return AvroType(given)
        name = _full_name(given, None, namespace)
        if name is None or name not in self._named:
            raise ValueError(f"expected a known type in {where} of the Avro schema, not {given!r}")
        found = self._named[name]
        if found is None:
            raise ValueError(f"expected no recursive type in the Avro schema: {given!r} contains itself in {where}")
        return found

    def _union(self, given: list[Any], namespace: str, where: str) -> AvroType:
        found = [self.type_of(each, namespace, where) for each in given]
        values = [each for each in found if each.kind != "null"]
        if len(values) != 1 or len(found) > 2 or values[0].branches:
            shown = ", ".join(_shown(each) for each in found) or "no type"
            raise ValueError(f"expected a union of null and one type in {where} of the Avro schema, not of {shown}")
        null = next((place for place, each in enumerate(found) if each.kind == "null"), None)
        return replace(values[0], branches=len(found), null=null)


def _logical(found: AvroType, given: Mapping[str, Any], where: str) -> AvroType:
    """Return ``found`` with the logical type of ``given``, if it is one that columns have."""
    logical = given.get("logicalType")
    if logical == "decimal" and found.kind in ("bytes", "fixed"):
        precision, scale = given.get("precision"), given.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or not precision:
            raise ValueError(
                f"expected a precision, and a scale up to it, of the decimal in {where} of the Avro schema"
            )
        if precision > _MAX_PRECISION:
            raise ValueError(
                f"expected a precision of at most {_MAX_PRECISION} of the decimal in {where} of the Avro schema"
            )
        return replace(found, logical="decimal", precision=precision, scale=scale)
    if (
        isinstance(logical, str)
        and (found.kind, logical) in _LOGICAL_DDL
        and (found.kind != "fixed" or found.size == _UUID_BYTES)
    ):
        return replace(found, logical=logical)
    return found


def _full_name(name: Any, own: Any, namespace: str) -> str | None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    if "." in name:
        return name
    space = own if isinstance(own, str) else namespace
    return f"{space}.{name}" if space else name


def _canonical(given: Any, namespace: str) -> str:
    """Return the Parsing Canonical Form of a valid schema."""
    if isinstance(given, list):
        return f"[{','.join(_canonical(each, namespace) for each in given)}]"
    if isinstance(given, str):
        is_full = given in _PRIMITIVES or "." in given or not namespace
        return _quoted(given if is_full else f"{namespace}.{given}")
    kind = given["type"]
    if not isinstance(kind, str) or kind not in ("record", "error", *_COMPLEX):
        return _canonical(kind, namespace)
    if kind in ("array", "map"):
        key = "items" if kind == "array" else "values"
        return f'{{"type":"{kind}","{key}":{_canonical(given[key], namespace)}}}'
    name = _full_name(given["name"], given.get("namespace"), namespace) or ""
    head = f'{{"name":{_quoted(name)},"type":"{kind}"'
    if kind == "enum":
        return f'{head},"symbols":[{",".join(map(_quoted, given["symbols"]))}]}}'
    if kind == "fixed":
        return f'{head},"size":{given["size"]}}}'
    inner = name.rpartition(".")[0]
    fields = (
        f'{{"name":{_quoted(each["name"])},"type":{_canonical(each["type"], inner)}}}' for each in given["fields"]
    )
    return f'{head},"fields":[{",".join(fields)}]}}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_EMPTY = 0xC15D213AA4D7A795


def _fingerprint(text: bytes) -> bytes:
    """Return the CRC-64-AVRO of ``text``, little-endian."""
    value = _EMPTY
    for byte in text:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (_EMPTY if value & 1 else 0)
    return value.to_bytes(8, "little")
