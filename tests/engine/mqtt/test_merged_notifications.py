"""Notifications in a full queue: the newest of each topic arrives, or the connection ends with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.mqtt.codec.packets import Disconnect, PubAck, Publish, Subscription
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from tests.engine.mqtt.harness import Bench, Peer
from tests.engine.mqtt.persistent_harness import HOUR, PersistentBench

POLICIES = [policy for policy in QueueOverflowPolicy if policy is not QueueOverflowPolicy.DISCONNECT]


def notify(bench: Bench, *changes: str, client_id: str = "observer") -> None:
    """``k=7`` sets key ``k``, ``k`` alone deletes it."""
    for change in changes:
        key, sets, _ = change.partition("=")
        publish = Publish(f"notify/{key}", change.encode(), 1)
        assert bench.broker.deliver(client_id, publish, bench.now, deletes=not sets)


def stalled(bench: Bench, expiry: int | None = None) -> Peer:
    """An observer whose client takes nothing from its socket."""
    peer = bench.connect("observer", expiry=expiry)
    peer.connection.pause(bench.now)
    return peer


def payloads(peer: Peer) -> list[str]:
    """What arrives once the client reads and acknowledges again."""
    peer.connection.unpause(peer.bench.now)
    found = []
    while messages := peer.publishes():
        found += [message.payload.decode() for message in messages]
        peer.send(*(PubAck(message.packet_id) for message in messages))
    return found


@pytest.mark.parametrize("policy", QueueOverflowPolicy)
def test_the_newest_notification_arrives_however_many_there_were(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=100, queue_overflow=policy))
    peer = stalled(bench)
    notify(bench, *(f"k={n}" for n in range(15_000)))
    arrived = [int(payload.removeprefix("k=")) for payload in payloads(peer)]
    assert arrived == list(range(arrived[0], 15_000)), "in order, and none missing after the merged ones"
    stats = bench.broker.stats
    assert (stats.notifications_merged, stats.dropped_queue_full) == (15_000 - len(arrived), 0)


def test_every_notification_arrives_while_there_is_room() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=100))
    peer = stalled(bench)
    notify(bench, *(f"k={n}" for n in range(100)))
    assert payloads(peer) == [f"k={n}" for n in range(100)]
    assert bench.broker.stats.notifications_merged == 0


def test_merged_notifications_keep_their_order_across_keys() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=5))
    peer = stalled(bench)
    notify(bench, "a=1", "b=2", "a=3", "c=4", "b=5", "a=6")
    assert payloads(peer) == ["c=4", "b=5", "a=6"]


def test_a_deletion_is_not_hidden_by_the_value_that_follows() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=5))
    peer = stalled(bench)
    notify(bench, "k=1", "k", "k=2", "k", "k=3", "k=4")
    assert payloads(peer) == ["k", "k=4"], "the last deletion and the newest value"


def test_a_client_that_reads_and_does_not_acknowledge_gets_the_newest_one() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=10))
    peer = bench.connect("observer", receive_maximum=2)
    notify(bench, *(f"k={n}" for n in range(1_000)))
    assert [message.payload for message in peer.publishes()] == [b"k=0", b"k=1"]
    peer.send(PubAck(1), PubAck(2))
    assert payloads(peer)[-1] == "k=999"


@pytest.mark.parametrize("policy", POLICIES)
def test_messages_of_subscriptions_are_not_merged_and_fall_under_the_policy(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=4, queue_overflow=policy))
    peer = bench.connect("observer")
    peer.subscribe("topic")
    peer.connection.pause(bench.now)
    publisher = bench.connect("p")
    publisher.send(*(Publish("topic", b"m%d" % n, 1, packet_id=n) for n in (1, 2)))
    notify(bench, "k=1", "k=2", "k=3")
    publisher.send(Publish("topic", b"m3", 1, packet_id=3))
    publisher.take()
    assert payloads(peer) == ["m1", "m2", "k=3", "m3"]


def test_the_oldest_message_makes_room_but_a_notification_does_not() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=QueueOverflowPolicy.DROP_OLDEST))
    peer = bench.connect("observer")
    peer.subscribe("topic")
    peer.connection.pause(bench.now)
    notify(bench, "a=1", "b=2")
    bench.connect("p").send(Publish("topic", b"m", 1, packet_id=1))
    assert payloads(peer) == ["a=1", "b=2"]
    assert bench.broker.stats.dropped_queue_full == 1


@pytest.mark.parametrize("policy", QueueOverflowPolicy)
def test_more_keys_than_the_queue_holds_end_the_connection(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=5, queue_overflow=policy))
    peer = bench.connect("observer", request_problem_information=1)
    peer.connection.pause(bench.now)
    notify(bench, *(f"{key}=1" for key in "abcdef"))
    bench.flush()
    (ended,) = [packet for packet in peer.take() if isinstance(packet, Disconnect)]
    assert ended.reason_code == 0x97
    assert "notification" in (ended.properties.reason_string or "")
    assert peer.closed
    assert bench.broker.stats.observers_disconnected == 1


def test_a_queue_that_is_mostly_of_different_keys_ends_the_connection_before_it_costs_much() -> None:
    """Each search for superseded notifications walks the queue, so it must have something to find."""
    bench = Bench(limits=BrokerLimits(max_queued_messages=100))
    peer = stalled(bench)
    notify(bench, *(f"k{n}=1" for n in range(80)))
    notify(bench, *(f"k{n}=2" for n in range(40)))
    bench.flush()
    assert not peer.closed
    notify(bench, "k0=3", "k1=3")
    bench.flush()
    assert peer.closed


def test_bytes_fill_a_queue_as_well() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_bytes=1_000))
    peer = stalled(bench)
    notify(bench, *(f"k={n:0300}" for n in range(50)))
    assert int(payloads(peer)[-1].removeprefix("k=")) == 49


def test_a_notification_larger_than_the_queue_ends_the_connection() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_bytes=100))
    peer = stalled(bench)
    notify(bench, f"k={0:0300}")
    bench.flush()
    assert peer.closed


def test_merged_notifications_leave_a_durable_session_too(tmp_path: Path) -> None:
    bench = PersistentBench(tmp_path, limits=BrokerLimits(max_queued_messages=5))
    peer = stalled(bench, expiry=HOUR)
    notify(bench, "a=1", "k", "k=2", "k=3", "k", "k=4", "k=5")
    bench.commit()
    peer.drop()
    bench.crash()
    again = bench.connect("observer", clean_start=False, expiry=HOUR)
    assert payloads(again) == ["a=1", "k", "k=4", "k=5"]


def test_the_merged_ones_are_reported() -> None:
    reports: list[tuple[str, int]] = []
    bench = Bench(limits=BrokerLimits(max_queued_messages=5))
    bench.broker.report_merged = lambda client_id, count: reports.append((client_id, count))
    stalled(bench)
    notify(bench, *(f"k={n}" for n in range(10)))
    assert reports == [("observer", 5)]


def test_an_ordinary_subscription_to_the_topic_gets_the_message_once() -> None:
    bench = Bench()
    peer = bench.connect("observer")
    peer.subscribe(Subscription("notify/#", 1), identifier=7)
    notify(bench, "k=1")
    (message,) = peer.publishes()
    assert message.properties.subscription_identifiers == [7]
