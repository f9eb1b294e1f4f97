"""Base-128 varints, the lengths and integers of protobuf. Those below 16,384 come from a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.errors import RemoteProtocolError

__all__ = ["decode_varint", "encode_rising", "encode_sums", "encode_varint"]


def _encode(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_TABLE = [_encode(value) for value in range(16384)]
# The same 14 bits with more to follow: long numbers are put together from these, five times faster than bit by bit.
_MORE = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(16384)]


def encode_varint(value: int) -> bytes:
    """``value`` as protobuf writes an int32 or int64: negative numbers take ten bytes."""
    if 0 <= value < 16384:
        return _TABLE[value]
    if 0 <= value < 1 << 42:  # checksums, offsets and times
        if value < 1 << 28:
            return _MORE[value & 0x3FFF] + _TABLE[value >> 14]
        return _MORE[value & 0x3FFF] + _MORE[value >> 14 & 0x3FFF] + _TABLE[value >> 28]
    value &= 0xFFFFFFFFFFFFFFFF
    encoded = b""
    while value >= 16384:
        encoded += _MORE[value & 0x3FFF]
        value >>= 14
    return encoded + _TABLE[value]


_upper = lru_cache(256)(encode_varint)
"""Upper parts of rising numbers, which change seldom."""


def encode_rising(first: int, step: int, count: int) -> list[bytes]:
    """``count`` numbers from ``first`` (0 or more) on, each ``step`` higher than the one before.

    Of a long one only the lowest 14 bits change mostly.
    """
    if count == 1:
        return [_MORE[first & 0x3FFF] + _upper(first >> 14) if first >= 16384 else _TABLE[first]]
    encoded: list[bytes] = []
    value, end = first, first + count * step
    while value < end:
        base = value >> 14 << 14
        lowest = slice(value - base, min(end - base, 16384), step)
        if base:
            rest = _upper(base >> 14)
            encoded += [low + rest for low in _MORE[lowest]]
        else:
            encoded += _TABLE[lowest]
        value = first + len(encoded) * step
    return encoded


def encode_sums(values: Sequence[int]) -> list[bytes]:
    """Numbers of 31 bits, as checksums are: most take five bytes."""
    return [
        _MORE[value & 0x3FFF] + _MORE[value >> 14 & 0x3FFF] + _TABLE[value >> 28]
        if 1 << 28 <= value < 1 << 31
        else encode_varint(value)
        for value in values
    ]


def decode_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """The unsigned value at ``position`` and the position after it.

    Raises:
        RemoteProtocolError: the bytes end inside it, or it has more than ten.
    """
    end = len(data)
    if position < end - 1:  # most numbers have one byte or two
        value = data[position]
        if value < 0x80:
            return value, position + 1
        byte = data[position + 1]
        if byte < 0x80:
            return value & 0x7F | byte << 7, position + 2
    end = min(end, position + 10)
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        if byte < 0x80:
            return value | byte << shift, position
        value |= (byte & 0x7F) << shift
        shift += 7
    raise RemoteProtocolError("tube: a number is cut off or longer than ten bytes")
