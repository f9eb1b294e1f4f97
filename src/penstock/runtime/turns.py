"""Fair shares of the event loop: deficit round robin among connections, for the servers of all protocols.

A server counts the work of each connection. A connection that has used its share of a loop turn pauses reading and is
queued here; it gets its next share in a later turn, after the loop has polled the other connections. All queued
connections together have a bounded amount of work per turn, regardless of their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["LARGE_READ_BYTES", "TURN_SHARES", "TurnQueue"]

T = TypeVar("T")

TURN_SHARES: Final = 4
"""Shares that all queued connections together get in one loop turn. Four shares take about a millisecond, which bounds
the delay of other clients regardless of the number of queued connections."""
LARGE_READ_BYTES: Final = 128 * 1024
"""Size of a read after which a connection is not read again in the same turn. libuv reads up to 32 times while each
read fills its buffer of 256,000 bytes, so that a client could send 8 MB before others are served."""


class TurnQueue(Generic[T]):
    """Queue of the connections that wait for their next share.

    ``take_turn`` handles one share of a connection and returns True if the connection needs another one. ``work``
    returns the work of the server since its start. A loop turn is limited to ``most`` units, which the last connection
    may exceed. ``wake`` schedules a call of :meth:`proceed` in a later loop turn.
    """

    def __init__(
        self, take_turn: Callable[[T], bool], work: Callable[[], int], most: int, wake: Callable[[], None]
    ) -> None:
        self._take_turn = take_turn
        self._work = work
        self._most = most
        self._wake = wake
        self._awake = False
        """A call of :meth:`proceed` is scheduled."""
        self.waiting: deque[T] = deque()

    def add(self, connection: T) -> None:
        """Queue the connection for a share in a later turn. Not to be called for a queued connection."""
        self.waiting.append(connection)
        self._schedule()

    def proceed(self) -> None:
        """Give queued connections a share each, round-robin, until the work of a loop turn is used."""
        self._awake = False
        waiting, work = self.waiting, self._work
        end = work() + self._most
        for _ in range(len(waiting)):
            if work() >= end:
                break
            connection = waiting.popleft()
            if self._take_turn(connection):
                waiting.append(connection)
        if waiting:
            self._schedule()

    def _schedule(self) -> None:
        if not self._awake:
            self._awake = True
            self._wake()
