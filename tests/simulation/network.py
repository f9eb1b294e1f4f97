"""The network of the virtual loop: connections of asyncio protocols, with random delays, cuts between reads, and
clients that end their direction.

A loop's ``create_server`` and ``create_connection`` lead here, so servers and clients of production run unchanged.
Connections of MQTT begin one layer above, see ``node``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from tests.simulation.history import Violation

__all__ = ["Address", "NetworkEnd", "Peer", "VirtualNetwork", "check_closed", "sent"]

Address = tuple[str, int]
CLOSED_S = 10.0
"""Time in which a server closes a connection whose client has ended its direction."""


class Peer(Protocol):
    """What an end of a connection is used by: an asyncio protocol, or a simulated client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool | None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


def check_closed(loop: asyncio.AbstractEventLoop, is_closed: Callable[[], bool], what: str) -> None:
    """Check that a server closes a connection after its client has ended its direction."""

    def check() -> None:
        if not is_closed():
            raise Violation(f"{what} is open {CLOSED_S:g} s after its client has ended its direction")

    # In two steps: a pause of the node makes one timer late, and the server gets time after it.
    loop.call_later(CLOSED_S / 2, loop.call_later, CLOSED_S / 2, check)


def sent(random: Random, data: bytes) -> list[tuple[bytes, float]]:
    """The pieces in which bytes arrive, most of them in one, each with its delay in seconds."""
    draw = random.random
    if len(data) > 1 and draw() < 0.1:
        at = random.randrange(1, len(data))
        return [(piece, 0.00005 + 0.005 * draw() ** 4) for piece in (data[:at], data[at:])]
    return [(data, 0.00005 + 0.005 * draw() ** 4)]


class VirtualNetwork:
    """The listeners of one virtual loop, and the connections to them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self._listeners: dict[Address, Callable[[], Peer]] = {}
        self._ports = 50_000

    def listen(self, address: Address, accept: Callable[[], Peer]) -> VirtualServer:
        """Have connections to ``address`` accepted."""
        self._listeners[address] = accept
        return VirtualServer(address, lambda: self._listeners.pop(address, None))

    def connect(self, address: Address, client: Peer, *, host: str = "192.0.2.1") -> NetworkEnd:
        """Connect ``client``; returns its end.

        Raises:
            ConnectionRefusedError: nobody listens there.
        """
        accept = self._listeners.get(address)
        if accept is None:
            raise ConnectionRefusedError("nobody listens")
        self._ports += 1
        near, far = NetworkEnd(self, client, address), NetworkEnd(self, accept(), (host, self._ports))
        near.other, far.other = far, near
        far.peer.connection_made(far)
        client.connection_made(near)
        return near


class VirtualServer:
    """In the place of ``asyncio.Server``; also its only socket."""

    def __init__(self, address: Address, close: Callable[[], object]) -> None:
        self.sockets = [self]
        self.close = close
        self._address = address

    def getsockname(self) -> Address:
        return self._address

    async def wait_closed(self) -> None: ...


class NetworkEnd(asyncio.Transport):
    """One end of a connection. Order is kept, until the connection is cut or falls silent."""

    other: NetworkEnd

    def __init__(self, network: VirtualNetwork, peer: Peer, address: Address) -> None:
        super().__init__({"peername": address})
        self._address = address
        self.peer = peer
        self.is_silent = False
        self._network = network
        self._arrival_s = 0.0
        """When the last bytes to this end arrive."""
        self._waiting: deque[bytes] = deque()
        """Bytes that arrived while the peer does not read; empty: the other end sends nothing more."""
        self._has_ended = False
        """Whether this end sends nothing more."""
        self._is_reading = True
        self._is_closing = False
        self._is_cut = False

    def fall_silent(self) -> None:
        """Drop what is under way and whatever is sent from now on; neither end notices."""
        self.is_silent = self.other.is_silent = True

    # asyncio.Transport

    def write(self, data: Any) -> None:
        if self._is_closing or self._has_ended or not data:
            return
        loop, other = self._network.loop, self.other
        for piece, delay_s in sent(self._network.random, bytes(data)):
            # A little later than the last: timers of the same time have no order.
            other._arrival_s = max(other._arrival_s + 1e-6, loop.time() + delay_s)
            loop.call_at(other._arrival_s, other._arrived, piece)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send nothing more; what the other end sends still arrives."""
        if not (self._is_closing or self._has_ended):
            self._has_ended = True
            loop, other = self._network.loop, self.other
            other._arrival_s = max(other._arrival_s + 1e-6, loop.time())
            loop.call_at(other._arrival_s, other._arrived, b"")

    def close(self) -> None:
        loop = self._network.loop
        if not self._is_closing:
            self._is_closing = True
            loop.call_at(max(self.other._arrival_s, loop.time()) + 0.001, self.abort)

    def abort(self) -> None:
        """Cut the connection: what is under way is lost; both ends notice, each in its time."""
        for end in (self, self.other):
            if not end._is_cut:
                end._is_cut = end._is_closing = True
                self._network.loop.call_later(0.05 * self._network.random.random() ** 3, end.peer.connection_lost, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._network.loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return 0

    def _arrived(self, data: bytes) -> None:
        if not (self._is_cut or self.is_silent):
            self._waiting.append(data)
            self._deliver()

    def _deliver(self) -> None:
        while self._waiting and self._is_reading and not self._is_cut:
            if data := self._waiting.popleft():
                self.peer.data_received(data)
            else:
                if not self.peer.eof_received():
                    self.close()
                check_closed(self._network.loop, self.is_closing, f"a connection of {self._address}")
