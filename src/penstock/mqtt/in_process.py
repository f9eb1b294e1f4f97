"""A client of the node itself on its own broker: the same bytes, sessions and acknowledgements, without a socket.

What takes part in MQTT inside the node as a client does (a bridge) needs no second way into the broker: limits, rules,
services and durability apply to it as to everybody. Nothing authenticates; the connection acts for a principal that the
node names, whose sessions no client of the network can have. It may do everything, unless its maker gives it an Access
that says what it may do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.mqtt.client.link import ClientLink, ClientLinkOwner
from penstock.mqtt.engine.access import Access, Action, Answer, Credentials, Granted, Principal
from penstock.mqtt.engine.connection import BrokerConnection

__all__ = ["AllowAll", "InProcessLink", "InsideServer"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the node as a principal."""

    name: str


class AllowAll:
    """Grants everything to one part of the node."""

    def __init__(self, name: str) -> None:
        self.part = _Part(name)

    def authenticate(self, _credentials: Credentials, answer: Answer, now: int) -> None:
        """Let it in: there is nothing to check [Access]."""
        answer(Granted(self.part), now)

    def allowed(self, _who: Principal, action: Action, _topic: str, _qos: int, *, retain: bool) -> bool:  # noqa: ARG002 - Access
        """Everything but to overhear others [Access]."""
        return action is not Action.OVERHEAR


class InsideServer(Protocol):
    """The broker's shell, as far as a link inside the process needs it."""

    def open_inside(self, link: InProcessLink, name: str, access: Access) -> BrokerConnection | None:
        """A connection; None where the broker is shutting down or full."""
        ...

    def received_inside(self, connection: BrokerConnection, data: bytes) -> None:
        """Bytes for the broker."""
        ...

    def lost_inside(self, connection: BrokerConnection) -> None:
        """The connection is gone; called once."""
        ...

    def now(self) -> int:
        """Milliseconds of the broker's clock."""
        ...


class InProcessLink(ClientLink):
    """The client's end. Bytes change sides at the next turn of the loop, as they would over a socket."""

    def __init__(self, owner: ClientLinkOwner, server: InsideServer, name: str, access: Access | None = None) -> None:
        super().__init__(owner)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._held: list[bytes] = []
        """What the broker does not take now: a service has no room."""
        self._connection = server.open_inside(self, name, access or AllowAll(name))
        if self._connection is None:
            self._closing = True
            self.connection_lost(None)
        else:
            self.on_open()

    @property
    def open(self) -> bool:
        """Whether something can still be sent."""
        return not self._closing

    def write(self, data: bytes) -> None:
        """Hand ``data`` to the part in the next turn of the loop, as a network would."""
        self._loop.call_soon(self._send, data)

    def close(self) -> None:
        """End the connection in the next turn; twice is harmless."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._end)

    def abort(self) -> None:
        """As :meth:`close`: there is no network whose buffer could be thrown away."""
        self.close()

    def set_reading(self, *, paused: bool) -> None:
        """Let what the part sends wait, or take it again: the back pressure of the broker's services."""
        if self._connection is not None:
            if paused:
                self._connection.pause(self._server.now())
            else:
                self._connection.unpause(self._server.now())

    # The server's side

    def deliver(self, data: bytes, *, close: bool) -> None:
        """Bytes of the broker, the last ones where it closes."""
        if data:
            self._loop.call_soon(self._owner.received, self, data)
        if close:
            self._loop.call_soon(self._end)
        elif self._held and self._connection is not None and not self._connection.holds:
            held, self._held = self._held, []
            for piece in held:
                self._send(piece)

    def _send(self, data: bytes) -> None:
        if self._connection is None:
            return
        if self._held or self._connection.holds:
            self._held.append(data)
        else:
            self._server.received_inside(self._connection, data)

    def _end(self) -> None:
        self._closing = True
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.lost_inside(connection)
            self.connection_lost(None)
