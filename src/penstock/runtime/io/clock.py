"""Clocks in milliseconds; engines get their values as arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["boot_id", "boot_ms", "monotonic_ms", "steady_clock", "wall_clock_ms"]

_read_clock: Final = time.clock_gettime_ns
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wall_clock_ms() -> int:
    """Milliseconds since 1970, UTC; may step."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never steps, from an arbitrary start."""
    return time.monotonic_ns() // 1_000_000


def steady_clock() -> Callable[[], int]:
    """Clock of milliseconds since 1970 that never steps: the current wall clock, advanced by the monotonic clock.

    A step of the system clock must not end sessions or leases.
    """
    offset = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset) // 1_000_000


def boot_id() -> str | None:
    """Identifier of this boot of the machine; None if the system has none (not Linux)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def boot_ms() -> int:
    """Milliseconds since boot, including suspended time. Linux only."""
    return _read_clock(_BOOT_CLOCK) // 1_000_000
