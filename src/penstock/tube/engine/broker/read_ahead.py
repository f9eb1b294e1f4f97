"""Read-ahead for consumers of old messages: the next read runs while the client processes the last one.

A client with one thread asks, processes, confirms, asks. Reading half a megabyte from disk and verifying it takes as
long as processing it. So the shell has the next read done when the response has been sent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

from penstock.tube.engine.interfaces import LogRead, LogStore

__all__ = ["PendingRead", "ReadAhead"]

_MOST = 16
"""Reads that are prepared at the same time, half a megabyte each; further consumers are served when they ask."""
_GONE_MS = 2_000
"""A prepared read that was not asked for within this time makes room for another."""


class PendingRead(NamedTuple):
    """A read of a store from offset ``start``: messages with key codes in ``keys`` (None: all), ``room`` bytes."""

    store: LogStore
    partition_id: int
    start: int
    keys: frozenset[int] | None
    room: int

    def read(self) -> LogRead:
        """Read now. Raises OSError for a temporary failure, as `LogStore.read` does."""
        return self.store.read(self.partition_id, self.start, keys=self.keys, max_bytes=self.room)


class ReadAhead:
    """Prepared reads, and those that are ``due``. Stored messages never change, so no result becomes stale."""

    def __init__(self) -> None:
        self.due: deque[PendingRead] = deque()
        self._held: dict[PendingRead, tuple[LogRead | None, int]] = {}
        """Results of reads (None while they are due) and the time when they were expected, oldest first."""

    def take(self, pending: PendingRead) -> LogRead | None:
        """Return the result of a prepared read, once; None: it must be read now."""
        found = self._held.pop(pending, None)
        return None if found is None else found[0]

    def expect(self, pending: PendingRead, now_ms: int) -> None:
        """Expect that a consumer asks for ``pending``. Ignored if too many others are expected."""
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
        """Do the read that is due for longest, unless its consumer has asked meanwhile."""
        pending = self.due.popleft()
        read, expected_at = self._held.get(pending, (None, None))
        # A consumer that asked earlier and is expected at the same offset again has its read due twice.
        if expected_at is not None and read is None and pending.start >= pending.store.min_offset:
            # A temporary failure is reported in the response to the consumer.
            with contextlib.suppress(OSError):
                self._held[pending] = (pending.read(), expected_at)

    def forget(self, store: LogStore) -> None:
        """Drop the reads of ``store``, which is removed with its files."""
        for pending in [pending for pending in self._held if pending.store is store]:
            del self._held[pending]
