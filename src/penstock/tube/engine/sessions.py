"""Sessions of clients at the master and at brokers: their timeout and their connection.

Client ids are not secret, so knowing an id must not be sufficient to take over a session. A session (a consumer's
registration, a member of a group) belongs to the connection that created it. Apache's clients continue a session on a
new connection after the old one broke, without registering again. So while the connection is open, no other connection
may use the session; after its end, the next connection with the id from the same host takes it over.
"""

from __future__ import annotations

__all__ = ["LEAST_SESSION_MS", "RequestContext", "SessionOrigin", "SessionOrigins", "session_of"]

LEAST_SESSION_MS = 3_000
"""Minimum session timeout that a consumer can request."""


def session_of(asked_ms: int, server_ms: int) -> int:
    """Return the session timeout of a consumer that requests ``asked_ms`` (0: the default); at most the server's."""
    if asked_ms <= 0:
        return server_ms
    return min(max(asked_ms, LEAST_SESSION_MS), server_ms)


class RequestContext:
    """Origin of a request and the time at which it is handled. Immutable by convention.

    ``peer`` is the address of the connection; the host in a request is not trusted. ``connection`` is the shell's key
    of the connection, None for a request without a connection. ``serial`` is the request's serial number on the
    connection. ``tls``: the connection is encrypted, so responses have the brokers' TLS ports.
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
        """Return the context of the same request at a later time."""
        return RequestContext(now_ms, self.peer, self.connection, self.serial, self.tls)


class SessionOrigin:
    """A connection that created sessions. ``host``: address of the peer; ``ended``: the connection is closed."""

    __slots__ = ("ended", "host")

    def __init__(self, host: str) -> None:
        self.host = host
        self.ended = False

    def may_be_continued_by(self, other: SessionOrigin) -> bool:
        """Return True if ``other`` may continue the sessions of this connection."""
        return self is other or (self.ended and self.host == other.host)


class SessionOrigins:
    """Open connections with requests, by the shell's key."""

    def __init__(self) -> None:
        self._open: dict[object, SessionOrigin] = {}

    def origin_of(self, context: RequestContext) -> SessionOrigin:
        """Return the connection of a request; None for a request without a connection."""
        connection = context.connection
        if connection is None:
            origin = SessionOrigin(context.peer)
            origin.ended = True
            return origin
        found = self._open.get(connection)
        if found is None:
            found = self._open[connection] = SessionOrigin(context.peer)
        return found

    def connection_closed(self, connection: object) -> None:
        """Mark a connection as closed."""
        found = self._open.pop(connection, None)
        if found is not None:
            found.ended = True
