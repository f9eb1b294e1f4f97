"""The messages of a range answer, taken apart all at once.

A get response holds each message as field 4 (`message.encode_stored` writes it). Where the size of each is known
(``range.messageBytes``), the numbers before the payloads are decoded as columns: a step per message costs more than
everything else that a batch reader does. Whatever does not look exactly as our brokers write it is left to the protobuf
parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

__all__ = ["Columns", "messages_start", "take_apart"]

_MESSAGES, _ID, _CHECKSUM, _PAYLOAD, _FLAG = 0x22, 0x08, 0x10, 0x1A, 0x20
_LENGTH_DELIMITED = 2
_ID_BYTES, _CHECKSUM_BYTES, _LENGTH_BYTES = 10, 5, 4
"""Most bytes of the varints; payloads of 256 MiB and more do not occur."""
_LEAST_BYTES = 10

Numbers = npt.NDArray[np.int64]


class Columns(NamedTuple):
    """Where the payload of each message is, ``[start, end)`` in the answer, with its flag and CRC-32 (31 bits)."""

    starts: list[int]
    ends: list[int]
    flags: list[int]
    checksums: list[int]


def messages_start(answer: bytes) -> int:
    """Where the first field 4 of an encoded get response begins; its end where it has none, or is not understood."""
    position, end = 0, len(answer)
    while position < end:
        tag = answer[position]
        if tag == _MESSAGES:
            return position
        position += 1
        if tag >= 0x80:  # a field above 15: the number of the tag goes on
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


def take_apart(answer: bytes, start: int, sizes: Sequence[int]) -> Columns | None:
    """The messages at ``start`` of an encoded get response, ``sizes[k]`` bytes each; None where they are not so."""
    lengths = np.asarray(sizes, np.int64)
    if not len(lengths) or int(lengths.min()) < _LEAST_BYTES or start + int(lengths.sum()) != len(answer):
        return None
    # Room behind the end, so that a window of the longest varint may be looked at anywhere.
    data = np.frombuffer(answer + bytes(_ID_BYTES), np.uint8)
    ends = start + np.cumsum(lengths)
    begins = ends - lengths
    inner, after_length, ok = _varint(data, begins + 1, _LENGTH_BYTES)
    ok &= (data[begins] == _MESSAGES) & (after_length + inner == ends) & (data[after_length] == _ID)
    *_, after_id, whole = _window(data, np.where(ok, after_length, start) + 1, _ID_BYTES)
    ok &= whole & (data[after_id] == _CHECKSUM)
    checksums, after_checksum, whole = _varint(data, after_id + 1, _CHECKSUM_BYTES)
    ok &= whole & (data[after_checksum] == _PAYLOAD)
    payload, payload_start, whole = _varint(data, after_checksum + 1, _LENGTH_BYTES)
    payload_end = ends - 2
    ok &= whole & (payload_start + payload == payload_end)
    ok &= (data[payload_end] == _FLAG) & (data[ends - 1] < 0x80)
    if not ok.all():
        return None
    return Columns(payload_start.tolist(), payload_end.tolist(), data[ends - 1].tolist(), checksums.tolist())


def _varint(
    data: npt.NDArray[np.uint8], positions: Numbers, most: int
) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """The varints at ``positions``, where each ends, and whether it ended within ``most`` bytes."""
    window, width, after, whole = _window(data, positions, most)
    values = (window[:, 0] & 0x7F).astype(np.int64)
    for place in range(1, int(width.max()) + 1):
        part = (window[:, place] & 0x7F).astype(np.int64) << (7 * place)
        values += np.where(place <= width, part, 0)
    return values, after, whole


def _window(
    data: npt.NDArray[np.uint8], positions: Numbers, most: int
) -> tuple[npt.NDArray[np.uint8], Numbers, Numbers, npt.NDArray[np.bool_]]:
    """The bytes of the varints at ``positions``, the place of the last byte of each, where it ends, whether it does."""
    window = sliding_window_view(data, most)[np.minimum(positions, len(data) - most)]
    last = window < 0x80
    width = last.argmax(axis=1)
    return window, width, positions + width + 1, np.asarray(last.any(axis=1))
