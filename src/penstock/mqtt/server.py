"""MQTT broker on asyncio: listeners, transports and one timer over the pure broker engine.

All that one loop turn produced for a connection leaves in one write, also what other connections caused: the engine
collects, :meth:`MqttServer._flush` runs once. System calls and wake-ups are what a broker costs, not Python.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Final, cast

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import reason_name
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connection import BrokerConnection
from penstock.mqtt.engine.limits import BrokerLimits, BrokerStats
from penstock.mqtt.service import Service
from penstock.runtime.clock import wall_clock_ms

__all__ = ["BrokerLimits", "BrokerStats", "MqttServer"]

logger = logging.getLogger("penstock.mqtt")

CLOSE_GRACE_S: Final = 5.0
"""How long a connection that was closed may take to read its last bytes; then it is cut."""
WRITE_BUFFER_BYTES: Final = 256 * 1024
"""Unwritten bytes above which a connection takes no more messages and is not read either."""


class _Link(asyncio.Protocol):
    """One TCP connection: moves bytes between its transport and its engine connection."""

    def __init__(self, server: MqttServer) -> None:
        self._server = server
        self._connection: BrokerConnection | None = None
        self._abort: asyncio.TimerHandle | None = None
        self._full = False
        self.transport: asyncio.Transport | None = None
        self.held = False
        """A service cannot take more: nothing is read until it can."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, without being a subclass
        self.transport = transport
        tcp = transport.get_extra_info("socket")
        if tcp is not None:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self._connection = self._server.opened(self, f"{peer[0]}:{peer[1]}" if peer else "?")
        if self._connection is None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._connection is not None:
            self._server.received(self._connection, self, data)

    def pause_writing(self) -> None:
        if self._connection is not None and self.transport is not None:
            self._full = True
            self._connection.pause(self._server.now())
            if not self.transport.is_closing():
                self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._connection is not None and self.transport is not None and not self.transport.is_closing():
            self._full = False
            self.read_on()
            self._connection.unpause(self._server.now())

    def read_on(self) -> None:
        """Read again, if nothing else stands against it."""
        self.held = self._connection is not None and self._connection.holds > 0
        transport = self.transport
        if transport is None or transport.is_closing() or self.held or self._full or not self._server.receiving:
            return
        transport.resume_reading()

    def hold(self) -> None:
        """Read nothing for now; :meth:`read_on` ends it."""
        self.held = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        if self._abort is not None:
            self._abort.cancel()
        if self._connection is not None:
            self._server.lost(self._connection)

    def close(self) -> None:
        """Close once what is buffered was sent; cut the connection where the peer does not take it."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            self._abort = asyncio.get_running_loop().call_later(CLOSE_GRACE_S, transport.abort)


class MqttServer:
    """An MQTT 5 broker. ``clock``: wall clock in ms, handed to services; deadlines run on the loop's clock.

    Call everything from the loop's thread. ``services`` take messages inside the node.
    """

    def __init__(
        self,
        *,
        services: Sequence[Service] = (),
        limits: BrokerLimits | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._clock = clock
        self._broker = Broker(
            limits,
            services=services,
            new_client_id=lambda: f"penstock-{uuid.uuid4().hex}",
            wake=self._wake,
            report=_log_protocol_error,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[asyncio.Server] = []
        self._links: dict[BrokerConnection, _Link] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._empty = asyncio.Event()
        self._closing = False
        self._receiving = True

    # For its owner

    def add_service(self, service: Service) -> None:
        """Hand the messages of the service's filters to it from now on."""
        self._broker.add_service(service)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the bound address. May be called for several addresses.

        Raises:
            OSError: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        listener = await self._loop.create_server(lambda: _Link(self), host, port, backlog=1024)
        self._listeners.append(listener)
        bound = listener.sockets[0].getsockname()
        return bound[0], bound[1]

    def stop_receiving(self) -> None:
        """Take no more connections and no more bytes; what services still settle and deliver leaves as before.

        The first half of a shutdown: services finish what they hold, then `close` says goodbye.
        """
        self._receiving = False
        for listener in self._listeners:
            listener.close()
        for link in self._links.values():
            if link.transport is not None and not link.transport.is_closing():
                link.transport.pause_reading()

    async def close(self) -> None:
        """Stop listening, send DISCONNECT 0x8B, wait for what is buffered to leave, cut what does not."""
        if self._closing or self._loop is None:
            return
        self._closing = True
        for listener in self._listeners:
            listener.close()
        self._broker.shut_down(self.now())
        self._flush()
        for link in list(self._links.values()):
            link.close()
        if self._links:
            try:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._empty.wait()
            except TimeoutError:
                logger.warning("cut %d connections that did not read to the end", len(self._links))
                for link in list(self._links.values()):
                    if link.transport is not None:
                        link.transport.abort()
                await self._empty.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def stats(self) -> BrokerStats:
        """Counters since the start and sizes now; reading it walks the sessions."""
        return self._broker.measure()

    # For services: the Outlet

    def publish(self, message: Publish) -> None:
        """Route a message of the node itself: to subscribers and retained, not to services. No Local does not apply.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        self._broker.publish(message, self.now())

    def respond(self, client_id: str, message: Publish) -> bool:
        """Route a message of the node itself to that client's matching subscriptions; False where there is none.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        return self._broker.respond(client_id, message, self.now())

    def deliver(self, client_id: str, message: Publish) -> bool:
        """Put a message straight into that client's session, exactly once, subscribed or not.

        False where there is no such session. A session that is offline keeps it (QoS 1).
        """
        return self._broker.deliver(client_id, message, self.now())

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """End that client's network connection with DISCONNECT; nothing where it has none."""
        self._broker.disconnect(client_id, reason_code, self.now(), reason_string)

    # For its links

    @property
    def receiving(self) -> bool:
        """Whether connections may be read."""
        return self._receiving

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        assert self._loop is not None, "the server is started first"
        return int(self._loop.time() * 1000)

    def opened(self, link: _Link, name: str) -> BrokerConnection | None:
        """A TCP connection came in."""
        connection = None if self._closing or not self._receiving else self._broker.open(name, self.now())
        if connection is not None:
            self._links[connection] = link
            self._empty.clear()
            self._arm()
        return connection

    def received(self, connection: BrokerConnection, link: _Link, data: bytes) -> None:
        """Bytes came in. A failure of ours ends this connection and no other."""
        try:
            connection.receive(data, self.now(), self._clock())
            if connection.holds and not link.held:
                link.hold()
        except Exception:
            logger.exception("internal error; closing %r", connection)
            if link.transport is not None:
                link.transport.abort()

    def lost(self, connection: BrokerConnection) -> None:
        """A TCP connection is gone."""
        connection.lost(self.now())
        self._links.pop(connection, None)
        if not self._links:
            self._empty.set()
        self._arm()

    # Inside

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what the engine collected, one write a connection."""
        links = self._links
        for connection, data, close in self._broker.flush(self.now()):
            link = links.get(connection)
            if link is None or link.transport is None:
                continue
            if data and not link.transport.is_closing():
                link.transport.write(data)
            if close:
                link.close()
            elif link.held and not connection.holds:
                link.read_on()
        self._arm()

    def _arm(self) -> None:
        """Have one timer for the engine's next deadline."""
        deadline = self._broker.next_deadline()
        if deadline is None or self._loop is None or self._closing:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline / 1000 + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._broker.tick(self.now())
        self._arm()


def _log_protocol_error(connection: BrokerConnection, error: RemoteProtocolError) -> None:
    logger.info("%r broke the protocol: %s (%s)", connection, error.what, reason_name(error.reason_code))
