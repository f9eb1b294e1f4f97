"""The RESP3 subset of the state store: commands, replies and notifications as bytes.

There are five types, identified by their first byte; each line ends with CRLF, and strings have a length, so keys and
values are binary::

    *<count>   array: requests and notifications, whose elements are bulk strings only
    $<length>  bulk string; $-1: the key does not exist
    +OK        success
    :<number>  integer; :-1 also means that the condition is not met
    -ERR <text>

Decoding is strict and linear in the size of the payload: decimal ASCII digits without signs, spaces or leading zeros,
no other RESP types, no bytes after the last element.

Source: state store protocol, "Payload format"; the payloads that the Go, Rust and .NET SDKs send and accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from librt.strings import read_i16_le, read_i32_le, read_i64_le
from mypy_extensions import i64

from penstock.errors import RemoteProtocolError

__all__ = [
    "MISSING",
    "OK",
    "Notification",
    "Pieces",
    "Reply",
    "ReplyKind",
    "array_head",
    "bulk_pieces",
    "check_end",
    "decode_array",
    "decode_notification",
    "decode_page",
    "decode_replies",
    "decode_reply",
    "decode_values",
    "element",
    "encode_array",
    "encode_bulk",
    "encode_error",
    "encode_integer",
]

OK: Final = b"+OK\r\n"
MISSING: Final = b"$-1\r\n"

_COMPILED: Final = not __file__.endswith(".py")
_ARRAY: Final = 0x2A
_BULK: Final = 0x24
_CRLF: Final = 0x0A0D  # read as a little-endian number
# Ten digits are enough for all lengths in an MQTT payload (268,435,455); more would overflow.
_MAX_DIGITS: Final = 10
# The shortest element is an empty bulk string; a count that cannot fit is rejected before any allocation.
_SHORTEST_ELEMENT: Final = len(b"$0\r\n\r\n")


class ReplyKind(StrEnum):
    """Kind of a response payload."""

    OK = "ok"
    INTEGER = "integer"
    VALUE = "value"
    MISSING = "missing"
    ERROR = "error"


class Reply(NamedTuple):
    """A decoded response: ``number`` of an integer, ``data`` of a value, ``text`` of an error (without ``-ERR ``)."""

    kind: ReplyKind
    number: int = 0
    data: bytes = b""
    text: str = ""


class Notification(NamedTuple):
    """A decoded notification: ``operation`` is ``SET`` with a value, or ``DELETE`` (also of an expired key)."""

    operation: str
    value: bytes | None = None


def encode_array(elements: Sequence[bytes]) -> bytes:
    """Encode ``elements`` as an array of bulk strings: a request or a notification."""
    parts = [b"*%d\r\n" % len(elements)]
    for element in elements:
        parts += (b"$%d\r\n" % len(element), element, b"\r\n")
    return b"".join(parts)


def encode_bulk(value: bytes) -> bytes:
    """Encode ``value`` as a bulk string: the answer to a GET of an existing key."""
    size = len(value)
    return b"%b%b\r\n" % (_BULK_HEADS[size] if size < _HEADS else b"$%d\r\n" % size, value)


Pieces = tuple[bytes, bytes, bytes]
"""A reply as parts that the caller joins; unused parts are empty."""


def bulk_pieces(value: bytes) -> Pieces:
    """Like :func:`encode_bulk`, as parts."""
    size = len(value)
    return _BULK_HEADS[size] if size < _HEADS else b"$%d\r\n" % size, value, b"\r\n"


def encode_integer(number: int) -> bytes:
    """Encode ``number`` as an integer: number of deleted keys, or -1."""
    return b":%d\r\n" % number


def encode_error(text: str) -> bytes:
    """Encode ``text`` as an error; the SDKs need the space after ``-ERR`` and the CRLF."""
    return b"-ERR %b\r\n" % text.encode()


def decode_array(payload: bytes) -> list[bytes]:
    """Decode an array of bulk strings with at least one element.

    Raises:
        RemoteProtocolError: other payloads, or additional bytes; the caller answers ``-ERR syntax error``.
    """
    if not _COMPILED:
        found = _array_in_bulk(payload)
        if found is not None:
            return found
    return _decode_elements(payload)


def _decode_elements(payload: bytes) -> list[bytes]:
    count, position = array_head(payload)
    elements: list[bytes] = []
    while count > 0:
        start, position = element(payload, position)
        elements.append(payload[start : position - 2])
        count -= 1
    check_end(payload, position)
    return elements


def array_head(payload: bytes) -> tuple[i64, i64]:
    """Return the number of elements of the array in ``payload``, at least one, and the offset of the first one."""
    count, position = _header(payload, 0, _ARRAY)
    if count == 0 or count * _SHORTEST_ELEMENT > len(payload) - position:
        raise _malformed(payload, 0, f"invalid number of elements {count}")
    return count, position


def element(payload: bytes, position: i64) -> tuple[i64, i64]:
    """Return the offsets of the content of the bulk string at ``position`` and of the first byte after its CRLF."""
    length, start = _header(payload, position, _BULK)
    end = start + length
    if end + 2 > len(payload) or read_i16_le(payload, end) != _CRLF:
        raise _malformed(payload, start, f"{length} bytes and CRLF expected")
    return start, end + 2


def _array_in_bulk(payload: bytes) -> list[bytes] | None:
    """Fast variant of :func:`decode_array` for elements without CRLF; None for other arrays.

    It avoids a loop over headers, which is four times as expensive in the interpreter.
    """
    head, *lines = payload.split(b"\r\n")
    elements = lines[1::2]
    count = len(elements)
    if not count or len(lines) != 2 * count + 1 or lines[-1] or head != b"*%d" % count:
        return None
    return elements if lines[:-1:2] == list(map(_BULK_LINE, map(len, elements))) else None


_BULK_LINE: Final = b"$%d".__mod__


def decode_reply(payload: bytes) -> Reply:
    """Decode a response to SET, GET, DEL, VDEL or KEYNOTIFY.

    Raises:
        RemoteProtocolError: not exactly one value of the five types.
    """
    if payload == OK:
        return Reply(ReplyKind.OK)
    if payload == MISSING:
        return Reply(ReplyKind.MISSING)
    if payload.startswith(b"$"):
        data, position = _bulk(payload, 0)
        check_end(payload, position)
        return Reply(ReplyKind.VALUE, data=data)
    if payload.endswith(b"\r\n"):
        line = payload[1:-2]
        if payload.startswith(b":"):
            digits = line.removeprefix(b"-")
            if digits.isdigit() and len(digits) <= _MAX_DIGITS:
                return Reply(ReplyKind.INTEGER, number=int(line))
        elif payload.startswith(b"-ERR ") and b"\r" not in line and b"\n" not in line:
            return Reply(ReplyKind.ERROR, text=line[4:].decode("utf-8", "replace"))
    raise _malformed(payload, 0, "not a response of the state store")


def decode_replies(payload: bytes) -> list[Reply]:
    """Decode an array of replies of one line each: the answer to BATCH.

    Raises:
        RemoteProtocolError: other payloads.
    """
    count, position = _header(payload, 0, _ARRAY)
    *lines, rest = payload[position:].split(b"\r\n")
    if rest or len(lines) != count:
        raise _malformed(payload, position, f"{count} replies of a line each expected")
    return [decode_reply(line + b"\r\n") for line in lines]


def decode_notification(payload: bytes) -> Notification:
    """Decode a notification; ``DEL``, as in the document, is returned as ``DELETE``, which brokers send.

    Raises:
        RemoteProtocolError: not a notification.
    """
    match decode_array(payload):
        case [b"NOTIFY", b"SET", b"VALUE", value]:
            return Notification("SET", value)
        case [b"NOTIFY", b"DELETE" | b"DEL"]:
            return Notification("DELETE")
        case _:
            raise _malformed(payload, 0, "not a notification of the state store")


def decode_page(payload: bytes) -> tuple[list[bytes], bytes | None]:
    """Decode one page of SCAN: its keys and the token of the next page; None on the last page.

    ``*1`` with an array of keys, or ``*2`` with the array and the token; empty pages with a token are valid.

    Raises:
        RemoteProtocolError: other payloads.
    """
    elements, position = _header(payload, 0, _ARRAY)
    if elements not in (1, 2):
        raise _malformed(payload, 0, "an array of one or two elements expected")
    count, position = _header(payload, position, _ARRAY)
    if count * _SHORTEST_ELEMENT > len(payload) - position:
        raise _malformed(payload, position, f"invalid number of keys {count}")
    found: list[bytes] = []
    for _ in range(count + elements - 1):
        element, position = _bulk(payload, position)
        found.append(element)
    check_end(payload, position)
    return (found, None) if elements == 1 else (found[:-1], found[-1])


def decode_values(payload: bytes) -> list[bytes | None]:
    """Decode an array of bulk strings and nulls (``$-1``): the answer to MGET and MVALUES.

    Raises:
        RemoteProtocolError: other payloads.
    """
    count, position = _header(payload, 0, _ARRAY)
    if count * len(MISSING) > len(payload) - position:
        raise _malformed(payload, 0, f"invalid number of elements {count}")
    found: list[bytes | None] = []
    for _ in range(count):
        if payload.startswith(MISSING, position):
            found.append(None)
            position += len(MISSING)
            continue
        element, position = _bulk(payload, position)
        found.append(element)
    check_end(payload, position)
    return found


_HEADS: Final = 1024
_BULK_HEADS: Final = [b"$%d\r\n" % size for size in range(_HEADS)]
"""Encoded headers of short values."""


def _header(payload: bytes, position: i64, kind: i64) -> tuple[i64, i64]:
    """Return the number in the line at ``position``, which must start with ``kind``, and the offset after the line.

    In compiled form, a line of up to three digits is read as one integer; a complete array always has enough bytes.
    """
    if not _COMPILED:
        return _header_in_bulk(payload, position, kind)
    size: i64 = len(payload)
    line: i64
    if position + 4 <= size:
        line = i64(read_i32_le(payload, position)) ^ kind  # removes the first byte if it is the expected one
        first = (line >> 8 & 0xFF) - 0x30
        if 0 <= first <= 9:
            if line & ~0xFF00 == 0x0A0D0000:
                return first, position + 4
            if first and position + 8 <= size:
                line = read_i64_le(payload, position) ^ kind
                second = (line >> 16 & 0xFF) - 0x30
                if 0 <= second <= 9:
                    if line & 0xFFFF0000FF == 0x0A0D000000:
                        return first * 10 + second, position + 5
                    third = (line >> 24 & 0xFF) - 0x30
                    if line & 0xFFFF000000FF == 0x0A0D00000000 and 0 <= third <= 9:
                        return first * 100 + second * 10 + third, position + 6
    return _header_in_bulk(payload, position, kind)


def _header_in_bulk(payload: bytes, position: int, kind: int) -> tuple[int, int]:
    """Like :func:`_header`, for lines of any length."""
    if position >= len(payload) or payload[position] != kind:
        raise _malformed(payload, position, f"{chr(kind)!r} expected")
    end = payload.find(b"\r\n", position + 1, position + _MAX_DIGITS + 3)
    digits = payload[position + 1 : end] if end > position + 1 else b""
    if not digits.isdigit() or (len(digits) > 1 and digits[0] == 0x30):
        raise _malformed(payload, position + 1, f"a length of at most {_MAX_DIGITS} digits and CRLF expected")
    return int(digits), end + 2


def _bulk(payload: bytes, position: i64) -> tuple[bytes, i64]:
    """Return the bulk string at ``position``, and the offset after it."""
    start, end = element(payload, position)
    return payload[start : end - 2], end


def check_end(payload: bytes, position: i64) -> None:
    """Raise an error if the payload does not end at ``position``."""
    if position != len(payload):
        raise _malformed(payload, position, f"{len(payload) - position} additional bytes")


def _malformed(payload: bytes, position: int, expected: str) -> RemoteProtocolError:
    near = payload[position : position + 24]
    return RemoteProtocolError(
        f"state store payload, byte {position}: {expected}, found {near!r}",
        why="the payload is not the RESP3 subset of the state store protocol",
    )
