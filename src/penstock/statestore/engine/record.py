"""The record of a key, changes of records, and the stored format of both."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from sys import intern
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

from librt.strings import BytesWriter, read_i64_be, write_i64_be
from mypy_extensions import mypyc_attr

from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    from mypy_extensions import i64

    from penstock.statestore.codec.dialects import Dialect

__all__ = [
    "CHANGE_BYTES",
    "RECORD_BYTES",
    "Change",
    "Observer",
    "Record",
    "decode_change",
    "decode_record",
    "digest_of",
    "digest_of_deleted",
    "encode_change",
    "encode_record",
    "encode_record_body",
]

RECORD_BYTES: Final = 260
"""Memory of a key in addition to key and value: record, version, entry of the table (measured, CPython 3.11)."""

CHANGE_BYTES: Final = 400
"""Memory of a change's objects, in addition to the bytes of key and value."""

Observer = tuple[str, "Dialect"]
"""A client that is notified of a change: client id, and dialect of its KEYNOTIFY request."""


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Record:
    """The state of one key; immutable, so that it can be written later.

    ``fence`` protects the key against lower tokens; ``expires_at`` is the last ms in which the key exists, counted from
    the epoch, 0 = forever; ``owner`` is the principal that created the key, for quotas; "" = an anonymous client.
    """

    __slots__ = ("expires_at", "fence", "key", "owner", "value", "version")

    def __init__(
        self,
        key: bytes,
        value: bytes,
        version: Hlc,
        fence: Hlc | None = None,
        expires_at: int = 0,
        owner: str = "",
    ) -> None:
        self.key = key
        self.value = value
        self.version = version
        self.fence = fence
        self.expires_at = expires_at
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (
            self.key == other.key
            and self.value == other.value
            and self.version == other.version
            and self.fence == other.fence
            and self.expires_at == other.expires_at
            and self.owner == other.owner
        )

    def __repr__(self) -> str:
        return f"<Record {self.key!r} version={self.version} fence={self.fence} expires_at={self.expires_at}>"


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Change:
    """Change of one key to ``record``, or its deletion if ``record`` is None.

    ``version`` is the version of the change: that of the record, or a newer one for a delete. ``previous`` is the
    version of a deleted value; None for a SET, and for a change that a restart has read from the log. ``observers`` are
    the clients to notify, as of the change. ``writer`` is the client id, empty for an expiry. ``floor`` is the prefix
    fence that the change raised. ``kept``: whether the key is on disk after the change (False for a delete). ``trace``
    is the context of the request's trace as headers, for notifications and change capture; None without one.
    """

    __slots__ = ("floor", "kept", "key", "observers", "previous", "record", "trace", "version", "writer")

    def __init__(
        self,
        key: bytes,
        record: Record | None,
        version: Hlc,
        observers: tuple[Observer, ...] = (),
        writer: str = "",
        floor: tuple[bytes, Hlc] | None = None,
        previous: Hlc | None = None,
    ) -> None:
        self.previous = previous
        self.key = key
        self.record = record
        self.version = version
        self.observers = observers
        self.writer = writer
        self.floor = floor
        self.kept = record is not None
        self.trace: list[tuple[str, str]] | None = None

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the change in bytes."""
        trace = 0 if self.trace is None else sum([len(name) + len(value) for name, value in self.trace])
        return CHANGE_BYTES + len(self.key) + (len(self.record.value) if self.record is not None else 0) + trace

    def __repr__(self) -> str:
        return f"<Change {'SET' if self.record is not None else 'DELETE'} {self.key!r} {self.version}>"


# Stored format, big-endian: CRC-32 of the following bytes; expiry; version; fence (without a fence, wall clock and
# counter are 0 and the node id is empty); lengths of node id, fence node id and key; these three; the rest is the
# value. If there is an owner, a zero byte and the owner follow the node id and are included in its length.
_CHECKSUM: Final = Struct(">I")
_SIGNED: Final = 1 << 60
"""Smaller numbers have the same encoding with and without a sign."""
_NO_CLOCK: Final = bytes(16)
_SIZES: Final = Struct(">HHI")
_HEAD_END: Final = 52


_MAX_DIGESTS: Final = 4096
_MAX_DIGEST_KEY: Final = 256
_digests: Final[dict[bytes, bytes]] = {}
"""Cached digests of keys of at most :data:`_MAX_DIGEST_KEY` bytes, as many are set again soon. Cleared at
:data:`_MAX_DIGESTS` entries."""


def digest_of(key: bytes) -> bytes:
    """Return the LMDB key of ``key``: LMDB keys have at most 511 bytes, keys of the store may be longer."""
    digest = _digests.get(key)
    if digest is None:
        digest = blake2b(key, digest_size=32).digest()
        if len(key) <= _MAX_DIGEST_KEY:
            if len(_digests) >= _MAX_DIGESTS:
                _digests.clear()
            _digests[key] = digest
    return digest


def digest_of_deleted(key: bytes) -> bytes:
    """Return :func:`digest_of` for a deleted key, and remove it from the cache."""
    digest = _digests.pop(key, None)
    return blake2b(key, digest_size=32).digest() if digest is None else digest


def encode_record(record: Record) -> bytes:
    """Encode ``record`` in the stored format, with checksum and the whole key."""
    body = encode_record_body(record)
    return crc32(body).to_bytes(4, "big") + body


def encode_record_body(record: Record) -> bytes:
    """Encode the stored format of ``record`` after the checksum."""
    key, version, fence = record.key, record.version, record.fence
    node = version.node.encode() if not record.owner else f"{version.node}\0{record.owner}".encode()
    out = BytesWriter()
    _write_number(out, record.expires_at)
    _write_number(out, version.wall_ms)
    _write_number(out, version.counter)
    if fence is None:
        out.write(_NO_CLOCK)
        _write_sizes(out, len(node), 0, len(key))
        out.write(node)
    else:
        fence_node = fence.node.encode()
        _write_number(out, fence.wall_ms)
        _write_number(out, fence.counter)
        _write_sizes(out, len(node), len(fence_node), len(key))
        out.write(node)
        out.write(fence_node)
    out.write(key)
    out.write(record.value)
    return out.getvalue()


def _write_sizes(out: BytesWriter, node_size: i64, fence_size: i64, key_size: i64) -> None:
    """Write the lengths of node id, fence node id and key in two, two and four bytes."""
    if node_size < 1 << 15:
        write_i64_be(out, node_size << 48 | fence_size << 32 | key_size)
    else:
        out.write(_SIZES.pack(node_size, fence_size, key_size))


def _write_number(out: BytesWriter, value: int) -> None:
    """Write an unsigned number of eight bytes."""
    if value < _SIGNED:
        write_i64_be(out, value)
    else:
        out.write(value.to_bytes(8, "big"))


def decode_record(stored: bytes) -> Record | None:
    """Decode the record in ``stored``; None if checksum or lengths are wrong."""
    size: i64 = len(stored)
    if size < _HEAD_END:
        return None
    checksum: i64 = crc32(stored[_CHECKSUM.size :])
    if read_i64_be(stored, 0) >> 32 & 0xFFFFFFFF != checksum:
        return None
    sizes = read_i64_be(stored, _HEAD_END - 8)
    node_end = _HEAD_END + (sizes >> 48 & 0xFFFF)
    fence_end = node_end + (sizes >> 32 & 0xFFFF)
    key_end = fence_end + (sizes & 0xFFFFFFFF)
    if key_end > size:
        return None
    name = stored[_HEAD_END:node_end]
    last = _last.owner
    if name != last.name:
        last = _last.owner = _node_and_owner(name)
    version = Hlc(_read_number(stored, 12), _read_number(stored, 20), last.node)
    fence = None
    if fence_end > node_end:
        fence = Hlc(_read_number(stored, 28), _read_number(stored, 36), _node(stored[node_end:fence_end]))
    return Record(stored[fence_end:key_end], stored[key_end:], version, fence, _read_number(stored, 4), last.owner)


def _read_number(stored: bytes, offset: i64) -> int:
    """Decode the eight bytes at ``offset`` as an unsigned number."""
    number = read_i64_be(stored, offset)
    return number if number >= 0 else int.from_bytes(stored[offset : offset + 8], "big")


@final
class _Owner:
    """Node id and owner of a version, stored as ``name``. Records share these strings."""

    __slots__ = ("name", "node", "owner")

    def __init__(self, name: bytes, node: str, owner: str) -> None:
        self.name = name
        self.node = node
        self.owner = owner


@final
class _LastOwner:
    """The owner decoded last: consecutive records usually have the same owner."""

    __slots__ = ("owner",)

    def __init__(self) -> None:
        self.owner = _Owner(b"", "", "")


_last: Final = _LastOwner()


@lru_cache(maxsize=128)  # a client may choose 64 KiB for the node of its fencing token
def _node(name: bytes) -> str:
    """Decode a node id; cached, so that all keys share one text."""
    return intern(name.decode())


@lru_cache(maxsize=1024)
def _node_and_owner(name: bytes) -> _Owner:
    """Decode the node id of a version, which may be followed by an owner."""
    node, _, owner = name.decode().partition("\0")
    return _Owner(name, intern(node), intern(owner))


# Format of a change in the log of changes: CRC-32 of the following bytes; version; length of the writer; the writer;
# for a SET, the record in the stored format; for a delete, a zero byte and the key. If there is the context of a trace,
# a zero byte and the traceparent, and perhaps another one and the tracestate, follow the writer and are included in its
# length: no client identifier has a zero byte [MQTT-1.5.4-2]. Earlier versions read all of it as the writer.
_CHANGE_HEAD: Final = Struct(">QQHB")
_CHANGE_END: Final = _CHECKSUM.size + _CHANGE_HEAD.size
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_MAX_WRITER: Final = 0xFFFF


def encode_change(change: Change) -> bytes:
    """Encode ``change`` in the stored format, with checksum, without observers and floor."""
    writer = change.writer.encode()
    if change.trace is not None:
        traced = b"\0".join([writer, *(value.encode() for _, value in change.trace)])
        if len(traced) <= _MAX_WRITER:
            writer = traced
    version = change.version
    is_set = change.record is not None
    body = b"".join(
        (
            _CHANGE_HEAD.pack(version.wall_ms, version.counter, len(writer), is_set),
            writer,
            encode_record(change.record) if change.record is not None else change.key,
        )
    )
    return _CHECKSUM.pack(crc32(body)) + body


def decode_change(stored: bytes, node: str) -> Change | None:
    """Decode the change in ``stored``; None if it is damaged. ``node``: node id of the store."""
    if len(stored) < _CHANGE_END or crc32(memoryview(stored)[_CHECKSUM.size :]) != _CHECKSUM.unpack_from(stored)[0]:
        return None
    wall, counter, writer_size, is_set = _CHANGE_HEAD.unpack_from(stored, _CHECKSUM.size)
    writer_end = _CHANGE_END + writer_size
    writer, *values = stored[_CHANGE_END:writer_end].decode().split("\0")
    if is_set:
        record = decode_record(stored[writer_end:])
        if record is None:
            return None
        change = Change(record.key, record, record.version, writer=writer)
    else:
        change = Change(stored[writer_end:], None, Hlc(wall, counter, node), writer=writer)
    if values:
        change.trace = list(zip(_TRACE_HEADERS, values, strict=False))
    return change
