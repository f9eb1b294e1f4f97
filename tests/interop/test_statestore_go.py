"""The Go SDK of Azure IoT Operations: its SETs continue when the node is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.statestore.client.client import StateStoreClient
from tests.end_to_end.nodes import RunningNode
from tests.interop.statestore_go import GoClient

WITHIN_S = 30


@pytest.mark.nightly  # 5 s
async def test_sets_of_the_go_sdk_continue_after_kill_9(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        client = GoClient(int(node.ready["mqtt"].rpartition(":")[2]), "go")
        try:
            client.first(WITHIN_S)
            node.kill()
            client.begin()
            node.start()
            client.first(WITHIN_S)
        finally:
            client.close()
        async with StateStoreClient.connect(f"mqtt://{node.ready['mqtt']}") as store:
            found = await store.get("go")
    assert found is not None
    assert int(found.value) > 0
