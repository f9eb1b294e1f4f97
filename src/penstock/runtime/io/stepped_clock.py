"""The clock of versions and deadlines: the system clock, without its sudden steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

__all__ = ["CLOCK_IS_SET_MS", "MAX_STEP_MS", "STEP_HOLD_S", "SteppedClock", "utc"]

_log = logging.getLogger("penstock.clock")

MAX_STEP_MS: Final = 30_000
"""Steps of the system clock up to this size are followed at once: half of the minute that clients of the state store
may be ahead, so that a step that is taken back leaves no version that they would refuse."""

STEP_HOLD_S: Final = 300.0
"""How long a larger step has to last before it is followed; time servers that err are corrected within minutes."""

CLOCK_IS_SET_MS: Final = 1_735_689_600_000
"""2025-01-01, before this program: a system clock that shows less has not been set yet, and is never followed back."""

_CHECK_S: Final = 1.0

_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that never steps and counts the time in which the machine was suspended, where there is one."""


def utc(ms: int) -> str:
    """An instant in ms since 1970, for people; years beyond 9999 as the number."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


class SteppedClock:
    """Milliseconds since 1970 for versions and time stamps: the system clock, without its sudden steps.

    A call reads the time that has elapsed since the clock was last compared with the system clock. :meth:`check` does
    that, once a second after :meth:`start`. A step of up to :data:`MAX_STEP_MS` is followed at once. A larger one is
    held: the clock runs on as before until the step is taken back or has lasted ``hold_s``, because what a wrong
    clock does to versions lasts, while a right one can wait. A clock that was not set yet is followed at once.

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
        self._given_elapsed = elapsed
        self._hold_ns = int(hold_s * 1e9)
        self._offset = self._wall() - self._elapsed()
        self._step: tuple[int, int] | None = None
        """The step that is held: its size, and when it was noticed."""
        self._timer: asyncio.TimerHandle | None = None
        self.steps = 0
        """Steps that were too large to be followed at once."""
        self.on_followed: list[Callable[[], None]] = []
        """Called after a held step was followed."""

    def __call__(self) -> int:
        """Now, in ms since 1970."""
        return self.now()

    def now(self) -> int:
        """The same as calling the object."""
        return (self._elapsed() + self._offset) // 1_000_000

    def _elapsed(self) -> int:
        given = self._given_elapsed
        return time.clock_gettime_ns(_CLOCK) if given is None else given()

    @property
    def offset_ms(self) -> int:
        """Lead of the system clock over this one; negative if it is behind."""
        return self._wall() // 1_000_000 - self.now()

    def start(self) -> None:
        """Compare with the system clock every second; call it in the event loop."""
        self.check()
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self.start)

    def close(self) -> None:
        """Compare no more; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Compare with the system clock: follow it, hold a step, or follow one that has lasted."""
        elapsed = self._elapsed()
        wall = self._wall()
        now = elapsed + self._offset
        step = wall - now
        if abs(step) <= MAX_STEP_MS * 1_000_000:
            self._offset += step
            if self._step is not None:
                self._step = None
                _log.warning("system clock is back where it was: now=%s", utc(wall // 1_000_000))
            return
        held = self._step
        if held is None or abs(step - held[0]) > MAX_STEP_MS * 1_000_000:
            held = self._step = step, elapsed
            self.steps += 1
            if self._hold_ns:
                _log.warning("system clock stepped and is not followed yet: %s", self.problem())
        is_set = wall >= CLOCK_IS_SET_MS * 1_000_000
        was_set = now >= CLOCK_IS_SET_MS * 1_000_000
        if not self._hold_ns or (is_set and (not was_set or elapsed - held[1] >= self._hold_ns)):
            self._offset += step
            self._step = None
            _log.warning("following the system clock: step_s=%d now=%s", step // 10**9, utc(wall // 1_000_000))
            for tell in self.on_followed:
                tell()

    def problem(self) -> str | None:
        """Warning for the operator that a clock step is held, with the action; None if all is well."""
        if self._step is None:
            return None
        size, noticed = self._step
        ahead = "ahead" if size > 0 else "back"
        now_ms = self()
        wall_ms = self._wall() // 1_000_000
        if wall_ms < CLOCK_IS_SET_MS:
            then = "set it; it is not followed to before 2025"
        else:
            left_s = max(0, self._hold_ns - (self._elapsed() - noticed)) // 1_000_000_000
            then = (
                f"if it is wrong, correct it; if it is right, wait {left_s} s (clock_step_hold_s) or restart the node"
            )
        return (
            f"clock: the system clock was set {ahead} by {abs(size) // 1_000_000_000} s to {utc(wall_ms)};"
            f" versions and deadlines still follow {utc(now_ms)}: {then}"
        )
