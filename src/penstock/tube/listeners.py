"""Listeners of a server: one plain address and, with a certificate, one with TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from penstock.runtime.io.tls import HANDSHAKE_FAILED, handshake_failure

__all__ = ["Listeners"]

logger = logging.getLogger("penstock.tube")

TLS_HANDSHAKE_S: Final = 10.0
"""Time limit of a TLS handshake, also for a client that does not read the alert of a failed one."""


class Listeners:
    """The listeners of a master or broker. Each connection gets a protocol of ``connection()``."""

    def __init__(self, connection: Callable[[], asyncio.Protocol]) -> None:
        self._connection = connection
        self._servers: list[asyncio.Server] = []
        self.tls_bound: tuple[str, int] | None = None
        """Address of the TLS listener; None without one."""

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, tls_port: int = 0
    ) -> tuple[str, int]:
        """Listen on ``port`` (0: a free one), with ``tls`` also on ``tls_port`` of ``host``; returns the plain address.

        Raises:
            OSError: an address cannot be listened on; then neither is.
        """
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(self._connection, host, port))
        if tls is not None:
            token = HANDSHAKE_FAILED.set(
                lambda error: logger.info("TLS listener of %s: no connection: %s", host, handshake_failure(error))
            )  # connections inherit the context of the call that creates the server
            try:
                self._servers.append(
                    await loop.create_server(
                        self._connection, host, tls_port, ssl=tls, ssl_handshake_timeout=TLS_HANDSHAKE_S
                    )
                )
            except OSError:
                self.stop()
                self._servers.clear()
                raise
            finally:
                HANDSHAKE_FAILED.reset(token)
            self.tls_bound = _bound(self._servers[1])
        return _bound(self._servers[0])

    def stop(self) -> None:
        """Accept no more connections; open ones stay."""
        for server in self._servers:
            server.close()

    async def closed(self) -> None:
        """Wait until everything is closed: call `stop`, and close the connections, first."""
        servers, self._servers = self._servers, []
        self.tls_bound = None
        for server in servers:
            await server.wait_closed()


def _bound(server: asyncio.Server) -> tuple[str, int]:
    address: tuple[str, int] = server.sockets[0].getsockname()[:2]
    return address
