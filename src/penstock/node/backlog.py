"""Changes of the state store that wait for the tube: the first of them in memory, the rest where the store logged them.

All of them lie in the store's log until the tube has them, so memory is a shortcut: what comes while it is full is only
counted, and read from the log once there is room. A page of the log may hold changes that are announced only after it,
and be older than others that are announced already. Versions settle both: what is no newer than the newest known is
known, and the log is read on until it has given that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.interfaces import LogPage, LogTail

__all__ = ["Backlog"]

_POSITION = attrgetter("position")


class Backlog:
    """Waiting changes after the version ``last``; of them in memory at most about ``max_bytes`` and one more."""

    def __init__(self, last: Hlc, max_bytes: int) -> None:
        self.held_bytes = 0
        self.last_taken = last
        """Version of the last change that left."""
        self._max_bytes = max_bytes
        self._held: deque[Change] = deque()
        self._left = 0
        """Number of changes that only the log holds."""
        self._through = last
        """Every change up to this version came into memory, or was before ``last``."""
        self._newest = last
        """Version of the newest change that is known of; greater than ``_through`` while the log has more."""
        self._asked = last

    def __len__(self) -> int:
        """Number of waiting changes, in memory or only in the log."""
        return len(self._held) + self._left

    @property
    def is_behind(self) -> bool:
        """True if only the log holds some changes."""
        return self._through.position < self._newest.position

    def resume(self, tail: LogTail) -> None:
        """What the log has after ``last``; before anything is announced."""
        self._left, self._newest = tail

    def announce(self, changes: Iterable[Change]) -> None:
        """More changes, in order; the log has them."""
        for change in changes:
            if change.version.position <= self._newest.position:
                continue  # it came with a page, or was there on start
            if self.is_behind or self.held_bytes >= self._max_bytes:
                self._left += 1
            else:
                self._hold(change)
                self._through = change.version
            self._newest = change.version

    def ask(self) -> Hlc:
        """The version after which the log is to be read now; its page comes with :meth:`add`."""
        self._asked = self._newest
        return self._through

    def add(self, page: LogPage) -> None:
        """The page that was asked for."""
        known = self._newest.position
        for change in page.changes:
            self._hold(change)
            self._left -= change.version.position <= known
        # Where the log ends it has given all that was known when it was asked, if it has it at all (damaged ones).
        self._through = max(page.through, self._asked, key=_POSITION) if page.complete else page.through
        self._newest = max(self._newest, self._through, key=_POSITION)
        if not self.is_behind:
            self._left = 0

    def first(self, count: int) -> list[Change]:
        """The first in memory, ``count`` at most; they stay."""
        return list(islice(self._held, count))

    def drop(self, count: int) -> None:
        """The first ``count`` are where they should be."""
        for _ in range(count):
            change = self._held.popleft()
            self.held_bytes -= change.held_bytes
            self.last_taken = change.version

    def _hold(self, change: Change) -> None:
        self._held.append(change)
        self.held_bytes += change.held_bytes
