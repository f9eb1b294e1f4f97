"""Read records from a stream as they arrive, without blocking the event loop while a pipe has no data."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import IO, Protocol

from penstock.errors import LocalProtocolError

__all__ = ["LARGEST", "LENGTH", "LengthSplitter", "LineSplitter", "Splitter", "WholeSplitter", "chunks"]

CHUNK = 256 << 10
AHEAD = 8
"""Maximum number of chunks that are read ahead."""
LENGTH = struct.Struct(">I")
LARGEST = 20 << 20
_FORMAT = "write a length before each value, or use --format lines"


async def chunks(stream: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield the content of ``stream`` as it arrives; a thread reads it.

    Raises:
        OSError: the stream cannot be read.
    """
    import asyncio  # imported here, because help does not need it

    # Not through the buffer: its lock, held by the waiting thread, would block the exit of the interpreter.
    read = getattr(stream, "raw", stream).read
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)

    def read_all() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the loop or the stream is closed
            data: bytes | OSError | None = b"-"
            while data and not isinstance(data, OSError):
                room.acquire()
                try:
                    data = read(CHUNK) or b""
                except OSError as error:
                    data = error
                loop.call_soon_threadsafe(arrived.put_nowait, data)

    threading.Thread(target=read_all, name="reads input", daemon=True).start()
    while data := await arrived.get():
        if isinstance(data, OSError):
            raise data
        room.release()
        yield data


class Splitter(Protocol):
    """Splits a stream into records."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the records that ``data`` completes. Raises LocalProtocolError for invalid data."""

    def finish(self) -> Iterator[bytes]:
        """Yield the rest at the end of the stream. Raises LocalProtocolError for an incomplete record."""


class LineSplitter:
    """One record per line, with LF or CR LF; the last line end is optional."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, without line ends [Splitter]."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(self._rest) > LARGEST:
            raise LocalProtocolError(
                f"a line has more than {LARGEST} bytes", hint="split it, or use another format: --format length"
            )

    def finish(self) -> Iterator[bytes]:
        """Yield the last line if it has no line end [Splitter]."""
        if self._rest:
            yield self._rest.removesuffix(b"\r")


class LengthSplitter:
    """Records with a length prefix of 4 bytes, big-endian."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the records that ``data`` completes, without lengths [Splitter]."""
        data = self._rest + data
        start = 0
        while len(data) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(data, start)
            if size > LARGEST:
                raise _no_length(data[start : start + LENGTH.size])
            end = start + LENGTH.size + size
            if end > len(data):
                break
            yield data[start + LENGTH.size : end]
            start = end
        self._rest = data[start:]

    def finish(self) -> Iterator[bytes]:
        """Yield nothing; an incomplete record is an error [Splitter]."""
        rest = self._rest
        if 0 < len(rest) < LENGTH.size:
            raise _no_length(rest)
        if rest:
            have, size = len(rest) - LENGTH.size, LENGTH.unpack_from(rest)[0]
            raise LocalProtocolError(
                f"the input ends after {have} of {size} bytes of a value",
                why="each value follows its length",
                hint=_FORMAT,
            )
        yield from ()


class WholeSplitter:
    """The whole input is one record; empty input is none."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield nothing: the record ends with the input [Splitter]."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > LARGEST:
            raise LocalProtocolError(f"the input has more than {LARGEST} bytes", hint="split it into several records")
        yield from ()

    def finish(self) -> Iterator[bytes]:
        """Yield the input [Splitter]."""
        if self._size:
            yield b"".join(self._parts)


def _no_length(head: bytes) -> LocalProtocolError:
    return LocalProtocolError(
        f"the bytes {head.hex(' ')} are not a length up to {LARGEST}",
        why="each value follows its length: 4 bytes, big-endian",
        hint=_FORMAT,
    )
