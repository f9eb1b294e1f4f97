"""Deduplication of writes: a request that is sent again after a lost connection is not executed again.

A client that lost its connection before it received PUBACK sends the request again, marked DUP [MQTT-4.4.0-1]. A second
execution would report the lock that the client just acquired (NX) as held by another, count a deleted key as missing,
and overwrite a newer value with an old one. The response to the first request waits in the client's session.

A request is identified by client, correlation data and timestamp: clients never use a timestamp twice, while some use
the same correlation data for all requests. A request without a timestamp is not deduplicated.
"""

from __future__ import annotations

from typing import Final

from penstock.statestore.hlc import parse_wire

__all__ = ["RecentWrites"]

_GENERATION: Final = 10_000
"""Writes per generation; the previous one is dropped. A client has 1024 requests in flight by default."""


class RecentWrites:
    """At least the last 10,000 writes of all clients."""

    __slots__ = ("_count", "_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[str, dict[bytes, bytes | None]] = {}
        self._older: dict[str, dict[bytes, bytes | None]] = {}
        """Time stamps by client and correlation data: two look-ups cost less than a key of both."""
        self._count = 0

    def note(self, client_id: str, correlation: bytes, stamp: bytes | None) -> None:
        """Remember a request that is being executed."""
        of_client = self._newer.get(client_id)
        if of_client is None:
            of_client = self._newer[client_id] = {}
        before = len(of_client)
        of_client[correlation] = stamp
        self._count += len(of_client) - before
        if self._count >= _GENERATION:
            self._older, self._newer = self._newer, {}
            self._count = 0

    def has(self, client_id: str, correlation: bytes, stamp: bytes | None) -> bool:
        """Whether the request was executed before."""
        noted = _find(self._newer, client_id, correlation) or _find(self._older, client_id, correlation)
        return noted is not None and stamp is not None and parse_wire(noted) == parse_wire(stamp)


def _find(writes: dict[str, dict[bytes, bytes | None]], client_id: str, correlation: bytes) -> bytes | None:
    of_client = writes.get(client_id)
    return None if of_client is None else of_client.get(correlation)
