"""Target of the write-ahead log: frames in damaged segments."""

from __future__ import annotations

import contextlib

from penstock.runtime.io.wal_frames import (
    DELETE,
    PUT,
    SECTOR,
    RowChanges,
    encode_frame,
    encode_operations,
    frames_in,
)
from tests.fuzz.data_provider import records

IDENTITY = b"identity"
OPERATIONS = [
    [(PUT, 0, b"k%d" % n, bytes([n]) * (n * 97)), (DELETE, 1, b"gone", b"")] + [(PUT, 1, b"x", IDENTITY)] * (n % 3)
    for n in range(8)
]
FRAMES = [encode_frame(IDENTITY, 1, n + 1, encode_operations(operations)) for n, operations in enumerate(OPERATIONS)]
SEGMENT = b"".join(FRAMES) + bytes(2 * SECTOR)
STARTS = [sum(map(len, FRAMES[:n])) for n in range(len(FRAMES))]


def fuzz_frames(data: bytes) -> object:
    """Records of patches: sector (number), offset in it (2 bytes), new bytes.

    Every frame that no patch touched is found, none is found that was not written.
    """
    segment = bytearray(SEGMENT)
    touched: set[int] = set()
    for number, patch in records(data, 16):
        if len(patch) < 3:
            continue
        at = (number * SECTOR + int.from_bytes(patch[:2], "big") % SECTOR) % len(segment)
        new = patch[2 : 2 + len(segment) - at]
        segment[at : at + len(new)] = new
        touched |= set(range(at, at + len(new)))
    found = {frame.sequence: frame for frame in frames_in(bytes(segment), IDENTITY)}
    for n, start in enumerate(STARTS):
        size = 28 + sum(8 + len(key) + len(value) for _, _, key, value in OPERATIONS[n])
        if not touched & set(range(start, start + size)):
            # A frame before it that claims this one's place must have a right checksum, which a patch cannot guess.
            assert n + 1 in found, n
    for sequence, frame in found.items():
        changes = RowChanges()
        changes.add(frame.body)
        if frame.epoch == 1 and sequence <= len(OPERATIONS):
            rows = [(table, key, value) for table, last in changes.tables.items() for key, value in last.items()]
            last_of_each = {
                (table, key): value if kind == PUT else None for kind, table, key, value in OPERATIONS[sequence - 1]
            }
            assert sorted(rows) == sorted((*row, value) for row, value in last_of_each.items())
            assert not changes.drops
    list(frames_in(data, IDENTITY))
    with contextlib.suppress(IndexError):  # a body whose checksum is right is never like this
        RowChanges().add(data)
    return sorted(found)
