"""When a micro-batch is due: Spark's mixin for streams that end, and the wait for enough messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

__all__ = ["MinBatchWait", "SupportsTriggerAvailableNow"]

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:  # Spark 4.1

        class SupportsTriggerAvailableNow:
            """Placeholder for versions of Spark without this mixin."""


class MinBatchWait:
    """Waits until ``least`` messages are there, but not longer than ``longest_s`` after the last batch that was due.

    The first batch of a run does not wait, as with Kafka's connector.
    """

    def __init__(self, least: int, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._longest_s = longest_s
        self._clock = clock
        self._last: float | None = None

    def waits(self, count: int) -> bool:
        """Return True if a batch of ``count`` messages is not due yet; otherwise restart the timer."""
        now = self._clock()
        if self._last is not None and count < self._least and now - self._last < self._longest_s:
            return True
        self._last = now
        return False
