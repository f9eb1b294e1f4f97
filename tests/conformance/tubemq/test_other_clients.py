"""Conversations of Apache's Go and C++ clients with our servers; `other_clients` and `other_consumers` model them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.master.master import TubeMaster
from penstock.tube.master.standby import StandbyMaster
from tests.conformance.tubemq.other_clients import CPP, GO, MOST_FAILURES, Kind, Producer
from tests.conformance.tubemq.other_consumers import BoundConsumption, Consumer
from tests.ports import free_port
from tests.unit.tube.servers import Tube, tube, until

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


def served(running: Tube) -> bool:
    """Whether the master has the broker of topic ``demo``, with a session."""
    assert running.master is not None
    cluster = running.master.engine.cluster
    info = cluster.topic_info("demo")
    return info is not None and bool(info.brokers) and all(broker.online for broker in cluster.brokers.values())


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
async def test_only_what_comes_from_now_on(kind: Kind, tmp_path: Path) -> None:
    """The end is where a group without a position starts, however often its members say that they start there."""
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, kind, "demo", [b"before"])
        consumer = await member(running, kind, "lake", "demo", from_start=False)
        await settle(consumer)
        assert await consumer.drain() == []
        await fill(running, kind, "demo", [b"now"])
        assert await consumer.drain() == [b"now"]
        await consumer.close()
        await fill(running, kind, "demo", [b"in between"])
        second = await member(running, kind, "lake", "demo", from_start=False)
        await settle(second)
        (held,) = second.held.values()
        # The broker has forgotten the reader, who drops the partition; the master hears of it by the next full report.
        assert (await second.registration(held.place, 32, 1)).success
        assert (await second.get(held))[0] == 411
        heartbeats = 0
        while not second.held:
            await second.heartbeat()
            heartbeats += 1
            assert heartbeats <= 20
        assert await second.drain() == [b"in between"]
        await second.close()


async def test_cpp_leaves_without_waiting_for_answers(tmp_path: Path) -> None:
    """It says that it goes, to master and brokers, and is gone; whoever comes next has nobody to wait for."""
    async with tube(tmp_path, "demo", brokers=2) as running:
        bodies = [b"%d" % number for number in range(12)]
        await fill(running, CPP, "demo", bodies)
        first = await member(running, CPP, "lake", "demo")
        await settle(first)
        held, *_ = first.held.values()
        _, unconfirmed = await first.get(held)
        assert unconfirmed
        await first.leave()
        second = await member(running, CPP, "lake", "demo")
        await settle(second)
        assert len(second.held) == 6
        assert sorted(await second.drain()) == sorted(bodies)
        await second.close()


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
    """Producers go on with heartbeats alone; consumers register again, Go's late, and keep what they hold."""
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
        for _ in range(max(kind.misses - 1, 1)):
            assert (await consumer.heartbeat()).errCode == 411
        await settle(consumer)
        assert set(consumer.held) == held
        await producer.send("demo", 0, b"after")
        assert await consumer.drain() == [b"after"]
        await consumer.close()
        await producer.close()


@KINDS
async def test_a_broker_restarts(kind: Kind, tmp_path: Path) -> None:
    """It knows of no reader any more: the next heartbeat gives consumers back what a get was refused."""
    async with tube(tmp_path, "demo", brokers=2) as running:
        producer = Producer(kind, running.masters)
        await producer.start()
        await producer.heartbeat("demo")
        await producer.heartbeat("demo")
        consumer = await member(running, kind, "lake", "demo")
        await settle(consumer)
        here = [held for held in consumer.held.values() if held.place.broker == 1]
        await running.stop_broker(1)
        with pytest.raises(ConnectionError):
            await consumer.get(here[0])
        await running.start_broker(1)
        await until(lambda: running.master is not None and 1 in running.master.engine.cluster.reporting())
        assert [(await consumer.get(held))[0] for held in here] == [411, 411, 411]
        assert len(consumer.held) == 3
        await consumer.heartbeat()
        assert len(consumer.held) == 6
        await settle(consumer)
        for number in range(6):
            await producer.send("demo", number, b"%d" % number)
        assert sorted(await consumer.drain()) == [b"%d" % number for number in range(6)]
        await consumer.close()
        await producer.close()


@KINDS
async def test_a_restarted_node_gets_its_readers_back_soon(kind: Kind, tmp_path: Path) -> None:
    """They drop what they may not read and would say so with their seventh heartbeat only: they are told to take it."""
    async with tube(tmp_path, "demo") as running:
        await fill(running, kind, "demo", [b"before"])
        consumer = await member(running, kind, "lake", "demo")
        await settle(consumer)
        held = dict(consumer.held)
        assert await consumer.drain() == [b"before"]
        await running.stop_broker()
        await running.stop_master()
        await running.start_master()
        await running.start_broker()
        await until(lambda: served(running))
        with pytest.raises(ConnectionError):
            await consumer.heartbeat()
        assert (await consumer.register()).success, "with all that it still believes to hold"
        first, *_ = held.values()
        with pytest.raises(ConnectionError):
            await consumer.get(first)
        assert [(await consumer.get(partition))[0] for partition in held.values()] == [411, 411, 411]
        for _ in range(3):
            await consumer.heartbeat()
        assert set(consumer.held) == set(held)
        await consumer.close()


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
        answer = await missing.register()
        assert (answer.errCode, answer.errMsg) == (431, "Requested topic [[none]] not deployed!")
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


@KINDS
async def test_a_broker_out_of_reach_when_its_partitions_are_given(kind: Kind, tmp_path: Path) -> None:
    """Both clients say that the order is done and do not name what they could not take: it is given again."""
    async with tube(tmp_path, "demo", brokers=2) as running:
        await fill(running, kind, "demo", [b"%d" % number for number in range(12)])
        consumer = await member(running, kind, "lake", "demo")
        consumer.client.unreachable.add(f"127.0.0.1:{running.ports[2]}")
        for _ in range(4):
            await consumer.heartbeat()
        assert {held.place.broker for held in consumer.held.values()} == {1}
        consumer.client.unreachable.clear()
        await settle(consumer)
        assert len(consumer.held) == 6
        assert len(await consumer.drain()) == 12
        await consumer.close()


@KINDS
async def test_bound_consumption(kind: Kind, tmp_path: Path) -> None:
    """The offsets go with the first order only, and only while the master says that nothing was given out yet."""
    async with tube(tmp_path, "demo", partitions=2) as running:
        await fill(running, kind, "demo", [b"%d" % number for number in range(20)])
        offsets = [{"1:demo:0": 10 * 28}, {"1:demo:0": 4 * 28, "1:demo:1": 16 * 28}]
        members = [
            await member(running, kind, "lake", "demo", bound=BoundConsumption("s1", len(offsets), named))
            for named in offsets
        ]
        await settle(*members)
        assert [[held.place.partition for held in each.held.values()] for each in members] == [[0], [1]]
        assert [await each.drain() for each in members] == [
            [b"%d" % number for number in range(10, 20, 2)],
            [b"%d" % number for number in range(17, 20, 2)],
        ]
        # Whoever takes over goes on behind what was confirmed, although it names offsets.
        await members[0].close()
        await settle(members[1])
        assert len(members[1].held) == 2
        assert await members[1].drain() == []
        await members[1].close()


@KINDS
async def test_rules_of_flow_control_come_and_end(kind: Kind, tmp_path: Path) -> None:
    rules = '[{"type":1,"rule":[{"zeroCnt":3,"freqInMs":800}]}]'
    async with tube(tmp_path, "demo") as running:
        assert running.master is not None
        consumer = await member(running, kind, "lake", "demo")
        change = {"confModAuthToken": "token", "modifyUser": "me", "groupName": "lake"}
        settings = {"flowCtrlEnable": "true", "flowCtrlInfo": rules}
        added = await running.master.webapi({"method": "admin_add_group_resctrl_info", **change, **settings})
        assert added["errCode"] == 0, added
        await consumer.heartbeat()
        assert consumer.group_rules.text == rules
        removed = await running.master.webapi({"method": "admin_delete_group_resctrl_info", **change})
        assert removed["errCode"] == 0, removed
        await consumer.heartbeat()
        await consumer.heartbeat()
        assert (consumer.group_rules.text, consumer.default_rules.text) == ("[]", "")
        await consumer.close()


@KINDS
async def test_groups_that_cannot_sign(kind: Kind, tmp_path: Path) -> None:
    """Neither client has got the signature: groups that are named need none, others are refused and may ask again."""
    async with tube(tmp_path, "demo", users={"edge": "secret"}, groups=["lake"]) as running:
        consumer = await member(running, kind, "lake", "demo", signs=True)
        await settle(consumer)
        assert len(consumer.held) == 3
        await consumer.broker_heartbeats()
        assert await consumer.drain() == []
        other = Consumer(kind, running.masters, "other", ["demo"], signs=True)
        assert [(await other.register()).errCode for _ in range(2)] == [415, 415]
        await other.client.disconnect()
        await consumer.close()


async def test_the_next_master(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        consumer = Consumer(GO, f"127.0.0.1:9,{running.masters}", "lake", ["demo"])
        with pytest.raises(ConnectionError):
            await consumer.register()
        assert (await consumer.register()).success
        await settle(consumer)
        assert len(consumer.held) == 3
        await consumer.close()


async def test_cpp_clients_and_two_masters(tmp_path: Path) -> None:
    """The consumer goes to the active master, after a handover and after a crash; the producer only when it starts."""
    addresses = [("127.0.0.1", free_port()), ("127.0.0.2", free_port())]
    masters = [f"{host}:{port}" for host, port in addresses]

    async def start_active(place: int) -> TubeMaster:
        master = TubeMaster(tmp_path / "master")
        await master.start(*addresses[place])
        return master

    async def start_standby(place: int) -> StandbyMaster:
        standby = StandbyMaster()
        await standby.start(*addresses[place])
        return standby

    standby, active = await start_standby(0), await start_active(1)
    broker = TubeBroker(tmp_path / "1", broker_id=1, masters=masters, heartbeat_s=0.05)
    await broker.start("127.0.0.1", 0)
    await active.create_topic("demo", ready_s=60)
    producer = Producer(CPP, ",".join(reversed(masters)))
    await producer.start_at_any()
    assert producer.master == masters[1], "the first of them is a standby"
    for _ in range(2):
        await producer.tick("demo")
    consumer = Consumer(CPP, ",".join(reversed(masters)), "lake", ["demo"])
    await consumer.start()
    assert consumer.master == masters[1]
    await settle(consumer)
    held = set(consumer.held)
    assert len(held) == 3

    # A handover: the next heartbeat is answered by a standby.
    await active.close()
    await standby.close()
    standby, active = await start_standby(1), await start_active(0)
    with pytest.raises(ConnectionError):
        await consumer.heartbeat()  # the connection of the master before
    for _ in range(2):  # its first registration there uses another connection that has ended
        await consumer.tick()
    assert (consumer.active, consumer.master) == (True, masters[0])
    with pytest.raises(ConnectionError):
        await producer.heartbeat("demo")
    await producer.tick("demo")
    assert producer.stopped, "it sends no heartbeats for the rest of its life"
    await producer.send("demo", 0, b"after the handover")
    await until(lambda: 1 in active.engine.cluster.reporting())
    await settle(consumer)
    assert set(consumer.held) == held
    assert await consumer.drain() == [b"after the handover"]

    # A crash: nothing answers, and a standby is elected meanwhile.
    await active.close()
    for _ in range(MOST_FAILURES - 1):
        await consumer.tick()
    assert consumer.master == masters[0]
    await producer.send("demo", 1, b"without a master")
    assert await consumer.drain() == [b"without a master"]
    await standby.close()
    active = await start_active(1)
    for _ in range(2):
        await consumer.tick()
    assert (consumer.active, consumer.master) == (True, masters[1])
    await until(lambda: 1 in active.engine.cluster.reporting())
    await settle(consumer)
    assert set(consumer.held) == held, "it has kept its partitions"
    await producer.send("demo", 2, b"after the crash")
    assert await consumer.drain() == [b"after the crash"]
    await consumer.close()
    await producer.disconnect()
    await broker.close()
    await active.close()


@KINDS
@pytest.mark.parametrize(
    "accepted", [{"anonymous": True}, {"networks": ["127.0.0.0/8"]}, {}], ids=["opt-out", "network", "refused"]
)
async def test_clients_without_signatures_need_an_exception_on_a_node_with_users(
    kind: Kind, accepted: dict[str, Any], tmp_path: Path
) -> None:
    """Neither client can sign: ``anonymous: allow`` of the listener accepts them, or a network of ``tube.access``."""
    async with tube(tmp_path, "demo", users={"usr": "secret"}, **accepted) as running:
        if not accepted:
            producer, stranger = Producer(kind, running.masters), Consumer(kind, running.masters, "lake", ["demo"])
            with pytest.raises(AssertionError, match="authentication failed"):
                await producer.start()
            assert (await stranger.register()).errCode == 415
            await producer.disconnect()
            await stranger.client.disconnect()
            return
        bodies = [b"%d" % number for number in range(9)]
        await fill(running, kind, "demo", bodies)
        consumer = await member(running, kind, "lake", "demo")
        await settle(consumer)
        assert sorted(await consumer.drain()) == bodies
        await consumer.close()
