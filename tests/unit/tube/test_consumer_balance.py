"""A consumer that balances by itself, and one that goes to a time, against a real master and broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.runtime.io.clock import wall_clock_ms
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.unit.tube.servers import Tube, tube, until

COUNT = 90


async def fill(running: Tube, first: int, count: int = COUNT) -> None:
    async with Producer(running.masters) as producer:
        await producer.send_all("demo", [b"%d" % n for n in range(first, first + count)])


async def read(consumers: list[Consumer], count: int) -> list[int]:
    """What the consumers get together, ``count`` messages of it; all confirmed."""
    seen: list[int] = []

    async def follow(consumer: Consumer) -> None:
        async for message in consumer:
            seen.append(int(message.data))

    tasks = [asyncio.create_task(follow(consumer)) for consumer in consumers]
    await until(lambda: len(seen) >= count)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for consumer in consumers:
        await consumer.confirm()
    return sorted(seen)


def member(running: Tube, node: int, of: int) -> Consumer:
    return Consumer(
        running.masters, "halves", ["demo"], balance="client", source_count=of, node_id=node, heartbeat_s=0.05
    )


async def test_members_take_their_shares_and_continue_after_restarts(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running, 0)
        pair = [member(running, node, 2) for node in range(2)]
        async with pair[0], pair[1]:
            assert set((await pair[0].available()).values()) == {True}
            await until(lambda: [len(consumer.assignment) for consumer in pair] == [2, 1])
            assert not pair[0].assignment & pair[1].assignment
            assert await read(pair, COUNT) == list(range(COUNT))
            await running.stop_broker()
            await running.start_broker()
            await running.stop_master()
            await running.start_master()
            await fill(running, COUNT)
            assert await read(pair, COUNT) == list(range(COUNT, 2 * COUNT))
        # What they confirmed is the group's: another member goes on there.
        await fill(running, 2 * COUNT)
        async with member(running, 0, 1) as alone:
            await until(lambda: len(alone.assignment) == 3)
            assert await read([alone], COUNT) == list(range(2 * COUNT, 3 * COUNT))


async def test_a_member_holds_the_partitions_it_selects(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, member(running, 0, 1) as consumer:
        await until(lambda: len(consumer.assignment) == 3)
        await consumer.assign(["1:demo:2"])
        await until(lambda: {partition.key for partition in consumer.assignment} == {"1:demo:2"})
        await consumer.assign(None)
        await until(lambda: len(consumer.assignment) == 3)


async def test_seek_to_a_time(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running, 0)
        between = wall_clock_ms() + 1
        await until(lambda: wall_clock_ms() > between)
        await fill(running, COUNT)
        async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as consumer:
            await until(lambda: len(consumer.assignment) == 3)
            await consumer.seek_to_time(between)
            assert await read([consumer], COUNT) == list(range(COUNT, 2 * COUNT))
            await consumer.seek_to_time(0)
            assert await read([consumer], 2 * COUNT) == list(range(2 * COUNT))


async def test_partitions_are_taken_again_while_their_gets_still_wait(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, member(running, 0, 1) as consumer:
        await until(lambda: len(consumer.assignment) == 3)
        await consumer.assign([])  # the broker holds the gets of an empty log, which are cancelled here
        await until(lambda: not consumer.assignment)
        await consumer.assign(None)
        await until(lambda: len(consumer.assignment) == 3)
        await fill(running, 0)
        assert await read([consumer], COUNT) == list(range(COUNT))
