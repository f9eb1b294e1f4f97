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
from penstock.payloads.confluent import message_path, schema_id_of
from penstock.payloads.errors import FieldError, PayloadError
from penstock.payloads.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    ProtobufSchema,
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

    ``writer``: the message in the schema of the serializer, if it is known. It names new fields and values of enums.

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
    writer: ProtobufSchema | None = None

    @property
    def accepts_empty(self) -> bool:
        """A message whose fields all have their default has no bytes."""
        return self.encoding == "plain"

    @property
    def _shows_new_fields(self) -> bool:
        return self.new_fields != "ignore" or self.new_fields_as is not None

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
                if new and self.writer is not None and self._shows_new_fields:
                    new = _named(new, payload, self.writer, made.DESCRIPTOR)
            except UnicodeDecodeError:
                raise PayloadError(errors.NOT_PROTOBUF, "a key of a map is not UTF-8") from None
        return message, new

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the fields of ``payload``.

        Raises:
            PayloadError: it is not a message of this type.
        """
        fields = _field_getters(self.descriptors, self.message, self.unknown_enums, self.writer)
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


def _named(new: dict[str, str], payload: bytes, writer: ProtobufSchema, reader: Any) -> dict[str, str]:
    """Return the ``new`` fields of ``payload`` with the names and values that the schema of the ``writer`` gives them.

    A field that it lacks keeps its number.
    """
    from google.protobuf.message import DecodeError

    message = _message_class(writer.descriptors, writer.message)[0]()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise PayloadError(
            errors.NOT_PROTOBUF, f"the payload is not Protobuf of the message {writer.message} of its schema"
        ) from None
    names = {path: (name, value) for path, name, value in _written_fields(message, reader, "")}
    found: dict[str, str] = {}
    for path, text in new.items():
        name, value = names.get(path, (path, None))
        found[name] = text if value is None else _as_text(value)
    return found


def _written_fields(message: Any, reader: Any, path: str) -> Iterator[tuple[str, str, object]]:
    """Yield each field that ``message``, which is at ``path``, has and the type ``reader`` lacks: its path with its
    number, its path with its name, and its value in JSON, or None if JSON has none."""
    in_json: dict[str, object] | None = None
    for field, value in message.ListFields():
        known = reader.fields_by_number.get(field.number)
        if known is None:
            in_json = _in_json(message) if in_json is None else in_json
            yield f"{path}{field.number}", f"{path}{field.name}", in_json.get(field.name)
        elif is_map(known):
            kind = map_fields(known)[1].message_type
            for key in value if kind is not None else ():
                yield from _written_fields(value[key], kind, f"{path}{known.name}[{key!r}].")
        elif known.message_type is not None:
            for at, each in enumerate(value) if known.is_repeated else ((None, value),):
                place = known.name if at is None else f"{known.name}[{at}]"
                yield from _written_fields(each, known.message_type, f"{path}{place}.")


def _in_json(message: Any) -> dict[str, object]:
    """Return the fields of ``message`` in JSON, without any if it has a value that JSON cannot have."""
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError

    pool = message.DESCRIPTOR.file.pool
    try:
        return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=pool)
    except (TypeError, ValueError, RecursionError, DecodeError, json_format.Error):
        # A time that is out of range, or an Any: its type is unknown, its value is not of this type, or has an Any in
        # an Any in turn.
        return {}


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
    found = schema_id_of(payload, errors.NOT_PROTOBUF)
    if found != schema_id:
        raise PayloadError(errors.OTHER_SCHEMA, f"the payload has the schema id {found}, not {schema_id}")
    named, at = message_path(payload)
    if named != path:
        raise PayloadError(errors.OTHER_SCHEMA, "the payload has another message of the schema")
    return at


@lru_cache(maxsize=128)
def _message_class(descriptors: bytes, message: str) -> tuple[type[Message], tuple[int, ...]]:
    """Return the class of the message, and its place in its file."""
    from google.protobuf.message_factory import GetMessageClass

    found = message_type(descriptors, message)
    return GetMessageClass(found), index_path(found)


@lru_cache(maxsize=128)
def _field_getters(
    descriptors: bytes, message: str, unknown_enums: str, writer: ProtobufSchema | None
) -> list[tuple[str, _Get]]:
    found: Any = _message_class(descriptors, message)[0].DESCRIPTOR
    written: Any = None if writer is None else _message_class(writer.descriptors, writer.message)[0].DESCRIPTOR
    return _getters(found, unknown_enums, written)


def _getters(found: Descriptor, unknown_enums: str, writer: Descriptor | None) -> list[tuple[str, _Get]]:
    written = {} if writer is None else writer.fields_by_number
    return [(field.name, _getter(field, unknown_enums, written.get(field.number))) for field in found.fields]


def _getter(field: FieldDescriptor, unknown_enums: str, writer: FieldDescriptor | None) -> _Get:
    """Return the function that gets the column of ``field`` from its message; ``writer``: the field of its schema."""
    get: _Get = attrgetter(field.name)
    if is_map(field):
        return _map(field, get, unknown_enums, writer)
    convert = _converter(field, unknown_enums, writer)
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


def _map(field: FieldDescriptor, get: _Get, unknown_enums: str, writer: FieldDescriptor | None) -> _Get:
    written = (None, None) if writer is None else map_fields(writer)
    of_key, of_value = (
        _converter(each, unknown_enums, other) for each, other in zip(map_fields(field), written, strict=True)
    )

    def get_pairs(message: Any) -> object:
        found: Any = get(message)
        return [
            (of_key(key) if of_key else key, of_value(value) if of_value else value) for key, value in found.items()
        ]

    return get_pairs


def _converter(field: FieldDescriptor, unknown_enums: str, writer: FieldDescriptor | None) -> _Get | None:
    """Return the function from a single value to that of the column; None if they are the same."""
    kind = field.message_type
    if kind is None:
        name = type_name(field)
        return _enum(field, unknown_enums, writer) if name == "enum" else _text if name == "string" else None
    if kind.full_name == TIMESTAMP:
        return _microseconds
    if kind.full_name in WRAPPERS:
        return attrgetter("value")
    fields = _getters(kind, unknown_enums, None if writer is None else writer.message_type)
    return lambda message: {name: get(message) for name, get in fields}


def _text(value: object) -> object:
    # The library returns bytes that are not UTF-8 as they are, for fields of proto2.
    if not isinstance(value, str):
        raise FieldError(errors.NOT_PROTOBUF, "a string is not UTF-8")
    return value


def _enum(field: FieldDescriptor, unknown: str, writer: FieldDescriptor | None) -> _Get:
    found = field.enum_type
    assert found is not None, "an enum has a type"
    written = None if writer is None else writer.enum_type
    others = {} if written is None else {number: value.name for number, value in written.values_by_number.items()}
    names = {number: value.name for number, value in found.values_by_number.items()}
    kind = found.full_name

    def name_of(number: Any) -> object:
        name = names.get(number)
        if name is None:
            other = others.get(number)
            if unknown == "add":
                return other or str(number)
            raise FieldError(errors.UNKNOWN_ENUM, f"{kind} lacks the value {number}" + (f" ({other})" if other else ""))
        return name

    return name_of


def _microseconds(at: Any) -> object:
    seconds, nanos = at.seconds, at.nanos
    if not (_SECONDS[0] <= seconds <= _SECONDS[1] and 0 <= nanos < _NANOS):
        raise FieldError(errors.RANGE, errors.TIME_OUT_OF_RANGE)
    return seconds * 1_000_000 + nanos // 1_000
