"""The index log: one 28-byte record per message of a store, in the reference's format (big-endian).

| field | bytes | |
|---|---|---|
| partition id | 4 | store * 10000 + partition |
| data offset | 8 | absolute, in the data log |
| data record size | 4 | 52 + payload |
| key code | 4 | hash of the message type, -1 none |
| received time | 8 | milliseconds |

Offsets on the wire are byte positions in this log. A lost message is replaced by a *filler* (partition -1, size 0), so
that later offsets do not change.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.tube.codec.message import INDEX_RECORD_BYTES

__all__ = ["DTYPE", "FILLER", "INDEX_RECORD", "INDEX_RECORD_BYTES", "IndexArray", "as_array", "filler", "is_sound"]

INDEX_RECORD: Final = struct.Struct(">iqiiq")
FILLER: Final = -1
"""Partition of a filler."""
DTYPE = np.dtype([("partition", ">i4"), ("position", ">i8"), ("size", ">i4"), ("key", ">i4"), ("time", ">i8")])

IndexArray: TypeAlias = npt.NDArray[np.void]


def as_array(data: bytes | bytearray) -> IndexArray:
    """Return a view of complete index records, without a copy. A bytearray cannot grow while a view of it exists."""
    return np.frombuffer(data, DTYPE, count=len(data) // INDEX_RECORD_BYTES)


def filler(position: int, time_ms: int) -> bytes:
    """Return the index record of a lost message."""
    return INDEX_RECORD.pack(FILLER, position, 0, -1, time_ms)


def is_sound(index: IndexArray, data_start: int, data_bytes: int) -> bool:
    """Return whether the records describe a data file of ``data_bytes`` bytes from ``data_start`` without overlap or
    gap.

    A gap next to a filler is accepted.
    """
    if not len(index):
        return data_bytes == 0
    start = index["position"].astype(np.int64)
    end = start + index["size"]
    lost = index["partition"] == FILLER
    joined = (end[:-1] == start[1:]) | lost[:-1] | lost[1:]
    ordered = bool((start[1:] >= end[:-1]).all()) and bool((np.diff(index["time"].astype(np.int64)) >= 0).all())
    sizes = bool(np.where(lost, index["size"] == 0, index["size"] >= 52).all())
    data_end = data_start + data_bytes
    first = start[0] == data_start or (bool(lost[0]) and start[0] >= data_start)
    last = end[-1] == data_end or (bool(lost[-1]) and end[-1] <= data_end)
    return bool(ordered and sizes and first and last and joined.all())
