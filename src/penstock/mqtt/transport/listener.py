"""Listener: accepts connections, refuses those over a limit, and pauses when file descriptors run out.

It does not use the event loop's server, for two reasons: connections over a limit are refused before the TLS handshake,
which costs a millisecond; and at the limit of descriptors new connections wait in the kernel's queue instead of being
dropped, without a busy loop of failing accepts.

Connections have neither a task nor a timer each: together these cost as much as CONNECT.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, cast

from penstock.mqtt.transport.connection_limits import address_group
from penstock.mqtt.transport.link import ServerLink, ServerLinkOwner
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport
from penstock.mqtt.transport.listener_state import ListenerState
from penstock.mqtt.transport.tls_transport import TlsTransport
from penstock.runtime.io.descriptors import first_reserved
from penstock.runtime.io.network import accept
from penstock.runtime.io.tls import handshake_failure

__all__ = ["Listener", "RefusingLink"]

logger = logging.getLogger("penstock.mqtt")

BACKLOG: Final = 1024
ACCEPT_AT_ONCE: Final = 16
"""Maximum number of connections accepted per loop turn."""
ACCEPT_WORK: Final = 32
"""Units of work for an accepted connection (see ``max_turn_work``). While the connections before it have used up the
turn, a listener accepts one connection per turn: the others wait in the kernel's queue."""
PROBE: Final = 16
"""Number of connections that were alone in their turn, after which a listener looks for a second one in a turn. An
``accept`` without a connection costs as much as the system calls of one."""
RESUME_S: Final = 0.25
"""Interval at which a paused listener checks for a free descriptor; it also checks when a connection is closed."""
REFUSING_AT_ONCE: Final = 64
"""Refused connections that are answered at the same time; further ones are closed without an answer."""
TLS_HANDSHAKE_S: Final = 10.0
HANDSHAKE_WORK: Final = 512
"""Units of work for a message of a TLS handshake (see ``max_turn_work``)."""
REFUSAL_S: Final = 2.0
"""Time for a refused connection to send the CONNECT that is answered with the reason."""

_NO_SUCH_ADDRESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener(ListenerState):
    """Accepts connections on one address."""

    def __init__(self, server: ServerLinkOwner, settings: ListenerSettings) -> None:
        """Read the certificates.

        Raises:
            ConfigError: a file cannot be used.
        """
        super().__init__(settings, server.limits)
        self._server = server
        self._sockets: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refusing = 0
        self._resume_timer: asyncio.TimerHandle | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        """Timer for all TLS handshakes, set for the oldest one, which may have ended."""
        self._max_descriptor = 0
        self._accepts = 1
        """Number of connections to accept in a turn: the loop calls again if there are more."""
        self._alone = 0
        """Number of turns with one connection."""
        self._closed = False

    async def start(self) -> tuple[str, int]:
        """Listen; return the bound address, or the first one of a host name with several addresses.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = self._loop = asyncio.get_running_loop()
        settings = self.settings
        found = await loop.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        port = settings.port
        failure: OSError | None = None
        try:
            for family, _, _, _, where in dict.fromkeys(found):
                try:
                    listening = self._bind(family, (where[0], port, *where[2:]))
                except OSError as error:
                    # A host name often has an IPv6 address although the machine has none.
                    if error.errno not in _NO_SUCH_ADDRESS or len(found) == 1:
                        raise
                    failure = error
                    continue
                port = listening.getsockname()[1]  # with port 0 all addresses get the same port
        except OSError:
            self.close()
            raise
        if not self._sockets:
            assert failure is not None
            raise failure
        self._max_descriptor = first_reserved()
        self._listen()
        bound = self._sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def close(self) -> None:
        """Stop accepting; existing connections stay open."""
        self._closed = True
        self._stop_listening()
        if self._resume_timer is not None:
            self._resume_timer.cancel()
            self._resume_timer = None
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    def abort_handshakes(self) -> None:
        """Abort the TLS handshakes in progress."""
        for transport in list(self.handshakes):
            transport.abort()
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None

    def connection_closed(self) -> None:
        """Resume accepting if paused: a descriptor may be free."""
        if self.stats.paused and not self._closed and self._loop is not None:
            self._loop.call_soon(self._resume)

    # Internal

    def _bind(self, family: int, where: tuple[object, ...]) -> socket.socket:
        # The event loops set TCP_NODELAY on accepted sockets; asyncio only if the protocol number is given.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.settimeout(0)
            listening.bind(where)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._sockets.append(listening)
        return listening

    def _listen(self) -> None:
        assert self._loop is not None
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening, int(listening.family))

    def _stop_listening(self) -> None:
        if self._loop is not None:
            # Typed as an object because uvloop returns None where asyncio returns False, which compiled code would
            # reject.
            remove: Callable[[int], object] = self._loop.remove_reader
            for listening in self._sockets:
                remove(listening.fileno())

    def _accept(self, listening: socket.socket, family: int) -> None:
        if self._accepts == 1:
            self._alone += 1
            if self._alone == PROBE:
                self._alone = 0
                self._accepts = 2
        for accepted in range(self._accepts):
            if not self._server.admits(ACCEPT_WORK) and accepted:
                return
            try:
                client, address, port = accept(listening, family)
            except (BlockingIOError, InterruptedError):
                self._accepts = max(1, accepted)
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._pause()
                return
            self._open_connection(client, address, port)
            if client.fileno() >= self._max_descriptor:
                self._pause()
                return
        if self._accepts > 1:
            self._accepts = min(2 * self._accepts, ACCEPT_AT_ONCE)

    def _open_connection(self, client: socket.socket, address: str, port: int) -> None:
        self.stats.accepted += 1
        group = address_group(address)
        now = self._server.now()
        refusal = self.connection_limiter.refusal(group, now) or self._server.connection_limiter.refusal(group, now)
        if refusal is not None:
            self.stats.refused += 1
            self._refuse(client, refusal.reason_code)
            return
        if self.settings.transport.websocket:
            # Imported here because the library uses half a megabyte and 20 ms.
            from penstock.mqtt.transport.websocket import WebSocketLink

            link: ServerLink = WebSocketLink(self._server, self, address, port, group)
        else:
            link = ServerLink(self._server, self, address, port, group)
        link.descriptor = client.fileno()
        self._server.arrived(link)
        protocol = link.as_protocol()
        tls = self.tls
        if tls is not None:
            transport = TlsTransport(
                protocol, tls, lambda error: self._failed(link, error), lambda data: link.defers(data, HANDSHAKE_WORK)
            )
            protocol = transport.as_protocol()
            self._begin_handshake(link, transport)
        try:
            self._connect(protocol, client)
        except OSError as error:
            self._failed(link, error)
            client.close()
            link.finish()

    def _connect(self, protocol: asyncio.Protocol, client: socket.socket) -> None:
        """Pass an accepted socket to the event loop, which calls ``connection_made`` in its next turn.

        The loop's coroutine awaits one future: it runs here up to that await, and is completed when the future is done.

        Raises:
            OSError: the socket cannot be used.
        """
        assert self._loop is not None
        opening = self._loop.connect_accepted_socket(lambda: protocol, client).__await__()
        waiter: asyncio.Future[object] = next(opening)
        waiter.add_done_callback(lambda _: next(opening, None))

    def _begin_handshake(self, link: ServerLink, transport: TlsTransport) -> None:
        assert self._loop is not None
        link.begin_handshake(transport)
        self.handshakes[transport] = self._server.now() + int(TLS_HANDSHAKE_S * 1000)
        if self._handshake_timer is None:
            self._handshake_timer = self._loop.call_later(TLS_HANDSHAKE_S, self._end_handshakes)

    def _end_handshakes(self) -> None:
        """Abort TLS handshakes that take too long."""
        assert self._loop is not None
        self._handshake_timer = None
        now = self._server.now()
        for transport, deadline in list(self.handshakes.items()):
            if now < deadline:
                self._handshake_timer = self._loop.call_later((deadline - now) / 1000, self._end_handshakes)
                return
            transport.end_handshake(TimeoutError(f"the TLS handshake took longer than {TLS_HANDSHAKE_S:g} s"))

    def _failed(self, link: ServerLink, error: Exception) -> None:
        self.stats.tls_failures += self.tls is not None
        logger.info("%s: no connection: %s", link.name, handshake_failure(error))

    def _refuse(self, client: socket.socket, reason_code: int) -> None:
        """Answer with the reason over plain TCP, for a few connections at a time; otherwise close."""
        if self.settings.transport is not Transport.TCP or self._refusing >= REFUSING_AT_ONCE:
            client.close()
            return
        self._refusing += 1
        try:
            self._connect(RefusingLink(reason_code, self._refused).as_protocol(), client)
        except OSError:
            client.close()
            self._refused()

    def _refused(self) -> None:
        self._refusing -= 1

    def _pause(self) -> None:
        """Stop accepting: new connections wait in the kernel's queue, existing ones are not affected."""
        self._stop_listening()
        if not self.stats.paused:
            self.stats.paused = 1
            self.stats.pauses += 1
            logger.warning("%s: out of file descriptors; new connections wait until one is free", self.name)
        self._schedule_resume()

    def _schedule_resume(self) -> None:
        if self._resume_timer is None and self._loop is not None and not self._closed:
            self._resume_timer = self._loop.call_later(RESUME_S, self._resume)

    def _resume(self) -> None:
        """Accept connections again if a descriptor is free."""
        if self._resume_timer is not None:
            self._resume_timer.cancel()
            self._resume_timer = None
        if not self.stats.paused or self._closed:
            return
        try:
            free = os.dup(self._sockets[0].fileno())
        except OSError:
            self._schedule_resume()
            return
        os.close(free)
        if free >= self._max_descriptor:
            self._schedule_resume()
            return
        self.stats.paused = 0
        logger.info("%s: accepts connections again", self.name)
        self._listen()


class RefusingLink:
    """A refused TCP connection: answers its CONNECT with the reason code, then closes."""

    __slots__ = ("_data", "_done", "_reason_code", "_timer", "_transport")

    def __init__(self, reason_code: int, done: Callable[[], None]) -> None:
        self._reason_code = reason_code
        self._done = done
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def as_protocol(self) -> asyncio.Protocol:
        """Return the link as the event loops' type."""
        return cast(asyncio.Protocol, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Limit the time to send CONNECT [asyncio]."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer as soon as the protocol version is known; then close [asyncio]."""
        if self._transport is None or self._transport.is_closing():
            return
        self._data = (self._data + data)[:16]
        level = _protocol_level(self._data)
        if level is None:
            return
        if level == 5:
            self._transport.write(bytes((0x20, 3, 0, self._reason_code, 0)))
        elif level:  # MQTT 3.1.1, a bridge or unknown: the closest return code is "server unavailable"
            self._transport.write(b"\x20\x02\x00\x03")
        self._transport.close()

    def eof_received(self) -> None:
        """Let the transport close: the peer closed its side [asyncio]."""

    def pause_writing(self) -> None:
        """Do nothing: the answer has only a few bytes [asyncio]."""

    def resume_writing(self) -> None:
        """Do nothing: the answer has only a few bytes [asyncio]."""

    def connection_lost(self, _exc: Exception | None) -> None:
        """Notify the listener [asyncio]."""
        if self._timer is not None:
            self._timer.cancel()
        self._done()


def _protocol_level(data: bytes) -> int | None:
    """Return the protocol level from the start of a CONNECT; None if more bytes are needed, 0 for another packet."""
    if data[:1] not in (b"", b"\x10"):
        return 0
    start = 1
    while start < len(data) and data[start] & 0x80 and start < 5:
        start += 1
    body = data[start + 1 :]
    for name in (b"\x00\x04MQTT", b"\x00\x06MQIsdp"):
        if len(body) > len(name) and body.startswith(name):
            return body[len(name)]
        if name.startswith(body[: len(name)]):
            return None
    return 0
