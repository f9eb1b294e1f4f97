"""A listener: accepts connections, refuses those that may not come in, and pauses where descriptors run out.

Connections are accepted here and not by the loop's own server, for two reasons: who may not come in is refused before
TLS spends a millisecond on it, and at the limit of descriptors the others wait in the kernel's queue until there is
room, instead of being dropped or asked for again and again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.mqtt.engine.access import Access
from penstock.mqtt.transport.connection_limits import Admission, AdmissionLimits, AdmissionStats, address_group
from penstock.mqtt.transport.link import Link, RefusingLink
from penstock.mqtt.transport.tls import ServerTls, TlsFiles
from penstock.mqtt.transport.tls_transport import TlsTransport
from penstock.runtime.io.tls import handshake_failure

if TYPE_CHECKING:
    from penstock.mqtt.server import MqttServer

__all__ = ["Listener", "ListenerSettings", "ListenerStats", "Transport"]

logger = logging.getLogger("penstock.mqtt")

BACKLOG: Final = 1024
ACCEPT_AT_ONCE: Final = 64
"""Connections accepted in one loop turn; those that are there have their turn in between."""
RESUME_S: Final = 0.25
"""How often a listener that paused looks for a free descriptor, beside each time that a connection ends."""
RESERVED_DESCRIPTORS: Final = 64
"""Kept for files, health checks and whatever else the node opens; an eighth of all where there are fewer."""
REFUSING_AT_ONCE: Final = 64
"""Connections that are being told why they may not come in; further ones are just closed."""
TLS_HANDSHAKE_S: Final = 10.0

_NO_SUCH_ADDRESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Transport(StrEnum):
    """What MQTT travels in."""

    TCP = "tcp"
    TLS = "tls"
    WS = "ws"
    WSS = "wss"

    @property
    def encrypted(self) -> bool:
        """Whether TLS is below it, which needs a certificate."""
        return self in (Transport.TLS, Transport.WSS)

    @property
    def websocket(self) -> bool:
        """Whether MQTT travels in frames of WebSocket, at a path."""
        return self in (Transport.WS, Transport.WSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """One listener. ``origins`` and ``path`` are for WebSocket, ``tls`` for TLS; ``max_connections`` 0: no own bound.

    ``access`` decides who may come in; None: everybody, and may do everything.
    """

    name: str = "mqtt"
    host: str = "127.0.0.1"
    port: int = 1883
    transport: Transport = Transport.TCP
    tls: TlsFiles | None = None
    path: str = "/mqtt"
    origins: frozenset[str] = frozenset()
    advertised_host: str = ""
    access: Access | None = None
    max_connections: int = 0
    limits: AdmissionLimits = field(default_factory=lambda: AdmissionLimits(max_unauthenticated=0))


class ListenerStats:
    """Counters of one listener since the start, and what there is now."""

    __slots__ = ("accepted", "connections", "paused", "pauses", "refused", "tls_failures", "websocket_rejected")

    def __init__(self) -> None:
        self.accepted = 0
        self.refused = 0
        """Connections over a limit, of this listener or of all."""
        self.tls_failures = 0
        """TLS handshakes that came to nothing."""
        self.websocket_rejected = 0
        """WebSocket handshakes that were refused."""
        self.pauses = 0
        """Times that it stopped accepting because there was no free descriptor."""
        self.paused = 0
        """1 while it does not accept."""
        self.connections = 0


class Listener:
    """One address on which clients come in."""

    def __init__(self, server: MqttServer, settings: ListenerSettings) -> None:
        self._server = server
        self._sockets: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refusing = 0
        self._resume: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fresh: set[socket.socket] = set()
        """Accepted, and not handed to the loop yet."""
        self._ceiling = 0
        self._closed = False
        self.stats = ListenerStats()
        self.admission_stats = AdmissionStats()
        self.admission: Admission[Link] = Admission(
            settings.limits, self.admission_stats, max_connections=settings.max_connections
        )
        self.tls: ServerTls | None = None
        self.settings = settings
        self.apply(settings, self.read_tls(settings))

    @staticmethod
    def read_tls(settings: ListenerSettings) -> ServerTls | None:
        """The certificates as they are on disk now.

        Raises:
            ConfigError: they cannot be used.
        """
        if settings.tls is None or not settings.transport.encrypted:
            return None
        return ServerTls(settings.tls, protocol="http/1.1" if settings.transport.websocket else "mqtt")

    def apply(self, settings: ListenerSettings, tls: ServerTls | None) -> None:
        """Go by these settings from now on; the address and the transport stay. Connections are not touched."""
        self.settings = settings
        self.tls = tls
        self.path = settings.path
        self.origins = settings.origins
        self.advertised_host = settings.advertised_host
        self.admission.limits = settings.limits
        self.admission.max_connections = settings.max_connections

    @property
    def name(self) -> str:
        """What logs and metrics call it."""
        return self.settings.name

    @property
    def max_connect_size(self) -> int:
        """Bytes that a stranger may make us buffer."""
        return self._server.limits.max_connect_size

    @property
    def max_packet_size(self) -> int:
        """Of a client that is known."""
        return self._server.limits.max_packet_size

    async def start(self) -> tuple[str, int]:
        """Listen; the bound address, of the first one where a name has several.

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
                    # A name often has an IPv6 address that this machine does not.
                    if error.errno not in _NO_SUCH_ADDRESS or len(found) == 1:
                        raise
                    failure = error
                    continue
                port = listening.getsockname()[1]  # with port 0 all of them get the same one
        except OSError:
            self.close()
            raise
        if not self._sockets:
            assert failure is not None
            raise failure
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Descriptors are numbered from below, so a high number says that there are few left.
        self._ceiling = soft - min(RESERVED_DESCRIPTORS, soft // 8) if soft > 0 else 1 << 30
        self._listen()
        bound = self._sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def close(self) -> None:
        """Accept no more; connections live on."""
        self._closed = True
        self._stop_listening()
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    async def abandon(self) -> None:
        """End the handshakes that are under way, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def released(self) -> None:
        """A descriptor may be free again."""
        if self.stats.paused and not self._closed and self._loop is not None:
            self._loop.call_soon(self._try_again)

    # Inside

    def _bind(self, family: int, where: tuple[object, ...]) -> socket.socket:
        listening = socket.socket(family, socket.SOCK_STREAM)
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
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _stop_listening(self) -> None:
        if self._loop is not None:
            for listening in self._sockets:
                self._loop.remove_reader(listening.fileno())

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                client, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._pause()
                return
            client.settimeout(0)
            self._take(client, str(peer[0]), int(peer[1]))
            if client.fileno() >= self._ceiling:
                self._pause()
                return

    def _take(self, client: socket.socket, address: str, port: int) -> None:
        self.stats.accepted += 1
        group = address_group(address)
        now = self._server.now()
        refusal = self.admission.refusal(group, now) or self._server.admission.refusal(group, now)
        if refusal is not None:
            self.stats.refused += 1
            self._refuse(client, refusal.reason_code)
            return
        if self.settings.transport.websocket:
            # Costs half a megabyte and 20 ms that only those who use it pay.
            from penstock.mqtt.transport.websocket import WebSocketLink

            link: Link = WebSocketLink(self._server, self, address, port, group)
        else:
            link = Link(self._server, self, address, port, group)
        self._fresh.add(client)
        self._server.arrived(link)
        link.opening = self._start(self._open(link, client))
        link.opening.add_done_callback(lambda _: self._opened(link, client))

    async def _open(self, link: Link, client: socket.socket) -> None:
        assert self._loop is not None
        self._fresh.discard(client)
        tls = self.tls
        try:
            if tls is None:
                await self._loop.connect_accepted_socket(lambda: link, client)
            else:
                transport = TlsTransport(link, tls.context)
                await self._loop.connect_accepted_socket(lambda: transport, client)
                await self._handshake(link, transport)
        except OSError as error:
            self._failed(link, error)

    async def _handshake(self, link: Link, transport: TlsTransport) -> None:
        failed = False
        try:
            async with asyncio.timeout(TLS_HANDSHAKE_S):
                try:
                    await transport.handshake()
                except OSError as error:
                    failed = True
                    self._failed(link, error)
                    await transport.wait_closed()
        except TimeoutError:
            if not failed:
                self._failed(link, TimeoutError(f"the TLS handshake took longer than {TLS_HANDSHAKE_S:g} s"))
        finally:
            if link.transport is None:
                transport.abort()

    def _failed(self, link: Link, error: OSError) -> None:
        self.stats.tls_failures += self.tls is not None
        logger.info("%s: no connection: %s", link.name, handshake_failure(error))

    def _opened(self, link: Link, client: socket.socket) -> None:
        """Also where it was cut in the turn that accepted it, to make room: then nothing of :meth:`_open` ran."""
        link.opening = None
        if client in self._fresh:
            self._fresh.discard(client)
            client.close()
        if link.transport is None:
            link.gone()

    def _refuse(self, client: socket.socket, reason_code: int) -> None:
        """Say why, over plain TCP and to a few at a time; else just close."""
        if self.settings.transport is not Transport.TCP or self._refusing >= REFUSING_AT_ONCE:
            client.close()
            return
        self._refusing += 1
        self._start(self._open_to_refuse(client, reason_code))

    async def _open_to_refuse(self, client: socket.socket, reason_code: int) -> None:
        assert self._loop is not None

        def done() -> None:
            self._refusing -= 1

        try:
            await self._loop.connect_accepted_socket(lambda: RefusingLink(reason_code, done), client)
        except OSError:
            done()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        assert self._loop is not None
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _pause(self) -> None:
        """There is no descriptor to spare: clients wait in the kernel's queue, those that are in go on."""
        self._stop_listening()
        if not self.stats.paused:
            self.stats.paused = 1
            self.stats.pauses += 1
            logger.warning("%s: no descriptor is free; new connections wait until one is", self.name)
        self._later()

    def _later(self) -> None:
        if self._resume is None and self._loop is not None and not self._closed:
            self._resume = self._loop.call_later(RESUME_S, self._tick)

    def _tick(self) -> None:
        self._resume = None
        self._try_again()

    def _try_again(self) -> None:
        if not self.stats.paused or self._closed:
            return
        try:
            free = os.dup(self._sockets[0].fileno())
        except OSError:
            self._later()
            return
        os.close(free)
        if free >= self._ceiling:
            self._later()
            return
        self.stats.paused = 0
        logger.info("%s: accepts connections again", self.name)
        self._listen()
