"""Apache's own client (Java) against our master and broker."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.interop.tube_java.clients import Got, JavaClients, body, number
from tests.unit.tube.servers import Tube, tube

T = TypeVar("T")

COUNT = 300


@pytest.fixture
async def ours(java_clients: JavaClients, tmp_path: Path) -> AsyncIterator[Tube]:
    """Our master and one broker, with a topic of three partitions."""
    assert java_clients is not None
    async with tube(tmp_path, "demo") as running:
        yield running


async def wait(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def send(masters: str, count: int, *, types: Sequence[str] = (), size: int = 0) -> None:
    """Store messages 0 to ``count``, in turns over the partitions."""
    async with Producer(masters) as producer, asyncio.TaskGroup() as group:
        for n in range(count):
            data = body(n, size)
            record = Record(data, msg_type=types[n % len(types)]) if types else data
            group.create_task(producer.send("demo", record))


def by_partition(found: Sequence[Got]) -> dict[str, list[int]]:
    parts: dict[str, list[int]] = defaultdict(list)
    for item in found:
        parts[item.partition].append(item.number)
    return dict(parts)


@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_consume(ours: Tube, java_clients: JavaClients, kind: str) -> None:
    await send(ours.masters, COUNT)
    found = await wait(java_clients.consume(ours.masters, f"group_{kind}", "demo", COUNT, kind=kind))
    parts = by_partition(found)
    assert sorted(item.number for item in found) == list(range(COUNT)), "each once"
    assert set(parts) == {"1:demo:0", "1:demo:1", "1:demo:2"}
    assert all(numbers == sorted(numbers) for numbers in parts.values()), "in order"
    # What it consumed is confirmed: the next member of the group gets what came after.
    await wait(java_clients.produce(ours.masters, "demo", 9, from_=COUNT))
    more = await wait(java_clients.consume(ours.masters, f"group_{kind}", "demo", 9, kind=kind))
    assert sorted(item.number for item in more) == list(range(COUNT, COUNT + 9))


@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_consume_with_filters(ours: Tube, java_clients: JavaClients, kind: str) -> None:
    await wait(java_clients.produce(ours.masters, "demo", 90, window=90, types="flow,heat,level"))
    found = await wait(java_clients.consume(ours.masters, f"some_{kind}", "demo", 60, kind=kind, filters="flow,level"))
    assert sorted(item.number for item in found) == [n for n in range(90) if n % 3 != 1]
    assert {(item.number % 3, item.msg_type) for item in found} == {(0, "flow"), (2, "level")}


async def test_several_members_share_the_partitions(ours: Tube, java_clients: JavaClients) -> None:
    reading = java_clients.consume(ours.masters, "shared", "demo", COUNT, members=3)
    assert ours.master is not None
    engine = ours.master.engine
    async with asyncio.timeout(50):
        while True:  # until all three hold one
            group = engine.groups.get("shared")
            held = [len(member.held) for member in group.members.values()] if group is not None else []
            if sorted(held) == [1, 1, 1]:
                break
            await asyncio.sleep(0.02)
    await wait(java_clients.produce(ours.masters, "demo", COUNT, window=50))
    found = await wait(reading)
    assert sorted(item.number for item in found) == list(range(COUNT)), "each once"
    assert len({(item.member, item.partition) for item in found}) == 3, "a partition a member"


async def test_bound_start_offsets(ours: Tube, java_clients: JavaClients) -> None:
    async with Producer(ours.masters) as producer:
        for n in range(30):
            await producer.send("demo", body(n), partition=0)
        results = [await producer.send("demo", body(n), partition=0) for n in range(30, 60)]
    at = results[0].append_offset
    bound = java_clients.consume(
        ours.masters, "bound", "demo", 30, session="s1", bound=f"1:demo:0={at},1:demo:1=0,1:demo:2=0"
    )
    assert [item.number for item in await wait(bound)] == list(range(30, 60))


async def test_client_balance(ours: Tube, java_clients: JavaClients) -> None:
    """Beside other suites Apache's client sometimes got no message in a minute; its cause is not known.

    A second one of another group must get them all: messages that it lost, or got twice, are a failure at once.
    """
    await send(ours.masters, COUNT)
    for group in ("balanced", "balanced-again"):
        consumed = java_clients.consume(ours.masters, group, "demo", COUNT, kind="balance", timeout_ms=25_000)
        try:
            found = await wait(consumed)
        except AssertionError as failure:
            if group == "balanced-again" or f": 0 of {COUNT} messages" not in str(failure):
                raise
            print(f"the client got no message: {failure}")
            continue
        break
    assert sorted(item.number for item in found) == list(range(COUNT))


async def test_large_messages(ours: Tube, java_clients: JavaClients) -> None:
    """1 MiB is the largest that the Java client sends by default."""
    await wait(java_clients.produce(ours.masters, "demo", 6, size=1 << 20, window=3))
    found = await wait(java_clients.consume(ours.masters, "large", "demo", 6))
    assert sorted(item.number for item in found) == list(range(6))


async def test_produce(ours: Tube, java_clients: JavaClients) -> None:
    await wait(java_clients.produce(ours.masters, "demo", COUNT, window=100, types="a,b"))
    seen = []
    async with Consumer(ours.masters, "ours", ["demo"]) as consumer:
        async with asyncio.timeout(50):
            async for message in consumer:
                n = number(message.record.value)
                assert message.record.msg_type == "ab"[n % 2]
                assert message.record.msg_time == "202401010101"
                seen.append(n)
                if len(seen) == COUNT:
                    break
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("server", ["broker", "master"])
async def test_restart_in_the_middle(ours: Tube, java_clients: JavaClients, server: str) -> None:
    consuming = java_clients.consume(ours.masters, "restart", "demo", COUNT, kind="push", timeout_ms=50_000)
    producing = java_clients.produce(ours.masters, "demo", COUNT, pause_ms=5)
    broker = ours.brokers[1]
    async with asyncio.timeout(50):
        while broker.engine.produce.messages < COUNT / 3:
            await asyncio.sleep(0.01)
    if server == "broker":
        await ours.stop_broker()
        await ours.start_broker()
    else:
        await ours.stop_master()
        await ours.start_master()
    await wait(producing)
    found = await wait(consuming)
    assert {item.number for item in found} == set(range(COUNT)), "acknowledged, so consumed"
