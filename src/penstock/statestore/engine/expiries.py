"""When keys expire: a heap of instants, in which what is no longer true stays until it is met or is most of it."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from penstock.statestore.engine.record import Record

__all__ = ["Expiries"]

_SLACK: Final = 1024
"""Stale items that do not count: the heap holds one for every SET with PX, also for keys set again since, and is
rebuilt when more than half of it is stale."""


class Expiries:
    """The instants of ``records``, which is its owner's: it tells of each record with an expiry that comes or goes."""

    __slots__ = ("_expiring", "_heap", "_records")

    def __init__(self, records: Mapping[bytes, Record]) -> None:
        self._records = records
        self._heap = [(record.expires_at, key) for key, record in records.items() if record.expires_at]
        heapify(self._heap)
        self._expiring = len(self._heap)

    def came(self, expires_at: int, key: bytes) -> None:
        """The record of ``key`` expires at that instant."""
        self._expiring += 1
        heappush(self._heap, (expires_at, key))
        if len(self._heap) > 2 * self._expiring + _SLACK:
            self._rebuild()

    def went(self) -> None:
        """A record that was to expire is gone, or another is in its place."""
        self._expiring -= 1

    def next(self) -> tuple[int, bytes] | None:
        """The next instant and the key that expires then; None where none ever will."""
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
