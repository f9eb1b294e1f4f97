"""Counters sampled once a second: current rates, and rates of the last five minutes for charts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

__all__ = ["SAMPLES", "Rates"]

SAMPLES: Final = 300
SMOOTHING: Final = 5
"""Seconds over which a rate is computed."""


class Rates:
    """Samples of the counters that ``read`` returns; names may appear or disappear with a part of the node.

    ``gauges``: names whose values are returned instead of rates.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]], *, gauges: Sequence[str] = ()) -> None:
        self._read = read
        self._gauges = frozenset(gauges)
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=SAMPLES + SMOOTHING + 1)

    def sample(self, now_s: float) -> Mapping[str, float]:
        """Read the counters at ``now_s``, and return them."""
        values = dict(self._read())
        self._samples.append((now_s, values))
        return values

    @property
    def latest(self) -> Mapping[str, float]:
        """The counters of the last sample; empty before the first."""
        return self._samples[-1][1] if self._samples else {}

    def rate(self, name: str) -> float:
        """Increase per second of a counter over the last seconds; 0 before the second sample."""
        return self._rate_at(name, len(self._samples) - 1)

    def history(self, names: Sequence[str], after_s: float = 0.0) -> tuple[list[float], dict[str, list[float]]]:
        """Return the times of the samples after ``after_s``, and for each name the rates (of gauges: the values) at
        these times."""
        first = next((i for i, (at, _) in enumerate(self._samples) if at > after_s), len(self._samples))
        first = max(first, 1)
        times = [self._samples[i][0] for i in range(first, len(self._samples))]
        found = {
            name: [
                self._samples[i][1].get(name, 0.0) if name in self._gauges else self._rate_at(name, i)
                for i in range(first, len(self._samples))
            ]
            for name in names
        }
        return times, found

    def _rate_at(self, name: str, index: int) -> float:
        first = max(0, index - SMOOTHING)
        if index <= first:
            return 0.0
        (began, before), (ended, after) = self._samples[first], self._samples[index]
        if ended <= began:
            return 0.0
        # The counter of a part that started in between begins at 0.
        return max(0.0, (after.get(name, 0.0) - before.get(name, 0.0)) / (ended - began))
