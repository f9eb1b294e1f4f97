"""Columns as the fields of a Protobuf message: the check against the message type that a file has.

No message type is derived from columns: fields have numbers, which must stay the same when a column is added, removed
or moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.payloads.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    ProtobufSchema,
    is_map,
    map_fields,
    message_type,
    type_name,
)
from penstock.pipelines.spec.columns import element_of, entry_of, fields_of

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["check_message"]

_UP_TO_32_BITS = ("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER")
_INTEGERS = (*_UP_TO_32_BITS, "BIGINT", "LONG")
_FLOATS = ("FLOAT", "REAL")
_TEXTS = ("STRING", "CHAR", "CHARACTER", "VARCHAR")
_INSTANTS = ("TIMESTAMP", "TIMESTAMP_LTZ")
_ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "bool": ("BOOLEAN",),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), _INTEGERS),
    "float": _FLOATS,
    "double": (*_FLOATS, "DOUBLE", *_UP_TO_32_BITS),
    "string": _TEXTS,
    "enum": _TEXTS,
    "bytes": ("BINARY",),
}
"""Types of columns that each scalar accepts; ``uint64`` also integers as DECIMAL."""
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")


def check_message(schema: ProtobufSchema, columns: Mapping[str, str]) -> None:
    """Check that ``columns``, types by field, can be written as the fields of ``schema``; others are not checked.

    Raises:
        ValueError: a column has another type; the text begins with "expected".
    """
    for field in message_type(schema.descriptors, schema.message).fields:
        if field.name in columns:
            _check(columns[field.name], field, field.name)


def _check(kind: str, field: FieldDescriptor, path: str) -> None:
    """Raise ValueError if values of the column type ``kind`` are not written as ``field``."""
    if is_map(field):
        if (entry := entry_of(kind)) is None:
            raise _unexpected(kind, "a map", path)
        for each, inner, name in zip(entry, map_fields(field), ("keys", "values"), strict=True):
            _check_single(each, inner, f"{name} of {path}")
    elif field.is_repeated:
        if (element := element_of(kind)) is None:
            raise _unexpected(kind, "a repeated field", path)
        _check_single(element, field, f"elements of {path}")
    else:
        _check_single(kind, field, path)


def _check_single(kind: str, field: FieldDescriptor, path: str) -> None:
    message = field.message_type
    if message is None:
        name = type_name(field)
        if not _is_accepted(kind, name):
            raise _unexpected(kind, name, path)
    elif message.full_name == TIMESTAMP:
        if kind not in _INSTANTS:
            raise _unexpected(kind, TIMESTAMP, path)
    elif message.full_name in WRAPPERS:
        if not _is_accepted(kind, type_name(message.fields_by_name["value"])):
            raise _unexpected(kind, message.full_name, path)
    else:
        _check_struct(kind, message, path)


def _check_struct(kind: str, message: Descriptor, path: str) -> None:
    fields = fields_of(kind)
    if fields is None:
        raise _unexpected(kind, message.full_name, path)
    types = {field.name: field.type for field in fields}
    for field in message.fields:
        if field.name not in types:
            raise ValueError(
                f"expected a field {field.name!r} of {path}, as in the message {message.full_name}, found {kind}"
            )
        _check(types[field.name], field, f"{path}.{field.name}")


def _is_accepted(kind: str, name: str) -> bool:
    head, _, numbers = kind.rstrip(")").partition("(")
    if name == "uint64" and head in _DECIMALS:
        return numbers.partition(",")[2].strip() in ("", "0")
    return head in _ACCEPTED[name]


def _unexpected(kind: str, name: str, path: str) -> ValueError:
    return ValueError(
        f"expected a type of {path} that can be written as {name} of the message, found {kind}: convert it in a map "
        "step"
    )
