"""TLS of an accepted connection, between the transport of its socket and its link.

The TLS transports of the event loops have read buffers for each connection. This transport has none: OpenSSL frees its
record buffers between records, and the two memory BIOs for its input and output contain bytes only during a call. All
connections of a listener share them, because a memory BIO never shrinks: 3 KB for a handshake. A method that fills a
BIO empties it before other code runs, even if the method fails. Remaining bytes would break the next connection that
uses the BIO, because they are encrypted with other keys.

Bytes are encrypted when they are written: the socket's transport is the only write buffer, with the connection's
limits. A failed handshake ends with an alert (see :mod:`penstock.runtime.io.tls`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from penstock.mqtt.transport.tls import ServerTls

__all__ = ["TlsTransport"]

RECORD_BYTES: Final = 16 * 1024
"""Maximum plaintext of one record [RFC 8446 section 5.1]."""


class TlsTransport:
    """The server's side of one TLS connection: protocol of the socket's transport, transport of ``protocol``.

    It has the methods of ``asyncio.Transport`` and ``asyncio.Protocol`` that are used here without being one: a
    compiled class has only compiled base classes.

    ``protocol.connection_made`` is called after the handshake. If that fails, ``failed`` is called with the reason,
    once, unless :meth:`abort` was called before; the caller limits the duration of the handshake by
    :meth:`end_handshake`. ``protocol.connection_lost`` is called at the end of the connection, also without a
    handshake. ``defers`` is called with each message of the handshake; if it returns True, its owner calls
    :meth:`receive` in a later turn.
    """

    __slots__ = ("_closing", "_defers", "_failed", "_incoming", "_open", "_outgoing", "_protocol", "_socket", "_tls")

    def __init__(
        self,
        protocol: asyncio.Protocol,
        tls: ServerTls,
        failed: Callable[[Exception], None],
        defers: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self._protocol = protocol
        self._defers = defers
        self._incoming = tls.incoming
        self._outgoing = tls.outgoing
        self._tls = tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._socket: asyncio.Transport | None = None
        self._open = False
        """True after the handshake."""
        self._closing = False
        self._failed: Callable[[Exception], None] | None = failed
        """None once the handshake has succeeded or failed."""

    def as_protocol(self) -> asyncio.Protocol:
        """Return the transport as the event loops' type of a protocol."""
        return cast(asyncio.Protocol, self)

    def end_handshake(self, error: Exception) -> None:
        """Close at once for ``error`` if the handshake has not succeeded."""
        if not self._open:
            self._fail(error)
            self.abort()

    # The protocol of the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client's first message [asyncio]."""
        self._socket = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of asyncio's
        if self._closing:
            self._socket.abort()

    def data_received(self, data: bytes) -> None:
        """Decrypt [asyncio]."""
        if self._open or not self._defers(data):
            self.receive(data)

    def receive(self, data: bytes) -> None:
        """Decrypt; the plaintext of one call is passed on in one piece."""
        incoming = self._incoming
        pieces: list[bytes] = []
        opened = ended = False
        try:
            incoming.write(data)
            if not self._open:
                opened = self._continue_handshake()
            if self._open and incoming.pending:
                ended = self._decrypt(pieces)
        finally:
            if incoming.pending:  # after close_notify or a failure
                incoming.read()
        if opened:
            self._protocol.connection_made(cast(asyncio.Transport, self))
        if pieces and not self._closing:
            self._protocol.data_received(b"".join(pieces) if len(pieces) > 1 else pieces[0])
        if ended and not self.eof_received():
            self.end()

    def eof_received(self) -> bool:
        """Handle the end of input; the socket's transport then closes, unless the protocol returns True and calls
        :meth:`end` later [asyncio]."""
        return self._open and not self._closing and bool(self._protocol.eof_received())

    def pause_writing(self) -> None:
        """The write buffer is full [asyncio]."""
        if self._open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """The write buffer has drained [asyncio]."""
        if self._open:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed [asyncio]."""
        if not self._closing:
            self._closing = True
            self._fail(exc or ConnectionResetError("the peer closed the connection during the handshake"))
        self._protocol.connection_lost(exc)

    # The transport of ``protocol``

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send ``data``; no effect while the connection is being closed."""
        if not self._closing:
            self.send_encrypted(self.encrypt(data))

    def encrypt(self, data: bytes | bytearray | memoryview) -> bytes:
        """Encrypt ``data``; the caller must send the result next. Empty after a failure of the connection."""
        try:
            written = self._tls.write(data)  # at most one record
            if written == len(data):
                return self._outgoing.read()
            records = [self._outgoing.read()]
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[self._tls.write(rest) :]
                records.append(self._outgoing.read())
        except ssl.SSLError:  # a damaged record was received before; data_received closes
            self._outgoing.read()
            return b""
        return b"".join(records)

    def send_encrypted(self, data: bytes) -> None:
        """Send the result of :meth:`encrypt`, or the remaining part."""
        if data and self._socket is not None and not self._socket.is_closing():
            self._socket.write(data)

    def close(self, *, wait: bool = True) -> None:
        """Send close_notify and discard received bytes until the client closes; the caller limits the time.

        Without ``wait`` the connection closes after close_notify was sent [RFC 8446 section 6.1]: for a client that
        sent DISCONNECT.
        """
        if self._closing or self._socket is None:
            return
        self._closing = True
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            self.send_encrypted(self._outgoing.read())
            if not wait:
                self._socket.close()
            elif not self._socket.is_closing() and not self._socket.is_reading():
                self._socket.resume_reading()
            return
        except ssl.SSLError:
            pass  # the connection failed before
        self.send_encrypted(self._outgoing.read())
        self._socket.close()

    def end(self) -> None:
        """Close after the end of input: send close_notify, and do not wait for the client."""
        self.close()
        if self._socket is not None:
            self._socket.close()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._failed = None
        if self._socket is not None:
            self._socket.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        return self._closing or self._socket is None or self._socket.is_closing()

    def can_write_eof(self) -> bool:
        """False: TLS closes the connection as a whole."""
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``ssl_object``, or the information of the socket's transport [asyncio]."""
        if name == "ssl_object":
            return self._tls
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause reading from the socket."""
        if self._socket is not None and not self._socket.is_closing():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading from the socket."""
        if self._socket is not None and not self._socket.is_closing():
            self._socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits, in encrypted bytes."""
        if self._socket is not None:
            self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the number of encrypted bytes that wait to be written."""
        return 0 if self._socket is None else self._socket.get_write_buffer_size()

    # Internal

    def _continue_handshake(self) -> bool:
        """Continue the handshake; return True if it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.send_encrypted(self._outgoing.read())
            failure, self._tls.failure = self._tls.failure, None
            if failure is not None:  # wait until the client closes: closing first could discard the alert
                self._fail(failure)
            return False
        except ssl.SSLError as error:  # the client does not use TLS: send no alert
            self._outgoing.read()
            self._fail(error)
            self.abort()
            return False
        self.send_encrypted(self._outgoing.read())
        if self._closing:  # aborted in this turn
            return False
        self._open = True
        self._failed = None
        return True

    def _fail(self, error: Exception) -> None:
        """Report that the handshake failed, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(error)

    def _decrypt(self, pieces: list[bytes]) -> bool:
        """Append decrypted bytes to ``pieces``; return True if the client has closed its side."""
        tls, incoming = self._tls, self._incoming
        ended = False
        try:
            while piece := tls.read(RECORD_BYTES):  # a whole record
                pieces.append(piece)
                if not incoming.pending:
                    break
            else:
                ended = True  # close_notify
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:  # a damaged record, or bytes after both sides have closed
            ended = True
        if self._outgoing.pending:  # an alert, or the answer to a key update
            self.send_encrypted(self._outgoing.read())
        return ended
