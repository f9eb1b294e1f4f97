"""One network connection over TCP or TLS: bytes between its transport and its connection in the engine."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from penstock.mqtt.transport.tls import certificate_of, trust_anchor
from penstock.security.certificates import certificate_identity, name_in_certificate

if TYPE_CHECKING:
    from penstock.mqtt.engine.connection import BrokerConnection
    from penstock.mqtt.transport.listener import Listener

__all__ = ["CLOSE_GRACE_S", "Link", "LinkOwner", "RefusingLink"]

CLOSE_GRACE_S: Final = 5.0
"""How long a connection that was closed may take to read its last bytes; then it is cut."""
WRITE_BUFFER_BYTES: Final = 256 * 1024
"""Unwritten bytes above which a connection takes no more messages and is not read either."""
REFUSAL_S: Final = 2.0
"""How long a connection that is refused may take to send the CONNECT that the refusal answers."""


class LinkOwner(Protocol):
    """The server, as its links see it."""

    @property
    def receiving(self) -> bool:
        """Whether connections may be read."""
        ...

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        ...

    def opened(self, link: Link) -> BrokerConnection | None:
        """A connection is ready for MQTT; None where it may not stay."""
        ...

    def received(self, connection: BrokerConnection, link: Link, data: bytes) -> None:
        """Bytes of MQTT came in."""
        ...

    def lost(self, link: Link) -> None:
        """The connection is gone; called once, also where it was never opened."""
        ...


class Link(asyncio.Protocol):
    """One TCP or TLS connection. ``write`` takes bytes of MQTT; ``address`` is the peer's, without its port."""

    __slots__ = (
        "_abort",
        "_descriptor",
        "_full",
        "_gone",
        "_lingering",
        "_server",
        "address",
        "anchor",
        "certificate",
        "connection",
        "group",
        "held",
        "identity",
        "listener",
        "opening",
        "port",
        "stranger",
        "transport",
        "write",
    )

    def __init__(self, server: LinkOwner, listener: Listener, address: str, port: int, group: str) -> None:
        self._server = server
        self._abort: asyncio.TimerHandle | None = None
        self._descriptor = -1
        """The socket's, where bytes of MQTT go to it as they are."""
        self._full = False
        self._gone = False
        self._lingering = False
        """Our side is closed: what still comes in is thrown away until the peer closes its own."""
        self.held = False
        """A service cannot take more: nothing is read until it can."""
        self.listener = listener
        self.address = address
        self.port = port
        self.group = group
        self.stranger = True
        """It has no accepted CONNECT."""
        self.opening: asyncio.Task[None] | None = None
        """While the transport is made: for TLS, during its handshake."""
        self.connection: BrokerConnection | None = None
        self.transport: asyncio.Transport | None = None
        self.write: Callable[[bytes], None] = _nowhere
        self.certificate: str | None = None
        """The name in the peer's certificate, which TLS has verified."""
        self.anchor: bytes | None = None
        """Digest of the authority that it was verified by; None without a certificate, empty where it is not known."""
        self.identity: bytes | None = None
        """What revocation lists know the certificate by."""

    @property
    def name(self) -> str:
        """For logs: where it came from, and in."""
        peer = f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"
        return peer if self.listener.name == "mqtt" else f"{peer} on {self.listener.name}"

    @property
    def vouched_for(self) -> bool:
        """Whether the authority of its certificate is trusted now and did not revoke it; also where it showed none."""
        tls = self.listener.tls
        return self.anchor is None or (tls is not None and self.anchor in tls.anchors and not self.revoked)

    @property
    def revoked(self) -> bool:
        """Whether its certificate is on a revocation list that the listener goes by now."""
        tls = self.listener.tls
        return tls is not None and self.identity in tls.revoked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there: its time to CONNECT begins, over TLS also what its certificate says [asyncio]."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, without being a subclass
        self.transport = transport
        tcp = transport.get_extra_info("socket")
        if tcp is not None:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        tls = self.listener.tls
        ssl_object = transport.get_extra_info("ssl_object")
        if tls is not None and isinstance(ssl_object, ssl.SSLObject) and (shown := certificate_of(ssl_object)):
            self.certificate = name_in_certificate(shown, tls.files.name)
            self.anchor = trust_anchor(ssl_object) or b""
            self.identity = certificate_identity(ssl_object.getpeercert(binary_form=True) or b"")
        self.write = self.writer(transport)
        if tcp is not None and self.write == transport.write and not self.listener.settings.transport.encrypted:
            self._descriptor = tcp.fileno()
        self.connection = self._server.opened(self)
        if self.connection is None:
            transport.abort()

    def writer(self, transport: asyncio.Transport) -> Callable[[bytes], None]:
        """What ``write`` is: the transport's own, since nothing lies between."""
        return transport.write

    def data_received(self, data: bytes) -> None:
        """Bytes of MQTT, for the broker [asyncio]."""
        if self.connection is not None and not self._lingering:
            self._server.received(self.connection, self, data)

    def send_now(self, data: bytes) -> None:
        """Write at once, past the transport where it has nothing to write [Sink].

        The transport of uvloop would write at the end of the turn, when the broker has worked for others.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._descriptor >= 0 and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:  # full, or gone: the transport finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self.write(data)

    def pause_writing(self) -> None:
        """The client does not take what it is sent: it is not read either until it does [asyncio]."""
        if self.connection is not None and self.transport is not None:
            self._full = True
            self.connection.pause(self._server.now())
            if not self.transport.is_closing():
                self.transport.pause_reading()

    def resume_writing(self) -> None:
        """It has taken enough: read on [asyncio]."""
        if self.connection is not None and self.transport is not None and not self.transport.is_closing():
            self._full = False
            self.read_on()
            self.connection.unpause(self._server.now())

    def read_on(self) -> None:
        """Read again, if nothing else stands against it."""
        self.held = self.connection is not None and self.connection.holds > 0
        transport = self.transport
        if transport is None or transport.is_closing() or self.held or self._full or not self._server.receiving:
            return
        transport.resume_reading()

    def hold(self) -> None:
        """Read nothing for now; :meth:`read_on` ends it."""
        self.held = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is over, whoever ended it [asyncio]."""
        if self._abort is not None:
            self._abort.cancel()
        self.gone()

    def gone(self) -> None:
        """Tell the server, once; then let go of what refers back, so that nothing waits for garbage collection."""
        if not self._gone:
            self._gone = True
            self._server.lost(self)
            if self.connection is not None:
                self.connection.sink = None
            self.connection = self.transport = self._abort = None
            self.write = _nowhere

    def close(self, *, linger: bool = True) -> None:
        """Close once what is buffered was sent; cut the connection where the peer does not take it.

        Our side closes first: bytes that come in on a socket that is closed reset the connection, and a client in the
        middle of sending would never read the DISCONNECT that says why. ``linger`` False ends that, too. TLS does the
        like by itself: its transport says goodbye, and reads on until the peer has as well.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not linger or self.stranger or not transport.can_write_eof():
            transport.close()
        elif not self._lingering:
            self._lingering = True
            try:
                transport.write_eof()
            except OSError:  # the peer has gone first
                transport.close()
            else:
                if not transport.is_reading():
                    transport.resume_reading()
        self.abort_later(transport)

    def abort_later(self, transport: asyncio.Transport) -> None:
        """Cut the connection after a grace, whatever the peer does."""
        if self._abort is None:
            self._abort = asyncio.get_running_loop().call_later(CLOSE_GRACE_S, transport.abort)

    def cut(self) -> None:
        """End it now, in whatever state it is."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class RefusingLink(asyncio.Protocol):
    """A TCP connection that may not come in: it gets the reason as the answer to its CONNECT, then it ends."""

    __slots__ = ("_data", "_done", "_reason_code", "_timer", "_transport")

    def __init__(self, reason_code: int, done: Callable[[], None]) -> None:
        self._reason_code = reason_code
        self._done = done
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the client a moment to send its CONNECT [asyncio]."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer as soon as the version can be told; then close [asyncio]."""
        if self._transport is None or self._transport.is_closing():
            return
        self._data = (self._data + data)[:16]
        level = _protocol_level(self._data)
        if level is None:
            return
        if level == 5:
            self._transport.write(bytes((0x20, 3, 0, self._reason_code, 0)))
        elif level:  # of 3.1.1, of a bridge, unknown: server unavailable, since MQTT 3.1.1 has no better one
            self._transport.write(b"\x20\x02\x00\x03")
        self._transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Say that the place is free again [asyncio]."""
        if self._timer is not None:
            self._timer.cancel()
        self._done()


def _protocol_level(data: bytes) -> int | None:
    """The protocol level in the beginning of a CONNECT; None where more is needed, 0 where it is none."""
    if data[:1] not in (b"", b"\x10"):
        return 0
    start = 1
    while start < len(data) and data[start] & 0x80 and start < 5:
        start += 1
    body = data[start + 1 :]
    for name in (b"\x00\x04MQTT", b"\x00\x06MQIsdp"):
        if len(body) > len(name) and body.startswith(name):
            return body[len(name)]
        if name.startswith(body[: len(name)]):
            return None
    return 0


def _nowhere(data: bytes) -> None:
    """Before there is a transport, and after it is gone."""
