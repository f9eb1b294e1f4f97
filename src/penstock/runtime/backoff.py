"""Exponential backoff: the delay before the next attempt. It does no IO, so engines can use it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Delays that double with each failure, from ``first_s`` to at most ``longest_s`` seconds.

    ``random`` returns numbers in [0, 1): each delay is then multiplied by a factor between 0.5 and 1, so that the
    clients of a restarted server do not all reconnect at the same moment. None: no jitter.
    """

    __slots__ = ("_first_s", "_longest_s", "_next_s", "_random", "failures")

    def __init__(self, first_s: float, longest_s: float, random: Callable[[], float] | None = None) -> None:
        self.failures = 0
        """Failed attempts since the last success."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s
        self._random = random

    def failed(self) -> float:
        """Count a failed attempt; return the delay before the next one in seconds."""
        self.failures += 1
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s if self._random is None else pause_s * (0.5 + self._random() / 2)

    def ended(self, lasted_s: float) -> None:
        """Reset the delay after a successful attempt that lasted at least as long as the next delay, in seconds.

        A peer that accepts connections and closes them soon is asked ever more slowly.
        """
        if lasted_s >= self._next_s:
            self.reset()

    def reset(self) -> None:
        """Reset the delay to ``first_s`` after a successful attempt."""
        self.failures = 0
        self._next_s = self._first_s
