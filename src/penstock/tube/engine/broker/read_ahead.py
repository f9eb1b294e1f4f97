"""What readers of old messages will ask for next, read while they work on what they got.

A client of one thread asks, works, confirms, asks. Reading half a megabyte from disk and checking it takes as long as
its work on that; so that both happen at once, the shell has the next read done when the answer has left.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

from penstock.tube.engine.interfaces import LogRead, LogStore

__all__ = ["PendingRead", "ReadAhead"]

_MOST = 16
"""Reads that wait for their reader, each of half a megabyte; with more readers some are served as they ask."""
_GONE_MS = 2_000
"""A reader that has not come by then leaves its pending to another."""


class PendingRead(NamedTuple):
    """A read of a store: from offset ``start``, messages with key codes in ``keys`` (None: all), ``room`` bytes."""

    store: LogStore
    partition_id: int
    start: int
    keys: frozenset[int] | None
    room: int

    def read(self) -> LogRead:
        """Raises OSError for what may pass, as `LogStore.read`."""
        return self.store.read(self.partition_id, self.start, keys=self.keys, max_bytes=self.room)


class ReadAhead:
    """Reads that were done ahead, and those that are ``due``. What is stored never changes, so none grows stale."""

    def __init__(self) -> None:
        self.due: deque[PendingRead] = deque()
        self._held: dict[PendingRead, tuple[LogRead | None, int]] = {}
        """By pending, oldest first: what was read (None while it is due), and when it was expected."""

    def take(self, pending: PendingRead) -> LogRead | None:
        """What was read there, once; None: it has to be read."""
        found = self._held.pop(pending, None)
        return None if found is None else found[0]

    def expect(self, pending: PendingRead, now_ms: int) -> None:
        """A reader will ask for ``pending``. Dropped where too many others are expected already."""
        held = self._held
        if len(held) >= _MOST:
            oldest = next(iter(held))
            if now_ms - held[oldest][1] < _GONE_MS:
                return
            del held[oldest]
        if pending not in held:
            held[pending] = (None, now_ms)
            self.due.append(pending)

    def work(self) -> None:
        """Do the read that is due for longest, if its reader has not come meanwhile."""
        pending = self.due.popleft()
        read, expected_at = self._held.get(pending, (None, None))
        # A reader that came first and is expected at the same pending again has it due twice.
        if expected_at is not None and read is None and pending.start >= pending.store.min_offset:
            # What may pass is left to the reader, whose answer can say so.
            with contextlib.suppress(OSError):
                self._held[pending] = (pending.read(), expected_at)

    def forget(self, store: LogStore) -> None:
        """``store`` is removed, with its files."""
        for pending in [pending for pending in self._held if pending.store is store]:
            del self._held[pending]
