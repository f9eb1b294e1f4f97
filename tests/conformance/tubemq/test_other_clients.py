"""Conversations of Apache's Go and C++ clients, as `other_clients` models them, with our master and brokers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.tubemq.other_clients import CPP, GO, Consumer, Kind, Producer
from tests.unit.tube.servers import Tube, tube

KINDS = pytest.mark.parametrize("kind", [GO, CPP], ids=lambda kind: kind.name)


async def fill(running: Tube, kind: Kind, topic: str, bodies: list[bytes], types: list[str] | None = None) -> None:
    producer = Producer(kind, running.masters)
    await producer.start()
    await producer.heartbeat(topic)
    await producer.heartbeat(topic)
    for number, body in enumerate(bodies):
        answer = await producer.send(topic, number, body, types[number % len(types)] if types else "")
        assert int(answer.errMsg) == answer.messageId, "older clients read the number there"
    assert await producer.close() in {None, 2}


async def settle(*consumers: Consumer) -> None:
    """Heartbeats until none brings an order any more and every event is reported."""
    for _ in range(20):
        answers = [await consumer.heartbeat() for consumer in consumers]
        if not any(answer.HasField("event") for answer in answers) and not any(c.finished for c in consumers):
            return
    raise AssertionError("orders without end")


async def member(running: Tube, kind: Kind, group: str, *topics: str, **options: Any) -> Consumer:
    consumer = Consumer(kind, running.masters, group, list(topics), **options)
    assert (await consumer.register()).success
    return consumer


@KINDS
async def test_from_producing_to_the_end(kind: Kind, tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", "other", brokers=2) as running:
        bodies = [b"%d" % number for number in range(60)]
        await fill(running, kind, "demo", bodies)
        await fill(running, kind, "other", [b"of the other"])
        first = await member(running, kind, "lake", "demo", "other")
        await settle(first)
        assert len(first.held) == 12
        assert sorted(await first.drain()) == sorted([*bodies, b"of the other"])
        await first.broker_heartbeats()
        assert len(first.held) == 12
        await first.close()
        second = await member(running, kind, "lake", "demo", "other")
        await settle(second)
        assert await second.drain() == [], "all of it was confirmed"
        await second.close()


@KINDS
async def test_members_share_and_take_over(kind: Kind, tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=4) as running:
        first = await member(running, kind, "lake", "demo")
        await settle(first)
        second = await member(running, kind, "lake", "demo")
        await settle(first, second)
        assert [len(first.held), len(second.held)] == [2, 2]
        assert not set(first.held) & set(second.held)
        await fill(running, kind, "demo", [b"%d" % number for number in range(8)])
        found = await first.drain()
        # What one got and did not confirm comes again, to whoever takes over.
        (held, _) = second.held.values()
        code, unconfirmed = await second.get(held)
        assert (code, len(unconfirmed)) == (200, 2)
        assert (await second.confirm(held, consumed=False)).success
        assert (await second.get(held))[1] == unconfirmed
        await second.close()
        await settle(first)
        assert len(first.held) == 4
        assert sorted(found + await first.drain()) == [b"%d" % number for number in range(8)]
        await first.close()


@KINDS
async def test_filters(kind: Kind, tmp_path: Path) -> None:
    """The C++ client sends types; both filter by them, and name topics without a filter in their own ways."""
    async with tube(tmp_path, "demo", "plain") as running:
        await fill(running, CPP, "demo", [b"%d" % number for number in range(30)], ["aa", "bb"])
        await fill(running, GO, "plain", [b"x"])
        filters = {"demo": ["bb"], "plain": []} if kind is GO else {"demo": ["bb"]}
        consumer = await member(running, kind, "lake", "demo", "plain", filters=filters)
        await settle(consumer)
        assert sorted(await consumer.drain()) == sorted([*(b"%d" % number for number in range(1, 30, 2)), b"x"])
        await consumer.close()


@KINDS
async def test_large_batches_fit_their_frames(kind: Kind, tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        bodies = [bytes([number]) * (1 << 20 if number == 3 else 200_000) for number in range(12)]
        await fill(running, kind, "demo", bodies)
        consumer = await member(running, kind, "lake", "demo")
        await settle(consumer)
        assert await consumer.drain() == bodies
        await consumer.close()


@KINDS
async def test_the_master_restarts(kind: Kind, tmp_path: Path) -> None:
    """Producers go on with heartbeats alone; consumers register again and keep what they hold."""
    async with tube(tmp_path, "demo") as running:
        producer = Producer(kind, running.masters)
        await producer.start()
        await producer.heartbeat("demo")
        await producer.heartbeat("demo")
        consumer = await member(running, kind, "lake", "demo")
        await settle(consumer)
        held = set(consumer.held)
        await running.stop_master()
        for client in (producer.heartbeat("demo"), consumer.heartbeat()):
            with pytest.raises(ConnectionError):
                await client
        await running.start_master()
        await producer.heartbeat("demo")
        assert (await consumer.heartbeat()).errCode == 411
        await settle(consumer)
        assert set(consumer.held) == held
        await producer.send("demo", 0, b"after")
        assert await consumer.drain() == [b"after"]
        await consumer.close()
        await producer.close()


@KINDS
async def test_a_partition_that_another_still_holds_comes_later(kind: Kind, tmp_path: Path) -> None:
    """Go gives up the whole order at the first refusal and says that it is not done; nothing stays without a reader."""
    async with tube(tmp_path, "demo", partitions=3) as running:
        stranger = await member(running, kind, "other", "demo")
        await settle(stranger)
        stranger.group = "lake"  # holds the group's partitions at the broker, which the master knows nothing of
        blocked = next(held.place for held in stranger.held.values())
        assert (await stranger.registration(blocked, 31, 0)).success
        consumer = await member(running, kind, "lake", "demo")
        await consumer.heartbeat()
        assert str(blocked) not in consumer.held
        assert (await stranger.registration(blocked, 32, 1)).success
        await settle(consumer)
        assert len(consumer.held) == 3
        await consumer.close()
        await stranger.client.disconnect()


@KINDS
async def test_refusals(kind: Kind, tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        missing = Consumer(kind, running.masters, "lake", ["none"])
        assert (await missing.register()).errCode == 431
        first = await member(running, kind, "lake", "demo", filters={"demo": ["aa"]})
        other = Consumer(kind, running.masters, "lake", ["demo"], {"demo": ["bb"]})
        assert (await other.register()).errCode == 426
        await settle(first)
        held = next(iter(first.held.values()))
        # A get of a partition that was let go drops it; a commit says so.
        assert (await first.registration(held.place, 32, 1)).success
        assert (await first.confirm(held)).errCode == 401
        assert (await first.get(held))[0] == 411
        assert len(first.held) == 2
        await first.close()
        for refused in (missing, other):
            await refused.client.disconnect()
