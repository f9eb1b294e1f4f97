"""Client connections of the node to its own broker: the same bytes, sessions and acknowledgements, without a socket.

For components of the node that are MQTT clients (bridges): limits, rules, services and durability apply as to any
client. The connection is not authenticated; it has a principal of the node, whose sessions network clients cannot take
over, and all permissions, unless an ``Access`` is set.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.mqtt.client.link import ClientLink, ClientLinkOwner
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.access import Access, Action, Answer, Credentials, Granted, Principal

__all__ = ["AllowAll", "InProcessLink", "InProcessServer"]


@dataclass(frozen=True, slots=True)
class _InProcessPrincipal:
    """A component of the node as a principal."""

    name: str


class AllowAll:
    """Permits everything to one component of the node, without authentication [Access]."""

    def __init__(self, name: str) -> None:
        self.principal = _InProcessPrincipal(name)

    def authenticate(self, _credentials: Credentials, answer: Answer, now: int) -> None:
        """Accept the component [Access]."""
        answer(Granted(self.principal), now)

    def allowed(self, _who: Principal, action: Action, _topic: str, _qos: int, *, retain: bool) -> bool:  # noqa: ARG002 - Access
        """Permit all actions except reading messages of others [Access]."""
        return action is not Action.OBSERVE_REQUESTS


class InProcessServer(Protocol):
    """The server of an in-process link."""

    def open_inside(self, link: InProcessLink, name: str, access: Access) -> BrokerConnection | None:
        """Open a connection; None if the broker is shutting down or full."""
        ...

    def received_inside(self, connection: BrokerConnection, data: bytes) -> None:
        """Handle bytes of the client."""
        ...

    def lost_inside(self, connection: BrokerConnection) -> None:
        """Handle the end of the connection; called once."""
        ...

    def now(self) -> int:
        """Milliseconds of the broker's clock."""
        ...


class InProcessLink(ClientLink):
    """The client's side of the connection. Bytes are delivered in the next loop turn, as over a socket."""

    def __init__(
        self, owner: ClientLinkOwner, server: InProcessServer, name: str, access: Access | None = None
    ) -> None:
        super().__init__(owner)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._blocked: list[bytes] = []
        """Bytes that wait because a service of the broker cannot accept more requests."""
        self._connection = server.open_inside(self, name, access or AllowAll(name))
        if self._connection is None:
            self._closing = True
            self.connection_lost(None)
        else:
            self.on_open()

    @property
    def open(self) -> bool:
        """Whether bytes may be sent."""
        return not self._closing

    def write(self, data: bytes) -> None:
        """Send ``data`` in the next loop turn."""
        self._loop.call_soon(self._send, data)

    def close(self) -> None:
        """Close in the next loop turn; idempotent."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._finish)

    def abort(self) -> None:
        """Close; there is no write buffer to discard."""
        self.close()

    def set_reading(self, *, paused: bool) -> None:
        """Pause or resume the output of the broker to the client."""
        if self._connection is not None:
            if paused:
                self._connection.pause(self._server.now())
            else:
                self._connection.unpause(self._server.now())

    # Called by the server

    def deliver(self, data: bytes, *, close: bool) -> None:
        """Receive bytes of the broker; ``close``: the connection ends after them."""
        if data:
            self._loop.call_soon(self._owner.received, self, data)
        if close:
            self._loop.call_soon(self._finish)
        elif self._blocked and self._connection is not None and not self._connection.holds:
            blocked, self._blocked = self._blocked, []
            for piece in blocked:
                self._send(piece)

    def _send(self, data: bytes) -> None:
        if self._connection is None:
            return
        if self._blocked or self._connection.holds:
            self._blocked.append(data)
        else:
            self._server.received_inside(self._connection, data)

    def _finish(self) -> None:
        self._closing = True
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.lost_inside(connection)
            self.connection_lost(None)
