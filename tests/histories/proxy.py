"""A TCP proxy on loopback whose connections are cut, or held."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

__all__ = ["Proxy"]


class Proxy:
    """Forwards connections to ``target`` (host, port) until they are cut; ``held``: bytes wait, in both directions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.release()
        self.cut()
        await self._server.wait_closed()

    def lead_to(self, target: tuple[str, int]) -> None:
        """Forward new connections to ``target``."""
        self._target = target

    @property
    def is_idle(self) -> bool:
        """Whether no connection is open."""
        return not self._writers

    def cut(self) -> None:
        """Reset every connection; what was under way in either direction is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold(self) -> None:
        """Forward nothing until :meth:`release`."""
        self._flowing.clear()

    def hold_responses(self) -> None:
        """Forward nothing from the target until :meth:`release`."""
        self._answering.clear()

    def release(self) -> None:
        """Forward what was held."""
        self._flowing.set()
        self._answering.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer, self._answering))

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answering: asyncio.Event | None = None
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._flowing.wait()
                if answering is not None:
                    await answering.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)
