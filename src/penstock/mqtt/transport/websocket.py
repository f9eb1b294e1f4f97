"""MQTT over WebSocket, server side: the opening handshake, then frames of MQTT bytes [MQTT 5.0 section 6].

The framing is the sans-IO layer of the ``websockets`` library. Packets need not be aligned to frames, so the content of
fragments is concatenated.
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
import logging
import socket
from typing import Final
from urllib.parse import urlsplit

from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from penstock.mqtt.transport.link import ServerLink, ServerLinkOwner
from penstock.mqtt.transport.listener_state import ListenerState

__all__ = ["WebSocketLink"]

_SUBPROTOCOL: Final = Subprotocol("mqtt")  # [MQTT-6.0.0-3]
MAX_REQUEST_BYTES: Final = 16 * 1024
"""Limit of the opening handshake's request, including cookies."""
UPGRADE_WORK: Final = 256
"""Units of work for an opening handshake (see ``max_turn_work``)."""
FRAMES_PER_TURN: Final = 64
"""Frames of a connection after which the rest of a read waits for a later turn."""
FRAME_WORK: Final = 4
"""Units of work for a frame, in later turns."""
FRAME_BYTES: Final = 64 * 1024
"""Content of the largest frame that is sent, since clients limit the size of frames, for example to a megabyte."""
PIECE_BYTES: Final = 1024
"""Bytes that are decoded in one step: at most 170 frames, which are handled in the same turn."""
FRAME_SLACK: Final = 64 * 1024
"""Bytes by which a frame may exceed the largest packet: some clients send several packets in a frame."""

# The library logs every connection; the server has its own log messages.
_quiet = logging.getLogger("penstock.mqtt.websocket")
_quiet.setLevel(logging.WARNING)


class WebSocketLink(ServerLink):
    """One connection over WebSocket."""

    __slots__ = ("_handshake_bytes", "_protocol")

    def __init__(self, server: ServerLinkOwner, listener: ListenerState, address: str, port: int, group: str) -> None:
        super().__init__(server, listener, address, port, group)
        self._handshake_bytes = 0
        # Before CONNECT is accepted, the buffer has the same limit as over TCP.
        self._protocol = ServerProtocol(
            subprotocols=[_SUBPROTOCOL], max_size=(None, listener.max_connect_size), logger=_quiet
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send all output as frames, with the transport [asyncio]."""
        self.descriptor = -1
        super().connection_made(transport)

    def write(self, data: bytes) -> None:
        """Send frames."""
        if self._server.gated and not self._server.may_send():
            return
        try:
            for start in range(0, len(data), FRAME_BYTES):
                self._protocol.send_binary(data[start : start + FRAME_BYTES])
        except InvalidState:
            return  # closed meanwhile
        self._send()

    def data_received(self, data: bytes) -> None:
        """Receive the handshake, then frames, and pass their content to the broker [asyncio].

        Bytes that wait for a later turn are not decoded before it: frames without MQTT bytes also cost time.
        """
        if self.early:
            self.early += data
        elif not self.unauthenticated or not self.defers(
            data, UPGRADE_WORK if self._protocol.state is State.CONNECTING else 0
        ):
            self._receive(data)

    def receive_early(self, data: bytes) -> None:
        """Handle bytes that waited for this turn."""
        if self.connection is None:
            super().receive_early(data)
        else:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Handle received bytes within the share of this turn."""
        protocol = self._protocol
        if protocol.state is State.CONNECTING:
            self._handshake_bytes += len(data)
            if self._handshake_bytes > MAX_REQUEST_BYTES and b"\r\n\r\n" not in data:
                self._reject(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large\n")
                return
        elif not self.unauthenticated and protocol.max_fragment_size == self.listener.max_connect_size:
            protocol.max_fragment_size = self.listener.max_packet_size + FRAME_SLACK
        pieces: list[bytes] = []
        frames = start = 0
        while start < len(data) and frames < FRAMES_PER_TURN:
            protocol.receive_data(data[start : start + PIECE_BYTES])
            start += PIECE_BYTES
            for event in protocol.events_received():
                frames += 1
                if isinstance(event, Request):
                    self._handshake(event)
                elif isinstance(event, Frame):
                    if event.opcode in (Opcode.BINARY, Opcode.CONT):
                        pieces.append(bytes(event.data))
                    elif event.opcode is Opcode.TEXT:  # [MQTT-6.0.0-1]
                        protocol.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is binary")
                        break
        if pieces and self.connection is not None and not self._lingering:
            self._server.received(self.connection, self, b"".join(pieces) if len(pieces) > 1 else pieces[0])
        self._send()
        if start < len(data) and self.connection is not None:
            self.early = data[start:]
            self.early_work = FRAMES_PER_TURN * FRAME_WORK
            self._server.defer(self)

    def eof_received(self) -> bool:
        """Handle the end of input [asyncio]."""
        if self._tls is None:
            self._receive_eof()
        return super().eof_received()

    def _close_ended(self) -> None:
        """Close the transport of a client that closed its side."""
        if self._tls is not None:
            self._receive_eof()
        super()._close_ended()

    def _receive_eof(self) -> None:
        """Handle the end of input; with TLS not before the output was written, because no frame can follow."""
        if not self.early:
            self._protocol.receive_eof()
            self._send()

    def finish(self) -> None:
        """Break reference cycles of the library: its parser is a generator that refers to its protocol and errors."""
        super().finish()
        self._protocol.parser.close()
        self._protocol.parser_exc = self._protocol.handshake_exc = None

    def close(self, *, linger: bool = True) -> None:
        """Send a close frame; the connection is closed when the peer answers, or after the grace period."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
            self._send()
            self.abort_later(transport)
        elif self._protocol.state is not State.CLOSING:
            super().close(linger=linger)

    def _handshake(self, request: Request) -> None:
        listener = self.listener
        path = request.path.partition("?")[0]
        if path != listener.settings.path:
            self._reject(http.HTTPStatus.NOT_FOUND, f"MQTT is at {listener.settings.path}\n")
            return
        origins, hosts = request.headers.get_all("Origin"), request.headers.get_all("Host")
        if len(origins) > 1 or len(hosts) != 1:
            self._reject(http.HTTPStatus.BAD_REQUEST, "one Host and at most one Origin are needed\n")
            return
        if origins and not self._origin_allowed(origins[0], hosts[0]):
            self._reject(http.HTTPStatus.FORBIDDEN, "this origin is not allowed; see the setting `origins`\n")
            return
        response = self._protocol.accept(request)
        if response.status_code == 101 and self._protocol.subprotocol != _SUBPROTOCOL:
            self._reject(http.HTTPStatus.BAD_REQUEST, "the subprotocol mqtt is needed\n")
            return
        self.listener.stats.websocket_rejected += response.status_code != 101
        self._respond(response)

    def _origin_allowed(self, origin: str, host: str) -> bool:
        """Return whether pages of ``origin`` may connect: configured origins, and the origin of this server.

        The latter only by IP address or the server's own name, because any DNS name can resolve to this address.
        """
        origins = self.listener.settings.origins
        if "*" in origins or origin in origins:
            return True
        try:
            page, mine = urlsplit(origin), urlsplit(f"//{host}")
            name = mine.hostname or ""
            same = page.hostname == mine.hostname and page.port == mine.port
        except ValueError:
            return False
        if name in {"localhost", socket.gethostname(), self.listener.settings.advertised_host}:
            return same
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return same

    def _reject(self, status: http.HTTPStatus, text: str) -> None:
        self.listener.stats.websocket_rejected += 1
        self._respond(self._protocol.reject(status, text))
        self._send()

    def _respond(self, response: Response) -> None:
        """Answer the handshake, unless later bytes of the same read have closed the connection: the library reads
        ahead."""
        if not self._protocol.eof_sent:
            self._protocol.send_response(response)

    def _send(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        for piece in self._protocol.data_to_send():
            if piece:
                transport.write(piece)
            else:
                transport.close()
                self.abort_later(transport)
