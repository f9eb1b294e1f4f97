"""Offsets of consumer groups per partition: the committed offset, and the messages in flight.

Offsets are byte offsets in a store's index, multiples of 28. The broker stores the offset; a consumer only reports
whether it consumed the messages of its last get. So a get marks its messages as *in flight*. The next get, a commit or
the end of the registration either *commits* or drops them; dropped messages are delivered again.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.tube.codec.message import INDEX_RECORD_BYTES

__all__ = ["GroupOffsets", "Key"]

Key = tuple[str, str, int]
"""Group, topic, partition id."""

READ_FROM_MIN = 0
READ_FROM_MAX = 1
READ_ALWAYS_MAX = 2


class _OffsetState:
    __slots__ = ("committed", "delivered", "in_flight")

    def __init__(self, committed: int) -> None:
        self.committed = committed
        self.in_flight = 0
        self.delivered = 0  # offset after the last message in flight; undefined without messages in flight


class GroupOffsets:
    """Offsets of all groups. ``dirty`` collects changes to store; the shell gets them with `take_dirty`."""

    def __init__(self, stored: Iterable[tuple[Key, int]] = ()) -> None:
        self._slots: dict[Key, _OffsetState] = {key: _OffsetState(offset) for key, offset in stored}
        self.dirty: set[Key] = set()
        self.founded = False
        """True if ``dirty`` has the first offset of a group: if it were lost, the group would start at the beginning or
        end of the log.
        """

    def __len__(self) -> int:
        return len(self._slots)

    def items(self) -> list[tuple[Key, int]]:
        """Every key with its committed offset."""
        return [(key, slot.committed) for key, slot in self._slots.items()]

    def committed(self, key: Key) -> int | None:
        """Return the committed offset; None for a group that never registered for the partition."""
        slot = self._slots.get(key)
        return None if slot is None else slot.committed

    def in_flight(self, key: Key) -> int:
        """Return the number of index bytes that were delivered and are not confirmed."""
        slot = self._slots.get(key)
        return 0 if slot is None else slot.in_flight

    def register(self, key: Key, read_status: int, wanted: int | None, low: int, high: int) -> int:
        """Register a consumer and return its start offset; messages in flight are delivered again.

        ``wanted`` is the request's currOffset (rounded down to a record, limited to ``low``..``high``). ``read_status``
        determines the start of a group without an offset; 2 always means ``high``.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _OffsetState(low if read_status == READ_FROM_MIN else high)
            self.dirty.add(key)
            self.founded = True
        slot.in_flight = 0
        target = slot.committed
        if read_status == READ_ALWAYS_MAX:
            target = high
        elif wanted is not None and wanted >= 0:
            target = max(low, min(wanted - wanted % INDEX_RECORD_BYTES, high))
        self._move(key, slot, target)
        return target

    def begin_get(self, key: Key, low: int, high: int, *, consumed: bool, manual: bool) -> tuple[int, bool]:
        """Begin a get; return the offset to read from, and whether there are messages below ``high``.

        ``consumed``: messages in flight are committed first; otherwise they are read again. ``manual``: reading
        continues after the messages in flight, which only a commit confirms.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _OffsetState(low)
            self.dirty.add(key)
            self.founded = True
        if consumed and not manual:
            self._move(key, slot, slot.committed + slot.in_flight)
            slot.in_flight = 0
        offset = slot.committed + (slot.in_flight if manual else 0)
        if offset >= high:
            if offset > high:
                self._move(key, slot, high)
                slot.in_flight = 0
            return high, False
        if offset < low:
            # Retention removed messages before the group read them: it continues with the oldest message.
            self._move(key, slot, low)
            slot.in_flight = 0
            offset = low
        return offset, True

    def end_get(self, key: Key, walked: int, *, empty: bool, manual: bool, delivered: int = 0) -> None:
        """End a get that read ``walked`` index bytes, which are committed immediately if no message is in flight.

        ``delivered``: with ``manual``, the offset after the last message of a get that returned messages.
        """
        slot = self._slots[key]
        if not manual:
            slot.in_flight = 0
        if empty and not slot.in_flight:
            self._move(key, slot, slot.committed + walked)
            return
        slot.in_flight += walked
        if not empty:
            slot.delivered = delivered if manual else slot.committed + walked

    def commit(self, key: Key, *, consumed: bool) -> int:
        """Commit or drop the messages in flight; returns the committed offset."""
        slot = self._slots[key]
        if consumed:
            self._move(key, slot, slot.committed + slot.in_flight)
        slot.in_flight = 0
        return slot.committed

    def commit_to(self, key: Key, offset: int) -> int | None:
        """Commit up to ``offset``; returns the committed offset, None if ``offset`` was not delivered.

        Entries after the last message (of other partitions, or rejected by filters) are committed with it.
        """
        slot = self._slots[key]
        end = slot.committed + slot.in_flight
        if offset > end:
            return None
        if offset > slot.committed:
            offset = end if offset >= slot.delivered else offset
            self._move(key, slot, offset)
            slot.in_flight = end - offset
        return slot.committed

    def discard(self, key: Key) -> None:
        """Drop the messages in flight, because the consumer has ended."""
        slot = self._slots.get(key)
        if slot is not None:
            slot.in_flight = 0

    def set(self, key: Key, offset: int) -> None:
        """Set a group's offset, as an administrator requests."""
        slot = self._slots.setdefault(key, _OffsetState(-1))
        slot.in_flight = 0
        self._move(key, slot, offset)

    def remove(self, key: Key) -> bool:
        """Remove an offset; returns whether there was one."""
        if self._slots.pop(key, None) is None:
            return False
        self.dirty.add(key)
        return True

    def forget_topic(self, topic: str) -> None:
        """Remove all offsets of a removed topic, so that a new topic of the same name starts without offsets."""
        for key in [key for key in self._slots if key[1] == topic]:
            del self._slots[key]
            self.dirty.add(key)

    def take_dirty(self) -> list[tuple[Key, int | None]]:
        """Return the offsets that changed since the last call; None: removed."""
        taken = [(key, self.committed(key)) for key in self.dirty]
        self.dirty.clear()
        self.founded = False
        return taken

    def _move(self, key: Key, slot: _OffsetState, offset: int) -> None:
        if offset != slot.committed:
            slot.committed = offset
            self.dirty.add(key)
