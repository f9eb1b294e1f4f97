"""Turns of connections that have used their share of a loop turn: deficit round robin, for servers of all protocols.

A server counts work. A connection that has used its share pauses reading and waits here for another one, which it gets
in a later loop turn, after the loop has polled the others. The connections that wait have a bounded amount of work per
loop turn together, however many they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["LARGE_READ_BYTES", "TURN_SHARES", "TurnQueue"]

T = TypeVar("T")

TURN_SHARES: Final = 4
"""Shares per loop turn of all connections together that wait for another one: other clients wait no longer, however
many they are. Four of them take about a millisecond."""
LARGE_READ_BYTES: Final = 128 * 1024
"""Size of a read after which a connection is not read again in the same turn. libuv reads up to 32 times while each
read fills its buffer of 256,000 bytes, so that a client could send 8 MB before others are served."""


class TurnQueue(Generic[T]):
    """Connections that wait for their next share, the next one first.

    ``take_turn`` handles one share of a connection, and returns whether it waits for another one. ``work`` is the work
    of the server since its start, of which a loop turn gets ``most`` units, and what the last connection takes beyond
    them. ``wake`` has the server call :meth:`proceed` in a later loop turn.
    """

    def __init__(
        self, take_turn: Callable[[T], bool], work: Callable[[], int], most: int, wake: Callable[[], None]
    ) -> None:
        self._take_turn = take_turn
        self._work = work
        self._most = most
        self._wake = wake
        self._awake = False
        """:meth:`proceed` will be called."""
        self.waiting: deque[T] = deque()

    def add(self, connection: T) -> None:
        """Give the connection a share in a later turn; call it once until then."""
        self.waiting.append(connection)
        self._schedule()

    def proceed(self) -> None:
        """Give a share to the connections that wait, round-robin, within the work of a loop turn."""
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
