"""A client's connection to the broker: frames in, the engine's answers out."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from penstock.errors import RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import decode_request, encode_error
from penstock.tube.codec.framing import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from penstock.tube.broker import TubeBroker

__all__ = ["BrokerConnection"]

_log = logging.getLogger("penstock.tube.broker")


class BrokerConnection(asyncio.Protocol):
    """One client. What is answered at once leaves with one write; a peer that does not read is not read either."""

    def __init__(self, broker: TubeBroker) -> None:
        self.out: list[bytes] = []
        self._broker = broker
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has it without being a subclass
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._broker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface's
        self._transport = None
        self.out.clear()
        self._broker.connections.discard(self)

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        broker = self._broker
        broker.bytes_in += len(data)
        try:
            frames = self._decoder.feed(data)
        except RemoteProtocolError as error:
            self._refuse(error)
            return
        self._receive(frames)
        if self._decoder.error is not None:
            self._refuse(self._decoder.error)

    def _receive(self, frames: Iterable[tuple[int, bytes]]) -> None:
        broker = self._broker
        engine = broker.engine
        clock = broker.clock
        arrived_ms = clock()
        out = self.out
        for serial, body in frames:
            broker.requests += 1
            try:
                request = decode_request(serial, body)
            except RemoteProtocolError as error:
                out.append(encode_frame(serial, encode_error(exceptions.EXCEPTION, error.what, fatal=True)))
                continue
            answer = engine.receive(request, arrived_ms, clock())
            if answer is None:
                continue
            if answer.wait:
                expires_ms = arrived_ms + request.timeout if request.timeout else 0
                broker.wait(self, serial, request.method, answer.body, expires_ms)
            else:
                out.append(encode_frame(serial, answer.body))
        self.flush()
        if engine.dirty_stores or engine.offsets.dirty:
            broker.schedule()
        broker.arm()

    def _refuse(self, error: RemoteProtocolError) -> None:
        # Nothing after a broken frame can be understood; the reference's server does not answer it either.
        fields = {"broker_id": self._broker.broker_id, "error": error.what}
        _log.warning("tube connection refused", extra={"fields": fields})
        self.close()

    def flush(self) -> None:
        """Send what was collected with one write."""
        if self.out and self._transport is not None:
            data = self.out[0] if len(self.out) == 1 else b"".join(self.out)
            self._broker.bytes_out += len(data)
            self._transport.write(data)
        self.out.clear()

    def stop(self) -> None:
        """Take no more requests; answers still leave."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def close(self) -> None:
        """Close once what was written has left."""
        if self._transport is not None:
            self._transport.close()
