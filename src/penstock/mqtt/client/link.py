"""One network connection of a client: moves bytes between its transport and the client that owns it."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

from penstock.errors import PenstockError

__all__ = ["Link", "LinkOwner"]


class LinkOwner(Protocol):
    """What a link tells of; ``link`` may be one that was given up already."""

    def received(self, link: Link, data: bytes) -> None:
        """Bytes came in."""
        ...

    def pause_writing(self, link: Link) -> None:
        """The transport is full."""
        ...

    def resume_writing(self, link: Link) -> None:
        """The transport takes bytes again."""
        ...


class Link(asyncio.Protocol):
    """One connection over TCP or TLS.

    ``ready``: MQTT may be spoken (or never, see ``failure``); ``answered``: CONNACK came, or it never will; ``ended``:
    the connection is gone.
    """

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self.failure: PenstockError | None = None
        """Why the transport under MQTT gave up, where it knows."""
        self.error: Exception | None = None
        """The error with which the transport ended the connection."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def open(self) -> bool:
        """Whether bytes may be written."""
        return self._transport is not None and not self._transport.is_closing()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there; MQTT may begin, after a handshake of what carries it [asyncio]."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, without being a subclass
        tcp = transport.get_extra_info("socket")
        if tcp is not None:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened()

    def data_received(self, data: bytes) -> None:
        """Bytes of MQTT, which the client takes at once [asyncio]."""
        self._owner.received(self, data)

    def pause_writing(self) -> None:
        """The transport's buffer is full: the client waits with what is not urgent [asyncio]."""
        self._owner.pause_writing(self)

    def resume_writing(self) -> None:
        """It has drained [asyncio]."""
        self._owner.resume_writing(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits for this connection: it is over for good [asyncio]."""
        self.error = exc
        for future in (self.ready, self.answered, self.ended):
            if not future.done():
                future.set_result(None)

    # The owner's side

    def opened(self) -> None:
        """The transport is there."""
        self.ready.set_result(None)

    def write(self, data: bytes) -> None:
        """Send bytes of MQTT."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close once what is buffered was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def set_reading(self, *, paused: bool) -> None:
        """Read from the network, or leave the bytes there."""
        if self._transport is not None and self.open:
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
