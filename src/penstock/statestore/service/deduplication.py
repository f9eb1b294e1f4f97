"""The writes of late, so that one that comes again is not carried out again.

A client that lost its connection before a PUBACK reached it sends the request once more, marked DUP [MQTT-4.4.0-1].
Carried out again, the lock that it just acquired (NX) would be "somebody else's", a deleted key would count as missing,
and an old value would cover a newer one. The answer to the first one is in the client's session.

A request is known by its client, its correlation data and its time stamp: clients stamp no two requests alike, while
some give all of them the same correlation data. One without a time stamp is not remembered.
"""

from __future__ import annotations

from typing import Final

from penstock.statestore.hlc import parse_wire

__all__ = ["RecentWrites"]

_GENERATION: Final = 10_000
"""Writes after which those of the generation before are forgotten; a client has 1024 under way by default."""


class RecentWrites:
    """At least the last 10,000 of all clients."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[tuple[str, bytes], bytes | None] = {}
        self._older: dict[tuple[str, bytes], bytes | None] = {}

    def note(self, client_id: str, correlation: bytes, stamp: bytes | None) -> None:
        """The client's request is being carried out."""
        newer = self._newer
        newer[client_id, correlation] = stamp
        if len(newer) >= _GENERATION:
            self._older, self._newer = newer, {}

    def has(self, client_id: str, correlation: bytes, stamp: bytes | None) -> bool:
        """Whether that request was noted."""
        key = (client_id, correlation)
        noted = self._newer.get(key) or self._older.get(key)
        return noted is not None and stamp is not None and parse_wire(noted) == parse_wire(stamp)
