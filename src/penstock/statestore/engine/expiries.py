"""Expiry of keys: a heap of times. Stale entries are removed when they are reached, or when they are the majority of
the heap."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from penstock.statestore.engine.record import Record

__all__ = ["Expiries"]

_SLACK: Final = 1024
"""Number of stale entries that never cause a rebuild. Each SET with PX adds an entry, so a key that is set repeatedly
leaves stale ones; the heap is rebuilt when more than half of it is stale."""


class Expiries:
    """Expiry times of ``records``; the owner of ``records`` reports each added or removed record with an expiry."""

    __slots__ = ("_expiring", "_heap", "_records", "sooner")

    def __init__(self, records: Mapping[bytes, Record]) -> None:
        self._records = records
        self._heap = [(record.expires_at, key) for key, record in records.items() if record.expires_at]
        heapify(self._heap)
        self._expiring = len(self._heap)
        self.sooner = False
        """Whether an expiry was added before all others. The owner of the timer reads and resets it."""

    def came(self, expires_at: int, key: bytes) -> None:
        """Add the expiry time of the record of ``key``."""
        self._expiring += 1
        heappush(self._heap, (expires_at, key))
        if self._heap[0][0] == expires_at:
            self.sooner = True
        if len(self._heap) > 2 * self._expiring + _SLACK:
            self._rebuild()

    def went(self) -> None:
        """Count a stale entry: a record with an expiry was removed or replaced."""
        self._expiring -= 1

    def next(self) -> tuple[int, bytes] | None:
        """Return the last ms of the next key that expires, and the key; None if no key expires."""
        heap = self._heap
        while heap:
            record = self._records.get(heap[0][1])
            if record is not None and record.expires_at == heap[0][0]:
                return heap[0]
            heappop(heap)
        return None

    def _rebuild(self) -> None:
        records = self._records
        self._heap = [
            deadline
            for deadline in set(self._heap)
            if (record := records.get(deadline[1])) is not None and record.expires_at == deadline[0]
        ]
        heapify(self._heap)
