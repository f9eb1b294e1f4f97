"""QoS 1 and 2 messages in flight, by packet identifier.

A hash table with chaining whose hash is the identifier itself: identifiers are assigned in sequence, so the messages in
flight fill neighbouring slots, and a slot with more than one message is rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["Inflight", "InflightEntry"]


@mypyc_attr(acyclic=True)
class InflightEntry:
    """Base class of entries of :class:`Inflight`: an exchange with a packet identifier, until its last
    acknowledgement."""

    __slots__ = ("next", "order", "packet_id")

    def __init__(self) -> None:
        self.packet_id: i64 = 0
        """0 until :meth:`Inflight.add`."""
        self.order: i64 = 0
        """Number in the order of sending."""
        self.next: InflightEntry | None = None
        """The next entry in the same slot."""


class Inflight:
    """Entries in flight. The owner limits their number to less than 65,535, and casts them to their class.

    Identifiers are assigned cyclically, so that a late acknowledgement of an old message does not match a new one. Not
    generic: mypyc checks each access to the attributes of a generic class.
    """

    __slots__ = ("_last", "_mask", "_order", "_slots", "bytes", "count")

    def __init__(self) -> None:
        self._slots: list[InflightEntry | None] = [None]
        self._mask: i64 = 0
        self._last: i64 = 0
        self._order: i64 = 0
        self.count: i64 = 0
        self.bytes: i64 = 0
        """Bytes of large payloads, counted by the owner."""

    def __len__(self) -> int:
        return self.count

    def assign(self, entry: InflightEntry) -> i64:
        """Add an entry under a free packet identifier, and return the identifier."""
        packet_id = self._last + 1
        mask = self._mask
        slots, slot = self._slots, packet_id & mask
        if self.count > mask or packet_id > 65_535 or slots[slot] is not None:
            packet_id = self.free_id()
            self.add(packet_id, entry)
            return packet_id
        slots[slot] = entry
        entry.packet_id = self._last = packet_id
        entry.order = self._order
        self._order += 1
        self.count += 1
        return packet_id

    def free_id(self) -> i64:
        """Return a free packet identifier [MQTT-2.2.1-3], [MQTT-2.2.1-4]."""
        slots, mask = self._slots, self._mask
        packet_id = self._last
        while True:
            packet_id += 1
            if packet_id > 65_535:
                packet_id = 1
            if slots[packet_id & mask] is None or self.get(packet_id) is None:
                self._last = packet_id
                return packet_id

    def add(self, packet_id: i64, entry: InflightEntry) -> None:
        """Add an entry under a free identifier."""
        entry.packet_id = packet_id
        entry.order = self._order
        self._order += 1
        self.put_back(entry)

    def put_back(self, entry: InflightEntry) -> None:
        """Add a removed entry again, with its identifier and its position in the order."""
        if self.count > self._mask:
            self._grow()
        slots, slot = self._slots, entry.packet_id & self._mask
        entry.next = slots[slot]
        slots[slot] = entry
        self.count += 1

    def restore(self, packet_id: i64, entry: InflightEntry) -> None:
        """Add a recovered entry; new identifiers continue after it."""
        self.add(packet_id, entry)
        self._last = packet_id

    def get(self, packet_id: i64) -> InflightEntry | None:
        """Return the entry with that identifier; None for a free one."""
        entry = self._slots[packet_id & self._mask]
        while entry is not None and entry.packet_id != packet_id:
            entry = entry.next
        return entry

    def pop(self, packet_id: i64) -> InflightEntry | None:
        """Remove and return the entry with that identifier; None for a free one."""
        slots, slot = self._slots, packet_id & self._mask
        entry = slots[slot]
        if entry is not None and entry.packet_id == packet_id:
            slots[slot] = entry.next
            entry.next = None
            self.count -= 1
            return entry
        entry = self.get(packet_id)
        if entry is not None:
            self.remove(entry)
        return entry

    def remove(self, entry: InflightEntry) -> None:
        """Remove an entry that is in flight."""
        slots, slot = self._slots, entry.packet_id & self._mask
        before = slots[slot]
        if before is entry:
            slots[slot] = entry.next
        else:
            while before is not None and before.next is not entry:
                before = before.next
            assert before is not None
            before.next = entry.next
        entry.next = None
        self.count -= 1

    def values(self) -> list[InflightEntry]:
        """Return all entries, the oldest first."""
        entries = self._entries()
        entries.sort(key=lambda entry: entry.order)
        return entries

    def clear(self) -> None:
        """Remove all entries; the sequence of identifiers continues."""
        # A client that acknowledges selected messages can have any number of entries in one slot. Chains are unlinked
        # first, because freeing a chain of more than 50 objects corrupts memory.
        for entry in self._entries():
            entry.next = None
        self._slots = [None]
        self._mask = 0
        self.count = 0

    def _grow(self) -> None:
        mask = self._mask * 2 + 1
        slots: list[InflightEntry | None] = [None] * (mask + 1)
        for entry in self._entries():
            slot = entry.packet_id & mask
            entry.next = slots[slot]
            slots[slot] = entry
        self._slots = slots
        self._mask = mask

    def _entries(self) -> list[InflightEntry]:
        entries: list[InflightEntry] = []
        for first in self._slots:
            entry = first
            while entry is not None:
                entries.append(entry)
                entry = entry.next
        return entries
