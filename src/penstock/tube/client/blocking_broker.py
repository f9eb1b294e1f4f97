"""One broker, asked over blocking connections: opened at the first question, and anew after one that failed."""

from __future__ import annotations

import ssl
import time
from types import TracebackType
from typing import Self

from penstock.errors import ConfigError
from penstock.tube.client.blocking_link import BlockingLink, credentials_of

__all__ = ["BlockingBroker"]


class BlockingBroker:
    """What readers and registrars of one broker have in common; each question has ``timeout_s``.

    ``user`` and ``password`` sign where the cluster has users; with ``tls`` the address is the broker's TLS address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"tube: port {port} is not possible", option="port")
        self._address = (host, port)
        self._peer = f"{host}:{port}"
        self._timeout_s = timeout_s
        self._credentials = credentials_of(user, password)
        self._tls = tls
        self._link: BlockingLink | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. It is opened again where something is asked."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _open(self, deadline: float) -> BlockingLink:
        """The connection, for a question that is to be answered by ``deadline`` (monotonic seconds).

        Raises UnavailableError where none can be made.
        """
        if self._link is None:
            self._link = BlockingLink(*self._address, max(0.001, deadline - time.monotonic()), self._tls)
        self._link.deadline = deadline
        return self._link
