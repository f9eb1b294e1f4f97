"""Protobuf messages: parsed by the library (upb); a function for each field returns what Arrow builds columns of."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from penstock.payloads import errors
from penstock.payloads.errors import FieldError, PayloadError
from penstock.payloads.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    index_path,
    is_map,
    map_fields,
    message_type,
    type_name,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

__all__ = ["ProtobufMessages"]

_Get = Callable[[Any], object]
"""Function from a message to the value of a field, or from the value in a message to that of a column."""
_SECONDS = errors.time_limits(1_000_000)
_NANOS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ProtobufMessages:
    """Decoder of messages of the type ``message``. ``schema_id``: that of Confluent's; other attributes: see ``Parse``.

    The library keeps fields that it cannot read as unknown fields of their message: new fields, but also known ones
    with another type, and unknown values of closed enums (proto2).
    """

    descriptors: bytes
    message: str
    encoding: str = "plain"
    schema_id: int | None = None
    new_fields: str = "ignore"
    new_fields_as: str | None = None
    unknown_enums: str = "dead_letter"

    @property
    def accepts_empty(self) -> bool:
        """A message whose fields all have their default has no bytes."""
        return self.encoding == "plain"

    def parse(self, payload: bytes) -> tuple[Message, dict[str, str]]:
        """Return the message in ``payload``, and its new fields: path and value as text.

        Raises:
            PayloadError: it is not a message of this type.
        """
        from google.protobuf.message import DecodeError

        made, path = _message_class(self.descriptors, self.message)
        if self.encoding == "confluent":
            payload = payload[_after_head(payload, self.schema_id, path) :]
        message = made()
        try:
            message.ParseFromString(payload)
        except DecodeError:
            # The library says no more than this.
            raise PayloadError(
                errors.NOT_PROTOBUF, f"the payload is not Protobuf of the message {self.message}"
            ) from None
        if not message.IsInitialized():
            missing = ", ".join(message.FindInitializationErrors())  # type: ignore[attr-defined]  # not in the stubs
            raise PayloadError(errors.NOT_PROTOBUF, f"the payload lacks required fields of {self.message}: {missing}")
        new: dict[str, str] = {}
        if _discard_unknown_fields(message):
            whole = made()
            whole.ParseFromString(payload)
            try:
                new = _new_fields(whole)
            except UnicodeDecodeError:
                raise PayloadError(errors.NOT_PROTOBUF, "a key of a map is not UTF-8") from None
        return message, new

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the fields of ``payload``.

        Raises:
            PayloadError: it is not a message of this type.
        """
        fields = _field_getters(self.descriptors, self.message, self.unknown_enums)
        message, new = self.parse(payload)
        if new and self.new_fields in ("dead_letter", "fail"):
            raise errors.new_fields_error(new)
        values: dict[str, object] = {}
        name = ""
        try:
            for name, get in fields:
                values[name] = get(message)
        except UnicodeDecodeError:
            # Of a key of a map.
            raise PayloadError(errors.NOT_PROTOBUF, f"a string is not UTF-8 in the field {name!r}") from None
        except FieldError as error:
            raise PayloadError(error.code, f"{error.text} in the field {name!r}") from None
        if self.new_fields_as is not None:
            values[self.new_fields_as] = list(new.items()) or None
        return values


def _discard_unknown_fields(message: Any) -> bool:
    """Discard the unknown fields of ``message`` and the messages in it; return True if there were any.

    Faster than to look at each message.
    """
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return bool(message.ByteSize() != size)


def _new_fields(message: Message) -> dict[str, str]:
    """Return the unknown fields of ``message`` and the messages in it that are new: path and value as text.

    Raises:
        PayloadError: a known field has another type, or an unknown value of an enum.
    """
    found: dict[str, list[object]] = {}
    for kind, path, field in _unknown_fields(message, ""):
        known = kind.fields_by_number.get(field.field_number)
        if known is None:
            found.setdefault(f"{path}{field.field_number}", []).append(_unknown_value(field.data))
            continue
        enum = (map_fields(known)[1] if is_map(known) else known).enum_type
        if enum is not None and field.wire_type == (_LENGTH_DELIMITED if is_map(known) else _VARINT):
            number = "the value of an entry" if is_map(known) else f"the value {field.data}"
            raise PayloadError(
                errors.UNKNOWN_ENUM, f"{enum.full_name} lacks {number} in the field {path + known.name!r}"
            )
        raise PayloadError(errors.MISMATCH, f"the field {path + known.name!r} has another type in the payload")
    return {path: _as_text(values[0] if len(values) == 1 else values) for path, values in found.items()}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_VARINT, _LENGTH_DELIMITED = 0, 2
"""Wire types."""


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[Descriptor, str, Any]]:
    """Yield the unknown fields of ``message``, which is at ``path``, and of the messages in it, with their types."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    kind: Any = message.DESCRIPTOR
    unknown: Any = UnknownFieldSet(message)
    for field in unknown:
        yield kind, path, field
    for known, value in message.ListFields():
        if known.message_type is None:
            continue
        if is_map(known):
            if map_fields(known)[1].message_type is not None:
                for key in value:
                    yield from _unknown_fields(value[key], f"{path}{known.name}[{key!r}].")
        elif known.is_repeated:
            for at, each in enumerate(value):
                yield from _unknown_fields(each, f"{path}{known.name}[{at}].")
        else:
            yield from _unknown_fields(value, f"{path}{known.name}.")


def _unknown_value(data: object) -> object:
    """Return the value of an unknown field: a number, bytes in base64, or a group as a list of numbers and values."""
    if isinstance(data, int):
        return data
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    return [[field.field_number, _unknown_value(field.data)] for field in cast(Any, data)]


def _after_head(payload: bytes, schema_id: int | None, path: tuple[int, ...]) -> int:
    """Check the head of Confluent's format, which ends with the path of the message in the schema; return its size."""
    if payload[:1] != b"\0" or len(payload) < 6:
        raise PayloadError(
            errors.NOT_PROTOBUF, "the payload does not begin with the byte 0, the id of a schema and a message"
        )
    found = int.from_bytes(payload[1:5], "big")
    if found != schema_id:
        raise PayloadError(errors.OTHER_SCHEMA, f"the payload has the schema id {found}, not {schema_id}")
    # The first message of a file is a single 0. Numbers are zigzag encoded.
    heads = [b"".join(map(_zigzag, (len(path), *path)))]
    if path == (0,):
        heads.append(b"\0")
    head = next((each for each in heads if payload[5 : 5 + len(each)] == each), None)
    if head is None:
        raise PayloadError(errors.OTHER_SCHEMA, "the payload has another message of the schema")
    return 5 + len(head)


def _zigzag(number: int) -> bytes:
    """Return a number, which is not negative, as a zigzag encoded varint."""
    left, found = 2 * number, bytearray()
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


@lru_cache(maxsize=128)
def _message_class(descriptors: bytes, message: str) -> tuple[type[Message], tuple[int, ...]]:
    """Return the class of the message, and its place in its file."""
    from google.protobuf.message_factory import GetMessageClass

    found = message_type(descriptors, message)
    return GetMessageClass(found), index_path(found)


@lru_cache(maxsize=128)
def _field_getters(descriptors: bytes, message: str, unknown_enums: str) -> list[tuple[str, _Get]]:
    found: Any = _message_class(descriptors, message)[0].DESCRIPTOR
    return _getters(found, unknown_enums)


def _getters(found: Descriptor, unknown_enums: str) -> list[tuple[str, _Get]]:
    return [(field.name, _getter(field, unknown_enums)) for field in found.fields]


def _getter(field: FieldDescriptor, unknown_enums: str) -> _Get:
    """Return the function that gets the column of ``field`` from its message."""
    get: _Get = attrgetter(field.name)
    if is_map(field):
        return _map(field, get, unknown_enums)
    convert = _converter(field, unknown_enums)
    if field.is_repeated:
        if convert is None:
            return lambda message: list(get(message))  # type: ignore[call-overload]
        return lambda message: [convert(each) for each in get(message)]  # type: ignore[attr-defined]
    if field.has_presence:
        name = field.name

        def get_present(message: Any) -> object:
            if not message.HasField(name):
                return None
            return get(message) if convert is None else convert(get(message))

        return get_present
    return get if convert is None else lambda message: convert(get(message))


def _map(field: FieldDescriptor, get: _Get, unknown_enums: str) -> _Get:
    of_key, of_value = (_converter(each, unknown_enums) for each in map_fields(field))

    def get_pairs(message: Any) -> object:
        found: Any = get(message)
        return [
            (of_key(key) if of_key else key, of_value(value) if of_value else value) for key, value in found.items()
        ]

    return get_pairs


def _converter(field: FieldDescriptor, unknown_enums: str) -> _Get | None:
    """Return the function from a single value to that of the column; None if they are the same."""
    kind = field.message_type
    if kind is None:
        name = type_name(field)
        return _enum(field, unknown_enums) if name == "enum" else _text if name == "string" else None
    if kind.full_name == TIMESTAMP:
        return _microseconds
    if kind.full_name in WRAPPERS:
        return attrgetter("value")
    fields = _getters(kind, unknown_enums)
    return lambda message: {name: get(message) for name, get in fields}


def _text(value: object) -> object:
    # The library returns bytes that are not UTF-8 as they are, for fields of proto2.
    if not isinstance(value, str):
        raise FieldError(errors.NOT_PROTOBUF, "a string is not UTF-8")
    return value


def _enum(field: FieldDescriptor, unknown: str) -> _Get:
    found = field.enum_type
    assert found is not None, "an enum has a type"
    names = {number: value.name for number, value in found.values_by_number.items()}
    kind = found.full_name

    def name_of(number: Any) -> object:
        name = names.get(number)
        if name is None:
            if unknown == "add":
                return str(number)
            raise FieldError(errors.UNKNOWN_ENUM, f"{kind} lacks the value {number}")
        return name

    return name_of


def _microseconds(at: Any) -> object:
    seconds, nanos = at.seconds, at.nanos
    if not (_SECONDS[0] <= seconds <= _SECONDS[1] and 0 <= nanos < _NANOS):
        raise FieldError(errors.RANGE, errors.TIME_OUT_OF_RANGE)
    return seconds * 1_000_000 + nanos // 1_000
