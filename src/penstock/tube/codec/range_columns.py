"""Columns of a range response: offsets, times and positions of all messages, decoded together.

A get response contains each message as field 4 (`storage.record` writes it). If their metadata are in columns
(``range.columns``, from :func:`describe`), the numbers before the payloads are decoded as columns too, and one checksum
covers everything: decoding each message separately would cost more than all other work of a batch reader. Messages in
any other form than that of penstock's brokers are decoded with protobuf.

Instead of messages a response may contain unverified records of the log's file (``asStored``): the client verifies each
record by its stored checksum, and the broker does not read their contents.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from librt.strings import BytesWriter, read_i64_le, write_i64_le

from penstock.tube.codec.proto.broker_pb2 import RangeColumns
from penstock.tube.codec.varint import decode_varint, encode_varint

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "LEAST_BYTES",
    "Columns",
    "MessageDecoder",
    "Numbers",
    "decode_columns",
    "describe",
    "describe_records",
    "ids_of",
    "messages_start",
    "numbers_of",
    "positions_of",
    "records_head",
    "records_start",
    "sums_of",
]

COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled. Compiled code loops over bytes; interpreted code uses numpy."""
_MESSAGES: Final = 0x22
_ID: Final = 0x08
_CHECKSUM: Final = 0x10
_PAYLOAD: Final = 0x1A
_FLAG: Final = 0x20
_MARKER_1: Final = 0xC0
_MARKER_2: Final = 0x3E
"""The tag of field 1000, the only one after the flag (`message.encode_marker`)."""
_RECORDS: Final = b"\xca\x3e"
"""The tag of field 1001 of a get response."""
_LENGTH_DELIMITED: Final = 2
_ID_BYTES: Final = 10
"""Maximum bytes of the varints of ids and checksums."""
_SUM_BYTES: Final = 5
_LENGTH_BYTES: Final = 4
"""Limit of payload sizes: 256 MiB."""
LEAST_BYTES: Final = 10
"""Minimum bytes of a message."""

Numbers: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Octets: TypeAlias = npt.NDArray[np.uint8]
Booleans: TypeAlias = npt.NDArray[np.bool_]

_ONE, _THREE, _SEVEN, _FIFTY_SIX = (np.uint64(n) for n in (1, 3, 7, 56))
_HIGH_BITS = np.uint64(0x8080808080808080)
_BYTE_NUMBERS = np.uint64(0x0001020304050607)
"""Multiplier that maps a word with only bit 8k set to k in the highest byte."""
_GROUPS = [np.uint64(0x7F << 7 * number) for number in range(5)]
"""Masks of the 7-bit groups of a varint after removing the continuation bits."""


class Columns(NamedTuple):
    """Positions of the payloads, ``[start, end)`` in the response, and the flags of all messages.

    ``ids`` and ``sums``: positions of the varints of its id and checksum, for :func:`ids_of` and :func:`sums_of`.
    """

    starts: Numbers
    ends: Numbers
    flags: Octets
    ids: Numbers
    sums: Numbers


def describe(joined: bytes, sizes: Iterable[int], offsets: Sequence[int], times: Sequence[int]) -> RangeColumns:
    """Create ``range.columns`` for the encoded fields 4 in ``joined``, of ``sizes`` bytes each."""
    count = len(offsets)
    return RangeColumns(
        offsets=struct.pack(f"<{count}q", *offsets),
        appendTimes=struct.pack(f"<{count}q", *times),
        messageBytes=struct.pack(f"<{count}i", *sizes),
        checkSum=crc32(joined),
    )


def describe_records(offsets: Numbers, times: Numbers, positions: Numbers, sizes: Numbers) -> RangeColumns:
    """Create ``range.columns`` for records, whose data offsets are ``positions``."""
    return RangeColumns(
        offsets=offsets.astype("<i8").tobytes(),
        appendTimes=times.astype("<i8").tobytes(),
        messageBytes=sizes.astype("<i4").tobytes(),
        positions=positions.astype("<i8").tobytes(),
    )


def records_head(size: int) -> bytes:
    """Return the encoded get response up to records of ``size`` bytes."""
    return _RECORDS + encode_varint(size)


def records_start(answer: bytes, position: int) -> int | None:
    """Return the start of the records whose field begins at ``position`` and ends the response; None if there are
    none."""
    if not answer.startswith(_RECORDS, position):
        return None
    size, start = decode_varint(answer, position + len(_RECORDS))
    return start if start + size == len(answer) else None


def positions_of(columns: RangeColumns) -> Numbers | None:
    """Decode data offsets of records; None if their number differs from the other columns."""
    if 2 * len(columns.messageBytes) != len(columns.positions):
        return None
    return np.frombuffer(columns.positions, "<i8")


def numbers_of(columns: RangeColumns) -> tuple[Numbers, Numbers, Numbers] | None:
    """Decode offsets, append times and sizes in ``columns``; None if their numbers differ."""
    texts = (columns.offsets, columns.appendTimes, columns.messageBytes)
    count = len(texts[2]) // 4
    if [len(text) for text in texts] != [8 * count, 8 * count, 4 * count]:
        return None
    return np.frombuffer(texts[0], "<i8"), np.frombuffer(texts[1], "<i8"), np.frombuffer(texts[2], "<i4").astype("i8")


def messages_start(answer: bytes) -> int:
    """Return the start of the first message of an encoded get response, or of the field of its records.

    Returns the end of the response if it has neither, or cannot be parsed.
    """
    position, end = 0, len(answer)
    while position < end:
        tag = answer[position]
        if tag == _MESSAGES or answer.startswith(_RECORDS, position):
            return position
        position += 1
        if tag >= 0x80:  # a field number above 15: the tag has another byte
            while position < end and answer[position] >= 0x80:
                position += 1
            position += 1
        value = shift = 0
        while position < end:
            byte = answer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if tag & 7 == _LENGTH_DELIMITED:
            position += value
        elif tag & 7:
            return end
    return end


def decode_columns(answer: bytes, begins: Numbers, ends: Numbers) -> Columns | None:
    """Decode messages at ``[begins[k], ends[k])`` of a get response, in ascending order; None if they have another
    form."""
    if not len(begins) or int((ends - begins).min()) < LEAST_BYTES or int(ends[-1]) > len(answer):
        return None
    if COMPILED:
        return _decode_columns_bytewise(answer, begins.astype("<i8").tobytes(), ends.astype("<i8").tobytes())
    data = np.frombuffer(answer, np.uint8)
    start = begins[0]
    inner, after_length, ok = _varint(answer, begins + 1, _LENGTH_BYTES)
    ok &= (data[begins] == _MESSAGES) & (after_length + inner == ends)
    after_length = np.where(ok, after_length, start)  # the other values are ignored below, but must be valid
    ok &= data[after_length] == _ID
    after_id, whole = _skip(answer, after_length + 1)
    ok &= whole & (_at(data, after_id) == _CHECKSUM)
    after_checksum, whole = _skip(answer, after_id + 1)
    ok &= whole & (_at(data, after_checksum) == _PAYLOAD)
    payload, payload_start, whole = _varint(answer, after_checksum + 1, _LENGTH_BYTES)
    payload_end = payload_start + payload
    left = ends - payload_end - 2
    flags = _at(data, payload_end + 1)
    ok &= whole & (_at(data, payload_end) == _FLAG) & (flags < 0x80) & (left >= 0)
    marked = np.flatnonzero(left)
    if len(marked):
        behind = payload_end[marked] + 2
        ok[marked] &= (_at(data, behind) == _MARKER_1) & (_at(data, behind + 1) == _MARKER_2)
    if not ok.all():
        return None
    return Columns(payload_start, payload_end, flags, after_length + 1, after_id + 1)


class MessageDecoder:
    """Decodes messages one by one, with a loop over bytes; interpreted, :func:`decode_columns` uses numpy."""

    __slots__ = ("_ends", "_flags", "_ids", "_starts", "_sums")

    def __init__(self) -> None:
        self._starts = BytesWriter()
        self._ends = BytesWriter()
        self._flags = BytesWriter()
        self._ids = BytesWriter()
        self._sums = BytesWriter()

    def add(self, answer: bytes, begin: i64, end: i64) -> bool:
        """Decode the message at ``[begin, end)``, 10 bytes or more; False if it has another form."""
        length, id_tag = _length_at(answer, begin + 1, end)
        if answer[begin] != _MESSAGES or id_tag + length != end or answer[id_tag] != _ID:
            return False
        sum_tag = _after_varint(answer, id_tag + 1, end)
        if sum_tag == end or answer[sum_tag] != _CHECKSUM:
            return False
        payload_tag = _after_varint(answer, sum_tag + 1, end)
        if payload_tag == end or answer[payload_tag] != _PAYLOAD:
            return False
        length, start = _length_at(answer, payload_tag + 1, end)
        stop = start + length
        left = end - stop - 2
        if left < 0 or answer[stop] != _FLAG or answer[stop + 1] >= 0x80:
            return False
        if left and (left == 1 or answer[stop + 2] != _MARKER_1 or answer[stop + 3] != _MARKER_2):
            return False
        write_i64_le(self._starts, start)
        write_i64_le(self._ends, stop)
        self._flags.append(answer[stop + 1])
        write_i64_le(self._ids, id_tag + 1)
        write_i64_le(self._sums, sum_tag + 1)
        return True

    def columns(self) -> Columns:
        """The columns of the messages so far."""
        return Columns(
            np.frombuffer(self._starts.getvalue(), "<i8"),
            np.frombuffer(self._ends.getvalue(), "<i8"),
            np.frombuffer(self._flags.getvalue(), np.uint8),
            np.frombuffer(self._ids.getvalue(), "<i8"),
            np.frombuffer(self._sums.getvalue(), "<i8"),
        )


def _decode_columns_bytewise(answer: bytes, begins: bytes, ends: bytes) -> Columns | None:
    """Like :func:`decode_columns`, with encoded positions."""
    decoder = MessageDecoder()
    count: i64 = len(begins)
    at: i64 = 0
    while at < count:
        if not decoder.add(answer, read_i64_le(begins, at), read_i64_le(ends, at)):
            return None
        at += 8
    return decoder.columns()


def _length_at(answer: bytes, at: i64, end: i64) -> tuple[i64, i64]:
    """Decode the varint of up to four bytes at ``at``; return its value and end, an end beyond ``end`` if it is
    incomplete."""
    value: i64 = 0
    shift: i64 = 0
    last = min(at + _LENGTH_BYTES, end)
    while at < last:
        byte: i64 = answer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end + 1


def _after_varint(answer: bytes, at: i64, end: i64) -> i64:
    """Return the end of the varint of up to ten bytes at ``at``; ``end`` if it is incomplete."""
    last = min(at + _ID_BYTES, end)
    while at < last:
        byte: i64 = answer[at]
        at += 1
        if byte < 0x80:
            return at
    return end


def sums_of(answer: bytes, columns: Columns) -> Numbers:
    """Decode the checksums of the messages that :func:`decode_columns` found in ``answer``."""
    return _varint(answer, columns.sums, _SUM_BYTES)[0]


def ids_of(answer: bytes, columns: Columns) -> list[int]:
    """Decode the ids of the messages that :func:`decode_columns` found in ``answer``; slow, because few clients need
    them."""
    found = (decode_varint(answer, position)[0] for position in columns.ids.tolist())
    return [number - (1 << 64) if number >> 63 else number for number in found]


def _at(data: Octets, positions: Numbers) -> Octets:
    return data[np.minimum(positions, len(data) - 1)]


def _words(answer: bytes, positions: Numbers) -> Words:
    """Return the little-endian words at ``positions``; bytes beyond the end are 0."""
    last = len(answer) - 8
    words: Words = np.ndarray((last + 1,), "<u8", answer, strides=(1,))
    if int(positions.max()) <= last:
        return words[positions]
    held = np.minimum(positions, last)
    beyond = np.minimum(positions - held, 7).astype(np.uint64)
    return words[held] >> (beyond << _THREE)


def _last_byte(words: Words) -> tuple[Words, Words]:
    """The bit that ends the varint at the start of each word (0: none in 8 bytes), and the index of its byte."""
    stops = ~words & _HIGH_BITS
    bit = stops & (~stops + _ONE)
    return bit, ((bit >> _SEVEN) * _BYTE_NUMBERS) >> _FIFTY_SIX


def _varint(answer: bytes, positions: Numbers, most: int) -> tuple[Numbers, Numbers, Booleans]:
    """Decode varints at ``positions``; return values, ends, and whether they end within ``most`` bytes (up to 5)."""
    words = _words(answer, positions)
    bit, last = _last_byte(words)
    words &= (bit << _ONE) - _ONE
    values = words & _GROUPS[0]
    for number in range(1, min(most, int(last.max()) + 1)):
        values |= (words >> np.uint64(number)) & _GROUPS[number]
    return values.astype(np.int64), positions + last.astype(np.int64) + 1, (bit != 0) & (last < most)


def _skip(answer: bytes, positions: Numbers) -> tuple[Numbers, Booleans]:
    """Return the ends of the varints at ``positions`` (up to 10 bytes), and whether they are complete."""
    bit, last = _last_byte(_words(answer, positions))
    steps = last.astype(np.int64) + 1
    whole = bit != 0
    if not whole.all():
        bit, last = _last_byte(_words(answer, positions + 8))
        steps = np.where(whole, steps, last.astype(np.int64) + 9)
        whole |= (bit != 0) & (last < _ID_BYTES - 8)
    return positions + steps, whole
