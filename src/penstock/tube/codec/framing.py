"""Frames: the unit on a TubeMQ connection, one request or one response.

    0  4      begin token FF 7F F4 FE
    4  4      serial number, chosen by the requester, echoed unchanged
    8  4      number of blocks, >= 1
   12  4 + n  block: length, bytes; repeated

The body is the concatenation of the blocks. Writers split it every 8,192 bytes (the C++ client closes the connection
after a longer or empty block, or more than 1,024 blocks); readers accept any length.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from penstock.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mypy_extensions import i64

__all__ = [
    "BEGIN_TOKEN",
    "BLOCK_SIZE",
    "MAX_BLOCKS",
    "MAX_FRAME_BYTES",
    "FrameDecoder",
    "encode_frame",
    "encode_frames",
    "encode_parts",
    "one_block",
]

COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled. Compiled code loops over bytes; interpreted code uses `struct`."""
BEGIN_TOKEN: Final = b"\xff\x7f\xf4\xfe"
_TOKEN: Final = 0xFF7FF4FE
BLOCK_SIZE: Final = 8192
# The Java reader's limit: (20 MiB message + 8 MiB) / 8192.
MAX_BLOCKS: Final = 3584
MAX_FRAME_BYTES: Final = 3584 * 8192

_HEAD = Struct(">4sIi")
_LENGTH = Struct(">i")
_ONE_BLOCK_HEAD = Struct(">4sIii")
_BYTES: Final = [bytes((n,)) for n in range(256)]
_FULL_BLOCK = _LENGTH.pack(BLOCK_SIZE)


def encode_frame(serial: int, body: bytes, *, one_block: bool = False) -> bytes:
    """Encode a frame around ``body`` (1 byte or more). ``serial`` is an unsigned 32-bit number.

    ``one_block``: write a single block, for receivers that accept any length and process it fastest.

    Raises:
        LocalProtocolError: the body is empty, or longer than readers accept.
    """
    size = len(body)
    if 0 < size <= (MAX_FRAME_BYTES if one_block else BLOCK_SIZE):
        return b"%b%b\0\0\0\1%b%b" % (BEGIN_TOKEN, serial.to_bytes(4, "big"), size.to_bytes(4, "big"), body)
    blocks = -(-size // BLOCK_SIZE)
    if not 0 < blocks <= MAX_BLOCKS:
        raise LocalProtocolError(f"tube: a frame of {size} bytes cannot be sent (1 to {MAX_FRAME_BYTES} are possible)")
    out: list[bytes | memoryview] = [_HEAD.pack(BEGIN_TOKEN, serial, blocks)]
    view = memoryview(body)
    for start in range(0, size, BLOCK_SIZE):
        out.append(_FULL_BLOCK if size - start >= BLOCK_SIZE else _LENGTH.pack(size - start))
        out.append(view[start : start + BLOCK_SIZE])
    return b"".join(out)


def encode_parts(serial: int, parts: Sequence[bytes], *, one_block: bool = False) -> bytes:
    """:func:`encode_frame` of a body in ``parts``.

    Raises:
        LocalProtocolError: as :func:`encode_frame`.
    """
    size = sum(map(len, parts))
    if one_block and 0 < size <= MAX_FRAME_BYTES:
        return b"".join([_ONE_BLOCK_HEAD.pack(BEGIN_TOKEN, serial, 1, size), *parts])
    # Splitting the parts at block boundaries instead saves a copy, but costs five times as much.
    return encode_frame(serial, b"".join(parts))


def encode_frames(serials: list[int], bodies: list[bytes]) -> bytes:
    """Encode ``bodies`` as consecutive frames, as :func:`encode_frame`."""
    parts: list[bytes] = []
    last_size: i64 = -1
    last_high = -1
    head = length = b""
    for serial, body in zip(serials, bodies, strict=True):
        size: i64 = len(body)
        if not 0 < size <= BLOCK_SIZE:
            parts.append(encode_frame(serial, body))
            continue
        if size != last_size:
            last_size = size
            length = b"\0\0\0\1" + len(body).to_bytes(4, "big")
        high = serial >> 8
        if high != last_high:
            last_high = high
            head = BEGIN_TOKEN + high.to_bytes(3, "big")
        parts.append(b"%b%b%b%b" % (head, _BYTES[serial & 0xFF], length, body))
    return b"".join(parts)


def one_block(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Return serial number, start and end of the body if ``data`` begins with a frame of one block; otherwise None.

    The end may be beyond ``data``, so that a receiver can read the rest into its final buffer.
    """
    if len(data) < _ONE_BLOCK_HEAD.size:
        return None
    token, serial, blocks, length = _ONE_BLOCK_HEAD.unpack_from(data)
    if token != BEGIN_TOKEN or blocks != 1 or not 0 < length <= MAX_FRAME_BYTES:
        return None
    return serial, _ONE_BLOCK_HEAD.size, _ONE_BLOCK_HEAD.size + length


def _unsigned(data: bytes, at: i64) -> i64:
    """The unsigned number of 32 bits at ``at``."""
    first: i64 = data[at]
    second: i64 = data[at + 1]
    third: i64 = data[at + 2]
    fourth: i64 = data[at + 3]
    return first << 24 | second << 16 | third << 8 | fourth


class FrameDecoder:
    """Decodes received bytes, split in any way, into frames ``(serial, body)``, in linear time.

    Holds at most one incomplete frame, whose body has at most `MAX_FRAME_BYTES`. Serial numbers are unsigned 32-bit.
    """

    def __init__(self) -> None:
        self.error: RemoteProtocolError | None = None
        self._chunks: list[bytes] = []  # received, not parsed yet: fewer than _need bytes
        self._have = 0
        self._need = 0
        self._serial = 0
        self._left = 0  # missing blocks of the current frame; 0: its head is missing
        self._blocks: list[memoryview] = []
        self._size = 0

    @property
    def held(self) -> int:
        """Number of bytes of an incomplete frame."""
        return self._have + self._size

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that ``data`` completes.

        Frames before a violation are returned; the violation is then in ``error`` and raised by the next call, so that
        splitting the same bytes differently changes nothing. The connection must then be closed.

        Raises:
            RemoteProtocolError: wrong token, block count or length, frame too long.
        """
        if self.error is not None:
            raise self.error.copy()
        frames: list[tuple[int, bytes]] = []
        position, end = 0, len(data)
        try:
            while self._chunks:
                # Only the missing bytes are joined with them: most of ``data`` is not copied.
                missing = self._need - self._have
                if end - position < missing:
                    self._have += end - position
                    self._chunks.append(data[position:])
                    return frames
                self._chunks.append(data[position : position + missing])
                position += missing
                joined = b"".join(self._chunks)
                self._keep(joined, self._parse(joined, 0, frames))
            self._keep(data, self._parse(data, position, frames))
        except RemoteProtocolError as error:
            self.error = error.copy()
            if not frames:
                raise
        return frames

    def _keep(self, data: bytes, used: int) -> None:
        """Keep ``data`` from ``used`` for the next step."""
        self._have = len(data) - used
        self._chunks = [data[used:]] if self._have else []

    def _parse(self, data: bytes, position: int, frames: list[tuple[int, bytes]]) -> int:
        """Parse ``data`` from ``position`` as far as possible; return the end of the parsed data.

        Sets ``_need``, the number of bytes that the next step requires.
        """
        end = len(data)
        while True:
            if not self._left:
                position = self._whole(data, position, frames)
                have = end - position
                if have < 12:
                    # Each byte of the token is checked when it arrives, so that a violation is found at the same byte
                    # regardless of splits.
                    self._need = 12 if have >= 4 else have + 1
                    self._check_token(data[position : position + 4])
                    return position
                self._head(data, position)
                position += 12
            if end - position < 4:
                self._need = 4
                return position
            (length,) = _LENGTH.unpack_from(data, position)
            if length < 0 or self._size + length > MAX_FRAME_BYTES:
                raise RemoteProtocolError(f"tube: block of {length} bytes: a frame has at most {MAX_FRAME_BYTES} bytes")
            if end - position < 4 + length:
                self._need = 4 + length
                return position
            start = position + 4
            position = start + length
            self._left -= 1
            if self._blocks or self._left:
                self._blocks.append(memoryview(data)[start:position])  # copied once, when the frame is complete
                self._size += length
                if self._left:
                    continue
                block = b"".join(self._blocks)
                self._blocks = []
            else:
                block = data[start:position]
            self._size = 0
            frames.append((self._serial, block))

    def _whole(self, data: bytes, position: int, frames: list[tuple[int, bytes]]) -> int:
        """Decode consecutive frames of one block (the usual case); return the offset of the first other data."""
        if COMPILED:
            return self._whole_bytewise(data, position, frames)
        unpack, last, most = _ONE_BLOCK_HEAD.unpack_from, len(data) - 16, MAX_FRAME_BYTES
        while position <= last:
            token, serial, blocks, length = unpack(data, position)
            start = position + 16
            if token != BEGIN_TOKEN or blocks != 1 or not 0 <= length <= most or start + length > len(data):
                break
            position = start + length
            frames.append((serial, data[start:position]))
        return position

    def _whole_bytewise(self, data: bytes, position: i64, frames: list[tuple[int, bytes]]) -> int:
        """Like :meth:`_whole`, with a loop over bytes."""
        size: i64 = len(data)
        while position + 16 <= size:
            if _unsigned(data, position) != _TOKEN or _unsigned(data, position + 8) != 1:
                break
            start = position + 16
            length = _unsigned(data, position + 12)
            if length > MAX_FRAME_BYTES or start + length > size:
                break
            serial = _unsigned(data, position + 4)
            position = start + length
            frames.append((serial, data[start:position]))
        return position

    def _head(self, data: bytes, position: int) -> None:
        token, self._serial, blocks = _HEAD.unpack_from(data, position)
        self._check_token(token)
        if not 1 <= blocks <= MAX_BLOCKS:
            raise RemoteProtocolError(f"tube: a frame of {blocks} blocks (1 to {MAX_BLOCKS} are possible)")
        self._left = blocks

    def _check_token(self, token: bytes) -> None:
        # A part of the token is checked as well: the first byte identifies a client of another protocol.
        if not BEGIN_TOKEN.startswith(token):
            raise RemoteProtocolError(
                f"tube: the frame begins with {token.hex()!r}, not with {BEGIN_TOKEN.hex()!r}",
                why="the peer does not speak TubeMQ, or speaks it inside TLS",
            )
