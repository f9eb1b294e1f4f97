"""The migration of the documentation under load, and back: from Apache's master and broker to a node or to two, with
Apache's clients and with ours, of which only the list of masters changes."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from penstock.tube.consumer import Consumer
from tests.end_to_end.nodes import RunningNode
from tests.interop.cluster_nodes import NodeProcess, command, until_pair
from tests.interop.etcd import EtcdCluster
from tests.interop.test_cluster_tube import masters
from tests.interop.tube_java.clients import Got, JavaClients, number
from tests.interop.tube_java.server import JavaTube

PAGE = Path(__file__).parents[2] / "docs" / "tubemq" / "migrate-from-apache.md"
SECTION = "## Migrate to two nodes"
TO_ONE, TO_TWO = "moved", "moved_to_two"
"""Topics of Apache's broker."""
COUNT = 1_000
"""Records in each of the three stages."""
PARTITIONS = 3
"""Of a topic on each broker."""
PAUSE_MS, LONG_PAUSE_MS = 3, 20
"""Between two records; the long one is that of the stage with a takeover."""
THEIRS, OURS = "java", "python"
"""The consumer groups."""
DEADLINE_S = 120

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


class Stage:
    """What the clients use in one of the three stages: the list of masters, and the administration of one of them."""

    def __init__(self, masters: str, http: str, *, brokers: int = 1, pause_ms: int = PAUSE_MS) -> None:
        self.masters = masters
        self.http = http
        self.partitions = PARTITIONS * brokers
        self.pause_ms = pause_ms
        self.read = 0
        """Number of records that our group has read."""
        self.complete = asyncio.Event()
        """Set when all brokers are there."""
        self.complete.set()


def documented(*words: str, **names: str) -> list[str]:
    """The arguments of the command on the page, of two nodes, that has these words; with other ``names``."""
    section = PAGE.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    lines = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ penstock ")]
    (line,) = (line for line in lines if all(word in line for word in words))
    for name, value in names.items():
        assert name in line, line
        line = line.replace(name, value)
    return shlex.split(line)[1:]


async def test_to_a_node_and_back_under_load(java_tube: JavaTube, java_clients: JavaClients, tmp_path: Path) -> None:
    """Each group reads every record once and in order: in each stage the producer switches first, then a group, when it
    has read the other cluster completely."""
    apache = java_tube.ready()
    with RunningNode(tmp_path) as node:
        token = "--admin-token-file", node.ready["admin_token_file"]
        status, _, errors = await command("tube", "topic", "create", TO_ONE, "--http", node.ready["http"], *token)
        assert status == 0, errors
        stages = [
            Stage(apache, java_tube.web),
            Stage(node.ready["tube_master"], node.ready["http"]),
            Stage(apache, java_tube.web),
        ]
        await run(java_clients, TO_ONE, stages)


async def test_to_two_nodes_and_back_with_a_takeover(
    java_tube: JavaTube,
    java_clients: JavaClients,
    tmp_path: Path,
    three: EtcdCluster,
    record_property: Callable[[str, object], None],
) -> None:
    """As above, and the active one of the two nodes is killed under load: no record is missing, and those that were
    under way at the kill may be read twice."""
    apache = java_tube.ready()
    nodes = [NodeProcess(tmp_path, name, "migration", three, broker) for broker, name in enumerate(("one", "two"), 1)]
    active, standby = nodes
    token = tmp_path / "token"
    token.write_text("administer")
    try:
        active.start()
        await active.until_active()
        at = f"127.0.0.1:{active.http}"
        names = {"line3": TO_TWO, "10.0.0.1:8086": at, "token_file": str(token)}
        status, _, errors = await command(*documented("topic create", **names))
        assert status == 0, errors
        standby.start()
        active, standby = await until_pair(nodes)  # a busy machine may have swapped them
        stages = [
            Stage(apache, java_tube.web),
            Stage(masters(nodes), f"127.0.0.1:{standby.http}", brokers=2, pause_ms=LONG_PAUSE_MS),
            Stage(apache, java_tube.web),
        ]
        repeated = await run(java_clients, TO_TWO, stages, take_over(active, standby, stages[1]))
        record_property("summary", f"repeated at the takeover: {repeated} of {2 * COUNT}")
    finally:
        for node in nodes:
            node.end()


async def take_over(active: NodeProcess, standby: NodeProcess, stage: Stage) -> None:
    """Kill the active node when a quarter of the stage's records was read; start it again when the other is active."""
    stage.complete.clear()
    while stage.read < COUNT // 4:
        await asyncio.sleep(0.01)
    active.signal(signal.SIGKILL)
    active.wait()
    assert stage.read < COUNT, "the takeover is under load"
    await standby.until_active()
    active.start()
    await until_pair([active, standby])
    stage.complete.set()


async def run(
    clients: JavaClients, topic: str, stages: Sequence[Stage], *faults: Coroutine[object, object, None]
) -> int:
    """Send and read in all stages; check what each group has read. Returns how often a record was read again."""
    async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(clients, topic, stages))
        for fault in faults:
            tasks.create_task(fault)
        groups = [
            tasks.create_task(follow_java(clients, topic, stages)),
            tasks.create_task(follow_python(topic, stages)),
        ]
    repeated = 0
    for group in groups:
        for number_, (stage, read) in enumerate(zip(stages, group.result(), strict=True)):
            wanted = range(number_ * COUNT, (number_ + 1) * COUNT)
            assert {item.number for item in read} == {*wanted}, "none is missing"
            if not faults:
                assert len(read) == COUNT, "each once"
            repeated += len(read) - COUNT
            by_partition: dict[str, dict[int, None]] = defaultdict(dict)
            for item in read:
                by_partition[item.partition][item.number] = None  # what is read again keeps its place
            assert len(by_partition) == stage.partitions
            assert all([*numbers] == sorted(numbers) for numbers in by_partition.values()), "in order"
    return repeated


async def produce(clients: JavaClients, topic: str, stages: Sequence[Stage]) -> None:
    """Send without a break, in each stage to its masters."""
    for number_, stage in enumerate(stages):
        sent = clients.produce(stage.masters, topic, COUNT, from_=number_ * COUNT, pause_ms=stage.pause_ms)
        await asyncio.wrap_future(sent)


async def follow_java(clients: JavaClients, topic: str, stages: Sequence[Stage]) -> list[list[Got]]:
    """Read each stage with two members of Apache's client; continue with the next one when no record is left."""
    found = []
    for stage in stages:
        reading = clients.consume(stage.masters, THEIRS, topic, COUNT, members=2, timeout_ms=DEADLINE_S * 1000)
        found.append(await asyncio.wrap_future(reading))
        await until_drained(THEIRS, topic, stage)
    return found


async def follow_python(topic: str, stages: Sequence[Stage]) -> list[list[Got]]:
    """The same with our client."""
    found = []
    for stage in stages:
        read: list[Got] = []
        numbers: set[int] = set()
        async with Consumer(stage.masters, OURS, [topic], heartbeat_s=0.5) as consumer:
            async for message in consumer:
                key = f"{message.broker_id}:{message.topic}:{message.partition}"
                read.append(Got(0, key, number(message.data), None))
                numbers.add(read[-1].number)
                stage.read = len(numbers)
                if stage.read == COUNT:
                    break
            await consumer.confirm()
        found.append(read)
        await until_drained(OURS, topic, stage)
    return found


async def until_drained(group: str, topic: str, stage: Stage) -> None:
    """Wait until the command of the documentation shows no lag.

    A member of the group keeps reading, as those of users do: Apache's broker counts the records of other partitions in
    the same store, until a fetch of a partition has passed them.
    """
    words = documented("group lag", "10.0.0.2", **{"lake": group, "line3": topic, "10.0.0.2:8087": stage.http})
    reading = asyncio.create_task(read_on(group, topic, stage))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await stage.complete.wait()
            while True:
                status, out, errors = await command(*words, "--json")
                assert status == 0, errors
                rows = [json.loads(line) for line in out.splitlines()]
                if len(rows) == stage.partitions and not any(row["messages"] for row in rows):
                    return
                await asyncio.sleep(0.5)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def read_on(group: str, topic: str, stage: Stage) -> None:
    async with Consumer(stage.masters, group, [topic], heartbeat_s=0.5) as consumer:
        async for message in consumer:
            assert stage.partitions > PARTITIONS, f"{message} was not read before"  # but for a takeover
