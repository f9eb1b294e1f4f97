"""A full queue: who makes room, who is refused, and what waits in all sessions together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.mqtt.codec.packets import (
    Disconnect,
    PubAck,
    Publish,
    PubRec,
    Subscription,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.client_events import QUEUE_FULL, QUEUE_REFUSED
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from tests.engine.mqtt.harness import Bench
from tests.engine.mqtt.test_access import Gate

URGENT = Properties(user_properties=[("$high_priority", "")])


@pytest.mark.parametrize("policy", [QueueOverflowPolicy.DROP_NEWEST, QueueOverflowPolicy.DROP_OLDEST])
def test_qos_0_makes_room_for_qos_1(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=policy))
    peer = bench.connect("s")
    peer.subscribe("a", Subscription("b", 0))
    peer.connection.pause(bench.now)
    bench.connect("p").send(
        *(Publish("b", b"%d" % n) for n in range(2)), *(Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 3))
    )
    peer.connection.unpause(bench.now)
    assert [(p.topic, p.payload) for p in peer.publishes()] == [("a", b"1"), ("a", b"2")]
    assert bench.broker.stats.dropped_queue_full == 2
    (event,) = bench.broker.client_events.collect()
    assert (event.kind, event.client_id, event.count) == (QUEUE_FULL, "s", 2)


@pytest.mark.parametrize("policy", [QueueOverflowPolicy.DROP_NEWEST, QueueOverflowPolicy.DROP_OLDEST])
def test_qos_1_makes_no_room_for_qos_0(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=policy))
    peer = bench.connect("s")
    peer.subscribe("a", Subscription("b", 0))
    peer.connection.pause(bench.now)
    bench.connect("p").send(
        *(Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 3)), *(Publish("b", b"%d" % n) for n in range(2))
    )
    peer.connection.unpause(bench.now)
    assert [(p.topic, p.payload) for p in peer.publishes()] == [("a", b"1"), ("a", b"2")]


def test_a_message_larger_than_the_queue_costs_no_other() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_bytes=1_000, queue_overflow=QueueOverflowPolicy.DROP_OLDEST))
    peer = bench.connect("s", expiry=100)
    peer.subscribe("a")
    peer.drop()
    bench.connect("p").send(
        *(Publish("a", bytes(size), 1, packet_id=n) for n, size in enumerate((100, 100, 2_000), start=1))
    )
    assert len(bench.connect("s", clean_start=False).publishes()) == 2


def numbered(count: int, size: int = 1) -> list[Publish]:
    return [Publish("a", bytes(size), 1, packet_id=n) for n in range(1, count + 1)]


def test_a_full_queue_may_refuse_the_publisher() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=QueueOverflowPolicy.REFUSE))
    full, other = bench.connect("s", expiry=100), bench.connect("o")
    for peer in (full, other):
        peer.subscribe("a")
    full.drop()
    sender = bench.connect("p").send(*numbered(4), Publish("a", b"zero"))
    assert sender.take() == [PubAck(1), PubAck(2), PubAck(3, 0x97), PubAck(4, 0x97)]
    assert len(other.publishes()) == 3, "what is refused reaches nobody, QoS 0 who is there"
    assert bench.broker.stats.refused_queue_full == 2
    found = bench.broker.client_events.collect()
    assert [(each.kind, each.client_id, each.count) for each in found] == [(QUEUE_REFUSED, "s", 2)]
    assert len(bench.connect("s", clean_start=False, expiry=100).publishes()) == 2
    assert sender.send(Publish("a", b"", 1, packet_id=9)).only() == PubAck(9), "there is room again"


def test_refusing_counts_a_shared_subscription_as_full_when_all_its_members_are() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=1, queue_overflow=QueueOverflowPolicy.REFUSE))
    members = [bench.connect(f"m{n}", expiry=100) for n in range(2)]
    for peer in members:
        peer.subscribe("$share/g/a")
    for peer in members:
        peer.drop()
    sender = bench.connect("p").send(*numbered(3))
    codes = [packet.reason_code for packet in sender.take() if isinstance(packet, PubAck)]
    assert codes == [0, 0, 0x97]


@pytest.mark.parametrize("out_of_space", ["", "no space"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize(
    ("limits", "size", "why"),
    [
        (BrokerLimits(max_queued_messages=1), 1, "the queue of a subscriber is full: publish again later"),
        (
            BrokerLimits(max_queued_bytes=10),
            10,
            "the message is larger than the queue of a subscriber: publish smaller ones",
        ),
        (
            BrokerLimits(max_total_queued_messages=1),
            1,
            "the queues of all subscribers together are full: publish again later",
        ),
    ],
)
def test_a_refusal_says_which_queue_is_full_also_while_the_disk_is(
    limits: BrokerLimits, size: int, why: str, qos: int, out_of_space: str
) -> None:
    bench = Bench(limits=replace(limits, queue_overflow=QueueOverflowPolicy.REFUSE))
    peer = bench.connect("s", receive_maximum=1)
    peer.subscribe(Subscription("a", 2))
    bench.broker.refuse_stored(out_of_space)
    v5, v4 = bench.connect("p", request_problem_information=1), bench.connect("q", version=4)
    v5.send(Publish("a", b"in flight", 1, packet_id=1), Publish("a", b"1", 1, packet_id=2)).take()
    answer = v5.send(Publish("a", bytes(size), qos, packet_id=3)).only()
    assert isinstance(answer, PubAck if qos == 1 else PubRec)
    assert (answer.packet_id, answer.reason_code) == (3, 0x97)
    assert (answer.properties.reason_string or "").startswith(why)
    # MQTT 3.1.1 has no reason code, and a connection that ended would only repeat the message.
    kind = PubAck if qos == 1 else PubRec
    assert v4.send(Publish("a", bytes(size), qos, packet_id=3)).only() == kind(3)
    assert not v4.closed
    assert bench.broker.stats.refused_queue_full == 2
    assert bench.broker.stats.refused_out_of_space == 0


def test_a_full_queue_may_end_the_connection_of_the_slow_client() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=QueueOverflowPolicy.DISCONNECT))
    slow, other = bench.connect("s", expiry=100, receive_maximum=1), bench.connect("o")
    for peer in (slow, other):
        peer.subscribe("a")
    bench.connect("p").send(*numbered(4))
    *messages, goodbye = slow.take()
    assert len(messages) == 1
    assert isinstance(goodbye, Disconnect)
    assert goodbye.reason_code == 0x97
    assert slow.closed
    assert len(other.publishes()) == 4, "nobody else is disturbed"
    assert len(bench.connect("s", clean_start=False, expiry=100).publishes()) == 3


def test_nothing_follows_the_disconnect_of_a_publisher_whose_own_queue_is_full() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=1, queue_overflow=QueueOverflowPolicy.DISCONNECT))
    peer = bench.connect("c", receive_maximum=1)
    peer.subscribe(Subscription("t", 1))
    peer.send(*[Publish("t", b"", 1, packet_id=n) for n in (1, 2, 3)])
    assert [type(packet) for packet in peer.take()] == [Publish, PubAck, PubAck, Disconnect]


def test_an_urgent_message_that_is_larger_than_the_queue_is_refused_with_this_reason() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_bytes=200, queue_overflow=QueueOverflowPolicy.REFUSE))
    peer = bench.connect("s", receive_maximum=1)
    peer.subscribe(Subscription("a", 1))
    sender = bench.connect("p", request_problem_information=1)
    sender.send(Publish("a", b"in flight", 1, packet_id=1)).take()
    sender.send(Publish("a", bytes(150), 1, packet_id=2)).take()
    # Urgent messages may fill the queue twice, but none may be larger than it.
    fits = sender.send(Publish("a", bytes(150), 1, packet_id=3, properties=URGENT)).only()
    assert isinstance(fits, PubAck)
    assert fits.reason_code == 0
    answer = sender.send(Publish("a", bytes(199), 1, packet_id=4, properties=URGENT)).only()
    assert isinstance(answer, PubAck)
    assert answer.reason_code == 0x97
    assert (answer.properties.reason_string or "").startswith("the message is larger than the queue of a subscriber")
    assert bench.broker.stats.dropped_queue_full == 0


def test_a_session_that_ends_while_a_message_is_on_its_way_holds_nothing() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=1, queue_overflow=QueueOverflowPolicy.DISCONNECT))
    for name, will in (("a", Will("t", b"will", 1)), ("b", None)):
        bench.connect(name, receive_maximum=1, will=will).subscribe(Subscription("t", 1))
    sender = bench.connect("p")
    for n in (1, 2, 3):  # the third ends a, whose will ends b before its turn comes
        sender.send(Publish("t", b"", 1, packet_id=n))
    assert sorted(bench.broker.sessions) == ["p"]
    assert bench.broker.measure().queued == 0


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (BrokerLimits(max_total_queued_messages=3), 3),
        (BrokerLimits(max_total_queued_bytes=3 * 104), 3),
        (BrokerLimits(max_total_queued_messages=3, queue_overflow=QueueOverflowPolicy.DROP_OLDEST), 3),
    ],
    ids=["messages", "bytes", "drop oldest"],
)
def test_total_queue_limits_apply_to_all_sessions_together(limits: BrokerLimits, kept: int) -> None:
    bench = Bench(limits=limits)
    for name in ("s1", "s2"):
        peer = bench.connect(name, expiry=100)
        peer.subscribe("a")
        peer.drop()
    bench.connect("p").send(*numbered(4, 100))
    stats = bench.broker.measure()
    assert (stats.queued, stats.queued_bytes, stats.dropped_queue_full) == (kept, kept * 104, 5)
    for name in ("s1", "s2"):
        peer = bench.connect(name, clean_start=False)
        peer.send(*(PubAck(p.packet_id) for p in peer.publishes())).drop()
    stats = bench.broker.measure()
    assert (stats.queued, stats.queued_bytes) == (0, 0)


def test_the_sizes_are_given_back_when_a_session_ends() -> None:
    bench = Bench()
    peer = bench.connect("s", expiry=100)
    peer.subscribe("a")
    peer.drop()
    bench.connect("p").send(*numbered(4, 100))
    bench.advance(100_001)
    assert (bench.broker.measure().queued, bench.broker.measure().queued_bytes) == (0, 0)


@pytest.mark.parametrize("policy", list(QueueOverflowPolicy))
@pytest.mark.parametrize("allowed", [True, False])
def test_a_message_that_may_hurry_passes_the_bounds_of_a_full_queue(
    policy: QueueOverflowPolicy, *, allowed: bool
) -> None:
    gate = Gate() if allowed else Gate(("hasty", "high_priority", "t"))
    bench = Bench(limits=BrokerLimits(max_queued_messages=3, queue_overflow=policy), access=gate)
    sender = bench.connect("p", username="hasty")
    bench.connect("r", expiry=100, username="r").subscribe(Subscription("t", 1))
    bench.peers[bench.broker.sessions["r"].connection].drop()  # type: ignore[index]
    sender.send(*(Publish("t", b"%d" % n, 1, packet_id=n) for n in range(1, 4)))
    sender.send(*(Publish("t", b"!%d" % n, 1, packet_id=n, properties=URGENT) for n in range(4, 9)))
    codes = [packet.reason_code for packet in sender.take() if isinstance(packet, PubAck)]
    got = [p.payload.decode() for p in bench.connect("r", expiry=100, clean_start=False, username="r").publishes()]
    if policy is QueueOverflowPolicy.DROP_OLDEST:
        assert got == ["!6", "!7", "!8"]
    elif allowed:
        assert got == ["1", "2", "3", "!4", "!5", "!6"], "twice the bound, and no further"
    else:
        assert got == ["1", "2", "3"]
    refused = 0 if policy is not QueueOverflowPolicy.REFUSE else 2 if allowed else 5
    assert codes == [0] * (8 - refused) + [0x97] * refused
