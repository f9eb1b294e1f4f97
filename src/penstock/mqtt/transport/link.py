"""Network connection of a client to the broker: moves bytes between its transport and the engine's connection."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from mypy_extensions import mypyc_attr

from penstock.mqtt.engine.connections.output import OutputTransport
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.connection_limits import Abortable, ConnectionLimiter
from penstock.mqtt.transport.listener_state import ListenerState
from penstock.mqtt.transport.tls import certificate_of, trust_anchor
from penstock.mqtt.transport.tls_transport import TlsTransport
from penstock.security.certificates import certificate_identity, name_in_certificate

if TYPE_CHECKING:
    from mypy_extensions import i64

    from penstock.mqtt.engine.connections.connection import BrokerConnection

__all__ = ["CLOSE_GRACE_S", "END_WORK", "ServerLink", "ServerLinkOwner"]

_write: Final = os.write

CLOSE_GRACE_S = 5.0
"""Time for a peer to read the last bytes of a connection that is being closed; then it is aborted."""
END_WORK: Final = 32
"""Units of work for the end of a connection (see ``max_turn_work``)."""
WRITE_BUFFER_BYTES: Final = 256 * 1024
"""Size of the write buffer above which a connection gets no messages and reading is paused."""


def _always() -> bool:
    return True


@mypyc_attr(allow_interpreted_subclasses=True)
class ServerLinkOwner:
    """The server of listeners and their links; a base class, so that a compiled link calls a compiled server."""

    __slots__ = ("_may_send", "connection_limiter", "gated", "limits", "receiving")

    def __init__(self, limits: BrokerLimits, connection_limiter: ConnectionLimiter[Abortable]) -> None:
        self.limits = limits
        self.connection_limiter = connection_limiter
        """Connection limits of all listeners together."""
        self.receiving = True
        """Whether connections are read."""
        self.gated = False
        """Whether :meth:`may_send` must be called before each write to a client."""
        self._may_send: Callable[[], bool] = _always

    def gate(self, may_send: Callable[[], bool]) -> None:
        """Call ``may_send`` before each write to a client; the bytes are discarded if it returns False.

        A node of a cluster must not answer after its lease has expired.
        """
        self.gated = True
        self._may_send = may_send

    def may_send(self) -> bool:
        """Return whether bytes may be sent to clients now."""
        return self._may_send()

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        raise NotImplementedError

    def arrived(self, link: ServerLink) -> None:
        """Register an accepted connection, before its TLS handshake."""
        raise NotImplementedError

    def opened(self, link: ServerLink) -> BrokerConnection | None:
        """Open a connection that is ready for MQTT; None if it must be closed."""
        raise NotImplementedError

    def received(self, connection: BrokerConnection, link: ServerLink, data: bytes) -> None:
        """Handle received bytes of MQTT."""
        raise NotImplementedError

    def accepted(self, link: ServerLink) -> None:
        """Handle an accepted CONNECT, before its CONNACK or soon after it."""
        raise NotImplementedError

    def admits(self, work: int) -> bool:
        """Return whether another connection may be accepted in this turn, and count ``work`` units for it."""
        raise NotImplementedError

    def defers(self, link: ServerLink, work: int) -> bool:
        """Return whether bytes of a connection without CONNACK, or its end, must wait for a later turn.

        False: the caller handles them now, for ``work`` units.
        """
        raise NotImplementedError

    def defer(self, link: ServerLink) -> None:
        """Continue with the connection in a later turn."""
        raise NotImplementedError

    def lost(self, link: ServerLink) -> None:
        """Handle the end of a connection; called once, also if it was never opened."""
        raise NotImplementedError


class ServerLink(OutputTransport):
    """One TCP or TLS connection. ``address`` is the peer's, without its port.

    It has the methods of ``asyncio.Protocol`` without being one: a compiled class has only compiled base classes.
    """

    __slots__ = (
        "_abort",
        "_aborted",
        "_buffered",
        "_end_counted",
        "_finished",
        "_full",
        "_lingering",
        "_server",
        "_tls",
        "address",
        "anchor",
        "certificate",
        "connection",
        "deferred",
        "descriptor",
        "early",
        "early_work",
        "ended",
        "group",
        "identity",
        "listener",
        "lost",
        "port",
        "reading_paused",
        "transport",
        "turn",
        "unauthenticated",
    )

    def __init__(self, server: ServerLinkOwner, listener: ListenerState, address: str, port: int, group: str) -> None:
        self._server = server
        self._abort: asyncio.TimerHandle | None = None
        self._aborted = False
        """True if the link was aborted before the event loop opened its transport."""
        self._buffered = False
        """Whether the transport was used for writing, so that its write buffer may have bytes."""
        self._full = False
        self._end_counted = False
        """Whether the end of the connection was counted as work of a turn."""
        self._finished = False
        self._tls: TlsTransport | None = None
        self._lingering = False
        """Whether the server's side is closed: received bytes are discarded until the peer closes its side."""
        self.reading_paused = False
        """Whether reading is paused because a service cannot accept more messages."""
        self.deferred = False
        """Whether reading is paused until a later turn because the connection has used its share."""
        self.turn: i64 = -1
        """Number of the last turn in which the connection had a share from the queue."""
        self.early = b""
        """Bytes of a TLS handshake, before CONNACK or of WebSocket frames that wait for a later turn."""
        self.early_work = 0
        """Units of work for these bytes, without the work for MQTT packets."""
        self.ended = False
        """Whether the client has ended the connection, and the transport is closed in a later turn."""
        self.lost = False
        """Whether the connection is closed while received bytes still wait."""
        self.listener = listener
        self.descriptor = -1
        """The socket's descriptor, to which :meth:`send_now` writes; set by the listener. -1 over WebSocket, and once
        the connection is being closed: then another descriptor may have the number."""
        self.address = address
        self.port = port
        self.group = group
        self.unauthenticated = True
        """True until CONNECT is accepted."""
        self.connection: BrokerConnection | None = None
        self.transport: asyncio.Transport | None = None
        self.certificate: str | None = None
        """The name in the verified certificate of the peer."""
        self.anchor: bytes | None = None
        """Digest of the authority of the certificate; None without a certificate, empty if it is not known."""
        self.identity: bytes | None = None
        """Identity of the certificate as used in revocation lists."""

    @property
    def name(self) -> str:
        """The peer's address, and the listener unless it is the default one; for logs."""
        peer = f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"
        return peer if self.listener.name == "mqtt" else f"{peer} on {self.listener.name}"

    @property
    def certificate_valid(self) -> bool:
        """Whether the peer's certificate is from a trusted authority and not revoked; True without a certificate."""
        tls = self.listener.tls
        return self.anchor is None or (tls is not None and self.anchor in tls.anchors and not self.revoked)

    @property
    def revoked(self) -> bool:
        """Whether the peer's certificate is on a current revocation list of the listener."""
        tls = self.listener.tls
        return tls is not None and self.identity in tls.revoked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the transport, read the client certificate and open the connection in the engine [asyncio]."""
        transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of asyncio's
        self.transport = transport
        if self._aborted:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        tls = self.listener.tls
        ssl_object = transport.get_extra_info("ssl_object")
        if (
            tls is not None
            and tls.files.client_ca is not None
            and isinstance(ssl_object, ssl.SSLObject)
            and (shown := certificate_of(ssl_object))
        ):
            self.certificate = name_in_certificate(shown, tls.files.name)
            self.anchor = trust_anchor(ssl_object) or b""
            self.identity = certificate_identity(ssl_object.getpeercert(binary_form=True) or b"")
        given: object = transport
        if isinstance(given, TlsTransport):
            self._tls = given
            self.listener.handshakes.pop(given, None)
        elif ssl_object is not None:
            self.descriptor = -1
        self.connection = self._server.opened(self)
        if self.connection is None:
            self.abort()

    def begin_handshake(self, transport: TlsTransport) -> None:
        """Note the beginning of the TLS handshake, which :meth:`abort` ends."""
        self._tls = transport

    def as_protocol(self) -> asyncio.Protocol:
        """Return the link as the event loops' type."""
        return cast(asyncio.Protocol, self)

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the broker [asyncio]."""
        if self.connection is not None and not self._lingering and not (self.unauthenticated and self.defers(data)):
            self._server.received(self.connection, self, data)

    def defers(self, data: bytes, work: int = 0) -> bool:
        """Keep bytes of a TLS handshake, or before CONNACK, for a later turn if this one is full; return whether it is.

        Otherwise ten thousand clients that connect at the same time would delay all others until the last of them has
        its CONNACK.
        """
        if not self._server.defers(self, work):
            return False
        self.early += data
        self.early_work = work
        return True

    def proceed(self) -> None:
        """Handle the bytes that :meth:`defers` kept."""
        data, self.early = self.early, b""
        self.deferred = False
        self.receive_early(data)
        if not self.deferred:
            self.end_turn()

    def end_turn(self) -> None:
        """Finish or close a connection that has ended, else read it again: nothing waits for a later turn any more."""
        if self.lost:
            self.finish()
        elif self.ended:
            self._close_after_output()
        else:
            self.resume_reading()

    def receive_early(self, data: bytes) -> None:
        """Handle bytes that waited for this turn."""
        if self.connection is not None:
            self._server.received(self.connection, self, data)
        elif self._tls is not None:
            self._tls.receive(data)

    def eof_received(self) -> bool:
        """The peer closed its side: let the transport close, or return True to close it later [asyncio].

        The answers to all that was received are written first, unless they wait for a commit or for a service.
        """
        if self._tls is None:
            return self.defers_end()
        if not self._end_counted and not self.defers_end():
            self._close_after_output()
        return True

    def defers_end(self) -> bool:
        """Return whether the transport must be closed in a later turn, because this one is full.

        When many clients leave at the same time, closing their sockets takes longer than all other work.
        """
        if self._end_counted:
            return False
        if self._server.defers(self, END_WORK):
            self.ended = True
            return True
        self._end_counted = True
        return False

    def _close_after_output(self) -> None:
        """Close the transport; with TLS after the output of this turn, because the client's close_notify may be in the
        same read as its last packets."""
        self._end_counted = True
        if self._tls is None:
            self._close_ended()
        else:
            asyncio.get_running_loop().call_soon(self._close_ended)

    def _close_ended(self) -> None:
        """Close the transport of a client that closed its side."""
        if self.connection is not None and self.connection.left:
            self.close(linger=False)
        elif self._tls is not None:
            self._tls.end()
        elif self.transport is not None:
            self.transport.close()

    def write(self, data: bytes) -> None:
        """Write ``data`` with the transport; no effect while it is closing."""
        transport = self.transport
        if self._server.gated and not self._server.may_send():
            return
        if transport is not None and not transport.is_closing():
            self._buffered = True
            transport.write(data)

    def send_now(self, data: bytes) -> None:
        """Write immediately, without the transport if its write buffer is empty.

        Only while received bytes are handled, or if the transport is not closing: a transport that closes by itself
        delivers no received bytes any more, so during a delivery the descriptor is valid. uvloop's transport would
        write at the end of the loop turn, after the broker has processed other connections, and at a higher cost.
        """
        tls = self._tls
        if self.descriptor < 0 or ((self._buffered or tls is not None) and self._waits()):
            self.write(data)
            return
        if tls is not None:
            data = tls.encrypt(data)
        if self._server.gated and not self._server.may_send():
            return
        try:
            sent = _write(self.descriptor, data)
        except OSError:  # full or closed: the transport handles it
            sent = 0
        if sent < len(data):
            rest = data[sent:]
            if tls is not None:
                tls.send_encrypted(rest)
            else:
                self.write(rest)

    def send_output(self, data: bytes) -> None:
        """Write the output of a flush, and resume reading if no hold is left [OutputTransport]."""
        transport, connection = self.transport, self.connection
        if transport is None or connection is None:
            return
        if data and not transport.is_closing():
            self.send_now(data)
        if self.unauthenticated and connection.session is not None:
            self._server.accepted(self)
        if self.reading_paused and not connection.holds:
            self.resume_reading()

    def _waits(self) -> bool:
        """Whether the transport has bytes to write."""
        self._buffered = self.transport is not None and self.transport.get_write_buffer_size() > 0
        return self._buffered

    def pause_writing(self) -> None:
        """The write buffer is full: stop reading from the client until it has drained [asyncio]."""
        if self.connection is not None and self.transport is not None:
            self._full = True
            self.connection.pause(self._server.now())
            if not self.transport.is_closing():
                self.transport.pause_reading()

    def resume_writing(self) -> None:
        """The write buffer has drained: resume reading [asyncio]."""
        if self.connection is not None and self.transport is not None and not self.transport.is_closing():
            self._full = False
            self.resume_reading()
            self.connection.unpause(self._server.now())

    def resume_reading(self) -> None:
        """Resume reading unless another reason to pause remains."""
        self.reading_paused = self.connection is not None and self.connection.holds > 0
        if self.reading_paused or self._full or self.deferred or not self._server.receiving:
            return
        transport = self.transport
        if transport is not None:
            if not transport.is_closing():
                transport.resume_reading()
        elif self._tls is not None:  # reading is paused by the TLS handshake
            self._tls.resume_reading()

    def defer_reading(self) -> None:
        """Pause reading until a later turn: the connection has used its share of this one."""
        self.deferred = True
        if self.transport is not None:
            if not self.transport.is_closing():
                self.transport.pause_reading()
        elif self._tls is not None:  # reading is paused by the TLS handshake
            self._tls.pause_reading()

    def pause_reading(self) -> None:
        """Pause reading until :meth:`resume_reading`, because a service cannot accept more messages."""
        self.reading_paused = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is closed [asyncio]."""
        if self._abort is not None:
            self._abort.cancel()
        if self.deferred and self.connection is not None and (self.connection.unread or self.early):
            self.lost = True  # handle the last packets first, for example DISCONNECT
            self.descriptor = -1
        elif not self._end_counted and self._server.defers(self, END_WORK):
            self.lost = True
            self.descriptor = -1
            self.early = b""
        else:
            self.finish()

    def finish(self) -> None:
        """Notify the server, once, and drop references, so that no cycle waits for garbage collection."""
        if not self._finished:
            self._finished = True
            if self._tls is not None:
                self.listener.handshakes.pop(self._tls, None)
            self._server.lost(self)
            if self.connection is not None:
                self.connection.sink = None
            self.connection = self.transport = self._tls = self._abort = None
            self.descriptor = -1
            self.deferred = False

    def close(self, *, linger: bool = True) -> None:
        """Close after the write buffer was sent; abort after a grace period if the peer does not read.

        Only the sending direction is closed first: bytes that arrive on a closed socket reset the connection, and a
        client in the middle of sending would not read the DISCONNECT. ``linger`` False closes both directions, for a
        client that sends nothing more. The TLS transport sends close_notify, and reads until the peer closes unless the
        client has sent DISCONNECT.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self.descriptor = -1
        if not linger or self.unauthenticated or not transport.can_write_eof():
            if self._tls is not None and self.connection is not None and self.connection.left:
                self._tls.close(wait=False)
            else:
                transport.close()
            if self._tls is None and not (self._buffered and self._waits()):
                return  # closed in the next turn
        elif not self._lingering:
            self._lingering = True
            try:
                transport.write_eof()
            except OSError:  # the peer closed first
                transport.close()
            else:
                if not transport.is_reading():
                    transport.resume_reading()
        self.abort_later(transport)

    def abort_later(self, transport: asyncio.Transport) -> None:
        """Abort the connection after the grace period."""
        if self._abort is None:
            self._abort = asyncio.get_running_loop().call_later(CLOSE_GRACE_S, transport.abort)

    def abort(self) -> None:
        """Close at once, in any state; received bytes are discarded."""
        self.descriptor = -1
        self.deferred = False
        if self.lost:
            self.finish()
        elif self.transport is not None:
            self.transport.abort()
        elif self._tls is not None:
            self._tls.abort()
        else:
            self._aborted = True
