"""Protobuf schemas: a message type of a descriptor set, as ``protoc --include_imports --descriptor_set_out`` writes it.

A field becomes one column. Refused are types that no column can hold: recursive messages, and names that differ in case
only.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

__all__ = [
    "TIMESTAMP",
    "WRAPPERS",
    "ProtobufSchema",
    "SchemaFile",
    "files_to_register",
    "index_path",
    "is_map",
    "map_fields",
    "message_at",
    "message_ddl",
    "message_type",
    "registered_files",
    "registered_messages",
    "type_name",
    "with_imports",
]

TIMESTAMP = "google.protobuf.Timestamp"
WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)
"""Messages with one field ``value``, which are read as the value, or null if the field is not set."""
_NAMES = {
    **dict.fromkeys(("sint32", "sfixed32"), "int32"),
    **dict.fromkeys(("sint64", "sfixed64"), "int64"),
    "fixed32": "uint32",
    "fixed64": "uint64",
}
_DDL = {
    "double": "DOUBLE",
    "float": "FLOAT",
    "int32": "INT",
    "int64": "BIGINT",
    "uint32": "BIGINT",
    "uint64": "DECIMAL(20, 0)",
    "bool": "BOOLEAN",
    "string": "STRING",
    "bytes": "BINARY",
    "enum": "STRING",
}
_HOW = "write it with `protoc --include_imports --descriptor_set_out=FILE`"


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    """The message type ``message`` of the descriptor set ``descriptors``."""

    descriptors: bytes
    message: str

    def ddl(self) -> str:
        """Return the columns: one for each field of the message.

        Raises:
            ValueError: it is not a descriptor set, or the message does not exist or cannot be read into columns; the
                text begins with "expected".
        """
        return message_ddl(message_type(self.descriptors, self.message))


def message_ddl(found: Descriptor) -> str:
    """Return the columns of a message. Raises ValueError: see ``ProtobufSchema.ddl``."""
    fields = list(_fields(found, (found.full_name,)))
    if not fields:
        raise ValueError(f"expected a message with fields, {found.name!r} has none")
    return ", ".join(f"{name} {kind}" for name, kind in fields)


def message_type(descriptors: bytes, message: str) -> Descriptor:
    """Return the type of ``message``; its package may be omitted if only one has this name.

    Raises:
        ValueError: see ``ProtobufSchema.ddl``.
    """
    pool, files = _loaded(descriptors)
    known = [name for file in files for name in _messages(file.package, file.message_type)]
    named = [name for name in known if name == message or name.endswith(f".{message}")]
    if message in known:
        named = [message]
    if len(named) != 1:
        shown = ", ".join((named or known)[:20]) or "no message"
        raise ValueError(f"expected the name of one message, not {message!r}; the descriptor set has {shown}")
    return pool.FindMessageTypeByName(named[0])


def _loaded(descriptors: bytes) -> tuple[DescriptorPool, Sequence[FileDescriptorProto]]:
    """Return a pool with the files of a descriptor set, and the files."""
    from google.protobuf.descriptor_pool import DescriptorPool

    files = _files(descriptors)
    if not files:
        raise ValueError(f"expected a descriptor set of Protobuf, found one without files; {_HOW}")
    pool = DescriptorPool()
    for file in files:
        try:
            pool.AddSerializedFile(file.SerializeToString())
        except TypeError as error:
            raise ValueError(f"expected a valid descriptor set with all imports: {error}; {_HOW}") from None
    return pool, files


def _files(descriptors: bytes) -> Sequence[FileDescriptorProto]:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    found = FileDescriptorSet()
    try:
        found.ParseFromString(descriptors)
    except DecodeError:
        raise ValueError(f"expected a descriptor set of Protobuf; {_HOW}") from None
    return found.file


def registered_files(text: str, references: Iterable[tuple[str, str]]) -> bytes:
    """Return a schema of a registry as a descriptor set whose last file it is; it may lack imports.

    ``text`` and ``references`` are files in base64, those of the references with the path that imports name.

    Raises:
        ValueError: they are not.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError, EncodeError

    made = FileDescriptorSet()
    for name, each in (*references, (_REGISTERED, text)):
        file = made.file.add()
        try:
            file.ParseFromString(base64.b64decode(each, validate=True))
        except (ValueError, DecodeError):
            raise ValueError("expected a FileDescriptorProto in base64") from None
        # Registries return any name, or none.
        file.name = name
    try:
        return made.SerializeToString()
    except EncodeError as error:
        # The library does not miss required fields when it parses.
        raise ValueError(f"expected a valid FileDescriptorProto: {error}") from None


_REGISTERED = "registered schema"
"""Name of the file with the schema itself, which no import has."""


def with_imports(descriptors: bytes, others: bytes = b"") -> bytes:
    """Return the last file of a descriptor set after the files that it imports, also through others.

    Those that it lacks are the ones of Google's Protobuf library, or are in the descriptor set ``others``.

    Raises:
        ValueError: a file that is imported is in none of them.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    known = {file.name: file for file in (*_files(others), *_files(descriptors))}
    found: dict[str, FileDescriptorProto] = {}

    def add(name: str, inside: tuple[str, ...]) -> None:
        file = known.get(name) or _library_file(name)
        if file is None:
            raise ValueError(
                f"expected all imports: {inside[-1]!r} imports {name!r}, to which the schema does not refer"
            )
        if name in inside:
            raise ValueError(f"expected no cycle of imports: {name!r} imports itself")
        for each in file.dependency:
            if each not in found:
                add(each, (*inside, name))
        found[name] = file

    files = _files(descriptors)
    if not files:
        raise ValueError("expected a descriptor set with a file")
    add(files[-1].name, ())
    return FileDescriptorSet(file=found.values()).SerializeToString()


_LIBRARY = re.compile(r"google/(?:protobuf|type)/[a-z_]{1,40}\.proto")


def _library_file(name: str) -> FileDescriptorProto | None:
    """Return a file of Google's libraries that is installed; registries have no references to them."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    if not _LIBRARY.fullmatch(name):
        return None
    try:
        module = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ModuleNotFoundError:
        return None
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def registered_messages(descriptors: bytes) -> list[Descriptor]:
    """Return the messages of the last file of a descriptor set, without nested ones. Raises ValueError: it is none."""
    pool, files = _loaded(descriptors)
    return list(pool.FindFileByName(files[-1].name).message_types_by_name.values())


class SchemaFile(NamedTuple):
    """A file as Confluent's client for Python registers it: a FileDescriptorProto in base64, without the JSON names
    that ``protoc`` adds, and the names of its ``imports``, without those of Google's libraries."""

    name: str
    text: str
    imports: tuple[str, ...]


def files_to_register(found: Descriptor) -> list[SchemaFile]:
    """Return the files of the message ``found``: its own is the last one, each follows those that it imports.

    Raises:
        ValueError: consumers do not agree on the indexes of the message; the text begins with "expected".
    """
    if index_path(found) != index_path(found, with_maps=False):
        raise ValueError(
            f"expected a message that is not nested behind a map: consumers find {found.full_name} by its index, which "
            "Go counts with maps, and Java without them"
        )
    files: dict[str, SchemaFile] = {}

    def add(file: FileDescriptor) -> None:
        imported = [each for each in file.dependencies if not _LIBRARY.fullmatch(each.name)]
        for each in imported:
            if each.name not in files:
                add(each)
        files[file.name] = SchemaFile(file.name, _as_text(file), tuple(each.name for each in imported))

    add(found.file)
    return list(files.values())


def _as_text(found: FileDescriptor) -> str:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto()
    found.CopyToProto(file)
    file.ClearField("source_code_info")
    _remove_json_names(file.message_type)
    for extension in file.extension:
        extension.ClearField("json_name")
    return base64.b64encode(file.SerializeToString(deterministic=True)).decode()


def _remove_json_names(messages: Any) -> None:
    for message in messages:
        for field in (*message.field, *message.extension):
            if field.json_name == _default_json_name(field.name):
                field.ClearField("json_name")
        _remove_json_names(message.nested_type)


def _default_json_name(name: str) -> str:
    first, *words = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in words)


def message_at(messages: Sequence[Descriptor], path: Sequence[int]) -> Descriptor | None:
    """Return the message at ``path``, see ``confluent.message_path``, in a file with ``messages``; or None.

    Java's serializers count nested messages without the entries of maps, which are messages too, and those of Go and
    Python with them. The first meaning counts, if there is such a message.
    """
    return _at(messages, path, lambda each: not each.GetOptions().map_entry) or _at(messages, path, lambda _each: True)


def _at(messages: Sequence[Descriptor], path: Sequence[int], counts: Callable[[Descriptor], bool]) -> Descriptor | None:
    found = None
    for index in path:
        counted = list(filter(counts, messages))
        if index >= len(counted):
            return None
        found = counted[index]
        messages = list(found.nested_types)
    return None if found is None or found.GetOptions().map_entry else found


def _messages(prefix: str, messages: Any) -> Iterator[str]:
    for message in messages:
        name = f"{prefix}.{message.name}" if prefix else message.name
        if not message.options.map_entry:
            yield name
            yield from _messages(name, message.nested_type)


def index_path(found: Descriptor, *, with_maps: bool = True) -> tuple[int, ...]:
    """Return the index of the message in its file, after those of the messages that contain it.

    ``with_maps``: count the entries of maps, see :func:`message_at`.
    """
    outer = found.containing_type
    siblings = found.file.message_types_by_name.values() if outer is None else outer.nested_types
    names = [each.full_name for each in siblings if with_maps or not each.GetOptions().map_entry]
    index = names.index(found.full_name)
    return (index,) if outer is None else (*index_path(outer, with_maps=with_maps), index)


def type_name(field: FieldDescriptor) -> str:
    """Return the name of the type of ``field``: of a scalar, ``enum`` or ``message``."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()  # type: ignore[arg-type]
    return "message" if name == "group" else _NAMES.get(name, name)


def is_map(field: FieldDescriptor) -> bool:
    """True for a map, which is a repeated message of keys and values on the wire."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def map_fields(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    """Return the fields with the key and the value of the map ``field``."""
    entry = field.message_type
    assert entry is not None, "a map is a repeated message"
    return entry.fields_by_name["key"], entry.fields_by_name["value"]


def _fields(found: Descriptor, outer: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for field in found.fields:
        if field.name.lower() in seen:
            raise ValueError(
                f"expected different names of the fields of {found.full_name}, in any case; {field.name!r} is twice"
            )
        seen.add(field.name.lower())
        yield field.name, _type(field, outer)


def _type(field: FieldDescriptor, outer: tuple[str, ...]) -> str:
    if is_map(field):
        key, value = map_fields(field)
        return f"MAP<{_single_type(key, outer)}, {_single_type(value, outer)}>"
    kind = _single_type(field, outer)
    return f"ARRAY<{kind}>" if field.is_repeated else kind


def _single_type(field: FieldDescriptor, outer: tuple[str, ...]) -> str:
    kind = field.message_type
    if kind is None:
        return _DDL[type_name(field)]
    if kind.full_name == TIMESTAMP:
        return "TIMESTAMP"
    if kind.full_name in WRAPPERS:
        return _DDL[type_name(kind.fields_by_name["value"])]
    if kind.full_name in outer:
        raise ValueError(
            f"expected no recursive message: {kind.full_name} contains itself in the field {field.full_name}"
        )
    fields = [f"{name}: {inner}" for name, inner in _fields(kind, (*outer, kind.full_name))]
    if not fields:
        raise ValueError(f"expected a message with fields in the field {field.full_name}; {kind.full_name} has none")
    return f"STRUCT<{', '.join(fields)}>"
