"""Averages per minute of what counts up, over the last minute, five and fifteen: Mosquitto's ``load/`` figures."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Final

__all__ = ["Loads"]

MINUTE_MS: Final = 60_000
WINDOWS_MIN: Final = (1, 5, 15)


class Loads:
    """Exponentially weighted, as load averages of operating systems are.

    Asked now and then: what happened since the last time counts as spread evenly over it, so no timer runs while nobody
    asks. ``began`` is when all totals were 0.
    """

    __slots__ = ("_at", "_averages", "_totals")

    def __init__(self, began: int) -> None:
        self._at = began
        self._totals: dict[str, int] = {}
        self._averages: dict[str, list[float]] = {}

    def measure(self, totals: Mapping[str, int], now: int) -> list[tuple[str, str]]:
        """Name (``messages/received/1min``) and text of each average, after ``totals`` were read at ``now``."""
        elapsed = now - self._at
        if elapsed > 0:
            decays = [exp(-elapsed / (minutes * MINUTE_MS)) for minutes in WINDOWS_MIN]
            for name, total in totals.items():
                rate = (total - self._totals.get(name, 0)) * MINUTE_MS / elapsed
                old = self._averages.get(name, [0.0] * len(WINDOWS_MIN))
                self._averages[name] = [rate + decay * (a - rate) for decay, a in zip(decays, old, strict=True)]
            self._at, self._totals = now, dict(totals)
        return [
            (f"{name}/{minutes}min", f"{average:.2f}")
            for name, averages in self._averages.items()
            for minutes, average in zip(WINDOWS_MIN, averages, strict=True)
        ]
