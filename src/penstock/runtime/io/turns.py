"""Turns of connections that have used their share of a loop turn: deficit round robin, for servers of all protocols.

A server counts work. A connection that has used its share pauses reading and waits here for another one, which it gets
in a later loop turn, after the loop has polled the others. The connections that wait have a bounded amount of work per
loop turn together, however many they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["LARGE_READ_BYTES", "TURN_SHARES", "TurnQueue"]

T = TypeVar("T")

TURN_SHARES: Final = 4
"""Shares per loop turn of all connections that wait for another one."""
LARGE_READ_BYTES: Final = 128 * 1024
"""Size of a read after which a connection is not read again in the same turn. libuv reads up to 32 times while each
read fills its buffer of 256,000 bytes, so that a client could send 8 MB before others are served."""


class TurnQueue(Generic[T]):
    """Connections that wait for their next share, the next one first.

    ``take_turn`` handles one share of a connection, and returns whether it waits for another one. ``work`` is the work
    of the server since its start, of which a loop turn gets ``most`` units, and what the last connection takes beyond
    them.
    """

    def __init__(self, take_turn: Callable[[T], bool], work: Callable[[], int], most: int) -> None:
        self._take_turn = take_turn
        self._work = work
        self._most = most
        self._waiting: deque[T] = deque()
        self._scheduled = False

    def add(self, connection: T) -> None:
        """Give the connection a share in a later turn; call it once until then."""
        self._waiting.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._proceed)

    def _proceed(self) -> None:
        self._scheduled = False
        waiting, work = self._waiting, self._work
        end = work() + self._most
        for _ in range(len(waiting)):
            if work() >= end:
                break
            connection = waiting.popleft()
            if self._take_turn(connection):
                waiting.append(connection)
        if waiting:
            self._schedule()
