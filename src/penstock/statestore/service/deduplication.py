"""Deduplication of writes: a request that is sent again after a lost connection is not executed again.

A client that lost its connection before it received PUBACK sends the request again, marked DUP [MQTT-4.4.0-1]. A second
execution would report the lock that the client just acquired (NX) as held by another, count a deleted key as missing,
and overwrite a newer value with an old one. The response to the first request waits in the client's session.

A request is identified by client, correlation data and timestamp: clients never use a timestamp twice, while some use
the same correlation data for all requests. A request without a timestamp is not deduplicated.
"""

from __future__ import annotations

from typing import Final, final

from penstock.statestore.hlc import parse_wire

__all__ = ["RecentWrites"]

_GENERATION: Final = 10_000
"""Writes per generation; the previous one is dropped. A client has 1024 requests in flight by default."""


@final
class _Generation:
    """Writes in their order: client, correlation data and time stamp. Repetitions are rare, so the index is made when
    the first one asks, and later continued.
    """

    __slots__ = ("_clients", "_correlations", "_index", "_stamps", "size")

    def __init__(self) -> None:
        self._clients: list[str] = []
        self._correlations: list[bytes] = []
        self._stamps: list[bytes | None] = []
        self._index: dict[tuple[str, bytes], bytes | None] = {}
        self.size = 0

    def add(self, client_id: str, correlation: bytes, stamp: bytes | None) -> None:
        self._clients.append(client_id)
        self._correlations.append(correlation)
        self._stamps.append(stamp)
        self.size += 1

    def stamp_of(self, client_id: str, correlation: bytes) -> bytes | None:
        """The time stamp of the client's last request with that correlation data."""
        self._index.update(zip(zip(self._clients, self._correlations, strict=True), self._stamps, strict=True))
        self._clients, self._correlations, self._stamps = [], [], []
        return self._index.get((client_id, correlation))


class RecentWrites:
    """At least the last 10,000 writes of all clients."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer = _Generation()
        self._older = _Generation()

    def note(self, client_id: str, correlation: bytes, stamp: bytes | None) -> None:
        """Remember a request that is being executed."""
        self._newer.add(client_id, correlation, stamp)
        if self._newer.size >= _GENERATION:
            self._older, self._newer = self._newer, _Generation()

    def has(self, client_id: str, correlation: bytes, stamp: bytes | None) -> bool:
        """Whether the request was executed before."""
        noted = self._newer.stamp_of(client_id, correlation) or self._older.stamp_of(client_id, correlation)
        return noted is not None and stamp is not None and parse_wire(noted) == parse_wire(stamp)
