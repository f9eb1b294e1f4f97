"""The format of a stored message: a 24-byte header, the message as in a get response, padding.

```
offset  size
0       4     CRC-32 of bytes 4.. up to the padding, started with the record's data offset (low 32 bits)
4       4     padding (6 bits, 0-63) << 26 | length of the whole record; 0 = the log ends here
8       4     ordinal of the record in its segment
12      2     partition within the store
14      4     key code (signed; -1 none)
18      6     bits of the number of earlier messages of the segment that were not acknowledged yet (5 bits) << 43
                | append time, milliseconds since 1970 (43 bits: until 2248)
24      n     field 4 (``messages``) of GetMessageResponseB2C: tag, length, TransferedMessage
24+n    p     zeros
```

The padding makes a record exactly as long as the reference's (52 + payload bytes), mostly 2 to 6 bytes. So the data
offsets and sizes in index records and on the wire, which are in the reference's units, are also the physical ones, and
no second set is stored. Only a message whose flag is outside 0..127 (no known client sends one) may need more than 52 +
payload; its index record then contains the actual size.

From the number of unacknowledged messages (rounded up to a power of two) recovery knows what a hole before a complete
record is: damage, if the messages in the hole were acknowledged when the record was written; otherwise part of an
interrupted commit.

The CRC starts with the record's data offset, so a record copied elsewhere (inside a payload, by a misdirected write,
left in a reused block) is not valid there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from penstock.tube.codec.strings import PARTITIONS_PER_STORE
from penstock.tube.storage.index import INDEX_RECORD

__all__ = [
    "HEADER_BYTES",
    "REFERENCE_OVERHEAD",
    "Run",
    "Stored",
    "encode_run",
    "find_record",
    "intact",
    "messages_at",
    "scan",
]

HEADER_BYTES = 24
REFERENCE_OVERHEAD = 52
"""Bytes of the reference's data record besides the payload."""

_HEADER = struct.Struct(">IIIHiHI")
_CRC = struct.Struct(">I")
_REST = struct.Struct(">IIHiHI")
_SIZE_BITS = 26
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_MIN_SIZE = REFERENCE_OVERHEAD
_TIME_BITS = 11  # of the upper two bytes
_TIME_MASK = (1 << _TIME_BITS) - 1
_PADDING = [bytes(n) for n in range(64)]
_HEAD = np.dtype([("sum", ">u4"), ("length", ">u4"), ("ordinal", ">u4")])
"""The beginning of a header."""
Numbers = npt.NDArray[np.int64]

_MESSAGE_START = re.compile(rb"\x22[\x80-\xff]{0,3}[\x00-\x7f]\x08", re.DOTALL)


class Run(NamedTuple):
    """Consecutive records of one partition."""

    parts: list[bytes]
    """Checksum, rest of the header, message and padding of each record, in the order of writing."""
    sizes: list[int]
    """Sizes of the records."""
    entries: bytes
    """The index records."""


def encode_run(
    messages: Sequence[bytes],
    payload_sizes: Sequence[int],
    keys: Sequence[int],
    position: int,
    ordinal: int,
    most: tuple[int, int],
    partition_id: int,
    time_ms: int,
    unacknowledged: int,
    *,
    immediate: bool,
) -> Run:
    """Encode ``messages`` (from `codec.message.encode_stored`) as records from data offset ``position`` on.

    The run ends before a record that would begin at data offset ``most[0]`` or have ordinal ``most[1]``.
    ``unacknowledged`` is that of the first record; it grows by one with each, or is 0 for the others if messages are
    readable at once (``immediate``). ``partition_id`` is that of the wire; a record contains the partition within its
    store.
    """
    parts: list[bytes] = []
    sizes: list[int] = []
    entries: list[bytes] = []
    pack, pack_crc, pack_entry, crc = _REST.pack, _CRC.pack, INDEX_RECORD.pack, crc32
    last_byte, last_ordinal = most
    partition = partition_id % PARTITIONS_PER_STORE
    high_time, low_time = time_ms >> 32, time_ms & 0xFFFFFFFF
    for message, payload_size, key in zip(messages, payload_sizes, keys, strict=True):
        if position >= last_byte or ordinal >= last_ordinal:
            break
        used = HEADER_BYTES + len(message)
        size = REFERENCE_OVERHEAD + payload_size
        padding = size - used
        if padding < 0:
            size, padding = used, 0
        high = unacknowledged.bit_length() << _TIME_BITS | high_time
        rest = pack(padding << _SIZE_BITS | size, ordinal, partition, key, high, low_time)
        parts += (pack_crc(crc(message, crc(rest, position & 0xFFFFFFFF))), rest, message, _PADDING[padding])
        sizes.append(size)
        entries.append(pack_entry(partition_id, position, size, key, time_ms))
        position += size
        ordinal += 1
        unacknowledged = 0 if immediate else unacknowledged + 1
    return Run(parts, sizes, b"".join(entries))


class Stored(NamedTuple):
    """A complete record found in a segment file."""

    position: int
    """Position in the scanned buffer."""
    size: int
    ordinal: int
    partition: int
    key_code: int
    time_ms: int
    message_end: int
    """End of the encoded message (which starts at ``position + HEADER_BYTES``) in the buffer."""
    acknowledged: int
    """Messages of lower ordinals were acknowledged when this one was written."""


def find_record(buffer: bytes, position: int, data_start: int) -> Stored | None:
    """The record at ``position`` of a segment that starts at data offset ``data_start``; None if it is incomplete."""
    if position + _MIN_SIZE > len(buffer):
        return None
    crc, length, ordinal, partition, key_code, high, low = _HEADER.unpack_from(buffer, position)
    size = length & _SIZE_MASK
    end = position + size
    message_end = end - (length >> _SIZE_BITS)
    if size < _MIN_SIZE or end > len(buffer) or message_end <= position + HEADER_BYTES:
        return None
    with memoryview(buffer) as view:
        if crc32(view[position + 4 : message_end], (data_start + position) & 0xFFFFFFFF) != crc:
            return None
    acknowledged = ordinal + 1 - (1 << (high >> _TIME_BITS))
    time_ms = (high & _TIME_MASK) << 32 | low
    return Stored(position, size, ordinal, partition, key_code, time_ms, message_end, acknowledged)


class _Heads(NamedTuple):
    """Headers of records, and whether they are plausible."""

    starts: Numbers
    ends: Numbers
    """Ends of the messages."""
    sums: Numbers
    ordinals: Numbers
    can_be: npt.NDArray[np.bool_]


def _heads(buffer: bytes | memoryview, positions: Numbers) -> _Heads:
    """The headers of the records at ``positions``, read at once. The buffer has room for a record at each."""
    readable = positions + _MIN_SIZE <= len(buffer)
    at = np.where(readable, positions, 0)
    anywhere = np.ndarray((len(buffer) - _HEAD.itemsize + 1,), _HEAD, buffer, strides=(1,))
    heads = anywhere[at]
    lengths = heads["length"].astype(np.int64)
    sizes = lengths & _SIZE_MASK
    ends = at + sizes - (lengths >> _SIZE_BITS)
    can_be = readable & (sizes >= _MIN_SIZE) & (at + sizes <= len(buffer)) & (ends > at + HEADER_BYTES)
    return _Heads(at, ends, heads["sum"].astype(np.int64), heads["ordinal"].astype(np.int64), can_be)


def messages_at(buffer: bytes, positions: Numbers, ordinals: Sequence[int], places: Numbers) -> list[bytes | None]:
    """Encoded messages of the records at ``positions``; None without a complete record of ordinal ``ordinals[k]``.

    ``places`` are their data offsets. Equivalent to :func:`find_record` for each, but faster: consumers of old data
    need it.
    """
    if len(buffer) < _MIN_SIZE:
        return [None] * len(positions)
    heads = _heads(buffer, positions)
    whole = heads.can_be & (heads.ordinals == np.asarray(ordinals, np.int64))
    seeds = (places & 0xFFFFFFFF).tolist()
    columns = (heads.starts.tolist(), heads.ends.tolist(), heads.sums.tolist(), seeds, whole.tolist())
    view = memoryview(buffer)
    return [
        buffer[start + HEADER_BYTES : end] if good and crc32(view[start + 4 : end], seed) == crc else None
        for start, end, crc, seed, good in zip(*columns, strict=True)
    ]


def intact(records: bytes | memoryview, sizes: Numbers, places: Numbers) -> tuple[Numbers, Numbers] | None:
    """Start and end of each encoded message in ``records``, one after the other; None if a record is not intact.

    ``places`` are the data offsets of the records: a complete record that belongs elsewhere is not accepted.
    """
    if not len(sizes) or int(sizes.min()) < _MIN_SIZE or int(sizes.sum()) != len(records):
        return None
    heads = _heads(records, np.cumsum(sizes) - sizes)
    if not heads.can_be.all():
        return None
    view = memoryview(records)
    seeds = (places & 0xFFFFFFFF).tolist()
    columns = ((heads.starts + 4).tolist(), heads.ends.tolist(), seeds)
    found = [crc32(view[start:end], seed) for start, end, seed in zip(*columns, strict=True)]
    return (heads.starts + HEADER_BYTES, heads.ends) if found == heads.sums.tolist() else None


def scan(buffer: bytes, data_start: int) -> Iterator[Stored]:
    """Find every complete record of a segment file, in order.

    After damage it continues with the next complete record; the caller sees the gap in positions and ordinals.
    """
    position = 0
    expected = 0
    while True:
        found = find_record(buffer, position, data_start)
        if found is None or found.ordinal < expected:
            found = _next_whole(buffer, position + 1, data_start, expected)
            if found is None:
                return
        yield found
        position = found.position + found.size
        expected = found.ordinal + 1


def _next_whole(buffer: bytes, position: int, data_start: int, expected: int) -> Stored | None:
    # A message starts with tag 0x22, a length of one to four bytes and tag 0x08: the regular expression engine finds
    # that quickly, and the CRC decides. Runs of zeros (a tail filled in advance) contain none.
    for match in _MESSAGE_START.finditer(buffer, position + HEADER_BYTES):
        found = find_record(buffer, match.start() - HEADER_BYTES, data_start)
        if found is not None and found.ordinal >= expected:
            return found
    return None
