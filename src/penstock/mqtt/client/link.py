"""Network connection of an MQTT client: moves bytes between its transport and the driver that owns it."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

from penstock.errors import PenstockError

__all__ = ["ClientLink", "ClientLinkOwner"]


class ClientLinkOwner(Protocol):
    """Callbacks of a link; the owner may have closed ``link`` already."""

    def received(self, link: ClientLink, data: bytes) -> None:
        """Bytes were received."""
        ...

    def pause_writing(self, link: ClientLink) -> None:
        """The transport's write buffer is full."""
        ...

    def resume_writing(self, link: ClientLink) -> None:
        """The transport's write buffer has drained."""
        ...


class ClientLink(asyncio.Protocol):
    """One connection over TCP or TLS.

    Three futures, all done at the latest when the connection is closed: ``ready``, when MQTT may be sent (unless
    ``failure`` is set); ``answered``, when CONNACK was received; ``closed``.
    """

    def __init__(self, owner: ClientLinkOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self.failure: PenstockError | None = None
        """The error of the protocol below MQTT, if known."""
        self.error: Exception | None = None
        """The error with which the transport closed the connection."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    @property
    def open(self) -> bool:
        """Whether bytes may be written."""
        return self._transport is not None and not self._transport.is_closing()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the transport [asyncio]."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of asyncio's
        tcp = transport.get_extra_info("socket")
        if tcp is not None:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_open()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the owner [asyncio]."""
        self._owner.received(self, data)

    def pause_writing(self) -> None:
        """The write buffer is full [asyncio]."""
        self._owner.pause_writing(self)

    def resume_writing(self) -> None:
        """The write buffer has drained [asyncio]."""
        self._owner.resume_writing(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete all futures [asyncio]."""
        self.error = exc
        for future in (self.ready, self.answered, self.closed):
            if not future.done():
                future.set_result(None)

    # Called by the owner

    def on_open(self) -> None:
        """The transport is connected: MQTT may be sent, or the handshake of another protocol."""
        self.ready.set_result(None)

    def write(self, data: bytes) -> None:
        """Send bytes of MQTT."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close after the write buffer was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def set_reading(self, *, paused: bool) -> None:
        """Pause or resume reading from the network."""
        if self._transport is not None and self.open:
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
