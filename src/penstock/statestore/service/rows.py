"""The rows that a commit of the state store puts and deletes; encoded on the path of every durable request.

:class:`~penstock.statestore.service.storage.Storage` describes the databases.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from librt.strings import BytesWriter

from penstock.runtime.io.wal_frames import (
    DELETE,
    DROP,
    PUT,
    Operation,
    write_operation,
    write_put,
    write_u32,
    write_u64,
)
from penstock.statestore.engine.record import (
    Change,
    Record,
    digest_of,
    encode_change,
    encode_record,
    encode_record_body,
)
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "CHANGES",
    "META",
    "NODE",
    "TABLES",
    "decode_clock",
    "delete_log",
    "drop_changes",
    "put_clock",
    "put_fence",
    "put_logged",
    "put_record",
    "version_at",
    "version_key",
    "write_clock",
    "write_rows",
]

NODE: Final = "StateStore"
"""Node id of the versions that the store gives; the document's."""

TABLES: Final = ("keys", "meta", "quarantine", "fences", "changes")
"""Frames of the log name a table by its index here: new tables go to the end."""
KEYS: Final = 0
META: Final = 1
FENCES: Final = 3
CHANGES: Final = 4

_CLOCK: Final = Struct(">QQI")  # wall clock, counter, crc32 of both
_CLOCK_BYTES: Final = 20
_COUNTERS: Final = 256
"""Counters that are usual: those of versions rise in a burst only."""
_SIGNED: Final = 1 << 60
"""Numbers below are the same with and without a sign."""
_MILLISECONDS: Final[list[bytes]] = [b"%03d" % number for number in range(1000)]
_COUNTER_DIGITS: Final[list[bytes]] = [b":%d" % number for number in range(_COUNTERS)]
_crc32: Final = crc32
"""A name of this module: compiled code looks up an imported one at each call."""
_VERSION: Final = Struct(">QQ")  # key of a logged change, so that changes lie in the order of their versions
_GREATEST_VERSION: Final = b"\xff" * _VERSION.size


def write_rows(out: BytesWriter, changes: Sequence[Change], *, log: bool) -> None:
    """Write the rows of ``changes``, in their order; with ``log`` those of the log of changes too."""
    for change in changes:
        record = change.record
        if record is not None and change.kept:
            body = encode_record_body(record)
            write_put(out, KEYS, digest_of(change.key), len(body) + 4)
            write_u32(out, _crc32(body))
            out.write(body)
        else:
            write_operation(out, DELETE, KEYS, digest_of(change.key), b"")
        if log:
            write_operation(out, *put_logged(change))
        if change.floor is not None:
            prefix, token = change.floor
            write_operation(out, *put_fence(prefix, token))


def write_clock(out: BytesWriter, clock: Hlc) -> None:
    """Write the row that stores the greatest version given."""
    write_put(out, META, b"clock", _CLOCK_BYTES)
    write_u64(out, clock.wall_ms)
    write_u64(out, clock.counter)
    write_u32(out, _clock_checksum(clock.wall_ms, clock.counter))


def put_record(record: Record) -> Operation:
    """The row of a key."""
    return PUT, KEYS, digest_of(record.key), encode_record(record)


def put_fence(prefix: bytes, token: Hlc) -> Operation:
    """The row of a prefix fence, in the form of a record: the prefix as the key, the floor as its version."""
    return PUT, FENCES, digest_of(prefix), encode_record(Record(prefix, b"", token))


def put_logged(change: Change) -> Operation:
    """The row of a change in the log of changes."""
    return PUT, CHANGES, version_key(change.version), encode_change(change)


def put_clock(name: bytes, clock: Hlc) -> Operation:
    """The row ``name`` of ``meta`` that stores a version."""
    return PUT, META, name, _CLOCK.pack(clock.wall_ms, clock.counter, _clock_checksum(clock.wall_ms, clock.counter))


def drop_changes(floor: Hlc) -> list[Operation]:
    """Drop the log of changes up to the version ``floor``."""
    return [(DROP, CHANGES, version_key(floor), b""), put_clock(b"floor", floor)]


def delete_log() -> list[Operation]:
    """Drop the whole log of changes, and that there is one."""
    return [(DROP, CHANGES, _GREATEST_VERSION, b""), (DELETE, META, b"floor", b"")]


def version_key(version: Hlc) -> bytes:
    """The key of a change in the log."""
    return _VERSION.pack(version.wall_ms, version.counter)


def version_at(key: bytes) -> Hlc:
    """The version of the change with that key in the log."""
    wall_ms, counter = _VERSION.unpack(key)
    return Hlc(wall_ms, counter, NODE)


def decode_clock(stored: bytes | None) -> Hlc | None:
    """The version in ``stored``; None where it is absent or damaged: the versions of the keys then have to do."""
    if stored is None or len(stored) != _CLOCK.size:
        return None
    wall_ms, counter, checksum = _CLOCK.unpack(stored)
    return Hlc(wall_ms, counter, "") if checksum == _clock_checksum(wall_ms, counter) else None


class _Second:
    """A second since the epoch, with the checksum of its digits."""

    __slots__ = ("checksum", "number")

    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.checksum = crc32(b"%d" % number)


class _Last:
    """The second that was needed last."""

    __slots__ = ("second",)

    def __init__(self) -> None:
        self.second = _Second(0)


_last: Final = _Last()


def _clock_checksum(wall_ms: int, counter: int) -> int:
    """The checksum of both in decimal digits, continued from that of the second: every commit has one."""
    if not 1000 <= wall_ms < _SIGNED or counter >= _COUNTERS:
        return crc32(b"%d:%d" % (wall_ms, counter))
    wall: i64 = wall_ms
    number = wall // 1000
    second = _last.second
    if second.number != number:
        second = _last.second = _Second(number)
    return _crc32(_MILLISECONDS[wall - number * 1000] + _COUNTER_DIGITS[counter], second.checksum)
