"""What idempotent producers had stored, kept across restarts.

A note a store says what each producer had stored up to an offset of the log; what came behind it is read back from the
log, where the first message of each send names its producer (`codec.message.Marker`). The note of a store is durable
before its first such message is written, and renewed now and then, so that little has to be read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from penstock.tube.codec.message import decode_marker
from penstock.tube.storage.index import INDEX_RECORD_BYTES
from penstock.tube.storage.store import Store

__all__ = ["PREFIX", "Row", "decode_note", "encode_note", "note_name", "read_back"]

PREFIX = "producers/"
Row = tuple[int, int, int, int]
"""Partition id, producer, last sequence stored, time of it (ms)."""

_OFFSET = struct.Struct(">q")
_ROW = struct.Struct(">iqqq")


def note_name(topic: str, store: int) -> str:
    """The name of a store's note."""
    return f"{PREFIX}{topic}-{store}"


def encode_note(offset: int, rows: Iterable[Row]) -> bytes:
    """``rows`` are what all messages below ``offset`` leave behind."""
    return _OFFSET.pack(offset) + b"".join(_ROW.pack(*row) for row in rows)


def decode_note(note: bytes) -> tuple[int, list[Row]]:
    """``(offset, rows)`` as `encode_note` was given them."""
    (offset,) = _OFFSET.unpack_from(note)
    return offset, [(p, producer, last, time) for p, producer, last, time in _ROW.iter_unpack(note[_OFFSET.size :])]


def read_back(store: Store, offset: int) -> Iterator[Row]:
    """What the messages from ``offset`` on say, oldest first. Raises OSError when the disk fails."""
    partition = producer = first = begin = stop = -1
    for at, of_partition, time_ms, message in store.stored(offset):
        marker = decode_marker(message)
        if marker is not None:
            partition, producer, first = of_partition, marker.producer, marker.sequence
            begin, stop = at, at + marker.size * INDEX_RECORD_BYTES
        if at < stop and of_partition == partition:
            yield partition, producer, first + (at - begin) // INDEX_RECORD_BYTES, time_ms
