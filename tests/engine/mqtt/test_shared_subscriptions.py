"""Shared subscriptions: one member per message, fair, no loss when a member leaves [MQTT 5.0 section 4.8.2]."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.mqtt.codec.packets import (
    Disconnect,
    PubAck,
    Publish,
    PubRec,
    PubRel,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer


def members(bench: Bench, count: int, topic_filter: str = "$share/g/a", qos: int = 1, expiry: int = 0) -> list[Peer]:
    peers = [bench.connect(f"m{n}", expiry=expiry or None) for n in range(count)]
    for peer in peers:
        assert peer.subscribe(Subscription(topic_filter, qos)) == [qos]
    return peers


def numbered(count: int, topic: str = "a", qos: int = 1, first: int = 1) -> list[Publish]:
    return [Publish(topic, b"%d" % n, qos, packet_id=n if qos else 0) for n in range(first, first + count)]


def payloads(peer: Peer) -> list[int]:
    return [int(p.payload) for p in peer.take() if isinstance(p, Publish)]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_and_all_take_turns(qos: int) -> None:
    bench = Bench()
    peers = members(bench, 3, qos=qos)
    bench.connect("p").send(*numbered(9, qos=qos))
    got = [payloads(peer) for peer in peers]
    assert sorted(n for one in got for n in one) == list(range(1, 10))
    assert [len(one) for one in got] == [3, 3, 3]


def test_groups_and_plain_subscriptions_do_not_know_each_other() -> None:
    bench = Bench()
    one, two = bench.connect("one"), bench.connect("two")
    one.subscribe("$share/g/a", "$share/h/a", "a", identifier=5)
    two.subscribe("$share/g/+", "$share/h/a")
    bench.connect("p").send(*numbered(4))
    got = Counter(payloads(one)), Counter(payloads(two))
    assert got[0][1] >= 1, "its own"
    assert [got[0][n] + got[1][n] for n in range(1, 5)] == [4, 4, 4, 4], "own, g/a, g/+ (another filter), h"


def test_no_retained_messages_and_no_delivery_above_the_grant() -> None:
    bench = Bench()
    sender = bench.connect("p")
    sender.send(Publish("a", b"0", retain=True))
    (peer,) = members(bench, 1, qos=1)
    assert peer.take() == []
    sender.send(*numbered(1, qos=2))
    assert [p.qos for p in peer.publishes()] == [1]


def test_options_and_identifier_of_the_member_count() -> None:
    bench = Bench()
    peer = bench.connect("m")
    peer.subscribe(Subscription("$share/g/a", 1, retain_as_published=True), identifier=300)
    peer.send(Publish("a", b"x", retain=True))
    (message,) = peer.publishes()
    assert message.retain
    assert message.properties.subscription_identifiers == [300]


def test_connected_members_are_preferred_to_disconnected_ones() -> None:
    bench = Bench()
    away, there = members(bench, 2, expiry=100)
    away.drop()
    sender = bench.connect("p").send(*numbered(4))
    assert payloads(there) == [1, 2, 3, 4]
    there.drop()
    sender.send(*numbered(2, first=5))
    figures = bench.broker.measure()
    assert (figures.inflight, figures.queued) == (4, 2), "nobody is there: all of it waits"
    back = bench.connect("m0", clean_start=False, expiry=100)
    assert sorted(payloads(back)) == [1, 2, 3, 4, 5, 6], "whoever comes first takes it over"
    assert payloads(bench.connect("m1", clean_start=False, expiry=100)) == []


def test_a_new_member_takes_over_from_disconnected_members() -> None:
    bench = Bench()
    (away,) = members(bench, 1, expiry=100)
    away.drop()
    bench.connect("p").send(*numbered(3))
    new = bench.connect("new")
    new.subscribe("$share/g/other", "$share/g/a")
    assert payloads(new) == [1, 2, 3]


def test_a_member_takes_over_what_it_has_room_for_and_the_rest_when_it_has_room_again() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=4))
    for peer in members(bench, 2, expiry=60):
        peer.drop()
    bench.connect("p").send(*numbered(8))
    helper = bench.connect("helper", receive_maximum=1)
    helper.subscribe(Subscription("$share/g/a", 1))
    got = []
    while came := helper.publishes():
        for message in came:
            got.append(int(message.payload))
            helper.send(PubAck(message.packet_id))
    assert sorted(got) == list(range(1, 9))
    assert bench.broker.measure().dropped_queue_full == 0


def acknowledge_all(peer: Peer) -> list[int]:
    """Acknowledge one message after the other, until none arrives."""
    got = []
    while came := peer.publishes():
        for message in came:
            got.append(int(message.payload))
            peer.send(PubAck(message.packet_id))
    return got


def test_a_member_of_several_groups_takes_over_the_rest_of_each() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=4))
    others = [bench.connect("other", expiry=60), *members(bench, 2, expiry=60)]
    others[0].subscribe(Subscription("$share/h/b", 1))
    for peer in others:
        peer.drop()
    publisher = bench.connect("p")
    publisher.send(*numbered(8))
    publisher.send(*numbered(4, "b", first=9))
    helper = bench.connect("helper", receive_maximum=1)
    helper.subscribe(Subscription("$share/g/a", 1), Subscription("$share/h/b", 1))
    assert sorted(acknowledge_all(helper)) == list(range(1, 13))


class CountedQueue(deque[Any]):
    """A queue that counts iterations over its messages."""

    visits = 0

    def __iter__(self) -> Iterator[Any]:
        self.visits += 1
        return super().__iter__()


@pytest.mark.parametrize("groups", [1, 40])
def test_a_member_of_many_groups_looks_at_the_messages_of_a_disconnected_member_once(groups: int) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=80))
    wanted = [Subscription(f"$share/g/{n}", 1) for n in range(groups)]
    away = bench.connect("away", expiry=60)
    away.subscribe(*wanted)
    away.drop()
    publisher = bench.connect("p")
    for n in range(groups):
        publisher.send(*numbered(80 // groups, str(n), first=1 + n * 80 // groups))
    bench.broker.limits.max_queued_messages = 40
    waiting = bench.broker.sessions["away"].waiting
    queue = waiting.reliable = CountedQueue(waiting.reliable)
    helper = bench.connect("helper", receive_maximum=1)
    helper.subscribe(*wanted)
    assert sorted(acknowledge_all(helper)) == list(range(1, 81))
    assert queue.visits < 20, "independent of the number of groups"


def test_what_a_member_had_no_room_for_goes_to_another_when_it_leaves() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=4))
    publisher = bench.connect("p")

    def topics_of(*peers: Peer) -> list[set[str]]:
        """The topics whose messages each member gets while all are connected: a hash decides."""
        publisher.send(*(Publish(f"t{n}", b"0", 0) for n in range(50)))
        return [set(peer.topics()) for peer in peers]

    def helper(name: str) -> Peer:
        peer = bench.connect(name, receive_maximum=1)
        peer.subscribe(Subscription("$share/g/+", 1))
        return peer

    away = members(bench, 2, "$share/g/+", expiry=60)
    of_away = topics_of(*away)
    for peer in away:
        peer.drop()
    helpers = [helper(name) for name in ("one", "two")]
    of_first, _ = topics_of(*helpers)
    for peer in helpers:
        peer.drop()
    for number, topics in enumerate(of_away):
        publisher.send(*numbered(4, min(topics & of_first), first=1 + 4 * number))
    first, second = helper("one"), helper("two")
    assert second.publishes() == [], "they wait for the first one"
    first.drop()
    assert sorted(acknowledge_all(second)) == list(range(1, 9))


def test_a_member_that_does_not_keep_up_is_spared() -> None:
    bench = Bench()
    slow, quick = bench.connect("slow", receive_maximum=1), bench.connect("quick")
    for peer in (slow, quick):
        peer.subscribe("$share/g/a")
    bench.connect("p").send(*numbered(10))
    assert (len(payloads(slow)), len(payloads(quick))) == (1, 9)


@pytest.mark.parametrize("expiry", [0, 100], ids=["session ends", "session stays"])
@pytest.mark.parametrize("polite", [False, True], ids=["lost", "disconnect"])
def test_unacknowledged_qos_1_goes_to_another_member(expiry: int, *, polite: bool) -> None:
    bench = Bench()
    first, second = members(bench, 2, expiry=expiry)
    bench.connect("p").send(*numbered(6))
    mine = first.publishes()
    assert len(payloads(second)) == 3
    first.send(PubAck(mine[0].packet_id))
    if polite:
        first.send(Disconnect())
        bench.flush()
    else:
        first.drop()
    assert sorted(payloads(second)) == [int(p.payload) for p in mine[1:]]
    if expiry:
        again = bench.connect("m0", clean_start=False, expiry=100)
        assert again.take() == [], "it is the other one's now"


def test_queued_messages_move_to_another_member_unless_expired() -> None:
    bench = Bench()
    one, two = bench.connect("one", receive_maximum=1, expiry=100), bench.connect("two", receive_maximum=1)
    for peer in (one, two):
        peer.subscribe("$share/g/a")
    sender = bench.connect("p").send(*numbered(6))
    assert bench.broker.measure().queued == 4
    sender.send(Publish("a", b"99", 1, packet_id=99, properties=Properties(message_expiry_interval=1)))
    bench.advance(2_000)
    first = payloads(two)
    got = list(first)
    one.drop()
    packet_id = 1
    while len(got) < 7:
        two.send(PubAck(packet_id))
        packet_id += 1
        more = payloads(two)
        if not more:
            break
        got += more
    assert sorted(got) == [1, 2, 3, 4, 5, 6]


def test_qos_2_that_was_begun_stays_with_its_member() -> None:
    bench = Bench()
    first, second = members(bench, 2, qos=2, expiry=100)
    bench.connect("p").send(*numbered(4, qos=2))
    sent, released = first.publishes()
    assert len(payloads(second)) == 2
    first.send(PubRec(released.packet_id)).take()
    first.drop()
    assert second.take() == []
    again = bench.connect("m0", clean_start=False, expiry=100)
    release, repeated = again.take()
    assert release == PubRel(released.packet_id)
    assert isinstance(repeated, Publish)
    assert (repeated.payload, repeated.dup) == (sent.payload, True)
    again.drop()
    bench.connect("m0", clean_start=True)
    assert second.take() == [], "and ends with its session"


def test_a_refusal_by_a_member_settles_it_for_all() -> None:
    bench = Bench()
    first, second = members(bench, 2)
    bench.connect("p").send(*numbered(1))
    holder = first if bench.broker.sessions["m0"].inflight else second
    (message,) = holder.publishes()
    holder.send(PubAck(message.packet_id, 0x97)).drop()
    assert first.closed or first.take() == []
    assert second.closed or second.take() == []


def test_unsubscribe_hands_over_what_was_not_sent() -> None:
    bench = Bench()
    one, two = bench.connect("one", receive_maximum=1), bench.connect("two", receive_maximum=100)
    one.subscribe("$share/g/a")
    bench.connect("p").send(*numbered(3))
    (begun,) = one.publishes()
    two.subscribe("$share/g/a")
    one.send(Unsubscribe(9, ["$share/g/a"]))
    one.take()
    assert payloads(two) == [2, 3]
    one.send(PubAck(begun.packet_id))
    assert one.take() == []
    assert bench.broker.measure().subscriptions == 1


def test_the_last_member_that_leaves_takes_the_group_along() -> None:
    bench = Bench()
    peers = members(bench, 2)
    for peer in peers:
        peer.drop()
    assert bench.broker.measure().subscriptions == 0
    assert bench.connect("p").send(*numbered(1)).only() == PubAck(1, 0x10)


def test_partition_keeps_together_what_has_one_value() -> None:
    bench = Bench()
    peers = members(bench, 4)
    keys = [f"device-{n}" for n in range(200)]
    publishes = [
        Publish("a", key.encode(), 0, properties=Properties(user_properties=[("$partition", key)])) for key in keys
    ]
    sender = bench.connect("p")

    def owners() -> dict[bytes, int]:
        sender.send(*publishes)
        return {p.payload: n for n, peer in enumerate(peers) if not peer.closed for p in peer.publishes()}

    before = owners()
    assert owners() == before
    shares = Counter(before.values())
    assert all(25 <= shares[n] <= 80 for n in range(4)), shares
    peers[3].drop()
    after = owners()
    assert {key: n for key, n in before.items() if n != 3} == {key: n for key, n in after.items() if before[key] != 3}


def test_with_wildcards_a_topic_stays_with_its_member() -> None:
    bench = Bench()
    peers = members(bench, 3, "$share/g/t/+")
    sender = bench.connect("p")
    for _ in range(3):
        sender.send(*(Publish(f"t/{n}", b"%d" % n) for n in range(60)))
    got = [Counter(payloads(peer)) for peer in peers]
    assert all(set(counts.values()) == {3} for counts in got)
    assert sum(len(counts) for counts in got) == 60


@pytest.mark.parametrize("rest", ["", "g", "g/", "/a", "+/a", "#/a", "g+/a", "g/#/a", "g/a+"])
def test_malformed_shared_filters(rest: str) -> None:
    packet = Bench().connect().send(Subscribe(1, [Subscription("fine"), Subscription(f"$share/{rest}")])).only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x81


@pytest.mark.parametrize("rest", ["", "g", "g/", "/a", "+/a"])
def test_filters_that_are_well_formed_in_3_1_1_only_are_refused_there(rest: str) -> None:
    """$share has no meaning in MQTT 3.1.1, so the filter does not break its rules; it would match nothing."""
    peer = Bench().connect(version=4)
    assert peer.subscribe(f"$share/{rest}", "fine") == [0x80, 1]


def test_no_local_on_a_shared_subscription_is_a_protocol_error() -> None:
    peer = Bench().connect()
    peer.send_bytes(bytes.fromhex("820f 0001 00 0009 2473686172652f672f 05".replace(" ", "")))
    packet = peer.take()[-1]
    assert isinstance(packet, Disconnect)
