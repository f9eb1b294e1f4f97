"""The migration of the documentation under load, and back: from Apache's master and broker to a node, with Apache's
clients and with ours, of which only the list of masters changes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path

import pytest

from penstock.tube.consumer import Consumer
from tests.end_to_end.nodes import RunningNode
from tests.interop.cluster_nodes import command
from tests.interop.tube_java.clients import Got, JavaClients, number
from tests.interop.tube_java.server import JavaTube

TOPIC = "moved"
COUNT = 1_000
"""Records in each of the three stages."""
PAUSE_MS = 3
THEIRS, OURS = "java", "python"
"""The consumer groups."""
DEADLINE_S = 120

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


async def test_to_a_node_and_back_under_load(java_tube: JavaTube, java_clients: JavaClients, tmp_path: Path) -> None:
    """Each group reads every record once and in order: in each stage the producer switches first, then a group, when it
    has read the other cluster completely."""
    apache = java_tube.ready()
    with RunningNode(tmp_path) as node:
        token = "--admin-token-file", node.ready["admin_token_file"]
        status, _, errors = await command("tube", "topic", "create", TOPIC, "--http", node.ready["http"], *token)
        assert status == 0, errors
        stages = [
            (apache, java_tube.web),
            (node.ready["tube_master"], node.ready["http"]),
            (apache, java_tube.web),
        ]
        async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce(java_clients, [masters for masters, _ in stages]))
            groups = [
                tasks.create_task(follow) for follow in (follow_java(java_clients, stages), follow_python(stages))
            ]
        found = [group.result() for group in groups]
    for group in found:
        for stage, read in enumerate(group):
            first = stage * COUNT
            assert sorted(item.number for item in read) == list(range(first, first + COUNT)), "each once"
            by_partition: dict[str, list[int]] = defaultdict(list)
            for item in read:
                by_partition[item.partition].append(item.number)
            assert len(by_partition) == 3
            assert all(numbers == sorted(numbers) for numbers in by_partition.values()), "in order"


async def produce(clients: JavaClients, masters: list[str]) -> None:
    """Send without a break, in each stage to the next masters."""
    for stage, at in enumerate(masters):
        await asyncio.wrap_future(clients.produce(at, TOPIC, COUNT, from_=stage * COUNT, pause_ms=PAUSE_MS))


async def follow_java(clients: JavaClients, stages: list[tuple[str, str]]) -> list[list[Got]]:
    """Read each stage with two members of Apache's client; continue with the next one when no record is left."""
    found = []
    for masters, http in stages:
        reading = clients.consume(masters, THEIRS, TOPIC, COUNT, members=2, timeout_ms=DEADLINE_S * 1000)
        found.append(await asyncio.wrap_future(reading))
        await until_drained(THEIRS, http)
    return found


async def follow_python(stages: list[tuple[str, str]]) -> list[list[Got]]:
    """The same with our client."""
    found = []
    for masters, http in stages:
        read: list[Got] = []
        async with Consumer(masters, OURS, [TOPIC], heartbeat_s=0.5) as consumer:
            async for message in consumer:
                key = f"{message.broker_id}:{message.topic}:{message.partition}"
                read.append(Got(0, key, number(message.data), None))
                if len(read) == COUNT:
                    break
            await consumer.confirm()
        found.append(read)
        await until_drained(OURS, http)
    return found


async def until_drained(group: str, http: str) -> None:
    """Wait until the command of the documentation shows no lag."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status, out, errors = await command(
                "tube", "group", "lag", group, "--topic", TOPIC, "--http", http, "--json"
            )
            assert status == 0, errors
            rows = [json.loads(line) for line in out.splitlines()]
            if rows and not any(row["messages"] for row in rows):
                return
            await asyncio.sleep(0.5)
