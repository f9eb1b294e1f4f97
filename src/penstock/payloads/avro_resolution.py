"""Avro messages of the schema of their writer, read into the columns of another schema, that of the reader (Avro 1.12,
"Schema Resolution").

Fields are found by their names, then by the aliases of the reader; those that only the writer has are new fields, those
that only the reader has get their defaults. Names of records, enums and fixed types are not compared. Two differences
from the specification serve columns: two timestamps with other units are converted, and a decimal may get more digits.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from penstock.payloads import errors
from penstock.payloads.avro import (
    Read,
    array_reader,
    decode_fields,
    enum_index_reader,
    map_reader,
    union_reader,
    value_reader,
)
from penstock.payloads.avro_schema import AvroField, AvroType
from penstock.payloads.errors import FieldError, PayloadError

__all__ = ["ResolvedMessages", "check_defaults", "resolve"]

_NUMBERS = ("int", "long", "float", "double")
_TEXTS = ("bytes", "string")
_INSTANTS = ("timestamp-millis", "timestamp-micros")
_LOCAL_TIMES = ("local-timestamp-millis", "local-timestamp-micros")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ResolvedMessages:
    """Decoder of messages of one writer's schema; see :func:`resolve`. Not for several threads at a time."""

    _fields: Sequence[tuple[str, Read]]
    _columns: Mapping[str, str]
    """Columns by the name of the writer's field."""
    _defaults: Mapping[str, object]
    _new: Mapping[str, AvroType]
    """The new fields by path, with their types."""
    _found: dict[str, list[object]]
    """Values of new fields in the message that is decoded."""
    _policy: str
    _new_fields_as: str | None

    def decode(self, payload: bytes, at: int) -> dict[str, object]:
        """Return the columns of the message that begins ``at`` a place of ``payload``.

        Raises:
            PayloadError: it is not a message of the writer's schema, or has no counterpart in the columns.
        """
        self._found.clear()
        read = decode_fields(payload, at, self._fields)
        if self._new and self._policy in ("dead_letter", "fail"):
            raise errors.new_fields_error(self._new)
        values = {**{column: read[name] for name, column in self._columns.items()}, **self._defaults}
        if self._new_fields_as is not None:
            values[self._new_fields_as] = [
                (path, _as_text(self._new[path], path, found)) for path, found in self._found.items()
            ] or None
        return values


def resolve(
    writer: AvroType, reader: AvroType, new_fields: str = "ignore", new_fields_as: str | None = None, *, enums: str
) -> ResolvedMessages:
    """Return a decoder of messages of the record ``writer`` to the columns of the record ``reader``.

    ``new_fields``, ``new_fields_as`` and ``enums``, the policy for unknown symbols: see ``Parse``.

    Raises:
        PayloadError: no message of ``writer`` can be read.
    """
    made = _Resolution(enums, keeps_new=new_fields_as is not None)
    columns, defaults = made.fields_of(writer, reader, "")
    fields = [
        (each.name, made.reader_of(each.type, columns[each.name].type, each.name))
        if each.name in columns
        else (each.name, made.new_field(each.type, each.name))
        for each in writer.fields
    ]
    named = {name: column.name for name, column in columns.items()}
    return ResolvedMessages(fields, named, defaults, made.new, made.found, new_fields, new_fields_as)


def check_defaults(kind: AvroType) -> None:
    """Check that all fields in ``kind`` have defaults of their types, or none. Raises ValueError: one has not."""
    for each in kind.fields:
        _default(each, each.name)
        check_defaults(each.type)
    if kind.items is not None:
        check_defaults(kind.items)


@dataclass(slots=True)
class _Resolution:
    enums: str
    keeps_new: bool
    new: dict[str, AvroType] = field(default_factory=dict)
    found: dict[str, list[object]] = field(default_factory=dict)

    def fields_of(
        self, writer: AvroType, reader: AvroType, path: str
    ) -> tuple[dict[str, AvroField], dict[str, object]]:
        """Return the reader's fields by the name of the writer's, and the defaults of those that the writer lacks."""
        names = {each.name for each in writer.fields}
        columns: dict[str, AvroField] = {}
        defaults: dict[str, object] = {}
        exact = {each.name for each in reader.fields} & names
        for each in reader.fields:
            others = (alias for alias in each.aliases if alias in names - exact and alias not in columns)
            name = each.name if each.name in exact else next(others, None)
            if name is not None:
                columns[name] = each
            elif each.default is None:
                raise PayloadError(
                    errors.MISMATCH, f"the schema of the message lacks the field {path + each.name!r}, without default"
                )
            else:
                defaults[each.name] = _default(each, path + each.name)
        return columns, defaults

    def reader_of(self, writer: AvroType, reader: AvroType, path: str) -> Read:
        """Return the function that reads a value of ``writer`` for a column of ``reader``, at ``path``."""
        value = self._value_of(writer, reader, path)
        return union_reader(writer, value, nullable=reader.null is not None) if writer.branches else value

    def new_field(self, kind: AvroType, path: str) -> Read:
        """Return the function that reads a field that the reader lacks."""
        self.new[path] = kind
        value = union_reader(kind, value_reader(kind)) if kind.branches else value_reader(kind)
        if not self.keeps_new:
            return value
        found = self.found

        def read(data: bytes, at: int) -> tuple[object, int]:
            made, at = value(data, at)
            found.setdefault(path, []).append(made)
            return made, at

        return read

    def _value_of(self, writer: AvroType, reader: AvroType, path: str) -> Read:
        kinds = (writer.kind, reader.kind)
        if kinds == ("record", "record"):
            return self._record(writer, reader, path)
        if kinds in (("array", "array"), ("map", "map")):
            assert writer.items is not None
            assert reader.items is not None
            inner = self.reader_of(writer.items, reader.items, f"{path}[]")
            return array_reader(inner) if writer.kind == "array" else map_reader(inner)
        if kinds == ("enum", "enum"):
            return self._enum(writer, reader)
        scalar = _scalar(writer, reader)
        if scalar is None:
            raise PayloadError(
                errors.MISMATCH,
                f"the field {path!r} is {_shown(writer)} in the schema of the message, and {_shown(reader)} in that of "
                "the columns",
            )
        return scalar

    def _record(self, writer: AvroType, reader: AvroType, path: str) -> Read:
        columns, defaults = self.fields_of(writer, reader, f"{path}.")
        fields: list[tuple[str | None, Read]] = []
        for each in writer.fields:
            column, below = columns.get(each.name), f"{path}.{each.name}"
            if column is None:
                fields.append((None, self.new_field(each.type, below)))
            else:
                fields.append((column.name, self.reader_of(each.type, column.type, below)))

        def read(data: bytes, at: int) -> tuple[object, int]:
            values = dict(defaults)
            for name, inner in fields:
                value, at = inner(data, at)
                if name is not None:
                    values[name] = value
            return values, at

        return read

    def _enum(self, writer: AvroType, reader: AvroType) -> Read:
        index = enum_index_reader(writer)
        adds = self.enums == "add"
        known = [each if adds or each in reader.symbols else reader.symbol for each in writer.symbols]

        def read(data: bytes, at: int) -> tuple[object, int]:
            place, at = index(data, at)
            if known[place] is None:
                raise FieldError(
                    errors.UNKNOWN_ENUM, f"the schema of the columns lacks the symbol {writer.symbols[place]!r}"
                )
            return known[place], at

        return read


def _scalar(writer: AvroType, reader: AvroType) -> Read | None:
    """Return the function that reads a value of ``writer`` as one of ``reader``; None if it cannot be one."""
    if writer.kind == reader.kind:
        if writer.size != reader.size:
            return None
        if "decimal" in (writer.logical, reader.logical) and writer.logical and reader.logical:
            is_same = writer.logical == reader.logical and writer.scale == reader.scale
            return value_reader(reader) if is_same and writer.precision <= reader.precision else None
        for times, others in ((_INSTANTS, _LOCAL_TIMES), (_LOCAL_TIMES, _INSTANTS)):
            if reader.logical in times and writer.logical in others:
                return None
            if reader.logical in times and writer.logical in times:
                return value_reader(replace(reader, logical=writer.logical))
        return value_reader(reader)
    if writer.kind in _TEXTS and reader.kind in _TEXTS:
        # A decimal as text, or a text as a decimal, would be other values.
        return None if "decimal" in (writer.logical, reader.logical) else value_reader(reader)
    if writer.kind not in _NUMBERS or reader.kind not in _NUMBERS or writer.logical:
        return None
    if _NUMBERS.index(writer.kind) > _NUMBERS.index(reader.kind):
        return None
    if reader.logical:
        # An int is encoded as a long.
        return value_reader(reader)
    number = value_reader(writer)
    return number if reader.kind == "long" else _as_float(number, is_single=reader.kind == "float")


def _as_float(number: Callable[[bytes, int], tuple[Any, int]], *, is_single: bool) -> Read:
    def read(data: bytes, at: int) -> tuple[object, int]:
        value, at = number(data, at)
        found = float(value)
        # As Java does: the nearest value of 32 bits.
        return (struct.unpack("<f", struct.pack("<f", found))[0] if is_single else found), at

    return read


def _shown(kind: AvroType) -> str:
    """Return the type for errors."""
    if kind.logical == "decimal":
        return f"decimal({kind.precision}, {kind.scale})"
    return kind.logical or (f"fixed({kind.size})" if kind.kind == "fixed" else kind.kind)


def _default(given: AvroField, path: str) -> object:
    """Return the default of a field as a value that functions return which read one; None without a default.

    It is encoded and read: so it has the limits and the conversions of its type.
    """
    if given.default is None:
        return None
    kind, value = given.type, json.loads(given.default)
    if value is None and kind.null is not None:
        return None
    try:
        data = _encoded(replace(kind, branches=0, null=None), value)
        return value_reader(kind)(data, 0)[0]
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, OverflowError, FieldError):
        raise ValueError(
            f"expected a default of the type {_shown(kind)} for the field {path!r} of the Avro schema, "
            f"not {given.default[:60]}"
        ) from None


def _encoded(kind: AvroType, value: Any) -> bytes:
    """Encode ``value``, JSON of a default. Raises ValueError, TypeError or others: it is not of this type."""
    if kind.branches:
        if value is None and kind.null is not None:
            return _long(kind.null)
        place = 0 if kind.null is None else 1 - kind.null
        return _long(place) + _encoded(replace(kind, branches=0, null=None), value)
    if kind.kind == "record":
        return b"".join(
            _encoded(each.type, value[each.name] if each.name in value else json.loads(each.default or ""))
            for each in kind.fields
        )
    if kind.kind in ("array", "map"):
        assert kind.items is not None
        items = value if kind.kind == "array" else value.items()
        if not items:
            return b"\0"
        parts = [
            _encoded(kind.items, each)
            if kind.kind == "array"
            else _sized(each[0].encode()) + _encoded(kind.items, each[1])
            for each in items
        ]
        return b"".join([_long(len(parts)), *parts, b"\0"])
    if kind.kind == "enum":
        return _long(kind.symbols.index(value))
    if kind.kind in ("bytes", "fixed"):
        data: bytes = value.encode("latin-1")
        if kind.kind == "fixed" and len(data) != kind.size:
            raise ValueError(value)
        return data if kind.kind == "fixed" else _sized(data)
    if kind.kind == "string":
        return _sized(value.encode())
    return _encoded_number(kind.kind, value)


def _encoded_number(kind: str, value: Any) -> bytes:
    if isinstance(value, bool) != (kind == "boolean"):
        raise ValueError(value)
    if kind == "boolean":
        return bytes([value])
    if kind in ("int", "long"):
        if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
            raise ValueError(value)
        return _long(value)
    return struct.pack("<f" if kind == "float" else "<d", value)


def _long(value: int) -> bytes:
    rest = value << 1 if value >= 0 else ~(value << 1)
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def _sized(data: bytes) -> bytes:
    return _long(len(data)) + data


def _as_text(kind: AvroType, path: str, found: list[object]) -> str | None:
    """Return the values of a new field as text: a text as it is, bytes in base64, other values in JSON."""
    values = [_json_value(kind, value) for value in found]
    value = values if "[]" in path else values[-1]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _json_value(kind: AvroType, value: Any) -> Any:
    """Return ``value``, as functions return it that read ``kind``, for JSON."""
    if value is None:
        return None
    if kind.kind == "record":
        return {each.name: _json_value(each.type, value[each.name]) for each in kind.fields}
    if kind.items is not None:
        if kind.kind == "array":
            return [_json_value(kind.items, each) for each in value]
        return {name: _json_value(kind.items, each) for name, each in value}
    if kind.logical == "date":
        return (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    if kind.logical in (*_INSTANTS, *_LOCAL_TIMES):
        at = _EPOCH + timedelta(microseconds=value)
        return (at if kind.logical in _INSTANTS else at.replace(tzinfo=None)).isoformat()
    if kind.logical == "decimal":
        return str(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
