"""Sessions that outlive the process: what is promised only after its commit, and what a restart brings back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.access import UNKNOWN, Rights
from penstock.mqtt.engine.limits import BrokerLimits, QueueFull
from tests.engine.mqtt.test_access import Gate, User

from .harness import RecordingService
from .kept import KeptBench

HOUR = 3600


@pytest.fixture
def bench(tmp_path: Path) -> KeptBench:
    return KeptBench(tmp_path)


def reader(bench: KeptBench, qos: int = 2, client_id: str = "reader", **more: object) -> None:
    """A kept session with a subscription to everything, offline."""
    peer = bench.connect(client_id, expiry=HOUR, **more)  # type: ignore[arg-type]
    peer.subscribe(Subscription("#", qos))
    peer.drop()


def back(bench: KeptBench, client_id: str = "reader") -> list[Packet]:
    """The reader connects again; what it is sent."""
    peer = bench.connect(client_id, clean_start=False, expiry=HOUR)
    assert bench.connack.session_present
    return peer.take()


# Promises


def test_a_puback_waits_for_the_commit_of_what_a_kept_session_gets(bench: KeptBench) -> None:
    reader(bench)
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=7), Publish("t", b"y", 2, packet_id=8))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(7), PubRec(8)]


def test_without_a_kept_taker_nothing_is_recorded_and_nothing_waits(bench: KeptBench) -> None:
    bench.stalled = True
    live = bench.connect("live")
    live.subscribe("#")
    writer = bench.connect("writer")
    writer.send(
        Publish("t", b"x", 1, packet_id=7),
        Publish("t", b"y", 2, packet_id=8),
        PubRel(8),
        Subscribe(9, [Subscription("a")]),
        Unsubscribe(10, ["a"]),
    )
    assert writer.take() == [PubAck(7), PubRec(8), PubComp(8), SubAck(9, [1]), UnsubAck(10, [0])]
    assert len(live.publishes()) == 2
    live.drop()
    writer.send(Disconnect())
    assert (bench.journal.waiting, bench.journal.promises, bench.commits) == (0, 0, 0)


def test_what_follows_a_promise_on_its_connection_waits_with_it_and_others_do_not(bench: KeptBench) -> None:
    reader(bench)
    writer, other = bench.connect("writer"), bench.connect("other")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=7))
    bench.flush()
    writer.send(Publish("$private", b"x", 1, packet_id=8))
    other.send(Publish("$private", b"x", 1, packet_id=9))
    assert (writer.take(), other.take()) == ([], [PubAck(9, 0x10)])
    bench.commit()
    assert writer.take() == [PubAck(7), PubAck(8, 0x10)]


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (Subscribe(5, [Subscription("a")]), SubAck(5, [1])),
        (Unsubscribe(6, ["a"]), UnsubAck(6, [0x11])),
        (Publish("t", b"x", 1, retain=True, packet_id=4), PubAck(4)),
        (PubRel(3), PubComp(3)),
    ],
    ids=["SUBACK", "UNSUBACK", "PUBACK of a retained message", "PUBCOMP"],
)
def test_answers_in_a_kept_session_wait_for_its_commit(bench: KeptBench, request_: Packet, answer: Packet) -> None:
    peer = bench.connect("c", expiry=HOUR)
    peer.send(Publish("none", b"", 2, packet_id=3))
    assert peer.only() == PubRec(3, 0x10)
    peer.send(Subscribe(2, [Subscription("b")]))
    peer.take()
    bench.stalled = True
    peer.send(Publish("b", b"", 0), request_)  # something is recorded before the UNSUBSCRIBE too
    if isinstance(request_, Unsubscribe):
        peer.send(Unsubscribe(7, ["b"]))
    assert answer not in peer.take()
    bench.commit()
    assert answer in peer.take()


def test_connack_of_a_kept_session_waits_and_a_lost_one_was_never_promised(bench: KeptBench) -> None:
    bench.stalled = True
    peer = bench.open()
    peer.send(Connect("c", properties=Properties(session_expiry_interval=HOUR)))
    assert peer.take() == []
    bench.crash()
    assert bench.broker.sessions == {}
    bench.stalled = True
    peer = bench.open()
    peer.send(Connect("c", properties=Properties(session_expiry_interval=HOUR)))
    bench.commit()
    assert isinstance(peer.only(), ConnAck)
    bench.crash()
    assert list(bench.broker.sessions) == ["c"]


def test_a_qos_2_message_reaches_a_kept_session_only_with_a_committed_identifier(bench: KeptBench) -> None:
    peer = bench.connect("reader", expiry=HOUR)
    peer.subscribe(Subscription("#", 2))
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"1", 1, packet_id=7))
    assert [p.payload for p in peer.publishes()] == [b"1"], "QoS 1 may come twice: it need not wait"
    writer.send(Publish("t", b"2", 2, packet_id=8))
    assert peer.take() == []
    bench.commit()
    (publish,) = peer.publishes()
    bench.stalled = True
    peer.send(PubRec(publish.packet_id))
    assert peer.take() == []
    bench.commit()
    assert peer.take() == [PubRel(publish.packet_id)]


def test_a_message_that_was_acknowledged_before_its_commit_is_never_written(bench: KeptBench) -> None:
    peer = bench.connect("reader", expiry=HOUR)
    peer.subscribe("#")
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"1", 1, packet_id=7))
    (publish,) = peer.publishes()
    peer.send(PubAck(publish.packet_id))
    before = bench.commits
    bench.commit()
    assert (writer.take(), bench.commits) == ([PubAck(7)], before)


# Restarts


def test_what_was_acknowledged_is_delivered_after_a_crash(bench: KeptBench) -> None:
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


def test_what_was_not_acknowledged_may_be_gone_but_not_half(bench: KeptBench) -> None:
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


def test_sent_messages_come_again_with_dup_their_identifier_and_their_order(bench: KeptBench) -> None:
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


def test_a_released_message_never_comes_again(bench: KeptBench) -> None:
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


def test_a_qos_2_message_of_the_client_is_taken_once_over_a_crash(bench: KeptBench) -> None:
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
    bench = KeptBench(tmp_path, service)
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
    bench = KeptBench(tmp_path, service)
    writer = bench.connect("writer", expiry=HOUR)
    writer.send(Publish("rule/t", b"x", 2, packet_id=9))
    service.taken[0].settle(0x97, "full")
    answer = writer.only()
    assert isinstance(answer, PubRec)
    assert answer.reason_code == 0x97
    bench.crash(RecordingService("rule/#"))
    assert bench.found.incoming == []


def test_subscriptions_come_back_with_their_options(bench: KeptBench) -> None:
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


def test_retained_messages_come_back_and_deleted_ones_do_not(bench: KeptBench) -> None:
    writer = bench.connect("writer")
    for topic, payload in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("b", b"")):
        writer.send(Publish(topic, payload, 0, retain=True))
    expiring = Properties(message_expiry_interval=10, user_properties=[("k", "v")])
    writer.send(Publish("d", b"5", 1, retain=True, packet_id=1, properties=expiring))
    assert writer.only() == PubAck(1)
    bench.crash(down_ms=4_000)
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


def test_message_expiry_runs_on_while_the_broker_is_down(bench: KeptBench) -> None:
    reader(bench)
    writer = bench.connect("writer")
    for n, seconds in enumerate((5, 60), start=1):
        expiry = Properties(message_expiry_interval=seconds)
        writer.send(Publish("t", b"%d" % n, 1, packet_id=n, properties=expiry))
    bench.flush()
    bench.crash(down_ms=20_000)
    assert bench.broker.stats.dropped_expired == 1
    (publish,) = back(bench)
    assert isinstance(publish, Publish)
    assert (publish.payload, publish.properties.message_expiry_interval) == (b"2", 40)
    bench.flush()
    bench.crash()
    assert [row.message.payload for row in bench.found.deliveries] == [b"2"]


def test_a_message_for_many_is_stored_once(bench: KeptBench) -> None:
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


def test_what_a_full_queue_drops_is_dropped_on_disk_too(tmp_path: Path) -> None:
    limits = BrokerLimits(max_queued_messages=2, when_queue_full=QueueFull.DROP_OLDEST)
    bench = KeptBench(tmp_path, limits=limits)
    reader(bench)
    writer = bench.connect("writer")
    for n in range(4):
        writer.send(Publish("t", b"%d" % n, 1, packet_id=n + 1))
    bench.flush()
    bench.crash()
    assert [p.payload for p in back(bench) if isinstance(p, Publish)] == [b"2", b"3"]


def test_shared_subscriptions_keep_their_group_over_a_restart(bench: KeptBench) -> None:
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


# Ends of sessions


def test_sessions_that_expired_meanwhile_are_gone_and_others_go_on_counting(bench: KeptBench) -> None:
    for client_id, expiry in (("short", 10), ("long", 100), ("for ever", 0xFFFFFFFF)):
        bench.connect(client_id, expiry=expiry).drop()
    connected = bench.connect("connected", expiry=10)
    assert not connected.closed
    bench.flush()
    bench.advance(5_000)
    bench.crash(down_ms=30_000)
    assert sorted(bench.broker.sessions) == ["connected", "for ever", "long"]
    bench.advance(9_000)
    assert "connected" in bench.broker.sessions, "its time began with the start"
    bench.advance(2_000)
    assert "connected" not in bench.broker.sessions
    bench.advance(53_000)
    assert "long" in bench.broker.sessions
    bench.advance(2_000)
    assert list(bench.broker.sessions) == ["for ever"]
    bench.flush()
    bench.crash()
    assert [row.client_id for row in bench.found.sessions] == ["for ever"]


def test_a_clean_start_ends_the_stored_session_before_it_is_accepted(bench: KeptBench) -> None:
    reader(bench)
    bench.connect("writer").send(Publish("t", b"old", 1, packet_id=1))
    bench.flush()
    bench.connect("reader", clean_start=True)
    bench.crash()
    assert bench.found[:5] == ([], [], [], [], [])


def test_a_session_that_gives_up_its_expiry_is_forgotten_at_once(bench: KeptBench) -> None:
    reader(bench)
    bench.connect("writer").send(Publish("t", b"x", 1, packet_id=1))
    bench.flush()
    peer = bench.connect("reader", clean_start=False, expiry=0)
    assert bench.connack.session_present
    (publish,) = peer.publishes()
    peer.send(PubAck(publish.packet_id))
    bench.flush()
    bench.crash()
    assert bench.found[:5] == ([], [], [], [], [])


def will_at(bench: KeptBench, delay: int, end: Callable[[], None]) -> list[str]:
    """Who sees the will of a client with ``delay``, from before the end to after."""
    reader(bench, client_id="heir")
    properties = Properties(will_delay_interval=delay)
    bench.connect("mortal", expiry=HOUR, will=Will("will", b"gone", 1, properties=properties))
    bench.flush()
    end()
    return [p.topic for p in back(bench, "heir") if isinstance(p, Publish)]


@pytest.mark.parametrize(("delay", "down_ms", "seen"), [(0, 0, ["will"]), (60, 10_000, []), (60, 70_000, [])])
def test_a_will_of_a_client_that_was_connected_counts_from_the_start(
    bench: KeptBench, delay: int, down_ms: int, seen: list[str]
) -> None:
    assert will_at(bench, delay, lambda: bench.crash(down_ms=down_ms)) == seen
    bench.advance(61_000)
    peer = bench.connect("heir", clean_start=False, expiry=HOUR)
    assert [p.topic for p in peer.publishes()] == ["will"]


def test_a_will_whose_delay_passed_during_the_downtime_is_published_on_start(bench: KeptBench) -> None:
    def end() -> None:
        connection = bench.broker.sessions["mortal"].connection
        assert connection is not None
        connection.lost(bench.now)
        bench.flush()
        bench.crash(down_ms=61_000)

    assert will_at(bench, 60, end) == ["will"]
    bench.crash()
    assert all(row.will is None for row in bench.found.sessions)


def test_the_will_of_a_client_that_did_not_come_back_is_of_an_unknown_one(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path / "mqtt", RecordingService("will"))
    for name in ("away", "back"):
        bench.connect(name, expiry=60, will=Will("will", name.encode(), 1))
    after = RecordingService("will")
    bench.crash(after)
    assert [(m.client_id, m.principal) for m in after.taken] == [("away", UNKNOWN), ("back", UNKNOWN)]
    bench.connect("back", expiry=60, clean_start=False, will=Will("will", b"", 1)).drop()
    assert (after.taken[-1].client_id, after.taken[-1].principal) == ("back", None)


def test_wills_from_before_the_start_are_checked_by_the_policy_of_now(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path / "mqtt")
    for name in ("gone", "allowed", "forbidden"):
        bench.connect(name, expiry=60, will=Will(f"will/{name}", b"", 1))
    bench.connect("watcher", expiry=HOUR).subscribe(Subscription("will/#", 1))
    rule = RecordingService("will/#")
    gate = Gate(("allowed", "publish", "will/gone"), ("forbidden", "publish", "will/forbidden"))
    asked: list[tuple[str, str]] = []

    def recall(owner: str, client_id: str) -> Rights | None:
        asked.append((owner, client_id))
        return None if client_id == "gone" else Rights(gate, User(client_id))

    bench.recall = recall
    bench.crash(rule)
    assert asked == [("", "gone"), ("", "allowed"), ("", "forbidden")]
    assert bench.connect("watcher", clean_start=False, expiry=HOUR).topics() == ["will/allowed"]
    assert [(message.publish.topic, message.principal) for message in rule.taken] == [("will/allowed", User("allowed"))]
    assert bench.broker.stats.refused_unauthorized == 2
    peer = bench.connect("gone", expiry=60, clean_start=False, will=Will("will/gone", b"", 1))
    peer.drop()
    assert len(asked) == 3, "who is back has rights of its own"


def test_wills_without_delay_are_published_when_the_node_ends(tmp_path: Path) -> None:
    rule = RecordingService("will/#")
    bench = KeptBench(tmp_path, rule)
    bench.connect("plain", will=Will("will/plain", b""))
    bench.connect("later", expiry=HOUR, will=Will("will/later", b"", properties=Properties(will_delay_interval=5)))
    bench.connect("now", expiry=HOUR, will=Will("will/now", b""))
    bench.broker.publish_wills(bench.now)
    assert [inbound.publish.topic for inbound in rule.taken] == ["will/plain", "will/now"]
    bench.broker.shut_down(bench.now)
    bench.flush()
    assert len(rule.taken) == 2
    again = RecordingService("will/#")
    bench.crash(again, down_ms=6_000)
    assert [inbound.publish.topic for inbound in again.taken] == ["will/later"]


# Where nothing waits for the disk


def test_written_behind_only_who_asks_waits(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path, promise_all=False)
    reader(bench)
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=1), Publish("t", b"x", 1, retain=True, packet_id=2))
    assert writer.take() == [PubAck(1), PubAck(2)]
    asked = Properties(user_properties=[("aio-persistence", "true")])
    writer.send(Publish("kept", b"x", 1, retain=True, packet_id=3, properties=asked))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(3)]
    bench.stalled = False
    reader(bench, client_id="asking", user_properties=[("aio-persistence", "true")])
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=4))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(4)]
    bench.crash()
    assert {row.client_id: row.promised for row in bench.found.sessions} == {"reader": False, "asking": True}


# Failure


def test_after_a_failed_commit_nothing_is_acknowledged_and_the_clients_are_told(bench: KeptBench) -> None:
    reader(bench)
    writer, idle = bench.connect("writer"), bench.connect("idle")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=1))
    bench.flush()
    bench.journal.cut(0)
    bench.journal.failure = "the disk is full"
    bench.broker.storage_failed(bench.now)
    (goodbye,) = writer.take()
    assert isinstance(goodbye, Disconnect)
    assert (goodbye.reason_code, writer.closed) == (0x83, True)
    # Later ones too; what promises nothing goes on.
    writer = bench.connect("writer")
    writer.send(Publish("t", b"x", 1, packet_id=1))
    (goodbye,) = writer.take()
    assert isinstance(goodbye, Disconnect)
    idle.send(Publish("$private", b"x", 1, packet_id=1))
    assert idle.take() == [PubAck(1, 0x10)]
    stranger = bench.open()
    stranger.send(Connect("kept", properties=Properties(session_expiry_interval=HOUR)))
    refusal = stranger.only()
    assert isinstance(refusal, ConnAck)
    assert refusal.reason_code == 0x88


def test_a_connack_that_waited_when_the_disk_failed_is_no_connack(bench: KeptBench) -> None:
    bench.stalled = True
    peer = bench.open()
    peer.send(Connect("c", properties=Properties(session_expiry_interval=HOUR)))
    assert peer.take() == []
    bench.journal.cut(0)
    bench.journal.failure = "the disk is full"
    bench.broker.storage_failed(bench.now)
    assert (peer.take(), peer.closed) == ([], True)


def test_output_that_waits_is_bounded(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path, limits=BrokerLimits(max_output_bytes=10_000))
    peer = bench.connect("reader", expiry=HOUR)
    peer.subscribe(Subscription("#", 2))
    writer = bench.connect("writer")
    bench.stalled = True
    for n in range(20):
        writer.send(Publish("t", bytes(4_000), 2, packet_id=n + 1))
        bench.flush()
    unpromised = peer.connection.unpromised
    assert unpromised is not None
    assert unpromised.bytes < 20_000
    got = 0
    for _ in range(20):
        bench.commit()
        got += len(peer.publishes())
    assert got == 20
