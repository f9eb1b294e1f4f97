"""The data types of MQTT on the wire: integers, strings, binary data, and a cursor that reads them.

Reading past the end, text that is not UTF-8 and integers that are not in their shortest form are malformed (0x81).

Source: MQTT 5.0 section 1.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i16_be

from penstock.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "COMPILED",
    "MAX_FILTERS",
    "MAX_VARINT",
    "Reader",
    "check_filter_count",
    "check_text",
    "decode_text",
    "encode_binary",
    "encode_frame",
    "encode_size",
    "encode_string",
    "encode_varint",
    "is_at",
    "is_plain",
    "length_size",
    "malformed",
    "protocol_error",
    "quoted",
    "write_two_bytes",
]

COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled. Compiled code loops over bytes; interpreted code uses bulk methods."""

MAX_FILTERS: Final = 10_000
"""Maximum topic filters of one packet; a packet of 4 MiB has room for a million."""
MAX_VARINT: Final = 268_435_455
_VARINTS: Final[list[bytes]] = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in range(2048)]

_SIZES: Final[list[bytes]] = [bytes((0, n)) for n in range(256)]


def quoted(text: str) -> str:
    """Return the first 64 characters of a peer's text, so that errors and log lines stay short."""
    return repr(text) if len(text) <= 64 else f"{text[:64]!r}… ({len(text)} characters)"


def malformed(what: str) -> RemoteProtocolError:
    """Create the error for a malformed packet (0x81)."""
    return RemoteProtocolError(f"mqtt: malformed packet: {what}", reason_code=0x81)


def protocol_error(what: str) -> RemoteProtocolError:
    """Create the error for a protocol violation (0x82)."""
    return RemoteProtocolError(f"mqtt: protocol error: {what}", reason_code=0x82)


def check_filter_count(count: int) -> None:
    """Raise RemoteProtocolError (0x97) if a SUBSCRIBE or UNSUBSCRIBE has more than ``MAX_FILTERS`` filters."""
    if count > MAX_FILTERS:
        raise RemoteProtocolError(f"mqtt: more than {MAX_FILTERS} topic filters in one packet", reason_code=0x97)


def encode_varint(value: int) -> bytes:
    """Encode a Variable Byte Integer in its shortest form [MQTT-1.5.5-1].

    Raises:
        LocalProtocolError: below 0 or above 268,435,455.
    """
    if 0 <= value < 2048:
        return _VARINTS[value]
    if not 0 <= value <= MAX_VARINT:
        raise LocalProtocolError(f"mqtt: {value} does not fit a Variable Byte Integer (0..{MAX_VARINT})")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_size(size: int) -> bytes:
    """Encode a length below 65,536 as two bytes."""
    return _SIZES[size] if size < 256 else size.to_bytes(2, "big")


def write_two_bytes(out: BytesWriter, number: i64) -> None:
    """Append a number below 65,536 as two bytes."""
    signed: int = (number ^ 0x8000) - 0x8000
    write_i16_be(out, signed)


def length_size(block: bytes) -> int:
    """Return the size in bytes of the Variable Byte Integer at the beginning of ``block``."""
    size = 1
    while block[size - 1] > 127:
        size += 1
    return size


def encode_string(text: str, what: str) -> bytes:
    """Encode ``text`` as UTF-8 with its two-byte length; ``what`` names the field in errors.

    Raises:
        LocalProtocolError: U+0000, a surrogate, or more than 65,535 bytes [MQTT-1.5.4-1, MQTT-1.5.4-2].
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError as e:
        raise LocalProtocolError(f"mqtt: {what} contains a surrogate, which UTF-8 cannot encode: {text!r}") from e
    if b"\0" in raw:
        raise LocalProtocolError(f"mqtt: {what} contains U+0000: {text!r}")
    return encode_binary(raw, what)


def encode_binary(raw: bytes, what: str) -> bytes:
    """Encode binary data with its two-byte length; ``what`` names the field in errors.

    Raises:
        LocalProtocolError: more than 65,535 bytes.
    """
    if len(raw) > 65_535:
        raise LocalProtocolError(f"mqtt: {what} has {len(raw)} bytes, the protocol allows 65535")
    return len(raw).to_bytes(2, "big") + raw


def is_plain(data: bytes, position: i64, end: i64, zeros: i64) -> bool:
    """Return whether ``data[position:end]`` is ASCII with exactly ``zeros`` zero bytes; checks eight bytes at a time.

    Adding 127 to each byte sets the highest bit of exactly the non-zero ones; ASCII bytes do not overflow into the next
    byte.
    """
    if not COMPILED or end < 8 or end - position > 2000:  # eight counters of one byte each must not overflow
        run = data[position:end]
        return run.isascii() and run.count(0) == zeros
    ones: i64 = 0x0101010101010101
    sevens = ones * 127  # mypyc would make a literal of this size a Python object
    word: i64
    all_bits: i64 = 0
    filled: i64 = 0
    at = position
    while at + 8 <= end:
        word = read_i64_le(data, at)
        all_bits |= word
        filled += word + sevens >> 7 & ones
        at += 8
    if at < end:
        word = read_i64_le(data, end - 8) >> (at + 8 - end) * 8
        all_bits |= word
        filled += word + sevens >> 7 & ones
    if all_bits >> 7 & ones:
        return False
    filled = (filled & 0x00FF00FF00FF00FF) + (filled >> 8 & 0x00FF00FF00FF00FF)
    return end - position - zeros == filled * 0x0001000100010001 >> 48 & 0xFFFF


def is_at(data: bytes, position: i64, piece: bytes) -> bool:
    """Return whether ``data`` has ``piece`` at ``position``; the caller has checked the length.

    For short pieces: compiled code compares overlapping words; from about 48 bytes a slice is faster.
    """
    if not COMPILED:
        return data.startswith(piece, position)
    size: i64 = len(piece)
    if size >= 8:
        at: i64 = 0
        last = size - 8
        while at < last:
            if read_i64_le(data, position + at) != read_i64_le(piece, at):
                return False
            at += 8
        return read_i64_le(data, position + last) == read_i64_le(piece, last)
    if size >= 4:
        last = size - 4
        return read_i32_le(data, position) == read_i32_le(piece, 0) and (
            read_i32_le(data, position + last) == read_i32_le(piece, last)
        )
    at = 0
    while at < size:
        if data[position + at] != piece[at]:
            return False
        at += 1
    return True


def check_text(data: bytes, position: i64, end: i64) -> None:
    """Check that ``data[position:end]`` is valid text, like :func:`decode_text`.

    Raises:
        RemoteProtocolError: as :func:`decode_text`.
    """
    if not is_plain(data, position, end, 0):
        decode_text(data[position:end])


def decode_text(raw: bytes) -> str:
    """Decode and validate UTF-8 text [MQTT-1.5.4-1, MQTT-1.5.4-2]; U+FEFF is kept [MQTT-1.5.4-3].

    Raises:
        RemoteProtocolError: U+0000, or invalid UTF-8, which includes surrogates and overlong forms.
    """
    if 0 in raw:
        raise malformed("a string contains U+0000")
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise malformed(f"a string is not UTF-8: {e.reason} at byte {e.start}") from e


def encode_frame(first: int, *parts: bytes) -> bytes:
    """Encode a packet: first byte, Remaining Length, and the concatenated ``parts``.

    Raises:
        LocalProtocolError: the packet exceeds the protocol's maximum size.
    """
    body = b"".join(parts)
    if len(body) > MAX_VARINT:
        raise LocalProtocolError(f"mqtt: a packet of {len(body)} bytes is larger than the protocol allows")
    return bytes((first,)) + encode_varint(len(body)) + body


class Reader:
    """A cursor over ``data[position:end]`` that never reads past ``end``. Returns copies."""

    __slots__ = ("data", "end", "position")

    def __init__(self, data: bytes, position: int, end: int) -> None:
        self.data = data
        self.position = position
        self.end = end

    def byte(self) -> int:
        """Read one byte."""
        position = self.position
        if position >= self.end:
            raise malformed("the packet ends within a field")
        self.position = position + 1
        return self.data[position]

    def two_bytes(self) -> int:
        """Read a Two Byte Integer."""
        position = self.position
        if position + 2 > self.end:
            raise malformed("the packet ends within a field")
        self.position = position + 2
        return self.data[position] << 8 | self.data[position + 1]

    def varint(self) -> int:
        """Read a Variable Byte Integer of at most four bytes, in its shortest form."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if byte == 0 and shift:
                    raise malformed("a Variable Byte Integer is not in its shortest form")
                return value
            shift += 7
            if shift > 21:
                raise malformed("a Variable Byte Integer has more than four bytes")

    def binary(self) -> bytes:
        """Read Binary Data: two bytes of length, then the bytes."""
        length = self.two_bytes()
        position = self.position
        if position + length > self.end:
            raise malformed("a length goes beyond the packet")
        self.position = position + length
        return self.data[position : position + length]

    def string(self) -> str:
        """Read and validate a UTF-8 Encoded String."""
        return decode_text(self.binary())
