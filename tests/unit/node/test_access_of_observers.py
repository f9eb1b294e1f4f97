"""Access of observers while tokens are renewed and policies are reloaded follows the current policy."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from penstock.mqtt.client import MqttClient, TokenAuthentication
from penstock.node.node import Node
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.observations import Observation
from tests.unit.node.test_node import config

DEADLINE_S = 30
POLICIES = """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["#"]}, {method: Subscribe, topics: ["#"]}]
    stateStoreResources: [{method: Read, keys: ["open"]}]
  - principals: {usernames: [writer]}
    stateStoreResources: [{method: ReadWrite, keys: ["*"]}]
  - principals: {attributes: [{shift: early}]}
    stateStoreResources: [{method: Read, keys: ["early"]}]
"""
LATE = """
  - principals: {attributes: [{shift: late}]}
    stateStoreResources: [{method: Read, keys: ["late"]}]
"""
TOKENS = [("t-early", "robot", "early"), ("t-late", "robot", "late"), ("t-writer", "writer", "any")]


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


async def seen(observation: Observation) -> bytes | None:
    async with asyncio.timeout(DEADLINE_S):
        return (await anext(observation)).value


async def test_a_renewed_token_and_a_reloaded_policy_decide_about_notifications(tmp_path: Path) -> None:
    """Observations stay where they are: rights that come back bring the changes back, without observing anew."""
    policies, tokens, token = tmp_path / "policies.yaml", tmp_path / "tokens.yaml", tmp_path / "robot.token"
    policies.write_text(POLICIES + LATE)
    listed = [f"  - {{sha256: {digest(t)}, user: {user}, attributes: {{shift: {s}}}}}\n" for t, user, s in TOKENS]
    tokens.write_text("tokens:\n" + "".join(listed))
    token.write_text("t-early")
    node = Node(config(tmp_path / "data", security={"policies": str(policies), "tokens": str(tokens)}))
    url = f"mqtt://{(await node.start()).mqtt}"
    robot = MqttClient(url, client_id="robot", authentication=TokenAuthentication(token), reconnect=False)
    writing = TokenAuthentication(lambda: b"t-writer")
    try:
        async with (
            robot,
            StateStoreClient(robot) as reads,
            StateStoreClient.connect(url, authentication=writing) as store,
            reads.observe("open") as marks,
            reads.observe("early") as early,
        ):
            await store.set("early", "1")
            assert await seen(early) == b"1"

            token.write_text("t-late")
            await robot.reauthenticate()
            async with reads.observe("late") as late:
                await store.set("early", "not for the late shift")
                await store.set("late", "2")
                assert await seen(late) == b"2"

                policies.write_text(POLICIES)
                assert node.reload(lambda: node.config)
                await store.set("late", "not by this policy")
                await store.set("open", "mark")
                assert await seen(marks) == b"mark"

                policies.write_text(POLICIES + LATE)
                assert node.reload(lambda: node.config)
                await store.set("late", "3")
                assert await seen(late) == b"3", "what was set meanwhile was never sent"

                token.write_text("t-early")
                await robot.reauthenticate()
                await store.set("late", "not for the early shift")
                await store.set("early", "4")
                assert await seen(early) == b"4"
    finally:
        await node.close()
