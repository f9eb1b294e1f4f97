"""An event loop that did not run for a while: a stopped process, a migrated machine, a disk that blocked.

Meanwhile clients sent what they had to, and it waits in sockets. Two rules keep servers from judging their silence:

* :func:`after_reading`: what judges silence runs after the loop has looked at every socket once. That is enough for
  short stalls, and nobody has to notice them.
* :class:`StallWatch`: a stall of more than :data:`STALL_S` gives everybody a grace of the same length, at most
  :data:`MAX_GRACE_S`. A machine that was frozen did not receive anything: its peers send again, at intervals that have
  doubled up to the length of the pause. Who is really gone is noticed one grace later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

__all__ = ["MAX_GRACE_S", "STALL_S", "StallWatch", "after_reading", "watch_stalls"]

_log = logging.getLogger("penstock.loop")

BEAT_S: Final = 1.0
STALL_S: Final = 1.5
"""Time between two beats that makes a stall."""
MAX_GRACE_S: Final = 60.0
"""The longest grace: the longest interval at which TCP sends again, about."""


def after_reading(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call back when the loop has looked at all its sockets once and read what was there.

    asyncio looks before it calls what was scheduled, uvloop after: the second turn is behind one look in both.
    """
    loop.call_soon(loop.call_soon, callback)


class StallWatch:
    """Notices stalls of one loop; made by :func:`watch_stalls`. ``stalls`` counts them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.stalls = 0
        self._loop = loop
        self._clock = clock
        self._beat = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._told: list[Callable[[int], None]] = []

    def add(self, told: Callable[[int], None]) -> None:
        """Call ``told`` with the grace in ms after each stall, until it is removed."""
        self._told.append(told)
        if self._timer is None:
            self._beat = self._clock()
            self._timer = self._loop.call_later(BEAT_S, self._next)

    def remove(self, told: Callable[[int], None]) -> None:
        """Call it no more; twice is harmless."""
        if told in self._told:
            self._told.remove(told)
        if not self._told and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Notice a stall that has just ended; before anybody's silence is judged."""
        if self._clock() - self._beat > STALL_S and self._timer is not None:
            self._stalled()

    def _next(self) -> None:
        self.look()
        self._beat = self._clock()
        self._timer = self._loop.call_later(BEAT_S, self._next)

    def _stalled(self) -> None:
        now = self._clock()
        stall_s, self._beat = now - self._beat, now
        self.stalls += 1
        grace_s = min(stall_s, MAX_GRACE_S)
        _log.warning(
            "the process did not run for up to %.1f s; the silence of clients is judged %.1f s later", stall_s, grace_s
        )
        for told in list(self._told):
            told(int(grace_s * 1000))


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, StallWatch] = WeakKeyDictionary()


def watch_stalls(told: Callable[[int], None]) -> StallWatch:
    """The watch of the running loop, which all servers in it share; it calls ``told`` with the grace in ms."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = StallWatch(loop)
    watch.add(told)
    return watch
