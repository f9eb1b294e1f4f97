"""Accepts the connections of listening sockets, and ends those that are not complete when it is closed.

The servers of asyncio and uvloop accept each connection in a task that nothing waits for. If such a server is closed, a
TLS handshake in progress keeps its socket open until the peer or the handshake's time limit ends it, and a connection
accepted in the same loop turn is left open.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Final

from penstock.runtime.io.descriptors import first_reserved

__all__ = ["Acceptor", "listen"]

BACKLOG: Final = 128
ACCEPT_AGAIN_S: Final = 0.1
"""Pause after a connection could not be accepted, for example without free file descriptors."""


async def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for the addresses of ``host``, as asyncio's servers have, all with the same port (0: a
    free one). Addresses of a family that the kernel lacks, such as IPv6, are left out.

    Raises:
        OSError: the host is unknown, or an address cannot be bound; then no socket is open.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with contextlib.ExitStack() as opened:
        listening: list[socket.socket] = []
        unsupported: OSError | None = None
        for family, kind, protocol, _, where in dict.fromkeys(found):
            try:
                made = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError as error:
                unsupported = error
                continue
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((where[0], listening[0].getsockname()[1] if listening else port, *where[2:]))
            made.listen(BACKLOG)
            made.settimeout(0)
            listening.append(made)
        if unsupported is not None and not listening:
            raise unsupported
        opened.pop_all()
    return listening


class Acceptor:
    """Accepts one connection per socket and loop turn. ``create()`` returns the protocol of each.

    ``tls`` is the context of new connections and may be replaced, not set to None; ``handshake_s``: time limit of a
    handshake. A connection beyond ``most`` that are being opened is closed, and one with a reserved file descriptor;
    ``reserved_share``: see :func:`~penstock.runtime.io.descriptors.first_reserved`.
    """

    def __init__(
        self,
        create: Callable[[], asyncio.Protocol],
        *,
        most: int,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        reserved_share: int = 1,
    ) -> None:
        self.tls = tls
        self.opening: set[asyncio.Task[None]] = set()
        """Tasks of the connections that are being opened: those whose TLS handshake is not complete."""
        self._create = create
        self._most = most
        self._handshake_s = handshake_s
        self._reserved_share = reserved_share
        self._sockets: list[socket.socket] = []
        self._again: dict[socket.socket, asyncio.TimerHandle] = {}

    def start(self, sockets: list[socket.socket]) -> None:
        """Accept connections of ``sockets``, which belong to the acceptor from now on, in the caller's context."""
        self._sockets = sockets
        for listening in sockets:
            self._watch(listening)

    def stop(self) -> None:
        """Close the sockets; connections stay open. Idempotent."""
        loop = asyncio.get_running_loop()
        sockets, self._sockets = self._sockets, []
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        for listening in sockets:
            loop.remove_reader(listening)
            listening.close()

    async def end_handshakes(self) -> None:
        """After :meth:`stop`: close the connections that are being opened, and wait until none is."""
        await asyncio.sleep(0)  # a task that is cancelled before it begins would leave its socket open
        if self.tls is not None:
            # Without TLS, uvloop would close a connection that the protocol has, and not call its connection_lost.
            for task in self.opening:
                task.cancel()
        await asyncio.gather(*self.opening, return_exceptions=True)

    def _watch(self, listening: socket.socket) -> None:
        self._again.pop(listening, None)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection of a socket that is readable."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:  # out of file descriptors, or the peer has disconnected
            loop.remove_reader(listening)
            self._again[listening] = loop.call_later(ACCEPT_AGAIN_S, self._watch, listening)
            return
        if len(self.opening) >= self._most or connection.fileno() >= first_reserved(self._reserved_share):
            connection.close()
            return
        connection.settimeout(0)
        task = loop.create_task(self._open(connection))
        self.opening.add(task)
        task.add_done_callback(self.opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        limit_s = None if self.tls is None else self._handshake_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._create, connection, ssl=self.tls, ssl_handshake_timeout=limit_s
            )
        except (OSError, TimeoutError):
            connection.close()  # a failed handshake is logged with its reason; other errors are disconnected peers
