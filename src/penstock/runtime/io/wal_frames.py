"""The format of the log: a commit is one checksummed frame of rows to put and to delete.

A frame begins at a sector and ends with zeros up to the next sector, so that writing it touches no earlier frame.
All numbers are big-endian. Its head: the identity of the log (8 random bytes), epoch (4), sequence (8), bytes of the
body (4), CRC-32 of the 24 bytes before it and of the body (4). The body is operations, each with kind (1), table (1),
bytes of the key (2) and of the value (4), then both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from librt.strings import BytesWriter, read_i64_be, write_i32_be, write_i64_be

from penstock.runtime.io.files import SECTOR

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "DELETE",
    "DROP",
    "PUT",
    "SECTOR",
    "Frame",
    "Operation",
    "RowChanges",
    "encode_frame",
    "encode_operations",
    "frame_bytes",
    "frames_in",
    "write_operation",
    "write_put",
    "write_u32",
    "write_u64",
]

PUT: Final = 0
"""Insert or replace this row."""
DELETE: Final = 1
"""Delete the row with this key."""
DROP: Final = 2
"""Delete all rows up to this key, inclusive. No later operation puts rows there."""

Operation = tuple[int, int, bytes, bytes]
"""Kind, number of the table, key, value (empty unless it is a PUT)."""

_HEAD: Final = Struct(">8sIQI")
_CHECKSUM: Final = Struct(">I")
_BODY_AT: Final = _HEAD.size + _CHECKSUM.size
_OPERATION_BYTES: Final = 8
_SIGNED: Final = 1 << 60
"""Smaller numbers have the same encoding with and without a sign."""
_ZEROS: Final = bytes(SECTOR)
_crc32: Final = crc32
"""A name of this module: compiled code looks up an imported one at each call."""


class Frame(NamedTuple):
    """A complete frame. ``sequence`` counts the commits of an ``epoch``, from 1; an epoch is one opening of the log."""

    epoch: int
    sequence: int
    body: bytes


def write_put(out: BytesWriter, table: i64, key: bytes, value_size: i64) -> None:
    """Begin a PUT in the body of a frame; the caller then writes the ``value_size`` bytes of the value."""
    key_size: i64 = len(key)
    write_i64_be(out, table << 48 | key_size << 32 | value_size)
    out.write(key)


def write_operation(out: BytesWriter, kind: i64, table: i64, key: bytes, value: bytes) -> None:
    """Write an operation into the body of a frame."""
    key_size: i64 = len(key)
    value_size: i64 = len(value)
    write_i64_be(out, kind << 56 | table << 48 | key_size << 32 | value_size)
    out.write(key)
    out.write(value)


def encode_operations(operations: Sequence[Operation]) -> bytes:
    """Encode operations as the body of a frame."""
    out = BytesWriter()
    for kind, table, key, value in operations:
        write_operation(out, kind, table, key, value)
    return out.getvalue()


def write_u32(out: BytesWriter, number: int) -> None:
    """Write an unsigned number of four bytes."""
    write_i32_be(out, number - (1 << 32) if number >= 1 << 31 else number)


def write_u64(out: BytesWriter, number: int) -> None:
    """Write an unsigned number of eight bytes."""
    if number < _SIGNED:
        write_i64_be(out, number)
    else:
        out.write(number.to_bytes(8, "big"))


def frame_bytes(body_size: i64) -> i64:
    """Bytes of a frame with its padding, for a body of ``body_size`` bytes."""
    size = _BODY_AT + body_size
    return size + -size % SECTOR


def encode_frame(identity: bytes, epoch: int, sequence: int, body: bytes) -> bytes:
    """Encode a frame, padded with zeros to whole sectors."""
    size: i64 = len(body)
    out = BytesWriter()
    out.write(identity)
    write_u32(out, epoch)
    write_u64(out, sequence)
    write_u32(out, size)
    write_u32(out, _crc32(out.getvalue() + body))  # copying the body costs less than a second call
    out.write(body)
    out.write(_ZEROS[: -(_BODY_AT + size) % SECTOR])
    return out.getvalue()


def frames_in(data: bytes, identity: bytes) -> Iterator[Frame]:
    """Find the complete frames of the log ``identity`` in a segment; zeros, torn and damaged frames are skipped."""
    at = data.find(identity)
    while at >= 0:
        size = _size_of_frame(data, at)
        if size:
            _, epoch, sequence, _ = _HEAD.unpack_from(data, at)
            yield Frame(epoch, sequence, data[at + _BODY_AT : at + size])
        # Frames begin at sectors only, so a value that looks like a frame is not mistaken for one.
        at = data.find(identity, at - at % SECTOR + (-(-size // SECTOR) or 1) * SECTOR)


def _size_of_frame(data: bytes, at: int) -> int:
    """Bytes of the frame that begins at ``at``, without padding; 0 if there is no complete one."""
    if at % SECTOR or at + _BODY_AT > len(data):
        return 0
    end = at + _BODY_AT + _HEAD.unpack_from(data, at)[3]
    if end > len(data):
        return 0
    view = memoryview(data)
    checksum = crc32(view[at + _BODY_AT : end], crc32(view[at : at + _HEAD.size]))
    return end - at if checksum == _CHECKSUM.unpack_from(data, at + _HEAD.size)[0] else 0


class RowChanges:
    """Changes of rows that operations describe: the last one of each row."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[bytes, bytes | None]] = {}
        """By number of the table, the last value of each row; None: it is deleted."""
        self.drops: dict[int, bytes] = {}
        """By number of the table, the last key to drop."""

    def add(self, body: bytes) -> None:
        """Add the operations of a frame whose checksum is correct, after those that were added before."""
        rows: dict[bytes, bytes | None] = {}
        table: i64 = -1
        at: i64 = 0
        end: i64 = len(body)
        while at < end:
            head = read_i64_be(body, at)
            key_at = at + _OPERATION_BYTES
            value_at = key_at + (head >> 32 & 0xFFFF)
            at = value_at + (head & 0xFFFFFFFF)
            key = body[key_at:value_at]
            kind = head >> 56 & 0xFF
            number = head >> 48 & 0xFF
            if kind == DROP:
                self.drops[number] = max(key, self.drops.get(number, b""))
                continue
            if number != table:
                table = number
                rows = self.tables.setdefault(number, {})
            rows[key] = body[value_at:at] if kind == PUT else None
