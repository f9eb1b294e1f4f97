"""Protobuf messages whose schema a registry has, read into the columns of a message type in a file.

Both are compared once for each schema: fields by their numbers, as Protobuf does, and then their types. The library
would read some other types without an error, and wrongly: a ``sint32`` as ``int32``. Messages are parsed with the type
in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.payloads import errors
from penstock.payloads.confluent import message_path
from penstock.payloads.errors import PayloadError
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    ProtobufSchema,
    is_map,
    map_fields,
    message_at,
    message_type,
    registered_messages,
    with_imports,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["RegisteredProtobuf"]

_READ_AS: Mapping[str, tuple[str, ...]] = {
    "int32": ("int64",),
    "sint32": ("sint64",),
    "uint32": ("uint64", "int64"),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""Types in the file that can have all values of a type of the writer, and the same bytes [Protobuf: "Updating A Message
Type"]."""


@dataclass(slots=True)
class RegisteredProtobuf:
    """Decoder of messages of the schema ``descriptors``, see ``registered_files``, for the columns of ``reader``.

    Raises:
        ValueError: it is not a valid schema.
    """

    descriptors: bytes
    reader: ProtobufMessages
    _messages: Sequence[Descriptor] = field(default=(), init=False)
    """Those of the schema, without nested ones."""
    _decoders: dict[tuple[int, ...], ProtobufMessages | PayloadError] = field(default_factory=dict, init=False)
    """By the path of the message."""

    def __post_init__(self) -> None:
        self.descriptors = with_imports(self.descriptors, self.reader.descriptors)
        self._messages = registered_messages(self.descriptors)

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the columns of ``payload``, which begins with the id of the schema.

        Raises:
            PayloadError: it is not the message of the columns, or its type in the schema has other types of fields.
        """
        path, start = message_path(payload)
        found = self._decoders.get(path)
        if found is None:
            writer = message_at(self._messages, path)
            if writer is None:
                raise PayloadError(errors.NOT_PROTOBUF, f"the schema has no message with the indexes {list(path)}")
            found = self._decoders[path] = self._resolved(writer)
        if isinstance(found, PayloadError):
            # Another one: each would add its traceback to the same object.
            raise PayloadError(found.code, found.reason)
        return found.decode(payload[start:])

    def _resolved(self, writer: Descriptor) -> ProtobufMessages | PayloadError:
        reader = message_type(self.reader.descriptors, self.reader.message)
        if writer.full_name != reader.full_name:
            # A topic may have messages of several types.
            return PayloadError(
                errors.OTHER_SCHEMA, f"the payload has the message {writer.full_name}, not {reader.full_name}"
            )
        problem = _problem(reader, writer, "")
        if problem is not None:
            return PayloadError(errors.MISMATCH, problem)
        return replace(self.reader, writer=ProtobufSchema(self.descriptors, writer.full_name))


def _problem(reader: Descriptor, writer: Descriptor, path: str) -> str | None:
    """Return why messages of ``writer``, at ``path``, cannot be read as ``reader``, which is not recursive."""
    for each in reader.fields:
        other = writer.fields_by_number.get(each.number)
        problem = None if other is None else _field_problem(each, other, f"{path}{each.name}")
        if problem is not None:
            return problem
    return None


def _field_problem(reader: FieldDescriptor, writer: FieldDescriptor, path: str) -> str | None:
    if (is_map(reader), reader.is_repeated) != (is_map(writer), writer.is_repeated):
        return _other_type(reader, writer, path)
    if is_map(reader):
        pairs = zip(map_fields(reader), map_fields(writer), strict=True)
        return next((found for one, other in pairs if (found := _value_problem(one, other, path))), None)
    return _value_problem(reader, writer, path)


def _value_problem(reader: FieldDescriptor, writer: FieldDescriptor, path: str) -> str | None:
    kind, written = _kind(reader), _kind(writer)
    if kind != written and kind not in _READ_AS.get(written, ()):
        return _other_type(reader, writer, path)
    if reader.message_type is None or writer.message_type is None:
        return None
    names = {reader.message_type.full_name, writer.message_type.full_name}
    if len(names) > 1 and names & (WRAPPERS | {TIMESTAMP}):
        return _other_type(reader, writer, path)
    return _problem(reader.message_type, writer.message_type, f"{path}.")


def _kind(found: FieldDescriptor) -> str:
    """Return the type as a schema names it, also ``enum``, ``message`` and ``group``."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return FieldDescriptorProto.Type.Name(found.type).removeprefix("TYPE_").lower()  # type: ignore[arg-type]


def _other_type(reader: FieldDescriptor, writer: FieldDescriptor, path: str) -> str:
    return f"the field {path!r} is {_shown(writer)} in the schema, and {_shown(reader)} in the file"


def _shown(found: FieldDescriptor) -> str:
    if is_map(found):
        return "a map"
    kind = found.message_type.full_name if found.message_type is not None else _kind(found)
    return f"repeated {kind}" if found.is_repeated else kind
