"""Decoding of messages with the checks that protobuf's Python runtime omits.

The runtime accepts a message without required fields, and a string that is not UTF-8 (returned as bytes, or failing on
access, depending on the backend). Peers of this protocol reject both; so does penstock.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from penstock.errors import RemoteProtocolError

__all__ = ["check", "decode"]

M = TypeVar("M", bound=Message)


MAX_ITEMS = 20_000
"""Maximum items of a repeated text field: more than the partitions of any known peer; limits the time of decoding."""


class _TextField(NamedTuple):
    """A field that is a string or a message with strings."""

    name: str
    repeated: bool
    nested: bool


def decode(kind: type[M], data: bytes) -> M:
    """Decode a message of type ``kind``.

    Raises:
        RemoteProtocolError: not protobuf, a required field is missing, a string is not UTF-8, a list is too long.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"tube: {kind.DESCRIPTOR.name} cannot be read", why=str(error)) from None
    check(message)
    return message


def check(message: Message) -> None:
    """Raise RemoteProtocolError if a required field is missing or a string is not UTF-8."""
    if not message.IsInitialized():
        raise RemoteProtocolError(f"tube: {message.DESCRIPTOR.name} lacks a required field", why=_missing(message))
    _check_texts(message, message.DESCRIPTOR)


def _missing(message: Message) -> str:
    try:
        message.SerializeToString()
    except EncodeError as error:
        return str(error)
    return ""


def _check_texts(message: Message, descriptor: Any) -> None:
    for name, repeated, nested in _texts(descriptor):
        try:
            if nested:
                if repeated:
                    for item in getattr(message, name):
                        _check_texts(item, item.DESCRIPTOR)
                elif message.HasField(name):
                    item = getattr(message, name)
                    _check_texts(item, item.DESCRIPTOR)
            else:
                value = getattr(message, name)
                if repeated and len(value) > MAX_ITEMS:
                    raise RemoteProtocolError(
                        f"tube: {descriptor.name}.{name} has {len(value)} items ({MAX_ITEMS} most)"
                    )
                for text in value if repeated else (value,):
                    if not isinstance(text, str):
                        raise UnicodeDecodeError("utf-8", text, 0, 1, "not UTF-8")
        except UnicodeDecodeError:
            raise RemoteProtocolError(f"tube: {descriptor.name}.{name} is not UTF-8") from None


_CACHE: dict[str, list[_TextField]] = {}


def _texts(descriptor: Any) -> list[_TextField]:
    """Fields of ``descriptor`` to check. No message of this protocol contains itself."""
    found = _CACHE.get(descriptor.full_name)
    if found is None:
        found = []
        for field in descriptor.fields:
            if field.type == FieldDescriptor.TYPE_STRING:
                found.append(_TextField(field.name, field.is_repeated, nested=False))
            elif field.message_type is not None and _texts(field.message_type):
                found.append(_TextField(field.name, field.is_repeated, nested=True))
        _CACHE[descriptor.full_name] = found
    return found
