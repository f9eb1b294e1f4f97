"""The server side of a connection: frames in, answers out, for the master (and whoever answers at once).

Everything that one read brought is answered with one write. A peer that does not read its answers is not read either.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from penstock.errors import RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, decode_request, encode_error
from penstock.tube.codec.framing import FrameDecoder, encode_frame

__all__ = ["AnsweringProtocol"]


class AnsweringProtocol(asyncio.Protocol):
    """Answers each request by ``answer(request) -> body``; ``connections`` is the server's set of open transports."""

    def __init__(self, answer: Callable[[Request], bytes], connections: set[asyncio.Transport]) -> None:
        self._answer = answer
        self._connections = connections
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has it without being a subclass
        self._transport = transport
        self._connections.add(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface's
        if self._transport is not None:
            self._connections.discard(self._transport)

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        answers = []
        try:
            for serial, body in self._decoder.feed(data):
                answers.append(encode_frame(serial, self._one(serial, body)))
        except RemoteProtocolError:
            self._transport.close()
            return
        if answers:
            self._transport.write(b"".join(answers))
        if self._decoder.error is not None:
            # The reference does not answer a broken frame; nothing after it can be understood.
            self._transport.close()

    def _one(self, serial: int, body: bytes) -> bytes:
        try:
            request = decode_request(serial, body)
        except RemoteProtocolError as error:
            return encode_error(exceptions.EXCEPTION, error.what, fatal=True)
        return self._answer(request)
