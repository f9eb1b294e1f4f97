"""Messages that were sent at QoS 1 or 2 and are not done, in the order in which they were sent."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, TypeVar

__all__ = ["Inflight"]

T = TypeVar("T")


class Inflight(Generic[T]):
    """Packet identifier -> what was sent with it; a dict in all but its class, which compiled code calls directly.

    The owner bounds it. Identifiers go round, so that a late acknowledgement of an old message does not hit a new one.
    """

    __slots__ = ("_items", "_last", "bytes")

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self._last = 0
        self.bytes = 0
        """Of the large payloads among them; the owner counts."""

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
        """The message sent with that identifier; None where it is free."""
        return self._items.get(packet_id)

    def pop(self, packet_id: int) -> T | None:
        """Remove what was sent with that identifier; None where it is free."""
        sent = self._items.get(packet_id)
        if sent is not None:
            del self._items[packet_id]
        return sent

    def values(self) -> ValuesView[T]:
        """All of them, the one sent first at the beginning."""
        return self._items.values()

    def items(self) -> ItemsView[int, T]:
        """The same with their packet identifiers."""
        return self._items.items()

    def clear(self) -> None:
        """Forget all of them; identifiers continue."""
        self._items.clear()

    def free_id(self) -> int:
        """A packet identifier that is free now [MQTT-2.2.1-3], [MQTT-2.2.1-4]. The owner keeps fewer than 65,535."""
        packet_id = self._last + 1
        if packet_id > 65_535:
            packet_id = 1
        items = self._items
        while packet_id in items:
            packet_id = packet_id + 1 if packet_id < 65_535 else 1
        self._last = packet_id
        return packet_id
