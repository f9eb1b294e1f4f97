"""Clocks in milliseconds; engines get their values as arguments.

:class:`SteppedClock` is the clock of versions and deadlines: the system clock without its sudden steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "CLOCK_IS_SET_MS",
    "MAX_STEP_MS",
    "STEP_HOLD_S",
    "SteppedClock",
    "boot_id",
    "boot_ms",
    "monotonic_ms",
    "steady_clock",
    "utc",
    "wall_clock_ms",
]

_read_clock: Final = time.clock_gettime_ns
_monotonic_ns: Final = time.monotonic_ns
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that never steps and includes suspended time, if the system has one."""
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


_log = logging.getLogger("penstock.clock")

MAX_STEP_MS: Final = 30_000
"""Steps of the system clock up to this size are followed immediately: half of the minute by which clients of the state
store tolerate versions of the future, so that a reverted step leaves no version that they reject."""

STEP_HOLD_S: Final = 300.0
"""Time after which a larger step is followed; time servers correct errors within minutes."""

CLOCK_IS_SET_MS: Final = 1_735_689_600_000
"""2025-01-01: an earlier system clock is not set yet, and is never followed."""

_CHECK_S: Final = 1.0

_SMALL_STEP_NS: Final = 100_000_000
"""Smaller differences are jitter of the two readings, or the clock's adjustment."""


def utc(ms: int) -> str:
    """Format ms since 1970 as a UTC time; times after the year 9999 as a number."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


class SteppedClock:
    """Milliseconds since 1970 for versions and time stamps: the system clock, without its sudden steps.

    A call reads the time that has elapsed since the clock was last compared with the system clock. :meth:`check` does
    that, once a second after :meth:`start`. A step of up to :data:`MAX_STEP_MS` is followed immediately. A larger step
    is held: the clock continues as before until the step is reverted or has lasted ``hold_s``, because versions from a
    wrong clock are permanent, while a correct clock can wait. A clock that was not set yet is followed immediately.

    Args:
        hold_s: how long a step has to last; 0: every step is followed.
        wall: the system clock, in ns since 1970.
        elapsed: ns of a clock that never steps; default: the system's.
    """

    def __init__(
        self,
        *,
        hold_s: float = STEP_HOLD_S,
        wall: Callable[[], int] | None = None,
        elapsed: Callable[[], int] | None = None,
    ) -> None:
        self._wall = wall or time.time_ns
        self._elapsed: Callable[[], int] = elapsed or partial(_read_clock, _BOOT_CLOCK)
        self._is_system = elapsed is None
        self._read_ns = 0
        """The result of the last reading of ``_elapsed`` for :meth:`now`."""
        self._read_until: i64 = 0
        """Instant of the monotonic clock until which it is in the same millisecond."""
        self._hold_ns = int(hold_s * 1e9)
        self._offset = self._wall() - self._elapsed()
        self._step: tuple[int, int] | None = None
        """Size of the held step, and the time when it was detected."""
        self._timer: asyncio.TimerHandle | None = None
        self.steps = 0
        """Number of steps that were not followed immediately."""
        self.on_followed: list[Callable[[], None]] = []
        """Called after a step was followed."""

    def __call__(self) -> int:
        """Current time in ms since 1970."""
        return self.now()

    def now(self) -> int:
        """The same as calling the object."""
        return (self._read() + self._offset) // 1_000_000

    def now_and_boot_ms(self) -> tuple[int, int]:
        """:meth:`now` and :func:`boot_ms`, from one reading of the clock that never steps."""
        elapsed = self._read()
        return (elapsed + self._offset) // 1_000_000, elapsed // 1_000_000

    def _read(self) -> int:
        """The elapsed time in ns, read once in each of its milliseconds.

        The monotonic clock shows whether it is still the same millisecond: reading it costs a fifth of reading the
        clock that includes suspended time.
        """
        if not self._is_system:
            return self._elapsed()
        monotonic: i64 = _monotonic_ns()
        if monotonic >= self._read_until:
            elapsed: i64 = self._elapsed()
            self._read_ns = elapsed
            self._read_until = monotonic + 1_000_000 - elapsed % 1_000_000
        return self._read_ns

    @property
    def offset_ms(self) -> int:
        """System clock minus this clock, in ms."""
        return self._wall() // 1_000_000 - self.now()

    def start(self) -> None:
        """Compare with the system clock every second; call it in the event loop."""
        self.check()
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self.start)

    def close(self) -> None:
        """Stop comparing; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Compare with the system clock: follow it, hold a step, or follow a held step."""
        elapsed = self._elapsed()
        wall = self._wall()
        now = elapsed + self._offset
        step = wall - now
        if abs(step) <= MAX_STEP_MS * 1_000_000:
            self._offset += step
            if self._step is not None:
                self._step = None
                _log.warning("system clock step was reverted: now=%s", utc(wall // 1_000_000))
            if abs(step) >= _SMALL_STEP_NS:
                self._notify()
            return
        held = self._step
        if held is None or abs(step - held[0]) > MAX_STEP_MS * 1_000_000:
            held = self._step = step, elapsed
            self.steps += 1
            if self._hold_ns:
                _log.warning("system clock stepped and is not followed yet: %s", self._problem(*held).line())
        is_set = wall >= CLOCK_IS_SET_MS * 1_000_000
        was_set = now >= CLOCK_IS_SET_MS * 1_000_000
        if not self._hold_ns or (is_set and (not was_set or elapsed - held[1] >= self._hold_ns)):
            self._offset += step
            self._step = None
            _log.warning("following the system clock: step_s=%d now=%s", step // 10**9, utc(wall // 1_000_000))
            self._notify()

    def _notify(self) -> None:
        for followed in self.on_followed:
            followed()

    def problem(self) -> PenstockError | None:
        """Warning about a held step, with the action; None if there is none."""
        return None if self._step is None else self._problem(*self._step)

    def _problem(self, size: int, noticed: int) -> PenstockError:
        ahead = "ahead" if size > 0 else "back"
        now_ms = self()
        wall_ms = self._wall() // 1_000_000
        if wall_ms < CLOCK_IS_SET_MS:
            then = "set it; times before 2025 are not followed"
        else:
            left_s = max(0, self._hold_ns - (self._elapsed() - noticed)) // 1_000_000_000
            then = (
                f"if it is wrong, correct it; if it is correct, wait {left_s} s (clock_step_hold_s) or restart the node"
            )
        return PenstockError(
            f"clock: the system clock was set {ahead} by {abs(size) // 1_000_000_000} s to {utc(wall_ms)};"
            f" versions and deadlines still follow {utc(now_ms)}",
            hint=then,
        )
