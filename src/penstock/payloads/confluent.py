"""The bytes that Confluent's serializers write before a message: a byte 0, the id of the schema, and for Protobuf the
place of the message in it [Confluent: "Wire format"]."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.payloads.errors import NOT_PROTOBUF, PayloadError

__all__ = ["AFTER_ID", "encoded_id", "encoded_path", "message_path", "schema_id_of"]

AFTER_ID = 5
"""Size of the byte 0 and the four bytes of the id."""
_MOST_INDEXES = 100
"""Maximum depth of a nested message: that of protoc is less."""
_MOST_BITS = 31


def schema_id_of(payload: bytes, code: str) -> int:
    """Return the id of the schema of ``payload``.

    Raises:
        PayloadError: it does not begin with one; the error has ``code``.
    """
    if payload[:1] != b"\0" or len(payload) < AFTER_ID:
        raise PayloadError(code, "the payload does not begin with the byte 0 and the id of a schema")
    return int.from_bytes(payload[1:AFTER_ID], "big")


def encoded_id(schema_id: int) -> bytes:
    """Return the bytes before a message of the schema ``schema_id``."""
    return b"\0" + schema_id.to_bytes(AFTER_ID - 1, "big")


def message_path(payload: bytes) -> tuple[tuple[int, ...], int]:
    """Return the index of the message in its file, after those of the messages that contain it, and where it begins.

    They are a number of indexes, and the indexes, as zigzag encoded varints. A single 0 is the first message.

    Raises:
        PayloadError: ``payload``, which has an id, does not have them.
    """
    count, at = _index(payload, AFTER_ID)
    if count > _MOST_INDEXES:
        raise _no_path()
    found = []
    for _ in range(count):
        index, at = _index(payload, at)
        found.append(index)
    return tuple(found) or (0,), at


def encoded_path(path: Sequence[int]) -> bytes:
    """Return the bytes between the id and a message for its ``path``, see :func:`message_path`."""
    if tuple(path) == (0,):
        return b"\0"
    found = bytearray()
    for index in (len(path), *path):
        rest = index << 1  # zigzag
        while rest > 0x7F:
            found.append(rest & 0x7F | 0x80)
            rest >>= 7
        found.append(rest)
    return bytes(found)


def _index(payload: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at``, which is not negative, and the place after it."""
    found = bits = 0
    for place in range(at, min(at + 5, len(payload))):
        found |= (payload[place] & 0x7F) << bits
        bits += 7
        if payload[place] < 0x80:
            if found & 1 or found >> 1 >= 1 << _MOST_BITS:
                break
            return found >> 1, place + 1
    raise _no_path()


def _no_path() -> PayloadError:
    return PayloadError(NOT_PROTOBUF, "the payload has no valid indexes of a message after the id of the schema")
