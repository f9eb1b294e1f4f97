"""The last changes, bounded: what an observation that resumes and a GET as of an older version read.

``floor`` is the version after which every change is here. Entries are the changes themselves, with the observers of
their time left out; what a key was before its first entry is kept beside them for as long as it has one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc

__all__ = ["History", "HistoryExpired"]


class HistoryExpired(Exception):
    """The history does not go back to the version asked for."""


class History:
    """At most ``max_changes`` changes of at most ``max_bytes`` together; ``floor``: version of the last dropped one."""

    def __init__(self, floor: Hlc, max_changes: int, max_bytes: int) -> None:
        self.floor = floor
        self.size = 0
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: deque[Change] = deque()
        self._of_key: dict[bytes, list[Change]] = {}
        self._before: dict[bytes, Record | None] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def restore(self, changes: Iterable[Change]) -> None:
        """Take over stored changes, in order; what was before each key's first is not known any more."""
        for change in changes:
            if change.version > self.floor:
                self._append(change)
        self._drop()

    def add(self, change: Change, before: Record | None) -> None:
        """A change came; ``before`` is what the key was."""
        if change.key not in self._of_key:
            self._before[change.key] = before
        self._append(change)
        self._drop()

    def since(self, version: Hlc, name: bytes, *, prefix: bool) -> list[Change]:
        """The changes after ``version`` to the key, or to all keys under the prefix, in order.

        Raises:
            OutOfReach: some of them may have been dropped.
        """
        if version.position < self.floor.position:
            raise HistoryExpired
        changes = self._changes if prefix else self._of_key.get(name, ())
        after = version.position
        return [
            change
            for change in changes
            if change.version.position > after and (not prefix or change.key.startswith(name))
        ]

    def at(self, key: bytes, version: Hlc, now: Record | None) -> Record | None:
        """What ``key`` was at ``version``; ``now``: what it is.

        Raises:
            OutOfReach: that is not known any more.
        """
        after = version.position
        if now is not None and now.version.position <= after:
            return now
        if after < self.floor.position:
            raise HistoryExpired
        changes = self._of_key.get(key)
        if changes is None:
            return now
        position = bisect_right(changes, after, key=lambda change: change.version.position)
        if position:
            return changes[position - 1].record
        if key not in self._before:
            raise HistoryExpired
        return self._before[key]

    def _append(self, change: Change) -> None:
        self._changes.append(change)
        self._of_key.setdefault(change.key, []).append(change)
        self.size += change.held_bytes

    def _drop(self) -> None:
        while len(self._changes) > self._max_changes or self.size > self._max_bytes:
            self._drop_first()

    def _drop_first(self) -> None:
        change = self._changes.popleft()
        self.floor = change.version
        self.size -= change.held_bytes
        changes = self._of_key[change.key]
        del changes[0]
        if changes:
            self._before[change.key] = change.record
        else:
            del self._of_key[change.key]
            self._before.pop(change.key, None)
