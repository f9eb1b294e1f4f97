"""The processor time of each test with its fixtures, all processes included, in the report of a measured run.

See tools/processor_time.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tools.processor_time import MEASURED, processor_s

__all__ = ["pytest_runtest_teardown"]

_LEAST_S = 0.25
"""Short tests are measured together, and the last of them has the sum: it takes a millisecond to look at all processes
of a session of Spark."""
_root = int(os.environ.get(MEASURED, "0"))
_last = [time.monotonic(), processor_s(_root)] if _root else []
"""When the processor time was last read, and what it was."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if _root and time.monotonic() - _last[0] >= _LEAST_S:
            now = processor_s(_root)
            item.user_properties.append(("processor_s", round(now - _last[1], 2)))
            _last[:] = time.monotonic(), now
