"""Quotas of a node's state store: one user cannot take the room of the others, also after a restart."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.mqtt.client import TokenAuthentication
from penstock.node.node import Node
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.errors import QuotaExceededError
from tests.unit.node.test_access_of_observers import digest
from tests.unit.node.test_node import config, http


async def test_users_share_the_quota_and_the_share_holds_over_a_restart(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    listed = [f"  - {{sha256: {digest(name)}, user: {name}}}\n" for name in ("anna", "ben")]
    tokens.write_text("tokens:\n" + "".join(listed))
    for name in ("anna", "ben"):
        (tmp_path / name).write_text(name)
    given = config(tmp_path / "data", security={"tokens": str(tokens)}, statestore={"max_keys": 8})
    for start in range(2):
        node = Node(given)
        ready = await node.start()
        try:
            async with AsyncExitStack() as stack:
                anna, ben = [
                    await stack.enter_async_context(
                        StateStoreClient.connect(f"mqtt://{ready.mqtt}", authentication=TokenAuthentication(path))
                    )
                    for path in (tmp_path / "anna", tmp_path / "ben")
                ]
                if not start:
                    for number in range(4):
                        await anna.set(f"a{number}", "v")
                with pytest.raises(QuotaExceededError, match="the quota has been exceeded"):
                    await anna.set("a4", "v")
                await anna.set("a0", "v")
                await ben.set(f"b{start}", "v")
                _, metrics = await http(ready.http, "/metrics")
                assert "penstock_statestore_largest_principal_keys 4.0" in metrics
                assert "penstock_statestore_refused_share_total 1.0" in metrics
                assert "penstock_statestore_refused_quota_total 0.0" in metrics
        finally:
            await node.close()
