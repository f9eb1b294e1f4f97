"""Sessions of clients at the master and at brokers: how long they last, and the connection that each belongs to.

Client ids are not secret, so an id alone must not be enough to take over a session. A session (a consumer's
registration, a member of a group) belongs to the connection that began it. Apache's clients continue a session on a new
connection after the old one broke, without registering again. So while the connection is open, no other connection may
use the session; once it has ended, the next connection from the same host that names the id takes it over.
"""

from __future__ import annotations

__all__ = ["LEAST_SESSION_MS", "RequestContext", "SessionOrigin", "SessionOrigins", "session_of"]

LEAST_SESSION_MS = 3_000
"""The shortest session timeout that a consumer can ask for."""


def session_of(asked_ms: int, server_ms: int) -> int:
    """Session timeout of a consumer that asks for ``asked_ms`` (0: no wish); at most the server's own."""
    if asked_ms <= 0:
        return server_ms
    return min(max(asked_ms, LEAST_SESSION_MS), server_ms)


class RequestContext:
    """Origin of a request and the time at which it is handled. Handlers pass it on and never change it.

    ``peer`` is the address that the connection came from; what a request says about its host is not trusted.
    ``connection`` is the key that the shell gives the connection, None for a request that came over none. ``serial``
    numbers the request on its connection. ``tls``: the connection is encrypted, so brokers are named by TLS ports.
    """

    __slots__ = ("connection", "now_ms", "peer", "serial", "tls")

    def __init__(
        self,
        now_ms: int,
        peer: str = "",
        connection: object = None,
        serial: int = 0,
        tls: bool = False,  # noqa: FBT001, FBT002 - positional on the hot path
    ) -> None:
        self.now_ms = now_ms
        self.peer = peer
        self.connection = connection
        self.serial = serial
        self.tls = tls

    def at(self, now_ms: int) -> RequestContext:
        """The same request, handled later."""
        return RequestContext(now_ms, self.peer, self.connection, self.serial, self.tls)


class SessionOrigin:
    """One connection. ``host``: address of the peer; ``ended``: it is closed."""

    __slots__ = ("ended", "host")

    def __init__(self, host: str) -> None:
        self.host = host
        self.ended = False

    def passes_to(self, other: SessionOrigin) -> bool:
        """Whether ``other`` may continue the sessions of this connection."""
        return self is other or (self.ended and self.host == other.host)


class SessionOrigins:
    """The open connections with requests, by the key that the shell gives each."""

    def __init__(self) -> None:
        self._open: dict[object, SessionOrigin] = {}

    def origin_of(self, context: RequestContext) -> SessionOrigin:
        """The connection of a request. A session that begins without a connection belongs to none."""
        connection = context.connection
        if connection is None:
            origin = SessionOrigin(context.peer)
            origin.ended = True
            return origin
        found = self._open.get(connection)
        if found is None:
            found = self._open[connection] = SessionOrigin(context.peer)
        return found

    def end(self, connection: object) -> None:
        """Mark a connection as closed."""
        found = self._open.pop(connection, None)
        if found is not None:
            found.ended = True
