"""A real server on a free port, for the tests that use sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.statestore.node import StoreNode


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNode]:
    started = StoreNode(tmp_path / "statestore")
    await started.start()
    yield started
    await started.close()
