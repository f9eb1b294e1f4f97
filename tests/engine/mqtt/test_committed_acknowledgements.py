"""Acknowledgements of persistent sessions leave after their commit, and none leaves after a failed commit."""

from __future__ import annotations

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
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits

from .harness import Peer
from .persistent_harness import HOUR, PersistentBench, back, reader


@pytest.fixture
def bench(tmp_path: Path) -> PersistentBench:
    return PersistentBench(tmp_path)


def test_a_puback_waits_for_the_commit_of_the_delivery_to_a_persistent_session(bench: PersistentBench) -> None:
    reader(bench)
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=7), Publish("t", b"y", 2, packet_id=8))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(7), PubRec(8)]


def test_without_a_persistent_subscriber_nothing_is_recorded_and_nothing_waits(bench: PersistentBench) -> None:
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
    assert (bench.journal.waiting, bench.journal.awaited_changes, bench.commits) == (0, 0, 0)


def test_packets_behind_an_uncommitted_acknowledgement_wait_on_its_connection_only(bench: PersistentBench) -> None:
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
def test_answers_in_a_persistent_session_wait_for_its_commit(
    bench: PersistentBench, request_: Packet, answer: Packet
) -> None:
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


def test_answers_that_wait_for_the_next_commit_are_counted(bench: PersistentBench) -> None:
    """Each answer after which its client may send the next request; PUBREL and CONNACK are none."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    bench.journal.answer_waits = count
    peer = bench.connect("c", expiry=HOUR)
    assert counted == 0
    peer.send(Subscribe(1, [Subscription("#", 2)]))
    assert counted == 1
    peer.send(Publish("a", b"", 1, packet_id=2), Publish("b", b"", 2, packet_id=3))
    assert counted == 3
    bench.flush()
    received = [packet for packet in peer.take() if isinstance(packet, Publish)]
    peer.send(PubRel(3))
    assert counted == 4
    peer.send(PubRec(received[-1].packet_id))
    peer.send(Publish("$private", b"", 1, packet_id=4))
    assert counted == 4
    peer.send(Unsubscribe(5, ["#"]))
    assert counted == 5


def test_connack_of_a_persistent_session_waits_for_its_commit(bench: PersistentBench) -> None:
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


def test_a_qos_2_message_reaches_a_persistent_session_only_with_a_committed_identifier(bench: PersistentBench) -> None:
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


def test_a_message_that_was_acknowledged_before_its_commit_is_never_written(bench: PersistentBench) -> None:
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


def test_written_behind_only_who_asks_waits(tmp_path: Path) -> None:
    bench = PersistentBench(tmp_path, durable_acknowledgements=False)
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
    for _ in range(2):  # the second deletion finds no message, but the first may not be on the disk
        writer.send(Publish("kept", b"", 1, retain=True, packet_id=3, properties=asked))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(3), PubAck(3)]
    bench.stalled = False
    reader(bench, client_id="asking", user_properties=[("aio-persistence", "true")])
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=4))
    assert writer.take() == []
    bench.commit()
    assert writer.take() == [PubAck(4)]
    bench.crash()
    assert {row.client_id: row.awaited for row in bench.found.sessions} == {"reader": False, "asking": True}


def test_after_a_failed_commit_nothing_is_acknowledged_and_the_clients_are_disconnected(bench: PersistentBench) -> None:
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


def disconnected_before_its_commit(bench: PersistentBench) -> Peer:
    """A client that the broker disconnects while its PUBACK waits for a commit."""
    reader(bench)
    writer = bench.connect("writer")
    bench.stalled = True
    writer.send(Publish("t", b"x", 1, packet_id=7))
    bench.broker.disconnect("writer", 0x98, bench.now)
    bench.flush()
    return writer


def test_the_end_of_a_connection_does_not_wait_for_a_commit_without_end(bench: PersistentBench) -> None:
    writer = disconnected_before_its_commit(bench)
    bench.advance(4999)
    before = writer.closed
    bench.advance(1)
    assert (before, writer.closed) == (False, True)
    assert writer.take() == [], "the client repeats its message"
    bench.commit()
    bench.stalled = False
    assert [packet.payload for packet in back(bench) if isinstance(packet, Publish)] == [b"x"]


def test_the_end_of_a_connection_waits_for_a_commit(bench: PersistentBench) -> None:
    writer = disconnected_before_its_commit(bench)
    bench.advance(4999)
    bench.commit()
    assert [type(packet) for packet in writer.take()] == [PubAck, Disconnect]
    assert writer.closed


def test_a_connack_that_waited_when_the_disk_failed_is_no_connack(bench: PersistentBench) -> None:
    bench.stalled = True
    peer = bench.open()
    peer.send(Connect("c", properties=Properties(session_expiry_interval=HOUR)))
    assert peer.take() == []
    bench.journal.cut(0)
    bench.journal.failure = "the disk is full"
    bench.broker.storage_failed(bench.now)
    assert (peer.take(), peer.closed) == ([], True)


def test_output_that_waits_is_bounded(tmp_path: Path) -> None:
    bench = PersistentBench(tmp_path, limits=BrokerLimits(max_output_bytes=10_000))
    peer = bench.connect("reader", expiry=HOUR)
    peer.subscribe(Subscription("#", 2))
    writer = bench.connect("writer")
    bench.stalled = True
    for n in range(20):
        writer.send(Publish("t", bytes(4_000), 2, packet_id=n + 1))
        bench.flush()
    uncommitted = peer.connection.uncommitted
    assert uncommitted is not None
    assert uncommitted.bytes < 20_000
    got = 0
    for _ in range(20):
        bench.commit()
        got += len(peer.publishes())
    assert got == 20
