"""Exponential backoff: how long to wait before the next attempt. Pure, so that engines can use it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Pauses that double with each failure, from ``first_s`` to at most ``longest_s`` seconds.

    ``random`` returns numbers in [0, 1): each pause then lies between a half and the whole of its length, so that many
    clients of a server that restarts do not reconnect in the same moment. None: no jitter.
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
        """Count a failed attempt; return the pause before the next one in seconds."""
        self.failures += 1
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s if self._random is None else pause_s * (0.5 + self._random() / 2)

    def reset(self) -> None:
        """Start again with the first pause: an attempt succeeded."""
        self.failures = 0
        self._next_s = self._first_s
