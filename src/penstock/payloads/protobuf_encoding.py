"""Protobuf messages as bytes, written by the library (upb): a function for each field sets it in a message.

Values are as Arrow has them: times are numbers (in microseconds), ``uint64`` may be ``Decimal``, maps are lists of
pairs. The library checks less than this: it would write null as 0 or an empty text, which readers cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.payloads.confluent import encoded_path
from penstock.payloads.errors import TIME_OUT_OF_RANGE, FieldValueError, time_limits
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

__all__ = ["message_encoder"]

_Set = Callable[[Any, Any], None]
"""Function from a message and a value, which sets the value. Raises ValueError if the message cannot have it."""
_Convert = Callable[[Any], Any]
_TIMES = time_limits(1)
_LIMITS: Mapping[str, tuple[int, int]] = {
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
_NULL = "it is null, which the schema does not permit"


def message_encoder(schema: ProtobufSchema) -> Callable[[Mapping[str, Any]], bytes]:
    """Return the function that encodes the values of the fields of a message, by name, after its indexes in its file.

    Equal values have equal bytes. The function raises ValueError, with the name of the field, for a value that the type
    of a field does not have.
    """
    from google.protobuf.message_factory import GetMessageClass

    found = message_type(schema.descriptors, schema.message)
    made, indexes, fill = GetMessageClass(found), encoded_path(index_path(found)), _fields(found)

    def encode(values: Mapping[str, Any]) -> bytes:
        message = made()
        fill(message, values)
        return indexes + message.SerializeToString(deterministic=True)

    return encode


def _fields(found: Descriptor) -> _Set:
    """Return the function that sets the fields of a message to values by name."""
    fields = [(field.name, _field(field)) for field in found.fields]
    # An optional field of proto3 is the only one of its oneof.
    oneofs = [[field.name for field in oneof.fields] for oneof in found.oneofs if len(oneof.fields) > 1]

    def fill(message: Any, values: Mapping[str, Any]) -> None:
        name = ""
        try:
            for name, write in fields:
                write(message, values[name])
        except ValueError as error:
            raise FieldValueError.of_field(name, error) from None
        for names in oneofs:
            given = [name for name in names if values[name] is not None]
            if len(given) > 1:
                raise FieldValueError(f"{given[1]}: only one field of a oneof can be set, {given[0]} is")

    return fill


def _field(field: FieldDescriptor) -> _Set:
    if is_map(field):
        return _map(field)
    name, convert = field.name, _converter(field)
    fill = None if convert is not None else _message(field)
    if field.is_repeated:
        return _repeated(name, fill, convert)
    may_be_null = field.has_presence and not field.is_required

    def write(message: Any, value: Any) -> None:
        if value is None:
            if not may_be_null:
                raise ValueError(_NULL)
        elif convert is not None:
            setattr(message, name, convert(value))
        else:
            assert fill is not None
            inner = getattr(message, name)
            # Also if all its fields have their defaults.
            inner.SetInParent()
            fill(inner, value)

    return write


def _repeated(name: str, fill: _Set | None, convert: _Convert | None) -> _Set:
    def write(message: Any, values: Any) -> None:
        if values is None or None in values:
            raise ValueError(_NULL)
        found = getattr(message, name)
        if convert is not None:
            found.extend(map(convert, values))
        else:
            assert fill is not None
            for value in values:
                fill(found.add(), value)

    return write


def _map(field: FieldDescriptor) -> _Set:
    name, (key_field, value_field) = field.name, map_fields(field)
    convert_key, convert = _converter(key_field), _converter(value_field)
    fill = None if convert is not None else _message(value_field)
    assert convert_key is not None, "a key is no message"

    def write(message: Any, pairs: Any) -> None:
        if pairs is None:
            raise ValueError(_NULL)
        found = getattr(message, name)
        for key, value in pairs:
            if value is None:
                raise ValueError(_NULL)
            if convert is not None:
                found[convert_key(key)] = convert(value)
            else:
                assert fill is not None
                # The library creates the message of a key that it does not have.
                fill(found[convert_key(key)], value)

    return write


def _message(field: FieldDescriptor) -> _Set:
    """Return the function that fills the message of a field."""
    kind = field.message_type
    assert kind is not None, "a field that is no scalar"
    if kind.full_name == TIMESTAMP:
        return _timestamp
    if kind.full_name in WRAPPERS:
        convert = _converter(kind.fields_by_name["value"])
        assert convert is not None

        def wrap(message: Any, value: Any) -> None:
            message.value = convert(value)

        return wrap
    return _fields(kind)


def _timestamp(message: Any, value: int) -> None:
    if not _TIMES[0] <= value <= _TIMES[1]:
        raise ValueError(TIME_OUT_OF_RANGE)
    message.seconds, rest = divmod(value, 1_000_000)
    message.nanos = rest * 1_000


def _converter(field: FieldDescriptor) -> _Convert | None:
    """Return the function from the value of a column to that of a field; None for a message."""
    if field.message_type is not None:
        return None
    name = type_name(field)
    if name == "enum":
        return _enum(field)
    if name not in _LIMITS:
        return lambda value: value
    first, last = _LIMITS[name]

    def integer(value: Any) -> int:
        found = int(value)
        if not first <= found <= last:
            raise ValueError(f"{found} is not a value of {name}")
        return found

    return integer


def _enum(field: FieldDescriptor) -> _Convert:
    found = field.enum_type
    assert found is not None, "an enum has a type"
    name, numbers = found.full_name, {value.name: value.number for value in found.values}

    def number_of(value: Any) -> int:
        if value not in numbers:
            raise ValueError(f"{value!r} is no value of the enum {name}")
        return numbers[value]

    return number_of
