"""Deduplication of writes: a request that is sent again after a lost connection is not executed again.

A client that lost its connection before it received PUBACK sends the request again, marked DUP [MQTT-4.4.0-1]. A second
execution would report the lock that the client just acquired (NX) as held by another, count a deleted key as missing,
and overwrite a newer value with an old one. The response to the first request is queued in the client's session.

A request is identified by client, correlation data and timestamp: clients never use a timestamp twice, while some use
the same correlation data for all requests. A request without a timestamp is not deduplicated.

Executed requests are not stored on disk. After a restart the stored versions are used instead: a version is greater
than the timestamp of its request, so a request was not executed before the restart if its timestamp is not less than
all versions, or if its key has an older version. For other requests it is unknown: they are not executed, and the
response has status 408.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from librt.strings import BytesWriter, read_i64_be, write_i64_be

from penstock.statestore.hlc import Hlc, parse_position, parse_wire

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["RecentWrites", "is_in_doubt"]

_GENERATION: Final = 10_000
"""Writes per generation; the previous one is dropped. A client has 1024 requests in flight by default."""

_PACKED: Final = 256
"""Number of writes that are packed together."""


@final
class _Generation:
    """Writes in order: client, correlation data and timestamp. Repetitions are rare, so the index is built for the
    first one and then extended.

    Hundreds of them are packed into one object: many small long-lived objects would keep the allocator from returning
    its arenas (120 MB after a load of 300,000 keys).
    """

    __slots__ = ("_index", "_packed", "clients", "count", "last")

    def __init__(self) -> None:
        self.clients: list[str] = []
        """The clients of the writes in ``last``."""
        self.last = BytesWriter()
        """The writes that are not packed: sizes of correlation data and timestamp (-1: none), then both."""
        self.count = 0
        """Number of packed writes."""
        self._packed: list[tuple[str, bytes]] = []
        """Packed writes that are not in the index: the clients, separated by U+0000, which no client identifier has
        [MQTT-1.5.4-2], and ``last``."""
        self._index: dict[tuple[str, bytes], bytes | None] = {}

    def pack(self) -> None:
        """Pack the last writes."""
        if self.clients:
            self.count += len(self.clients)
            self._packed.append(("\0".join(self.clients), self.last.getvalue()))
            self.clients = []
            self.last.truncate(0)

    def stamp_of(self, client_id: str, correlation: bytes) -> bytes | None:
        """Return the timestamp of the client's last request with this correlation data."""
        self.pack()
        for clients, writes in self._packed:
            at: i64 = 0
            for client in clients.split("\0"):
                size: i64 = read_i64_be(writes, at)
                stamp_size: i64 = read_i64_be(writes, at + 8)
                stamp_at = at + 16 + size
                noted = writes[at + 16 : stamp_at]
                at = stamp_at + max(stamp_size, 0)
                self._index[client, noted] = None if stamp_size < 0 else writes[stamp_at:at]
        self._packed.clear()
        return self._index.get((client_id, correlation))


class RecentWrites:
    """Stores at least the last 10,000 writes of all clients."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer = _Generation()
        self._older = _Generation()

    def note(self, client_id: str, correlation: bytes, stamp: bytes | None) -> None:
        """Store a request that is being executed."""
        newer = self._newer
        clients = newer.clients
        clients.append(client_id)
        last = newer.last
        write_i64_be(last, len(correlation))
        write_i64_be(last, -1 if stamp is None else len(stamp))
        last.write(correlation)
        if stamp is not None:
            last.write(stamp)
        if len(clients) >= _PACKED:
            newer.pack()
            if newer.count >= _GENERATION:
                self._older, self._newer = newer, _Generation()

    def has(self, client_id: str, correlation: bytes, stamp: bytes | None) -> bool:
        """Return True if the request was executed before."""
        noted = self._newer.stamp_of(client_id, correlation) or self._older.stamp_of(client_id, correlation)
        return noted is not None and stamp is not None and parse_wire(noted) == parse_wire(stamp)


def is_in_doubt(stamp: bytes | None, recovered: Hlc, existing: Hlc | None) -> bool:
    """Return True if a repeated write may have been executed before the store started.

    Args:
        stamp: its timestamp.
        recovered: the greatest version before the start.
        existing: the current version of its key, None if the key does not exist.
    """
    if stamp is None:
        return False
    position = parse_position(stamp)
    return position < recovered.position and (existing is None or position < existing.position)
