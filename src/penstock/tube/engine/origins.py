"""The connection that a session belongs to: client ids are not secret, so an id alone must not give a session away.

A session (a consumer's registration, a member of a group) belongs to the connection that began it. Apache's clients go
on with a session after their connection broke, on a new one and without registering again. So once the connection has
ended, the next one from the same host that names the id takes the session over; while it is open, no other may use it.
"""

from __future__ import annotations

__all__ = ["Origin", "Origins"]


class Origin:
    """One connection. ``host``: address of the peer; ``ended``: it is closed."""

    __slots__ = ("ended", "host")

    def __init__(self, host: str) -> None:
        self.host = host
        self.ended = False

    def passes_to(self, other: Origin) -> bool:
        """Whether ``other`` may go on with the sessions of this connection."""
        return self is other or (self.ended and self.host == other.host)


class Origins:
    """The open connections that asked for something, by the key that the shell gives each."""

    def __init__(self) -> None:
        self._open: dict[object, Origin] = {}

    def of(self, connection: object | None, host: str) -> Origin:
        """The connection of a request; None (a request that came over none) binds a session to nothing."""
        if connection is None:
            origin = Origin(host)
            origin.ended = True
            return origin
        found = self._open.get(connection)
        if found is None:
            found = self._open[connection] = Origin(host)
        return found

    def end(self, connection: object) -> None:
        """The connection is closed."""
        found = self._open.pop(connection, None)
        if found is not None:
            found.ended = True
