"""Avro records as bytes: a function for each type that appends a value to a message (Avro 1.12, "Binary Encoding").

Written here, and not with fastavro, which writes an int of more than 32 bits and a text that is not a UUID: readers
refuse such messages. The functions accept values as Arrow has them: times (in microseconds) and dates are numbers,
decimals ``Decimal``, maps lists of pairs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from typing import Any
from uuid import UUID

from penstock.payloads.avro_schema import AvroType
from penstock.payloads.errors import FieldValueError

__all__ = ["record_encoder"]

_Write = Callable[[bytearray, Any], None]
"""Function that appends a value to a message. Raises ValueError if the type does not have it."""
_ALL_DIGITS = Context(prec=80)


def record_encoder(record: AvroType) -> Callable[[Mapping[str, Any]], bytes]:
    """Return the function that encodes the values of the fields of ``record``, by name.

    It raises ValueError, with the name of the field, for a value that the type of a field does not have.
    """
    write = _record(record)

    def encode(values: Mapping[str, Any]) -> bytes:
        out = bytearray()
        write(out, values)
        return bytes(out)

    return encode


def _writer(kind: AvroType) -> _Write:
    write = _value_writer(kind)
    null = kind.null
    if null is None:

        def write_branch(out: bytearray, value: Any) -> None:
            if value is None:
                raise ValueError("it is null, which the schema does not permit")
            if kind.branches:
                out.append(0)
            write(out, value)

        return write_branch
    null_branch, value_branch = (0, 2) if null == 0 else (2, 0)  # indexes of a union of two types, as a long

    def write_union(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(null_branch)
        else:
            out.append(value_branch)
            write(out, value)

    return write_union


def _value_writer(kind: AvroType) -> _Write:
    if kind.logical == "decimal":
        return _decimal(kind)
    if kind.logical == "uuid":
        return _uuid(kind)
    if kind.logical.endswith("timestamp-millis"):
        return lambda out, value: _long(out, value // 1000)
    if kind.kind == "record":
        return _record(kind)
    if kind.kind == "array":
        assert kind.items is not None
        return _array(_writer(kind.items))
    if kind.kind == "map":
        assert kind.items is not None
        return _map(_writer(kind.items))
    if kind.kind == "enum":
        return _enum(kind)
    if kind.kind == "fixed":
        return _fixed(kind.size)
    return _SIMPLE[kind.kind]


def _record(kind: AvroType) -> _Write:
    fields = [(field.name, _writer(field.type)) for field in kind.fields]

    def write(out: bytearray, values: Any) -> None:
        name = ""
        try:
            for name, append in fields:
                append(out, values[name])
        except ValueError as error:
            raise FieldValueError.of_field(name, error) from None

    return write


def _array(write_item: _Write) -> _Write:
    def write(out: bytearray, values: Any) -> None:
        if values:
            _long(out, len(values))
            for value in values:
                write_item(out, value)
        out.append(0)

    return write


def _map(write_value: _Write) -> _Write:
    def write(out: bytearray, pairs: Any) -> None:
        if pairs:
            _long(out, len(pairs))
            for key, value in pairs:
                _string(out, key)
                write_value(out, value)
        out.append(0)

    return write


def _boolean(out: bytearray, value: Any) -> None:
    out.append(1 if value else 0)


def _int(out: bytearray, value: int) -> None:
    if not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise ValueError(f"{value} has more than 32 bits")
    _long(out, value)


def _long(out: bytearray, value: int) -> None:
    """Append an integer of at most 64 bits, which is what columns have."""
    rest = (value << 1) ^ (value >> 63)
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


def _float(out: bytearray, value: float) -> None:
    out += _FLOAT.pack(value)


def _double(out: bytearray, value: float) -> None:
    out += _DOUBLE.pack(value)


def _bytes(out: bytearray, value: bytes) -> None:
    _long(out, len(value))
    out += value


def _string(out: bytearray, value: str) -> None:
    _bytes(out, value.encode())


_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_SIMPLE: dict[str, _Write] = {
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _float,
    "double": _double,
    "bytes": _bytes,
    "string": _string,
}


def _fixed(size: int) -> _Write:
    def write(out: bytearray, value: bytes) -> None:
        if len(value) != size:
            raise ValueError(f"it has {len(value)} bytes, not {size}")
        out += value

    return write


def _enum(kind: AvroType) -> _Write:
    indexes = {symbol: index for index, symbol in enumerate(kind.symbols)}

    def write(out: bytearray, value: str) -> None:
        index = indexes.get(value)
        if index is None:
            raise ValueError(f"{value!r} is no symbol of the enum")
        _long(out, index)

    return write


def _decimal(kind: AvroType) -> _Write:
    limit, scale, size = 10**kind.precision, kind.scale, kind.size if kind.kind == "fixed" else None

    def write(out: bytearray, value: Decimal) -> None:
        # Exact: the column has no more digits after the point than the schema.
        number = int(value.scaleb(scale, _ALL_DIGITS))
        length = size or (number if number >= 0 else ~number).bit_length() // 8 + 1
        try:
            found = number.to_bytes(length, "big", signed=True)
        except OverflowError:
            found = None
        if found is None or not -limit < number < limit:
            raise ValueError(f"{value} has more digits than the decimal")
        if size is None:
            _long(out, length)
        out += found

    return write


def _uuid(kind: AvroType) -> _Write:
    def write(out: bytearray, value: str) -> None:
        try:
            found = UUID(value)
        except ValueError:
            raise ValueError(f"{value[:50]!r} is not a UUID") from None
        if kind.kind == "fixed":
            out += found.bytes
        else:
            _string(out, str(found))

    return write
