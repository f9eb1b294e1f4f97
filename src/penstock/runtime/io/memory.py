"""Return free memory to the kernel when a server becomes idle.

While a server works, memory that was freed is kept for the next allocation: returning it and faulting it in again
halves the throughput of large messages (:func:`~penstock.runtime.io.loop.tune_process`). After the work it would stay
permanently: glibc returns none by itself, and LMDB keeps the pages of its largest transaction.

Python's own allocator returns an arena of 1 MB when the arena's last object is freed, so a few long-lived small objects
that are spread among many short-lived ones keep most of a peak. With ``PYTHONMALLOC=malloc`` in the environment, the C
library allocates them, too, and returns each free page.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.runtime.io.lmdb_environment import release_pages

__all__ = ["INTERVAL_S", "IdleRelease", "release_memory"]

INTERVAL_S: Final = 10.0
"""Seconds between two checks of the processor time of the process."""

_IDLE: Final = 0.1
"""Cores in use during an interval, below which the process is idle."""

_WORK_S: Final = 0.1
"""Processor time in seconds after which there may be memory to return: 10,000 clients need less than one."""


def release_memory() -> None:
    """Return free memory to the kernel; from any thread. With a C library other than glibc, only the memory of LMDB is
    returned."""
    release_pages()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class IdleRelease:
    """Calls ``forget`` in the loop, then ``release`` in a thread, when the process becomes idle after work.

    ``forget`` empties caches of small objects; ``processor_s`` returns the processor time of the process.
    """

    def __init__(
        self,
        forget: Callable[[], None] = lambda: None,
        *,
        release: Callable[[], None] = release_memory,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._forget = forget
        self._release = release
        self._processor_s = processor_s
        self._released_s = self._looked_s = processor_s()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Check every :data:`INTERVAL_S` seconds; call it in the event loop."""
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look_again)

    def close(self) -> None:
        """Stop, after a running release has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()

    def _look_again(self) -> None:
        if self.is_due():
            self._forget()
            # A thread of its own: one of the loop's executor would stay.
            self._thread = threading.Thread(target=self._release, name="release memory")
            self._thread.start()
        self.start()

    def is_due(self) -> bool:
        """True if the process was idle since the last call, and has worked since the last release."""
        now_s = self._processor_s()
        is_idle = now_s - self._looked_s < _IDLE * INTERVAL_S
        self._looked_s = now_s
        if not is_idle or now_s - self._released_s < _WORK_S:
            return False
        self._released_s = now_s
        return True
