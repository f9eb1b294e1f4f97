"""MQTT over WebSocket: the handshake, then binary frames [MQTT 5.0 section 6].

The framing is the sans-IO layer of the ``websockets`` library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from penstock.errors import PenstockError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client.link import ClientLink, ClientLinkOwner
from penstock.mqtt.url import BrokerUrl

__all__ = ["WebSocketClientLink"]

_SUBPROTOCOL: Final = Subprotocol("mqtt")  # [MQTT-6.0.0-3]
FRAME_BYTES: Final = 64 * 1024
"""Content of the largest frame that is sent, since servers limit the size of frames."""
_TRANSIENT: Final = frozenset((429, 502, 503, 504))
"""HTTP statuses after which the client connects again: a proxy sends them while its server restarts."""


class WebSocketClientLink(ClientLink):
    """One connection over WebSocket. ``headers`` are sent with the handshake (a bearer token, an Origin)."""

    def __init__(
        self, owner: ClientLinkOwner, url: BrokerUrl, headers: Sequence[tuple[str, str]], max_size: int
    ) -> None:
        super().__init__(owner)
        self._url = url
        self._protocol = ClientProtocol(
            parse_uri(f"{url.scheme}://{url.authority}{url.path}"), subprotocols=[_SUBPROTOCOL], max_size=max_size
        )
        self._headers = headers

    def on_open(self) -> None:
        """Send the request of the opening handshake [RFC 6455 section 4.1]."""
        request = self._protocol.connect()
        for name, value in self._headers:
            request.headers[name] = value
        self._send_request(request)

    def data_received(self, data: bytes) -> None:
        """Receive the handshake, then frames, and pass their content to the owner [asyncio]."""
        self._protocol.receive_data(data)
        self._handle_events()

    def eof_received(self) -> None:
        """The server closed its side [asyncio]."""
        self._protocol.receive_eof()
        self._handle_events()

    def _handle_events(self) -> None:
        pieces: list[bytes] = []
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._handshake(event)
            elif isinstance(event, Frame):
                self._frame(event, pieces)
        if self._protocol.handshake_exc is not None and self.failure is None:
            self._fail(
                RemoteProtocolError(
                    f"mqtt: {self._url} does not speak WebSocket", why=str(self._protocol.handshake_exc)
                )
            )
        self._flush()
        if pieces:
            self._owner.received(self, b"".join(pieces) if len(pieces) > 1 else pieces[0])
        if self._protocol.close_expected() and self.open:
            self.close_transport()

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete all futures; set ``failure`` if the handshake was not complete [asyncio]."""
        if not self.ready.done() and self.failure is None:
            self.failure = UnavailableError(
                f"mqtt: {self._url} closed the connection during the WebSocket handshake", applied=False
            )
        super().connection_lost(exc)

    def write(self, data: bytes) -> None:
        """Send ``data`` in binary frames, unless the connection is being closed."""
        if self._protocol.state is State.OPEN:
            for start in range(0, len(data), FRAME_BYTES):
                self._protocol.send_binary(data[start : start + FRAME_BYTES])
            self._flush()

    def close(self) -> None:
        """Send a close frame (code 1000), then close."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
            self._flush()
        self.close_transport()

    def close_transport(self) -> None:
        """Close the TCP or TLS connection after the write buffer was sent."""
        super().close()

    def _send_request(self, request: Request) -> None:
        self._protocol.send_request(request)
        self._flush()

    def _handshake(self, response: Response) -> None:
        if self._protocol.handshake_exc is not None:
            self._fail(self._refusal(response, self._protocol.handshake_exc))
        elif self._protocol.subprotocol != _SUBPROTOCOL:
            self._fail(
                RemoteProtocolError(
                    f"mqtt: {self._url} does not support MQTT over WebSocket",
                    why="it did not choose the subprotocol 'mqtt'",
                    hint="check the path of the address",
                )
            )
        else:
            self.ready.set_result(None)

    def _frame(self, frame: Frame, pieces: list[bytes]) -> None:
        # MQTT packets need not be aligned to frames, so the content of fragments is concatenated [MQTT-6.0.0-2].
        if frame.opcode in (Opcode.BINARY, Opcode.CONT):
            pieces.append(bytes(frame.data))
        elif frame.opcode is Opcode.TEXT:  # [MQTT-6.0.0-1]
            self._fail(RemoteProtocolError(f"mqtt: {self._url} sent a WebSocket text frame"))

    def _refusal(self, response: Response, error: Exception) -> PenstockError:
        if isinstance(error, InvalidHandshake) and response.status_code != 101:
            refused = RefusedError(
                f"mqtt: {self._url} refused the WebSocket: HTTP {response.status_code} {response.reason_phrase}",
                code=response.status_code,
                text=response.reason_phrase,
                peer=self._url.authority,
                hint="check the path of the address and the credentials",
            )
            if response.status_code in _TRANSIENT:
                refused.retriable = True
                refused.hint = "try again later; if it repeats, check the server behind this proxy"
            return refused
        return RemoteProtocolError(f"mqtt: {self._url} does not speak WebSocket", why=str(error))

    def _fail(self, error: PenstockError) -> None:
        self.failure = error
        if not self.ready.done():
            self.ready.set_result(None)
        if self._protocol.state is State.OPEN:
            self._protocol.fail(1003)
        self._flush()
        self.close_transport()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                super().write(data)
            elif self.open:
                self.close_transport()
