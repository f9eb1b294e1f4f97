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
offsets and sizes in index records and on the wire, which use the reference's sizes, are also the physical ones. Only a
message whose flag is outside 0..127 (no known client sends one) may need more than 52 + payload; its index record then
contains the actual size.

From the number of unacknowledged messages (rounded up to a power of two) recovery classifies a hole before a complete
record: as damage if the messages in the hole were acknowledged when the record was written, otherwise as part of an
interrupted commit.

The CRC starts with the record's data offset, so a record copied elsewhere (inside a payload, by a misdirected write,
left in a reused block) is not valid at its new offset.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from librt.strings import read_i32_be, read_i64_le
from mypy_extensions import i64

from penstock.tube.codec.range_columns import LEAST_BYTES, Columns, MessageDecoder, decode_columns
from penstock.tube.codec.strings import PARTITIONS_PER_STORE
from penstock.tube.codec.varint import RisingVarints, encode_varint

__all__ = [
    "HEADER_BYTES",
    "REFERENCE_OVERHEAD",
    "EncodedRun",
    "StoredRecord",
    "decode_records",
    "decode_records_bytewise",
    "encode_run",
    "find_record",
    "messages_at",
    "messages_joined",
    "scan",
]

HEADER_BYTES: Final = 24
REFERENCE_OVERHEAD: Final = 52
"""Bytes of the reference's data record in addition to the payload."""

_HEADER = struct.Struct(">IIIHiHI")
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">H")
_UNSIGNED: Final = struct.Struct(">I")
_UNSIGNED_LONG: Final = struct.Struct(">Q")
_FIXED: Final = struct.Struct(">HiHI")
"""Partition, key, upper and lower part of the time in a header."""
_KEY_AND_TIME: Final = struct.Struct(">iq")
"""Key and time in an index record."""
_SIZE_BITS: Final = 26
_SIZE_MASK: Final = (1 << _SIZE_BITS) - 1
_MIN_SIZE: Final = REFERENCE_OVERHEAD
_TIME_BITS: Final = 11  # of the upper two bytes
_TIME_MASK = (1 << _TIME_BITS) - 1
_PADDING: Final = [bytes(n) for n in range(64)]
_BYTES: Final = [bytes((n,)) for n in range(256)]
_POLYNOMIAL: Final = 0xEDB88320


def _crc_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_CRC_TABLE: Final = b"".join([_crc_entry(value).to_bytes(4, "big") for value in range(256)])
"""Table of the CRC-32 of each byte, in zlib's bit order, four bytes each, the fastest form for compiled code."""
_SHIFTS: Final[dict[int, int]] = {}
"""Results of `_shift_of`, by size."""
_SHIFTS_KEPT: Final = 16_384
_CRC_BYTES: Final = 64 << 10
"""Bytes whose CRC-32 is computed before their records are decoded, so that they are still in the processor's cache."""
_ALIKE: Final = 8
"""Minimum messages of one size that are copied with one call."""
COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled. Compiled code loops over bytes; interpreted code uses zlib."""
_HEAD = np.dtype([("sum", ">u4"), ("length", ">u4"), ("ordinal", ">u4")])
"""The beginning of a header."""
Numbers: TypeAlias = npt.NDArray[np.int64]

_MESSAGE_START = re.compile(rb"\x22[\x80-\xff]{0,3}[\x00-\x7f]\x08", re.DOTALL)


class EncodedRun:
    """Encoded messages of one partition, and their consecutive records."""

    __slots__ = ("entries", "messages", "parts", "size", "sizes")

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        """Messages as fields 4 (TransferedMessage) of a get response, tag and length included."""
        self.parts: list[bytes] = []
        """Header, message and padding of each record, in the order of writing."""
        self.sizes: list[int] = []
        """Sizes of the records."""
        self.size = 0
        """Sum of the sizes."""
        self.entries = b""
        """The index records."""


def encode_run(
    datas: list[bytes],
    sums: list[int],
    flags: list[int],
    keys: list[int],
    first: i64,
    message_id: i64,
    marker: bytes,
    position: i64,
    ordinal: i64,
    last_byte: i64,
    last_ordinal: i64,
    partition_id: int,
    time_ms: int,
    unacknowledged: i64,
    immediate: bool,  # noqa: FBT001 - positional on the hot path
) -> EncodedRun:
    """Encode messages from index ``first`` of the lists on, as records from data offset ``position`` on.

    The run ends before data offset ``last_byte`` or ordinal ``last_ordinal``. ``sums`` are CRC-32 of ``datas``. Message
    ids rise by one from ``message_id``; ``marker``, from `codec.message.encode_marker`, belongs to the first message.
    ``unacknowledged`` is the value of the first record; it is incremented for each following one, or 0 for them if
    messages are readable at once (``immediate``). ``partition_id`` is the wire id; a record contains the partition
    within its store.
    """
    run = EncodedRun()
    messages, parts, sizes = run.messages, run.parts, run.sizes
    entries: list[bytes] = []
    numbers = RisingVarints()
    begin = position
    partition = partition_id % PARTITIONS_PER_STORE
    entry_partition = _INT.pack(partition_id)
    high_time, low_time = time_ms >> 32, time_ms & 0xFFFFFFFF
    # Consecutive messages are usually similar: bytes equal to those of the previous message are not encoded again.
    data_size: i64 = -1
    last_flag, last_key = 0, 0
    last_inner: i64 = -1
    record_size: i64 = -1
    shift: i64 = 0
    around: i64 = 0
    head = length = tail = size_of_record = size_in_entry = fixed = key_and_time = b""
    ordinal_high = position_high = b""
    last_ordinal_high: i64 = -1
    last_position_high: i64 = -1
    bits: i64 = 0
    power: i64 = 1  # 1 << bits
    last_bits: i64 = -1
    last_padding: i64 = -1
    at = first
    count: i64 = len(datas)
    while at < count and position < last_byte and ordinal < last_ordinal:
        data, flag, key = datas[at], flags[at], keys[at]
        total: i64 = sums[at]
        size: i64 = len(data)
        if size != data_size or flag != last_flag or at <= first + 1:
            data_size, last_flag = size, flag
            length = b"\x1a" + encode_varint(size)
            tail = b"\x20%b%b" % (encode_varint(flag), marker)
            marker = b""
            around = len(length) + size + len(tail) + 2
            if COMPILED:
                shift = _shift_of(size)
        number = numbers.encode(message_id)
        checksum = encode_varint(total & 0x7FFFFFFF)
        inner = around + len(number) + len(checksum)
        if inner != last_inner:
            last_inner = inner
            head = b"\x22%b\x08" % encode_varint(inner)
        message = b"%b%b\x10%b%b%b%b" % (head, number, checksum, length, data, tail)

        used: i64 = HEADER_BYTES + len(message)
        size = REFERENCE_OVERHEAD + size
        padding = size - used
        if padding < 0:
            size, padding = used, 0
        if size != record_size or padding != last_padding:
            record_size, last_padding = size, padding
            size_in_entry = _INT.pack(size)
            size_of_record = _UNSIGNED.pack(padding << _SIZE_BITS | size)
        while unacknowledged >= power:
            bits += 1
            power += power
        if key != last_key or bits != last_bits:
            last_key, last_bits = key, bits
            fixed = _FIXED.pack(partition, key, bits << _TIME_BITS | high_time, low_time)
            key_and_time = _KEY_AND_TIME.pack(key, time_ms)
        if ordinal >> 16 != last_ordinal_high:
            last_ordinal_high = ordinal >> 16
            ordinal_high = _SHORT.pack(last_ordinal_high)
        rest = b"%b%b%b%b%b" % (
            size_of_record, ordinal_high, _BYTES[ordinal >> 8 & 0xFF], _BYTES[ordinal & 0xFF], fixed
        )  # fmt: skip
        if COMPILED:
            crc = _record_sum(rest, message, position & 0xFFFFFFFF, len(tail), data_size, shift, total)
        else:
            crc = crc32(message, crc32(rest, position & 0xFFFFFFFF))
        messages.append(message)
        parts.append(
            b"%b%b%b%b%b"
            % (_BYTES[crc >> 24], _BYTES[crc >> 16 & 0xFF], _BYTES[crc >> 8 & 0xFF], _BYTES[crc & 0xFF], rest)
        )
        parts.append(message)
        parts.append(_PADDING[padding])
        sizes.append(size)
        if position >> 16 != last_position_high:
            last_position_high = position >> 16
            position_high = _UNSIGNED_LONG.pack(last_position_high)[2:]
        entries.append(
            b"%b%b%b%b%b%b"
            % (
                entry_partition,
                position_high,
                _BYTES[position >> 8 & 0xFF],
                _BYTES[position & 0xFF],
                size_in_entry,
                key_and_time,
            )
        )
        position += size
        ordinal += 1
        message_id += 1
        at += 1
        if immediate:
            unacknowledged = 0
            bits = 0
            power = 1
        else:
            unacknowledged += 1
    run.size = position - begin
    run.entries = b"".join(entries)
    return run


def _record_sum(
    rest: bytes, message: bytes, seed: i64, tail_size: i64, data_size: i64, shift: i64, data_sum: i64
) -> i64:
    """Return the CRC-32, started with ``seed``, of a record: the ``rest`` of its header, and ``message``.

    The data of the message are not read again: their CRC ``data_sum`` is combined with the CRC of the bytes before, as
    ``crc32_combine`` of zlib does. ``shift`` is `_shift_of` of the size of the data.
    """
    size: i64 = len(message)
    crc = _add_bytes(seed, rest, 0, len(rest))
    crc = _add_bytes(crc, message, 0, size - tail_size - data_size)
    crc = _product(shift, crc) ^ data_sum
    return _add_bytes(crc, message, size - tail_size, size)


def _add_bytes(crc: i64, data: bytes, start: i64, end: i64) -> i64:
    """``crc32(data[start:end], crc)``."""
    crc ^= 0xFFFFFFFF
    for at in range(start, end):
        crc = _table(crc ^ data[at]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table(value: i64) -> i64:
    return i64(read_i32_be(_CRC_TABLE, (value & 0xFF) << 2)) & 0xFFFFFFFF


def _product(a: i64, b: i64) -> i64:
    """Return the product of two polynomials modulo the polynomial of CRC-32; the highest bit is the coefficient of
    x^0."""
    product: i64 = 0
    shift: i64 = 31
    while shift >= 0:
        # Without branches: a processor cannot predict bits of a CRC.
        product ^= b & -(a >> shift & 1)
        b = b >> 1 ^ _POLYNOMIAL & -(b & 1)
        shift -= 1
    return product


def _shift_of(size: i64) -> i64:
    """Return x^(8 * ``size``): multiplying a CRC by it appends ``size`` zero bytes."""
    known = _SHIFTS.get(size)
    if known is not None:
        return known
    product: i64 = 0x80000000
    square: i64 = 0x00800000
    left = size
    while left:
        if left & 1:
            product = _product(square, product)
        square = _product(square, square)
        left >>= 1
    if len(_SHIFTS) >= _SHIFTS_KEPT:
        _SHIFTS.clear()
    _SHIFTS[size] = product
    return product


class StoredRecord(NamedTuple):
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
    """Ordinal below which messages were acknowledged when this record was written."""


def find_record(buffer: bytes, position: int, data_start: int) -> StoredRecord | None:
    """Return the record at ``position`` of a segment that starts at data offset ``data_start``; None if it is
    incomplete."""
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
    return StoredRecord(position, size, ordinal, partition, key_code, time_ms, message_end, acknowledged)


class _Headers(NamedTuple):
    """Headers of records, and flags that show whether they are plausible."""

    starts: Numbers
    ends: Numbers
    """Ends of the messages."""
    sums: Numbers
    ordinals: Numbers
    can_be: npt.NDArray[np.bool_]


def _heads(buffer: bytes | memoryview, positions: Numbers) -> _Headers:
    """Return the headers of the records at ``positions``, read together. The buffer has room for a record at each
    position."""
    readable = positions + _MIN_SIZE <= len(buffer)
    at = np.where(readable, positions, 0)
    anywhere = np.ndarray((len(buffer) - _HEAD.itemsize + 1,), _HEAD, buffer, strides=(1,))
    heads = anywhere[at]
    lengths = heads["length"].astype(np.int64)
    sizes = lengths & _SIZE_MASK
    ends = at + sizes - (lengths >> _SIZE_BITS)
    can_be = readable & (sizes >= _MIN_SIZE) & (at + sizes <= len(buffer)) & (ends > at + HEADER_BYTES)
    return _Headers(at, ends, heads["sum"].astype(np.int64), heads["ordinal"].astype(np.int64), can_be)


def messages_at(buffer: bytes, positions: Numbers, ordinals: Sequence[int], places: Numbers) -> list[bytes | None]:
    """Return the encoded messages of the records at ``positions``; None instead of a message if the record is
    incomplete or has another ordinal than ``ordinals[k]``.

    ``places`` are their data offsets. Equivalent to :func:`find_record` for each, but faster, for consumers of old
    data.
    """
    if COMPILED:
        return _messages_bytewise(buffer, positions.tolist(), list(ordinals), (places & 0xFFFFFFFF).tolist())
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


def _messages_bytewise(
    buffer: bytes, positions: list[int], ordinals: list[int], seeds: list[int]
) -> list[bytes | None]:
    """Like :func:`messages_at`, but reads the headers byte by byte."""
    out: list[bytes | None] = []
    available: i64 = len(buffer)
    at: i64 = 0
    count: i64 = len(positions)
    while at < count:
        message: bytes | None = None
        start: i64 = positions[at]
        if start + _MIN_SIZE <= available:
            length = _number(buffer, start + 4)
            size = length & _SIZE_MASK
            end = start + size - (length >> _SIZE_BITS)
            ordinal: i64 = ordinals[at]
            if (
                size >= _MIN_SIZE
                and start + size <= available
                and end > start + HEADER_BYTES
                and _number(buffer, start + 8) == ordinal
            ):
                message = buffer[start + HEADER_BYTES : end]
                crc: i64 = crc32(message, crc32(buffer[start + 4 : start + HEADER_BYTES], seeds[at]))
                if crc != _number(buffer, start):
                    message = None
        out.append(message)
        at += 1
    return out


def messages_joined(buffer: bytes, positions: list[int], ordinals: list[int], seeds: list[int]) -> bytes | None:
    """Join what :func:`messages_at` returns; None if a record is not complete. ``seeds``: 32 bits of data offsets.

    Adjacent records are verified together: the CRC-32 of all their bytes is compared with the combination of their
    stored sums, as in `_record_sum`. It detects the same damage as comparing each record, at half of the cost for small
    messages. Adjacent messages of one size are copied together. Used in the compiled form only, because it loops over
    bytes.
    """
    parts: list[bytes | memoryview] = []
    view = memoryview(buffer)
    available: i64 = len(buffer)
    count: i64 = len(positions)
    # Start, end and CRC-32 of a sequence of adjacent records.
    first: i64 = 0
    end: i64 = -1
    crc: i64 = 0
    # The last records of this sequence with the same size: their number, the start of the first, the size of each, and
    # the end of its message.
    alike: i64 = 0
    alike_start: i64 = 0
    alike_size: i64 = 0
    alike_end: i64 = 0
    shift: i64 = 0
    for at in range(count):
        start: i64 = positions[at]
        ordinal: i64 = ordinals[at]
        if start + _MIN_SIZE > available or _number(buffer, start + 8) != ordinal:
            return None
        length = _number(buffer, start + 4)
        size = length & _SIZE_MASK
        message_end = size - (length >> _SIZE_BITS)
        if size < _MIN_SIZE or start + size > available or message_end <= HEADER_BYTES:
            return None
        if start != end:
            if end >= 0 and crc32(view[first:end]) != crc:
                return None
            first, crc = start, 0
        if start != end or size != alike_size or message_end != alike_end:
            _add_equal_sized(parts, view, alike_start, alike_size, alike_end, alike)
            alike, alike_start, alike_size, alike_end = 0, start, size, message_end
            shift = _shift_of(message_end - 4)
        alike += 1
        end = start + size
        crc = _append_sum(crc, _number(buffer, start), seeds[at], shift, size - message_end)
    if end >= 0 and crc32(view[first:end]) != crc:
        return None
    _add_equal_sized(parts, view, alike_start, alike_size, alike_end, alike)
    return b"".join(parts)


def _add_equal_sized(
    parts: list[bytes | memoryview], view: memoryview, start: i64, size: i64, message_end: i64, count: i64
) -> None:
    """Add the messages of ``count`` adjacent records of ``size`` bytes, each of which ends at ``message_end``."""
    if count < _ALIKE:
        for _ in range(count):
            parts.append(view[start + HEADER_BYTES : start + message_end])
            start += size
    else:
        rows = np.frombuffer(view, np.uint8, count * size, start).reshape(count, size)
        parts.append(rows[:, HEADER_BYTES:message_end].tobytes())


def _append_sum(crc: i64, record_sum: i64, seed: i64, shift: i64, padding: i64) -> i64:
    """Return the CRC-32 of bytes with sum ``crc`` followed by a complete record with sum ``record_sum``.

    ``record_sum`` started with ``seed``; ``shift`` is `_shift_of` of the bytes that it covers, which ``padding`` zeros
    follow.
    """
    crc ^= 0xFFFFFFFF
    crc = _table(crc ^ record_sum >> 24) ^ crc >> 8
    crc = _table(crc ^ record_sum >> 16) ^ crc >> 8
    crc = _table(crc ^ record_sum >> 8) ^ crc >> 8
    crc = _table(crc ^ record_sum) ^ crc >> 8
    crc = _product(shift, crc ^ 0xFFFFFFFF ^ seed) ^ record_sum ^ 0xFFFFFFFF
    for _ in range(padding):
        crc = _table(crc) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _number(data: bytes, at: i64) -> i64:
    """The unsigned number of 32 bits at ``at``."""
    return i64(read_i32_be(data, at)) & 0xFFFFFFFF


def decode_records(answer: bytes, start: int, sizes: Numbers, places: Numbers) -> Columns | None:
    """Decode the messages of the adjacent records in ``answer`` from ``start``.

    None if a record is not intact, or a message has another form than that of :func:`decode_columns`. ``sizes`` and
    ``places`` are sizes and data offsets of the records: a complete record of another data offset is not accepted.
    """
    if not len(sizes) or int(sizes.min()) < _MIN_SIZE or int(sizes.sum()) != len(answer) - start:
        return None
    if COMPILED:
        found = decode_records_bytewise(answer, start, sizes.astype("<i8").tobytes(), places.astype("<i8").tobytes())
        if found is not None:
            return found
        # If the sum of all bytes differs, the damage may be between the messages.
    heads = _heads(answer, start + np.cumsum(sizes) - sizes)
    if not heads.can_be.all():
        return None
    view = memoryview(answer)
    columns = ((heads.starts + 4).tolist(), heads.ends.tolist(), (places & 0xFFFFFFFF).tolist())
    if heads.sums.tolist() != [crc32(view[begin:end], seed) for begin, end, seed in zip(*columns, strict=True)]:
        return None
    return decode_columns(answer, heads.starts + HEADER_BYTES, heads.ends)


def decode_records_bytewise(answer: bytes, start: i64, sizes: bytes, places: bytes) -> Columns | None:
    """Like :func:`decode_records`, with a loop over bytes; also None if padding is not zero.

    One CRC-32 of all bytes is compared with the combination of the records' sums; see `_append_sum`. ``sizes`` (52 or
    more, up to the end of ``answer``) and ``places`` are encoded.
    """
    view = memoryview(answer)
    available: i64 = len(answer)
    decoder = MessageDecoder()
    count: i64 = len(sizes)
    place: i64 = 0
    at = start
    crc: i64 = 0  # CRC of the records, combined from their own sums
    whole: i64 = 0  # CRC of the bytes before `read`
    read = start
    last: i64 = -1
    shift: i64 = 0
    while place < count:
        size = read_i64_le(sizes, place)
        if at + size > read:
            stop = min(at + max(size, _CRC_BYTES), available)
            whole = crc32(view[read:stop], whole)
            read = stop
        length = _number(answer, at + 4)
        message_end = size - (length >> _SIZE_BITS)
        if length & _SIZE_MASK != size or message_end < HEADER_BYTES + LEAST_BYTES:
            return None
        if message_end != last:
            last, shift = message_end, _shift_of(message_end - 4)
        seed = read_i64_le(places, place) & 0xFFFFFFFF
        crc = _append_sum(crc, _number(answer, at), seed, shift, size - message_end)
        if not decoder.add(answer, at + HEADER_BYTES, at + message_end):
            return None
        at += size
        place += 8
    return decoder.columns() if crc == whole else None


def scan(buffer: bytes, data_start: int) -> Iterator[StoredRecord]:
    """Find every complete record of a segment file, in order.

    After damage it continues with the next complete record, which leaves a gap in positions and ordinals.
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


def _next_whole(buffer: bytes, position: int, data_start: int, expected: int) -> StoredRecord | None:
    # A message starts with tag 0x22, a length of one to four bytes and tag 0x08: the regular expression engine finds
    # that quickly, and the CRC determines whether it is a record. Zeros (a tail filled in advance) contain no match.
    for match in _MESSAGE_START.finditer(buffer, position + HEADER_BYTES):
        found = find_record(buffer, match.start() - HEADER_BYTES, data_start)
        if found is not None and found.ordinal >= expected:
            return found
    return None
