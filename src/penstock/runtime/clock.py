"""The clocks of the IO shells; engines are handed what these say. All in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["monotonic_ms", "steady_clock", "wall_clock_ms"]


def wall_clock_ms() -> int:
    """Milliseconds since 1970, UTC; jumps when the machine's clock is set."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never jumps, from an arbitrary start."""
    return time.monotonic_ns() // 1_000_000


def steady_clock() -> Callable[[], int]:
    """Milliseconds since 1970 that never jump: the wall clock of now, advanced by the monotonic clock.

    Setting the machine's clock must not end sessions or leases.
    """
    offset = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset) // 1_000_000
