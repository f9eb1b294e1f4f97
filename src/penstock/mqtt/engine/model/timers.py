"""Deadlines of many owners, with one entry per owner, so that the shell needs only one timer.

An owner keeps its entry while its deadline is postponed (every packet postpones keep alive): when the entry is due, the
owner checks the actual deadline and arms again. Entries of ended owners are removed once they are more than half of
all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush

__all__ = ["DeadlineOwner", "Timers", "after_s"]


def after_s(now: int, seconds: int) -> int:
    """Return the first ms that is not before the end of ``seconds`` from ``now``, which is rounded down."""
    return now + seconds * 1000 + 1 if seconds else now


class DeadlineOwner(ABC):
    """Owner of a deadline. ``armed_for``: the time of its entry, 0 for none."""

    __slots__ = ("armed_for", "gone")

    def __init__(self) -> None:
        self.armed_for = 0
        self.gone = False

    @abstractmethod
    def due(self, now: int) -> None:
        """Handle the time of the entry: act, or arm again for the real deadline."""


class Timers:
    """A heap of (milliseconds, tie-break, owner)."""

    __slots__ = ("_gone", "_heap", "_sequence", "sooner")

    def __init__(self) -> None:
        self.sooner = False
        """Whether a new entry is before all others; the shell then adjusts its timer and clears the flag."""
        self._heap: list[tuple[int, int, DeadlineOwner]] = []
        self._sequence = 0
        self._gone = 0

    def __len__(self) -> int:
        return len(self._heap)

    def arm(self, owner: DeadlineOwner, when: int) -> None:
        """Call ``owner.due`` at ``when`` or earlier: an earlier entry is not replaced."""
        if owner.armed_for and owner.armed_for <= when:
            return
        owner.armed_for = when
        self._sequence += 1
        heap = self._heap
        if not heap or when < heap[0][0]:
            self.sooner = True
        heappush(heap, (when, self._sequence, owner))

    def remove(self, owner: DeadlineOwner) -> None:
        """Remove the entry of ``owner``."""
        if owner.gone:
            return
        owner.gone = True
        if owner.armed_for:
            self._gone += 1
            if self._gone > 64 and self._gone * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].gone]
                heapify(self._heap)
                self._gone = 0

    def next_deadline(self) -> int | None:
        """Return the instant at which :meth:`tick` is due; None without a deadline."""
        heap = self._heap
        while heap and heap[0][2].gone:
            heappop(heap)
            self._gone -= 1
        return heap[0][0] if heap else None

    def tick(self, now: int) -> None:
        """Call the owners that are due."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            when, _, owner = heappop(heap)
            if owner.gone:
                self._gone -= 1
            elif owner.armed_for == when:
                owner.armed_for = 0
                owner.due(now)
            heap = self._heap
