"""Persistent sessions: recovery after a restart or a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.mqtt.codec.packets import (
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscription,
    Unsubscribe,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy

from .harness import RecordingService
from .persistent_harness import HOUR, PersistentBench, back, reader


@pytest.fixture
def bench(tmp_path: Path) -> PersistentBench:
    return PersistentBench(tmp_path)


def test_acknowledged_messages_are_delivered_after_a_crash(bench: PersistentBench) -> None:
    reader(bench)
    writer = bench.connect("writer")
    for n in range(3):
        writer.send(Publish(f"t/{n}", b"x", 1 + n % 2, packet_id=n + 1))
    assert len(writer.take()) == 3
    bench.crash()
    got = back(bench)
    assert [(p.topic, p.qos, p.dup) for p in got if isinstance(p, Publish)] == [
        ("t/0", 1, False),
        ("t/1", 2, False),
        ("t/2", 1, False),
    ]


def test_an_unacknowledged_publish_is_stored_completely_or_not_at_all(bench: PersistentBench) -> None:
    reader(bench)
    writer = bench.connect("writer", expiry=HOUR)
    bench.stalled = True
    writer.send(Publish("t", b"x", 2, packet_id=1))
    assert writer.take() == []
    bench.crash()
    writer = bench.connect("writer", clean_start=False, expiry=HOUR)
    writer.send(Publish("t", b"x", 2, packet_id=1, dup=True))
    assert writer.only() == PubRec(1)
    assert len(back(bench)) == 1


def test_sent_messages_come_again_with_dup_their_identifier_and_their_order(bench: PersistentBench) -> None:
    peer = bench.connect("reader", expiry=HOUR, receive_maximum=3)
    peer.subscribe(Subscription("#", 2))
    writer = bench.connect("writer")
    for n in range(5):
        writer.send(Publish("t", b"%d" % n, 1 + n % 2, packet_id=n + 1))
    sent = {p.payload: p.packet_id for p in peer.publishes()}
    assert len(sent) == 3
    peer.send(PubAck(sent[b"0"]))  # the fourth leaves, which waited
    sent |= {p.payload: p.packet_id for p in peer.publishes()}
    bench.flush()
    bench.crash()
    got = [p for p in back(bench) if isinstance(p, Publish)]
    assert [(p.payload, p.dup) for p in got] == [(b"1", True), (b"2", True), (b"3", True), (b"4", False)]
    assert {p.payload: p.packet_id for p in got[:3]} == {text: sent[text] for text in (b"1", b"2", b"3")}


def test_a_released_message_never_comes_again(bench: PersistentBench) -> None:
    peer = bench.connect("reader", expiry=HOUR)
    peer.subscribe(Subscription("#", 2))
    bench.connect("writer").send(Publish("t", b"x", 2, packet_id=1))
    (publish,) = peer.publishes()
    peer.send(PubRec(publish.packet_id))
    assert peer.only() == PubRel(publish.packet_id)
    bench.crash()
    assert back(bench) == [PubRel(publish.packet_id)]
    bench.crash()
    again = bench.connect("reader", clean_start=False, expiry=HOUR)
    assert again.only() == PubRel(publish.packet_id)
    again.send(PubComp(publish.packet_id))
    bench.flush()
    bench.crash()
    assert back(bench) == []
    assert bench.found.progress == []


def test_a_qos_2_message_of_the_client_is_taken_once_over_a_crash(bench: PersistentBench) -> None:
    reader(bench)
    writer = bench.connect("writer", expiry=HOUR)
    writer.send(Publish("t", b"x", 2, packet_id=9))
    assert writer.only() == PubRec(9)
    bench.crash()
    writer = bench.connect("writer", clean_start=False, expiry=HOUR)
    writer.send(Publish("t", b"x", 2, packet_id=9, dup=True))
    assert writer.only() == PubRec(9)
    writer.send(PubRel(9))
    assert writer.only() == PubComp(9)
    bench.crash()
    writer = bench.connect("writer", clean_start=False, expiry=HOUR)
    writer.send(Publish("t", b"y", 2, packet_id=9))
    assert writer.only() == PubRec(9)
    assert [p.payload for p in back(bench) if isinstance(p, Publish)] == [b"x", b"y"]


def test_between_subscribers_and_services_a_crash_makes_services_alone_get_it_again(tmp_path: Path) -> None:
    service = RecordingService("rule/#")
    bench = PersistentBench(tmp_path, service)
    reader(bench)
    writer = bench.connect("writer", expiry=HOUR)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9))
    assert writer.take() == []
    assert len(service.taken) == 1
    again = RecordingService("rule/#")
    bench.crash(again)
    writer = bench.connect("writer", clean_start=False, expiry=HOUR)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9, dup=True))
    (inbound,) = again.taken
    inbound.settle()
    assert writer.only() == PubRec(9)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9, dup=True))
    assert (writer.only(), len(again.taken)) == (PubRec(9), 1)
    assert len(back(bench)) == 1
    last = RecordingService("rule/#")
    bench.crash(last)
    writer = bench.connect("writer", clean_start=False, expiry=HOUR)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9, dup=True))
    assert (writer.only(), last.taken) == (PubRec(9), [])


def test_a_refused_qos_2_message_leaves_no_identifier(tmp_path: Path) -> None:
    service = RecordingService("rule/#")
    bench = PersistentBench(tmp_path, service)
    writer = bench.connect("writer", expiry=HOUR)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9))
    service.taken[0].settle(0x97, "full")
    answer = writer.only()
    assert isinstance(answer, PubRec)
    assert answer.reason_code == 0x97
    bench.crash(RecordingService("rule/#"))
    assert bench.found.incoming == []


def test_subscriptions_come_back_with_their_options(bench: PersistentBench) -> None:
    peer = bench.connect("c", expiry=HOUR)
    peer.subscribe(Subscription("a/+", 1, retain_as_published=True), Subscription("b", 0, no_local=True), identifier=77)
    peer.subscribe(Subscription("gone", 1))
    peer.send(Unsubscribe(50, ["gone"]))
    peer.take()
    bench.crash()
    peer = bench.connect("c", clean_start=False, expiry=HOUR)
    assert bench.connack.session_present
    peer.send(Publish("a/1", b"x", 1, retain=True, packet_id=1), Publish("b", b"x", 0), Publish("gone", b"", 0))
    publish, ack = peer.take()
    assert isinstance(publish, Publish)
    assert (publish.topic, publish.retain, publish.properties.subscription_identifiers) == ("a/1", True, [77])
    assert ack == PubAck(1)


def test_retained_messages_come_back_and_deleted_ones_do_not(bench: PersistentBench) -> None:
    writer = bench.connect("writer")
    for topic, payload in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("b", b"")):
        writer.send(Publish(topic, payload, 0, retain=True))
    expiring = Properties(message_expiry_interval=10, user_properties=[("k", "v")])
    writer.send(Publish("d", b"5", 1, retain=True, packet_id=1, properties=expiring))
    assert writer.only() == PubAck(1)
    bench.crash(down_ms=4_500)
    got = {}
    peer = bench.connect("c")
    peer.subscribe("#")
    for publish in peer.publishes():
        got[publish.topic] = publish
    assert {topic: publish.payload for topic, publish in got.items()} == {"a": b"3", "c": b"4", "d": b"5"}
    assert got["d"].properties.message_expiry_interval == 6
    assert got["d"].properties.user_properties == [("k", "v")]
    bench.crash(down_ms=6_000)
    assert bench.broker.retained.get("d") is None
    bench.flush()
    bench.crash()
    assert len(bench.found.retained) == 2


def test_a_lower_limit_deletes_no_retained_message(bench: PersistentBench) -> None:
    writer = bench.connect("writer")
    for topic in ("a", "b"):
        writer.send(Publish(topic, b"old", 1, retain=True, packet_id=1))
    assert writer.take() == [PubAck(1)] * 2
    bench.limits = BrokerLimits(max_retained_messages=1)
    bench.crash()
    bench.crash()
    writer = bench.connect("writer")
    for topic, payload in (("a", b"new"), ("c", b"old"), ("b", b""), ("a", b"newer")):
        writer.send(Publish(topic, payload, 1, retain=True, packet_id=1))
    assert [ack.reason_code for ack in writer.take() if isinstance(ack, PubAck)] == [0, 0x97, 0, 0]
    peer = bench.connect("c")
    peer.subscribe("#")
    assert [(publish.topic, publish.payload) for publish in peer.publishes()] == [("a", b"newer")]


def test_message_expiry_runs_on_while_the_broker_is_down(bench: PersistentBench) -> None:
    reader(bench)
    writer = bench.connect("writer")
    for n, seconds in enumerate((5, 60), start=1):
        expiry = Properties(message_expiry_interval=seconds)
        writer.send(Publish("t", b"%d" % n, 1, packet_id=n, properties=expiry))
    bench.flush()
    bench.crash(down_ms=20_500)
    assert bench.broker.stats.dropped_expired == 1
    (publish,) = back(bench)
    assert isinstance(publish, Publish)
    assert (publish.payload, publish.properties.message_expiry_interval) == (b"2", 40)
    bench.flush()
    bench.crash()
    assert [row.message.payload for row in bench.found.deliveries] == [b"2"]


def test_a_message_for_many_is_stored_once(bench: PersistentBench) -> None:
    for n in range(5):
        reader(bench, client_id=f"r{n}")
    bench.connect("writer").send(Publish("t", b"x" * 50_000, 1, packet_id=1))
    bench.flush()
    bench.crash()
    assert len({id(row.message) for row in bench.found.deliveries}) == 1
    assert bench.found.deliveries[0].message.number > 0
    for n in range(5):
        peer = bench.connect(f"r{n}", clean_start=False, expiry=HOUR)
        (publish,) = peer.publishes()
        peer.send(PubAck(publish.packet_id))
    bench.flush()
    bench.crash()
    assert bench.found.deliveries == []


def test_messages_dropped_from_a_full_queue_are_dropped_on_disk(tmp_path: Path) -> None:
    limits = BrokerLimits(max_queued_messages=2, queue_overflow=QueueOverflowPolicy.DROP_OLDEST)
    bench = PersistentBench(tmp_path, limits=limits)
    reader(bench)
    writer = bench.connect("writer")
    for n in range(4):
        writer.send(Publish("t", b"%d" % n, 1, packet_id=n + 1))
    bench.flush()
    bench.crash()
    assert [p.payload for p in back(bench) if isinstance(p, Publish)] == [b"2", b"3"]


def test_shared_subscriptions_keep_their_group_over_a_restart(bench: PersistentBench) -> None:
    first = bench.connect("first", expiry=HOUR)
    first.subscribe("$share/g/t")
    first.drop()
    bench.connect("writer").send(Publish("t", b"x", 1, packet_id=1))
    bench.flush()
    bench.crash()
    second = bench.connect("second", expiry=HOUR)
    second.subscribe("$share/g/t")
    assert [p.payload for p in second.publishes()] == [b"x"], "what waits for a member that is away"
    bench.crash()
    assert [row.session for row in bench.found.deliveries] == [
        row.number for row in bench.found.sessions if row.client_id == "second"
    ]
