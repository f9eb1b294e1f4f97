"""The message that the log stores: payload, attributes, checksum, filter key.

    flag bit 0 clear   data is the body
    flag bit 0 set     int32 length, attribute text (UTF-8), body

The broker stores and returns ``data`` unchanged; it reads neither attributes nor body.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.errors import LocalProtocolError
from penstock.tube.codec.strings import java_trim
from penstock.tube.codec.varint import decode_varint, encode_varint

__all__ = [
    "HAS_ATTRIBUTES",
    "INDEX_RECORD_BYTES",
    "MSG_TIME",
    "MSG_TYPE",
    "NO_KEY",
    "Marker",
    "check_sum",
    "decode_marker",
    "encode_data",
    "encode_marker",
    "filter_key",
    "fits_attribute",
    "format_attributes",
    "java_hash",
    "parse_attributes",
    "split_data",
]

HAS_ATTRIBUTES = 1
INDEX_RECORD_BYTES: Final = 28
"""Size of an index record in bytes; offsets on the wire are byte offsets in the index."""
MSG_TYPE = "$msgType$"
MSG_TIME = "$msgTime$"
NO_KEY: Final = -1  # index key of a message without a type, which no filter matches


def check_sum(data: bytes) -> int:
    """Return the CRC-32 of ``data`` without the highest bit: 0 to 2**31 - 1."""
    return zlib.crc32(data) & 0x7FFFFFFF


def java_hash(text: str) -> int:
    """``String.hashCode()``: 31 * h + c over UTF-16 units, a signed 32-bit number."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = value * 31 + unit & 0xFFFFFFFF
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(units[::2], units[1::2], strict=True):
            value = value * 31 + (high << 8 | low) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def filter_key(msg_type: str | None) -> int:
    """Return the index key of ``msg_type`` without surrounding blanks; -1 for no type."""
    if msg_type is None:
        return NO_KEY
    trimmed = java_trim(msg_type)
    return java_hash(trimmed) if trimmed else NO_KEY


def fits_attribute(text: str) -> bool:
    """Return whether ``text`` is a valid key or value of an attribute."""
    return bool(text.strip()) and "," not in text and "=" not in text


def format_attributes(pairs: Iterable[tuple[str, str]]) -> str:
    """Format attributes as ``key=value,key=value``.

    Raises:
        LocalProtocolError: a key or value is blank or contains ``,`` or ``=``.
    """
    parts = []
    for key, value in pairs:
        for text in (key, value):
            if not fits_attribute(text):
                raise LocalProtocolError(
                    f"tube: attribute {key!r}={value!r}: ',', '=' and blank texts are not possible"
                )
        parts.append(f"{key}={value}")
    return ",".join(parts)


def parse_attributes(text: str) -> list[tuple[str, str]]:
    """Parse attribute text. As in the Java client each part is split at ``=``, and piece 1 is the value.

    A part without ``=`` is skipped.
    """
    pairs = []
    for part in text.split(","):
        pieces = part.split("=")
        if len(pieces) > 1:
            pairs.append((pieces[0], pieces[1]))
    return pairs


def encode_data(body: bytes, attributes: str = "") -> tuple[bytes, int]:
    """Encode ``data`` and ``flag`` of a message: flag 0 without attributes, otherwise flag 1 with a length prefix."""
    if not attributes:
        return body, 0
    text = attributes.encode()
    return b"".join((struct.pack(">i", len(text)), text, body)), HAS_ATTRIBUTES


def split_data(data: bytes, flag: int) -> tuple[str, bytes] | None:
    """Split ``data`` into attribute text and body; None if the attribute length exceeds it.

    The reference's clients skip such a message silently. Text that is not UTF-8 is read with replacement characters.
    """
    if not flag & HAS_ATTRIBUTES:
        return "", data
    if len(data) < 4:
        return None
    (length,) = struct.unpack_from(">i", data)
    if length < 0 or 4 + length > len(data):
        return None
    return data[4 : 4 + length].decode("utf-8", "replace"), data[4 + length :]


class Marker(NamedTuple):
    """Producer and sequence of this message and the ``size - 1`` following ones in the log."""

    producer: int
    sequence: int
    size: int


def encode_marker(producer: int, sequence: int, count: int) -> bytes:
    """Fields 1000 to 1002 of TransferedMessage, which follow the flag of a stored message."""
    return b"\xc0\x3e%b\xc8\x3e%b\xd0\x3e%b" % (
        encode_varint(producer),
        encode_varint(sequence),
        encode_varint(count),
    )


def decode_marker(message: bytes) -> Marker | None:
    """Decode the marker of a stored message (field 4 of a get response); None without one."""
    # Skips tag, length, id, checksum and payload: the bytes after the payload contain the marker.
    _, at = decode_varint(message, 1)
    for _ in range(2):
        _, at = decode_varint(message, at + 1)
    size, at = decode_varint(message, at + 1)
    _, at = decode_varint(message, at + size + 1)
    if at >= len(message):
        return None
    numbers = []
    for _ in range(3):
        number, at = decode_varint(message, at + 2)
        numbers.append(number)
    return Marker(*numbers)
