"""How often and how long a question to a tube is repeated."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import UnavailableError

__all__ = ["Attempts"]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Attempts:
    """Pauses between attempts, growing, until a deadline that starts with the first failure after progress."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._failing_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def progress(self) -> None:
        """An answer came: the deadline and the pauses begin anew with the next failure."""
        self._failing_since = None
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, error: UnavailableError) -> None:
        """Wait, or raise ``error`` again when the deadline has passed."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since + self._pause_s > self._timeout_s:
            raise UnavailableError(
                f"{error.what} (tried for {self._timeout_s:g} s)",
                applied=error.applied,
                why=error.why,
                do=error.do or "start the tube, check tubemq.master, or raise tubemq.timeoutMs",
            ) from error
        self._sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
