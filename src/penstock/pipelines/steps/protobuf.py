"""Protobuf messages: parsed by the library (upb); a function for each field returns what Arrow builds columns of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from penstock.pipelines.spec.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    index_path,
    is_map,
    map_fields,
    message_type,
    type_name,
)
from penstock.pipelines.steps.payload_errors import (
    MISMATCH,
    NOT_PROTOBUF,
    OTHER_SCHEMA,
    RANGE,
    TIME_OUT_OF_RANGE,
    FieldError,
    PayloadError,
    time_limits,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

__all__ = ["ProtobufMessages"]

_Get = Callable[[Any], object]
"""Function from a message to the value of a field, or from the value in a message to that of a column."""
_SECONDS = time_limits(1_000_000)
_NANOS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ProtobufMessages:
    """Decoder of messages of the type ``message``. ``encoding``: see ``Parse``; ``schema_id``: that of Confluent's."""

    descriptors: bytes
    message: str
    encoding: str = "plain"
    schema_id: int | None = None

    @property
    def accepts_empty(self) -> bool:
        """A message whose fields all have their default has no bytes."""
        return self.encoding == "plain"

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the fields of ``payload``.

        Raises:
            PayloadError: it is not a message of this type.
        """
        from google.protobuf.message import DecodeError

        made, path, fields = _compiled(self.descriptors, self.message)
        if self.encoding == "confluent":
            payload = payload[_after_head(payload, self.schema_id, path) :]
        message = made()
        try:
            message.ParseFromString(payload)
        except DecodeError:
            # The library says no more than this.
            raise PayloadError(NOT_PROTOBUF, f"the payload is not Protobuf of the message {self.message}") from None
        if not message.IsInitialized():
            missing = ", ".join(message.FindInitializationErrors())  # type: ignore[attr-defined]  # not in the stubs
            raise PayloadError(NOT_PROTOBUF, f"the payload lacks required fields of {self.message}: {missing}")
        values: dict[str, object] = {}
        name = ""
        try:
            for name, get in fields:
                values[name] = get(message)
        except UnicodeDecodeError:
            # Of a key of a map.
            raise PayloadError(NOT_PROTOBUF, f"a string is not UTF-8 in the field {name!r}") from None
        except FieldError as error:
            raise PayloadError(error.code, f"{error.text} in the field {name!r}") from None
        return values


def _after_head(payload: bytes, schema_id: int | None, path: tuple[int, ...]) -> int:
    """Check the head of Confluent's format, which ends with the path of the message in the schema; return its size."""
    if payload[:1] != b"\0" or len(payload) < 6:
        raise PayloadError(NOT_PROTOBUF, "the payload does not begin with the byte 0, the id of a schema and a message")
    found = int.from_bytes(payload[1:5], "big")
    if found != schema_id:
        raise PayloadError(OTHER_SCHEMA, f"the payload has the schema id {found}, not {schema_id}")
    # The first message of a file is a single 0. Numbers are zigzag encoded.
    heads = [b"".join(map(_zigzag, (len(path), *path)))]
    if path == (0,):
        heads.append(b"\0")
    head = next((each for each in heads if payload[5 : 5 + len(each)] == each), None)
    if head is None:
        raise PayloadError(OTHER_SCHEMA, "the payload has another message of the schema")
    return 5 + len(head)


def _zigzag(number: int) -> bytes:
    """Return a number, which is not negative, as a zigzag encoded varint."""
    left, found = 2 * number, bytearray()
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


@lru_cache(maxsize=16)
def _compiled(descriptors: bytes, message: str) -> tuple[type[Message], tuple[int, ...], list[tuple[str, _Get]]]:
    from google.protobuf.message_factory import GetMessageClass

    found = message_type(descriptors, message)
    return GetMessageClass(found), index_path(found), _getters(found)


def _getters(found: Descriptor) -> list[tuple[str, _Get]]:
    return [(field.name, _getter(field)) for field in found.fields]


def _getter(field: FieldDescriptor) -> _Get:
    """Return the function that gets the column of ``field`` from its message."""
    get: _Get = attrgetter(field.name)
    if is_map(field):
        return _map(field, get)
    convert = _converter(field)
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


def _map(field: FieldDescriptor, get: _Get) -> _Get:
    of_key, of_value = map(_converter, map_fields(field))

    def get_pairs(message: Any) -> object:
        found: Any = get(message)
        return [
            (of_key(key) if of_key else key, of_value(value) if of_value else value) for key, value in found.items()
        ]

    return get_pairs


def _converter(field: FieldDescriptor) -> _Get | None:
    """Return the function from a single value to that of the column; None if they are the same."""
    kind = field.message_type
    if kind is None:
        name = type_name(field)
        return _enum(field) if name == "enum" else _text if name == "string" else None
    if kind.full_name == TIMESTAMP:
        return _microseconds
    if kind.full_name in WRAPPERS:
        return attrgetter("value")
    fields = _getters(kind)
    return lambda message: {name: get(message) for name, get in fields}


def _text(value: object) -> object:
    # The library returns bytes that are not UTF-8 as they are, for fields of proto2.
    if not isinstance(value, str):
        raise FieldError(NOT_PROTOBUF, "a string is not UTF-8")
    return value


def _enum(field: FieldDescriptor) -> _Get:
    found = field.enum_type
    assert found is not None, "an enum has a type"
    names = {number: value.name for number, value in found.values_by_number.items()}
    kind = found.full_name

    def name_of(number: Any) -> object:
        name = names.get(number)
        if name is None:
            raise FieldError(MISMATCH, f"{kind} has no value {number}")
        return name

    return name_of


def _microseconds(at: Any) -> object:
    seconds, nanos = at.seconds, at.nanos
    if not (_SECONDS[0] <= seconds <= _SECONDS[1] and 0 <= nanos < _NANOS):
        raise FieldError(RANGE, TIME_OUT_OF_RANGE)
    return seconds * 1_000_000 + nanos // 1_000
