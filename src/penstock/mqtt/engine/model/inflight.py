"""QoS 1 and 2 messages in flight, in the order in which they were sent."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, TypeVar

__all__ = ["Inflight"]

T = TypeVar("T")


class Inflight(Generic[T]):
    """Messages in flight by packet identifier; not a dict, because compiled code calls its methods directly.

    The owner bounds it. Identifiers go round, so that a late acknowledgement of an old message does not hit a new one.
    """

    __slots__ = ("_items", "_last", "bytes")

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self._last = 0
        self.bytes = 0
        """Bytes of large payloads, counted by the owner."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._items

    def __getitem__(self, packet_id: int) -> T:
        return self._items[packet_id]

    def __setitem__(self, packet_id: int, sent: T) -> None:
        self._items[packet_id] = sent

    def __delitem__(self, packet_id: int) -> None:
        del self._items[packet_id]

    def get(self, packet_id: int) -> T | None:
        """Return the message with that identifier; None for a free one."""
        return self._items.get(packet_id)

    def pop(self, packet_id: int) -> T | None:
        """Remove and return the message with that identifier; None for a free one."""
        sent = self._items.get(packet_id)
        if sent is not None:
            del self._items[packet_id]
        return sent

    def values(self) -> ValuesView[T]:
        """Return all messages, the oldest first."""
        return self._items.values()

    def items(self) -> ItemsView[int, T]:
        """Return all messages with their packet identifiers, the oldest first."""
        return self._items.items()

    def clear(self) -> None:
        """Remove all messages; identifiers continue."""
        self._items.clear()

    def free_id(self) -> int:
        """Return a free packet identifier [MQTT-2.2.1-3], [MQTT-2.2.1-4]; there must be fewer than 65,535 messages."""
        packet_id = self._last + 1
        if packet_id > 65_535:
            packet_id = 1
        items = self._items
        while packet_id in items:
            packet_id = packet_id + 1 if packet_id < 65_535 else 1
        self._last = packet_id
        return packet_id
