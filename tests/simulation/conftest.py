"""Processes that simulate seeds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from tests.simulation.run import processes


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """A process for each core: a seed is independent of all others."""
    with processes() as pool:
        yield pool
