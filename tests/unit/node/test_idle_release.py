"""Memory is released while a node runs: every store reads and writes afterwards, and a restart finds all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.mqtt.client import MqttClient
from penstock.node.config.node import RuleSection
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.memory import release_memory
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from tests.unit.node.test_node import config

RULES = [RuleSection(filter="plant/#", topic="water")]


async def use(ready: ReadyNode, number: int, received: list[bytes]) -> None:
    """Write with all parts of the node, and read what earlier calls wrote."""
    text = b"%d" % number
    async with MqttClient(ready.listeners["mqtt"]) as client, StateStoreClient(client) as store:
        await client.publish(f"plant/{number}", text, qos=1, retain=True)
        await store.set(f"key-{number}", text)
        for earlier in range(number + 1):
            found = await store.get(f"key-{earlier}")
            assert found is not None
            assert found.value == b"%d" % earlier
    async with Consumer(ready.tube_master, "group", ["water"]) as consumer, asyncio.timeout(30):
        while len(received) <= number:
            async for messages in consumer.batches():
                received += [message.data[-1:] for message in messages]
                break
        await consumer.confirm()


async def test_stores_work_after_each_release_and_after_a_restart(tmp_path: Path) -> None:
    received: list[bytes] = []
    for life in range(2):
        node = Node(config(tmp_path, rules=RULES))
        ready = await node.start()
        try:
            for number in range(3 * life, 3 * life + 3):
                await use(ready, number, received)
                await asyncio.to_thread(release_memory)
            assert node.health.problems() == []
        finally:
            await node.close()
    assert sorted(received) == [b"%d" % number for number in range(6)]
