"""Durations counted by upper bounds, for histograms: a few additions per observation, read at a scrape only."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["BOUNDS_S", "Durations", "TracedDuration"]

BOUNDS_S: Final[tuple[float, ...]] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds in seconds, from a commit in memory to a disk that hangs."""


class TracedDuration(NamedTuple):
    """A duration whose trace was recorded: trace id (hexadecimal), seconds, and when it ended, in s since 1970."""

    trace_id: str
    seconds: float
    ended: float


class Durations:
    """Number of durations up to each of ``BOUNDS_S`` and beyond, and their sum."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS_S) + 1)
        """Durations above the previous bound, up to this one."""
        self.sum_s = 0.0
        self.traced: dict[int, TracedDuration] = {}
        """The last traced duration of each position in ``counts``: exemplars."""

    def observe(self, seconds: float) -> int:
        """Count a duration; returns its position in ``counts``."""
        position = bisect_left(BOUNDS_S, seconds)
        self.counts[position] += 1
        self.sum_s += seconds
        return position

    def observe_traced(self, seconds: float, trace_id: str, clock: Callable[[], float] = time.time) -> None:
        """Count a duration and keep it as an example."""
        self.traced[self.observe(seconds)] = TracedDuration(trace_id, seconds, clock())
