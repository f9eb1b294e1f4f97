"""The time that sessions and append times go by."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["steady_clock"]


def steady_clock() -> Callable[[], int]:
    """Milliseconds since 1970 that never jump: the wall clock of now, advanced by the monotonic clock.

    Setting the machine's clock must not end sessions.
    """
    offset = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset) // 1_000_000
