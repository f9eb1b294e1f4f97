"""Our producer and consumer against Apache's master and broker; brokers of one at the master of the other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LocalProtocolError, RefusedError
from penstock.tube.consumer import BoundConsumption, Consumer
from penstock.tube.exactly_once import BatchId, Stager
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.docs.pages import ROOT, blocks
from tests.interop.tube_java.clients import JavaClients, body, number
from tests.interop.tube_java.jars import Jars
from tests.interop.tube_java.server import JavaTube, start_broker
from tests.ports import free_ports
from tests.unit.tube.servers import Tube, tube, until

COUNT = 300
# The master gives partitions out at its balance, once a second here, and the news travels by heartbeat.
HEARTBEAT_S = 0.2


@pytest.fixture
def masters(java_tube: JavaTube) -> str:
    """Apache's master, when its topics can be used."""
    return java_tube.ready()


async def read(masters: str, group: str, topic: str, count: int, **options: Any) -> list[tuple[int, int]]:
    """(partition, number) of the messages, until ``count`` different ones came; all of them are confirmed."""
    seen: list[tuple[int, int]] = []
    async with Consumer(masters, group, [topic], heartbeat_s=HEARTBEAT_S, **options) as consumer:
        async with asyncio.timeout(30):
            async for message in consumer:
                seen.append((message.partition, number(message.record.value)))
                if len(set(seen)) == count:
                    break
        await consumer.confirm()
    return seen


async def send(masters: str, topic: str, count: int, **options: Any) -> None:
    async with Producer(masters, heartbeat_s=HEARTBEAT_S) as producer, asyncio.TaskGroup() as group:
        for n in range(count):
            group.create_task(producer.send(topic, body(n), **options))


def in_order(seen: list[tuple[int, int]]) -> bool:
    parts: dict[int, list[int]] = defaultdict(list)
    for partition, n in seen:
        parts[partition].append(n)
    return all(numbers == sorted(numbers) for numbers in parts.values())


async def test_produce_and_consume(masters: str) -> None:
    await send(masters, "pulled", COUNT)
    seen = await read(masters, "ours", "pulled", COUNT)
    assert sorted(n for _, n in seen) == list(range(COUNT)), "each once"
    assert {partition for partition, _ in seen} == {0, 1, 2}
    assert in_order(seen)
    # The position is kept: a new member of the group gets what came after.
    async with Producer(masters) as producer:
        await producer.send("pulled", body(COUNT))
    assert [n for _, n in await read(masters, "ours", "pulled", 1)] == [COUNT]


async def test_confirming_at_any_message_loses_nothing(masters: str) -> None:
    """Apache's brokers commit whole batches: a confirmation in the middle of one stores nothing, and skips nothing."""
    first, second = range(10_000, 10_000 + COUNT), range(20_000, 20_000 + COUNT)
    seen: dict[int, int] = {}
    options: dict[str, Any] = {"auto_confirm": False, "heartbeat_s": HEARTBEAT_S, "most_wait_ms": 20}
    async with Producer(masters) as producer, Consumer(masters, "careful", ["pulled"], **options) as consumer:
        await producer.send_all("pulled", map(body, first))
        async with asyncio.timeout(60):
            async for message in consumer:
                n = number(message.data)
                seen[n] = seen.get(n, 0) + 1
                if n == first[COUNT // 2]:
                    await producer.send_all("pulled", map(body, second))  # the broker has more than was delivered
                await consumer.confirm()
                if seen.keys() >= {*first, *second}:
                    break
        assert set(seen.values()) == {1}, "nothing was fetched twice"


async def test_a_batch_that_is_not_confirmed_is_an_error_after_a_time(masters: str) -> None:
    await send(masters, "pulled", COUNT)
    options: dict[str, Any] = {"auto_confirm": False, "heartbeat_s": HEARTBEAT_S, "confirm_timeout_s": 0.5}
    async with Consumer(masters, "careless", ["pulled"], **options) as consumer:

        async def read_on() -> None:
            async for _ in consumer:
                pass

        with pytest.raises(LocalProtocolError, match="not confirmed"):
            await asyncio.wait_for(read_on(), 60)
        assert consumer.blocked


async def test_filters_and_records(masters: str) -> None:
    async with Producer(masters, heartbeat_s=HEARTBEAT_S) as producer:
        for n in range(30):
            record = Record(body(n), b"k%d" % n, [("unit", "l/s")], msg_type=("flow", "heat", "level")[n % 3])
            await producer.send("filtered", record)
    async with Consumer(masters, "some", ["filtered"], filters=["flow", "level"], heartbeat_s=HEARTBEAT_S) as consumer:
        seen = {}
        # Apache's broker shows messages to a filter only once they are in its files.
        async with asyncio.timeout(30):
            async for message in consumer:
                seen[number(message.record.value)] = message.record
                if len(seen) == 20:
                    break
    assert sorted(seen) == [n for n in range(30) if n % 3 != 1]
    assert seen[3] == Record(body(3), b"k3", [("unit", "l/s")], msg_type="flow")


async def test_members_share_the_partitions(masters: str) -> None:
    first = Consumer(masters, "pair", ["shared"], heartbeat_s=HEARTBEAT_S)
    second = Consumer(masters, "pair", ["shared"], heartbeat_s=HEARTBEAT_S)
    seen: list[int] = []

    async def follow(consumer: Consumer) -> None:
        async for message in consumer:
            seen.append(number(message.record.value))

    async with first, second:
        async with asyncio.timeout(30):
            while not (first.assignment and second.assignment and len(first.assignment | second.assignment) == 3):
                await asyncio.sleep(0.05)
        assert not first.assignment & second.assignment
        tasks = [asyncio.create_task(follow(first)), asyncio.create_task(follow(second))]
        await send(masters, "shared", COUNT)
        await until(lambda: len(set(seen)) == COUNT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(seen) == list(range(COUNT))


async def test_large_messages(masters: str) -> None:
    async with Producer(masters, heartbeat_s=HEARTBEAT_S) as producer:
        for n in range(4):
            await producer.send("large", body(n, 1 << 20))
        with pytest.raises(LocalProtocolError, match="1048576"):
            await producer.send("large", bytes((1 << 20) + 1))
    seen = await read(masters, "large", "large", 4)
    assert sorted(n for _, n in seen) == [0, 1, 2, 3]


async def test_client_balance(masters: str) -> None:
    await send(masters, "balanced", COUNT)
    halves = [
        Consumer(
            masters, "halves", ["balanced"], balance="client", source_count=2, node_id=node, heartbeat_s=HEARTBEAT_S
        )
        for node in range(2)
    ]
    seen: list[int] = []
    async with halves[0], halves[1]:
        assert set((await halves[0].available()).values()) == {True}
        await until(lambda: [len(consumer.assignment) for consumer in halves] == [2, 1])
        async with asyncio.timeout(60):
            while len(seen) < COUNT:
                for consumer in halves:
                    while (message := consumer.next_message()) is not None:
                        seen.append(number(message.record.value))
                    if len(seen) < COUNT:
                        try:
                            async with asyncio.timeout(0.2):
                                await consumer.fetch()
                        except TimeoutError:
                            continue
    assert sorted(seen) == list(range(COUNT))


async def test_start_offsets_bound_and_seek(masters: str) -> None:
    async with Producer(masters, heartbeat_s=HEARTBEAT_S) as producer:
        results = await producer.send_all("bound", [body(n) for n in range(60)], partition=1)
    at = results[20].append_offset
    bound = BoundConsumption("session-1", 1, {"1:bound:0": 0, "1:bound:1": at, "1:bound:2": 0})
    for group, options in (("atoffset", {"start_offsets": {"1:bound:1": at}}), ("bound", {"bound": bound})):
        async with Consumer(masters, group, ["bound"], heartbeat_s=HEARTBEAT_S, **options) as consumer:
            async with asyncio.timeout(30):
                assert [number((await anext(consumer)).data) for _ in range(40)] == list(range(20, 60))
                place = next(item for item in consumer.assignment if item.id == 1)
                await consumer.seek({place: results[10].append_offset})
                assert [number((await anext(consumer)).data) for _ in range(50)] == list(range(10, 60))
                with pytest.raises(RefusedError, match="by time"):
                    await consumer.seek_to_time(0)


async def test_an_idempotent_producer_is_refused(masters: str) -> None:
    async with Producer(masters, idempotent=True) as producer:
        with pytest.raises(RefusedError, match="idempotent"):
            await producer.send("quick", b"x")


async def test_their_brokers_stage_nothing_and_store_nothing_of_it(masters: str) -> None:
    async with Producer(masters) as producer:
        before = await producer.send("quick", b"before", 0)
        async with Stager(producer, BatchId("query", "run", 0), task=0, timeout_s=60) as stager:
            assert not await stager.stages("quick")
            assert (await stager.finish()).brokers == {}
        behind = await producer.send("quick", b"behind", 0)
    assert behind.append_offset == before.append_offset + 28


async def test_a_topic_that_is_not_there(masters: str) -> None:
    async with Producer(masters, topic_timeout_s=0.5) as producer:
        with pytest.raises(RefusedError, match="no partition"):
            await producer.send("nowhere", b"x")
    with pytest.raises(RefusedError) as caught:
        await Consumer(masters, "ours", ["nowhere"]).start()
    assert caught.value.code == 431


async def test_a_topic_is_copied_as_the_page_says(masters: str, tmp_path: Path) -> None:
    """The program of "Move from Apache TubeMQ": attributes and order are kept, Ctrl-C ends it quietly."""
    page = ROOT / "docs/tubemq/migrate-from-apache.md"
    [program] = [block.text for block in blocks(page) if block.directive == "file copy_topic.py"]
    async with Producer(masters, heartbeat_s=HEARTBEAT_S) as producer:
        wanted = [Record(body(n), b"k%d" % (n % 7), [("unit", "l/s")], msg_type="copy") for n in range(COUNT)]
        await producer.send_all("filtered", wanted, partition=1)
    async with tube(tmp_path, "filtered") as ours:
        arguments = ["-c", program, masters, ours.masters, "filtered"]
        copying = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=subprocess.PIPE)
        try:
            found = []
            async with (
                asyncio.timeout(60),
                Consumer(ours.masters, "check", ["filtered"], filters=["copy"], heartbeat_s=HEARTBEAT_S) as consumer,
            ):
                async for message in consumer:
                    found.append((message.partition, message.record))
                    if len(found) == COUNT:
                        break
            assert found == [(1, record) for record in wanted]
        finally:
            copying.send_signal(signal.SIGINT)
            _, complaints = await copying.communicate()
        assert (copying.returncode, complaints) == (0, b"")


async def test_our_broker_at_their_master(masters: str, java_clients: JavaClients) -> None:
    """Our producer, Apache's consumer, and the other way round."""
    await send(masters, "ours", COUNT)
    found = await asyncio.wrap_future(java_clients.consume(masters, "theirs", "ours", COUNT))
    assert sorted(item.number for item in found) == list(range(COUNT))
    assert {item.partition for item in found} == {f"2:ours:{n}" for n in range(3)}
    await asyncio.wrap_future(java_clients.produce(masters, "ours", 30, from_=COUNT, window=10))
    seen = await read(masters, "ours", "ours", COUNT + 30)
    assert {n for _, n in seen} == set(range(COUNT + 30))


async def test_their_broker_at_our_master(java: Jars, java_clients: JavaClients, tmp_path: Path) -> None:
    ours = Tube(tmp_path)
    master = await ours.start_master()
    port, web = free_ports(2)
    process = await asyncio.to_thread(start_broker, java, tmp_path / "theirs", ours.masters, 7, port, web)
    try:
        await until(lambda: 7 in master.engine.cluster.brokers, 60)
        await master.create_topic("demo", 3, ready_s=60)
        await send(ours.masters, "demo", COUNT)
        seen = await read(ours.masters, "ours", "demo", COUNT)
        assert sorted(n for _, n in seen) == list(range(COUNT))
        found = await asyncio.wrap_future(java_clients.consume(ours.masters, "theirs", "demo", COUNT))
        assert sorted(item.number for item in found) == list(range(COUNT))
        # What their broker is pushed is its own: broker 1 has another shape, and keeps it when theirs lets go.
        await ours.start_broker(1)
        await until(lambda: len(_shapes(master)) == 2)
        await _change(master, "admin_modify_topic_info", brokerId="1", numPartitions="5")
        await _change(master, "admin_modify_topic_info", brokerId="7", acceptPublish="false")
        await until(lambda: _shapes(master) == {1: (5, True), 7: (3, False)}, 60)
        await _change(master, "admin_modify_topic_info", brokerId="7", acceptSubscribe="false")
        await _change(master, "admin_delete_topic_info", brokerId="7")
        await _change(master, "admin_remove_topic_info", brokerId="7")
        await until(lambda: not master.engine.cluster.topics["demo"].on(7), 60)
        assert _shapes(master) == {1: (5, True)}
        await send(ours.masters, "demo", COUNT)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        await ours.close()


async def _change(master: TubeMaster, method: str, **params: str) -> None:
    told = {"topicName": "demo", "modifyUser": "me", "confModAuthToken": "token"}
    answer = await master.webapi({"method": method, **told, **params})
    assert all(row["success"] for row in answer["data"]), answer


def _shapes(master: TubeMaster) -> dict[int, tuple[int | None, bool]]:
    """What brokers say they serve: partitions, and whether they take messages."""
    brokers = master.engine.cluster.brokers.items()
    served = {number: broker.serving["demo"] for number, broker in brokers if "demo" in broker.serving}
    return {number: (config.partitions, bool(config.accept_publish)) for number, config in served.items()}
