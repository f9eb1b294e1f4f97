"""Avro messages: a function for each type that reads a value from the bytes of a message (Avro 1.12, "Binary
Encoding").

Written here, and not with fastavro, which accepts broken messages: a negative index of an enum or a union counts from
the end, any byte is a boolean, and an int may have 64 bits. It also rounds decimals, and computes powers of ten from
the length of a decimal in the message. The functions return what Arrow builds columns of, so that values are touched
once; they are as fast as fastavro.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from uuid import UUID

from penstock.payloads import errors
from penstock.payloads.avro_schema import AvroSchema, AvroType, parse_avro_schema
from penstock.payloads.confluent import AFTER_ID, schema_id_of
from penstock.payloads.errors import FieldError, PayloadError

__all__ = [
    "AvroMessages",
    "Read",
    "array_reader",
    "broken",
    "decode_fields",
    "enum_index_reader",
    "map_reader",
    "union_reader",
    "value_reader",
]

Read = Callable[[bytes, int], tuple[object, int]]
"""Function from a message and the place of a value in it to the value and the place after it.

Raises IndexError or struct.error if the message ends within the value.
"""
_SINGLE_OBJECT = b"\xc3\x01"
_ALL_DIGITS = Context(prec=80)
_MAX_DECIMAL_BYTES = 32
"""A decimal of 38 digits has 16 bytes; more are accepted because they may be leading zeros."""
_DATES, _MICROSECONDS = errors.time_limits(86_400_000_000), errors.time_limits(1)


@dataclass(frozen=True, slots=True)
class AvroMessages:
    """Decoder of messages with the schema ``text``. ``encoding``: see ``Parse``; ``schema_id``: that of Confluent's."""

    text: str
    encoding: str = "plain"
    schema_id: int | None = None

    @property
    def accepts_empty(self) -> bool:
        """A record without fields has no columns."""
        return False

    @property
    def record(self) -> AvroType:
        """The type of the messages."""
        return _compiled(self.text)[0].record

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the fields of ``payload``.

        Raises:
            PayloadError: it is not a message of this schema.
        """
        schema, fields = _compiled(self.text)
        at = 0
        if self.encoding == "single_object":
            at = _after_fingerprint(payload, schema)
        elif self.encoding == "confluent":
            at = _after_id(payload, self.schema_id)
        return decode_fields(payload, at, fields)


def decode_fields(payload: bytes, at: int, fields: Sequence[tuple[str, Read]]) -> dict[str, object]:
    """Return the values of ``fields``, names with their functions, which are in ``payload`` from ``at`` to its end.

    Raises:
        PayloadError: they are not.
    """
    values: dict[str, object] = {}
    name = ""
    try:
        for name, read in fields:
            values[name], at = read(payload, at)
    except (IndexError, struct.error):
        raise broken(f"it ends within the field {name!r}") from None
    except UnicodeDecodeError:
        raise broken(f"a string in the field {name!r} is not UTF-8") from None
    except FieldError as error:
        raise PayloadError(error.code, f"{_TEXTS[error.code]}{error.text} in the field {name!r}") from None
    if at != len(payload):
        raise broken(f"its record ends after {at} of {len(payload)} bytes")
    return values


_TEXTS = {
    errors.NOT_AVRO: "the payload is not Avro of this schema: ",
    errors.RANGE: "",
    errors.MISMATCH: "",
    errors.UNKNOWN_ENUM: "",
}


def broken(text: str) -> PayloadError:
    """Return the error of a payload that is not Avro of its schema."""
    return PayloadError(errors.NOT_AVRO, f"{_TEXTS[errors.NOT_AVRO]}{text}")


def _after_fingerprint(payload: bytes, schema: AvroSchema) -> int:
    if payload[:2] != _SINGLE_OBJECT or len(payload) < 10:
        raise PayloadError(
            errors.NOT_AVRO, "the payload is not Avro in single-object encoding: it does not begin with C3 01"
        )
    if payload[2:10] != schema.fingerprint:
        found, expected = (int.from_bytes(each, "little") for each in (payload[2:10], schema.fingerprint))
        raise PayloadError(
            errors.OTHER_SCHEMA, f"the payload has a schema with the fingerprint {found:016x}, not {expected:016x}"
        )
    return 10


def _after_id(payload: bytes, schema_id: int | None) -> int:
    found = schema_id_of(payload, errors.NOT_AVRO)
    if found != schema_id:
        raise PayloadError(errors.OTHER_SCHEMA, f"the payload has the schema id {found}, not {schema_id}")
    return AFTER_ID


@lru_cache(maxsize=128)
def _compiled(text: str) -> tuple[AvroSchema, list[tuple[str, Read]]]:
    schema = parse_avro_schema(text)
    return schema, [(field.name, _reader(field.type)) for field in schema.record.fields]


def _reader(kind: AvroType) -> Read:
    """Return the function that reads values of ``kind``."""
    return union_reader(kind, value_reader(kind)) if kind.branches else value_reader(kind)


def union_reader(kind: AvroType, value: Read, *, nullable: bool = True) -> Read:
    """Return the function that reads a union of ``kind``, whose type other than null ``value`` reads.

    Without ``nullable``, null is a changed type.
    """
    branches, null = kind.branches, kind.null

    def read(data: bytes, at: int) -> tuple[object, int]:
        branch, at = _long(data, at)
        if branch == null:
            if not nullable:
                raise FieldError(errors.MISMATCH, "null, which the schema of the columns does not permit,")
            return None, at
        if not 0 <= branch < branches:
            raise FieldError(errors.NOT_AVRO, f"{branch} is no index of a union")
        return value(data, at)

    return read


def value_reader(kind: AvroType) -> Read:
    """Return the function that reads values of ``kind``, without its union."""
    if kind.logical in _LOGICAL:
        return _LOGICAL[kind.logical](kind)
    if kind.kind == "record":
        return _record(kind)
    if kind.kind == "array":
        assert kind.items is not None
        return array_reader(_reader(kind.items))
    if kind.kind == "map":
        assert kind.items is not None
        return map_reader(_reader(kind.items))
    if kind.kind == "enum":
        return _enum(kind)
    if kind.kind == "fixed":
        return _fixed(kind.size)
    return _SIMPLE[kind.kind]


def _long(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        if shift > 63:
            raise FieldError(errors.NOT_AVRO, "a number has more than 64 bits")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    if value >> 64:
        raise FieldError(errors.NOT_AVRO, "a number has more than 64 bits")
    return (value >> 1) ^ -(value & 1), at


def _int(data: bytes, at: int) -> tuple[int, int]:
    value, at = _long(data, at)
    if not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise FieldError(errors.NOT_AVRO, "an int has more than 32 bits")
    return value, at


def _boolean(data: bytes, at: int) -> tuple[bool, int]:
    byte = data[at]
    if byte > 1:
        raise FieldError(errors.NOT_AVRO, f"the byte {byte} is no boolean")
    return byte == 1, at + 1


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _long(data, at)
    end = at + size
    if size < 0:
        raise FieldError(errors.NOT_AVRO, f"the length {size} is negative")
    if end > len(data):
        raise IndexError
    return data[at:end], end


def _string(data: bytes, at: int) -> tuple[str, int]:
    found, at = _bytes(data, at)
    return found.decode(), at


def _float(data: bytes, at: int) -> tuple[float, int]:
    return _FLOAT.unpack_from(data, at)[0], at + 4


def _double(data: bytes, at: int) -> tuple[float, int]:
    return _DOUBLE.unpack_from(data, at)[0], at + 8


_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_SIMPLE: dict[str, Read] = {
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _float,
    "double": _double,
    "bytes": _bytes,
    "string": _string,
}


def _fixed(size: int) -> Callable[[bytes, int], tuple[bytes, int]]:
    def read(data: bytes, at: int) -> tuple[bytes, int]:
        end = at + size
        if end > len(data):
            raise IndexError
        return data[at:end], end

    return read


def _enum(kind: AvroType) -> Read:
    index, symbols = enum_index_reader(kind), kind.symbols

    def read(data: bytes, at: int) -> tuple[object, int]:
        found, at = index(data, at)
        return symbols[found], at

    return read


def enum_index_reader(kind: AvroType) -> Callable[[bytes, int], tuple[int, int]]:
    """Return the function that reads the index of a symbol."""
    symbols = kind.symbols

    def read(data: bytes, at: int) -> tuple[int, int]:
        index, at = _int(data, at)
        if not 0 <= index < len(symbols):
            # A negative one is no enum of any schema.
            code = errors.UNKNOWN_ENUM if index >= 0 else errors.NOT_AVRO
            raise FieldError(code, f"{index} is no index of an enum with {len(symbols)} symbols")
        return index, at

    return read


def _record(kind: AvroType) -> Read:
    fields = [(field.name, _reader(field.type)) for field in kind.fields]

    def read(data: bytes, at: int) -> tuple[object, int]:
        values: dict[str, object] = {}
        for name, inner in fields:
            values[name], at = inner(data, at)
        return values, at

    return read


def array_reader(inner: Read) -> Read:
    """Return the function that reads arrays whose elements ``inner`` reads."""

    def read(data: bytes, at: int) -> tuple[object, int]:
        values: list[object] = []
        count, at = _block(data, at)
        while count:
            # Each element has a byte at least, so a count that is too large soon ends at the end of the message.
            for _ in range(count):
                value, at = inner(data, at)
                values.append(value)
            count, at = _block(data, at)
        return values, at

    return read


def map_reader(inner: Read) -> Read:
    """Return the function that reads maps whose values ``inner`` reads, as pairs."""

    def read(data: bytes, at: int) -> tuple[object, int]:
        values: dict[str, object] = {}
        count, at = _block(data, at)
        while count:
            for _ in range(count):
                key, at = _string(data, at)
                if key in values:
                    raise FieldError(errors.NOT_AVRO, f"the key {key!r} occurs twice in a map")
                values[key], at = inner(data, at)
            count, at = _block(data, at)
        return list(values.items()), at

    return read


def _block(data: bytes, at: int) -> tuple[int, int]:
    """Read the number of elements in a block; 0 ends an array or map. A negative number precedes the block's size."""
    count, at = _long(data, at)
    if count >= 0:
        return count, at
    size, at = _long(data, at)
    if size < 0:
        raise FieldError(errors.NOT_AVRO, f"the size {size} of a block is negative")
    return -count, at


def _within(read: Read, limits: tuple[int, int], factor: int = 1) -> Read:
    """Return a function that reads a number, multiplies it with ``factor``, and checks that it is a date or time."""
    least, most = limits

    def read_checked(data: bytes, at: int) -> tuple[object, int]:
        number, at = read(data, at)
        assert isinstance(number, int)
        value = number * factor
        if not least <= value <= most:
            raise FieldError(errors.RANGE, errors.TIME_OUT_OF_RANGE)
        return value, at

    return read_checked


def _decimal(kind: AvroType) -> Read:
    read_bytes = _bytes if kind.kind == "bytes" else _fixed(kind.size)
    limit, scale = 10**kind.precision, kind.scale

    def read(data: bytes, at: int) -> tuple[object, int]:
        found, at = read_bytes(data, at)
        if not found:
            raise FieldError(errors.NOT_AVRO, "a decimal has no bytes")
        number = int.from_bytes(found, "big", signed=True) if len(found) <= _MAX_DECIMAL_BYTES else limit
        if not -limit < number < limit:
            raise FieldError(errors.RANGE, f"a decimal has more than {kind.precision} digits")
        return Decimal(number).scaleb(-scale, _ALL_DIGITS), at

    return read


def _uuid(kind: AvroType) -> Read:
    read_bytes = _bytes if kind.kind == "string" else _fixed(kind.size)

    def read(data: bytes, at: int) -> tuple[object, int]:
        found, at = read_bytes(data, at)
        try:
            return str(UUID(bytes=found) if kind.kind == "fixed" else UUID(found.decode())), at
        except ValueError:
            raise FieldError(errors.MISMATCH, "a text is not a UUID") from None

    return read


_LOGICAL: dict[str, Callable[[AvroType], Read]] = {
    "date": lambda _: _within(_int, _DATES),
    "timestamp-millis": lambda _: _within(_long, _MICROSECONDS, 1000),
    "timestamp-micros": lambda _: _within(_long, _MICROSECONDS),
    "local-timestamp-millis": lambda _: _within(_long, _MICROSECONDS, 1000),
    "local-timestamp-micros": lambda _: _within(_long, _MICROSECONDS),
    "decimal": _decimal,
    "uuid": _uuid,
}
