"""Records out of a stream of bytes as it arrives: a pipe that is silent for an hour must not stop an event loop."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import IO, Protocol

from penstock.errors import LocalProtocolError

__all__ = ["LARGEST", "LENGTH", "Lengths", "Lines", "Splitter", "chunks"]

CHUNK = 256 << 10
AHEAD = 8
"""Chunks that are read and not taken yet: then the reading waits."""
LENGTH = struct.Struct(">I")
LARGEST = 20 << 20


async def chunks(stream: IO[bytes]) -> AsyncIterator[bytes]:
    """What ``stream`` has, whenever it has something, to its end. A thread reads it, and nobody has to wait for that.

    Raises:
        OSError: it cannot be read.
    """
    import asyncio  # help, which shows limits from here, is there without it

    # Below the buffer: its lock, held by a thread that waits for input, would stop the interpreter's end.
    read = getattr(stream, "raw", stream).read
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)

    def read_all() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # loop or stream is closed: nobody wants it any more
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
    """Cuts a stream into records."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The records that ``data`` completes; to be taken all. Raises LocalProtocolError: the stream is broken."""

    def end(self) -> Iterator[bytes]:
        """What is left at the end of the stream. Raises LocalProtocolError: it is half a record."""


class Lines:
    """Each line is a record; the last one need not end. CR LF ends a line, too."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, without their ends [Splitter]."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(self._rest) > LARGEST:
            raise LocalProtocolError(f"a line has more than {LARGEST} bytes")

    def end(self) -> Iterator[bytes]:
        """The last line, where it does not end [Splitter]."""
        if self._rest:
            yield self._rest.removesuffix(b"\r")


class Lengths:
    """Before each record its length, 4 bytes, big-endian."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The records that ``data`` completes, without their lengths [Splitter]."""
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

    def end(self) -> Iterator[bytes]:
        """Nothing: a record that is begun is an error [Splitter]."""
        rest = self._rest
        if 0 < len(rest) < LENGTH.size:
            raise _no_length(rest)
        if rest:
            have, size = len(rest) - LENGTH.size, LENGTH.unpack_from(rest)[0]
            raise LocalProtocolError(f"the input ends after {have} of {size} bytes")
        yield from ()


def _no_length(head: bytes) -> LocalProtocolError:
    return LocalProtocolError(f"{head.hex(' ')} is no length up to {LARGEST}")
