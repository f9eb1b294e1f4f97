"""Commands of the state store that the policies deny: counted by verb, and named in the log and the events."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.mqtt.client import TokenAuthentication
from penstock.node.node import Node
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.errors import NotAuthorizedError
from tests.unit.node.test_access_of_observers import POLICIES, digest
from tests.unit.node.test_node import config, http


async def test_denied_commands_are_counted_logged_and_shown_as_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.mqtt")
    policies, tokens = tmp_path / "policies.yaml", tmp_path / "tokens.yaml"
    policies.write_text(POLICIES)
    tokens.write_text(f"tokens:\n  - {{sha256: {digest('t-robot')}, user: robot}}\n")
    security = {"policies": str(policies), "tokens": str(tokens)}
    node = Node(config(tmp_path / "data", security=security, http={"bind": "127.0.0.1:0", "anonymous_metrics": True}))
    ready = await node.start()
    try:
        robot = TokenAuthentication(lambda: b"t-robot")
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}", client_id="r", authentication=robot) as store:
            await store.get("open")
            for command in (store.set("open", "v"), store.set("k" * 200, "v"), store.get("closed")):
                with pytest.raises(NotAuthorizedError):
                    await command
        _, metrics = await http(ready.http, "/metrics")
    finally:
        await node.close()
    counts = {verb: f'penstock_statestore_denied_requests_total{{verb="{verb}"}}' for verb in ("GET", "SET", "DEL")}
    assert f"{counts['GET']} 1.0" in metrics
    assert f"{counts['SET']} 2.0" in metrics
    assert f"{counts['DEL']} 0.0" in metrics
    told = next(text for record in caplog.records if "state store command" in (text := record.getMessage()))
    assert "client 'r' (user robot) denied by the policies since " in told
    assert "grant Read on 'closed' in the policy file" in told
    assert told in {event.text for event in node.console.events.since(0, 100, least="warning")}
