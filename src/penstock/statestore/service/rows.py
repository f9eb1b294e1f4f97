"""Encoding of the rows that a commit of the state store puts and deletes, for every durable request.

:class:`~penstock.statestore.service.storage.Storage` describes the databases.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final
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
    digest_of_deleted,
    encode_change,
    encode_record,
    encode_record_body,
)
from penstock.statestore.hlc import Hlc

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
"""Node id of the store's versions, as in the document."""

TABLES: Final = ("keys", "meta", "quarantine", "fences", "changes")
"""Frames of the log identify a table by its index: append new tables."""
KEYS: Final = 0
META: Final = 1
FENCES: Final = 3
CHANGES: Final = 4

_CLOCK: Final = Struct(">QQI")  # wall clock, counter, crc32 of both
_crc32: Final = crc32
"""Assigned in this module, since compiled code looks up an imported name at each call."""
_VERSION: Final = Struct(">QQ")  # key of a logged change, so that changes are sorted by version
_GREATEST_VERSION: Final = b"\xff" * _VERSION.size


def write_rows(out: BytesWriter, changes: Sequence[Change], *, log: bool) -> None:
    """Encode the rows of ``changes``, in order; with ``log`` also those of the log of changes."""
    for change in changes:
        record = change.record
        if record is not None and change.kept:
            body = encode_record_body(record)
            write_put(out, KEYS, digest_of(change.key), len(body) + 4)
            write_u32(out, _crc32(body))
            out.write(body)
        else:
            write_operation(out, DELETE, KEYS, digest_of_deleted(change.key), b"")
        if log:
            write_operation(out, *put_logged(change))
        if change.floor is not None:
            prefix, token = change.floor
            write_operation(out, *put_fence(prefix, token))


def put_record(record: Record) -> Operation:
    """Return the row of a key."""
    return PUT, KEYS, digest_of(record.key), encode_record(record)


def put_fence(prefix: bytes, token: Hlc) -> Operation:
    """Return the row of a prefix fence, in the format of a record: the prefix is the key, the floor its version."""
    return PUT, FENCES, digest_of(prefix), encode_record(Record(prefix, b"", token))


def put_logged(change: Change) -> Operation:
    """Return the row of a change in the log of changes."""
    return PUT, CHANGES, version_key(change.version), encode_change(change)


def put_clock(name: bytes, clock: Hlc) -> Operation:
    """Return the row ``name`` of ``meta`` with the version ``clock``."""
    return PUT, META, name, _CLOCK.pack(clock.wall_ms, clock.counter, _clock_checksum(clock.wall_ms, clock.counter))


def write_clock(out: BytesWriter, name: bytes, clock: Hlc) -> None:
    """Encode :func:`put_clock` into the body of a frame; every commit has the row of the store's clock."""
    wall_ms, counter = clock.wall_ms, clock.counter
    write_put(out, META, name, _CLOCK.size)
    write_u64(out, wall_ms)
    write_u64(out, counter)
    write_u32(out, _clock_checksum(wall_ms, counter))


def drop_changes(floor: Hlc) -> list[Operation]:
    """Return the operations that drop the log of changes up to the version ``floor``."""
    return [(DROP, CHANGES, version_key(floor), b""), put_clock(b"floor", floor)]


def delete_log() -> list[Operation]:
    """Return the operations that drop the whole log of changes and its floor."""
    return [(DROP, CHANGES, _GREATEST_VERSION, b""), (DELETE, META, b"floor", b"")]


def version_key(version: Hlc) -> bytes:
    """Return the key of a change in the log."""
    return _VERSION.pack(version.wall_ms, version.counter)


def version_at(key: bytes) -> Hlc:
    """Return the version of the change with this key in the log."""
    wall_ms, counter = _VERSION.unpack(key)
    return Hlc(wall_ms, counter, NODE)


def decode_clock(stored: bytes | None) -> Hlc | None:
    """Decode the version in ``stored``; None if it is absent or damaged: then only the versions of keys are used."""
    if stored is None or len(stored) != _CLOCK.size:
        return None
    wall_ms, counter, checksum = _CLOCK.unpack(stored)
    return Hlc(wall_ms, counter, "") if checksum == _clock_checksum(wall_ms, counter) else None


def _clock_checksum(wall_ms: int, counter: int) -> int:
    """The checksum of both in decimal digits."""
    return _crc32(f"{wall_ms}:{counter}".encode())  # in compiled code, formatting as bytes takes 50 % longer
