"""Two clients of one store, ``a`` and ``b``, that compete."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.statestore.client.client import StateStoreClient
from tests.conformance.statestore.node import StoreNode


@pytest.fixture
async def store(node: StoreNode) -> AsyncIterator[StateStoreClient]:
    async with StateStoreClient.connect(node.url, client_id="a") as client:
        yield client


@pytest.fixture
async def other(node: StoreNode) -> AsyncIterator[StateStoreClient]:
    async with StateStoreClient.connect(node.url, client_id="b") as client:
        yield client
