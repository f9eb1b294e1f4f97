"""Without disk space, messages that must be stored are refused, and all others are delivered."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, Publish, PubRec, SubAck, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from tests.engine.mqtt.persistent_harness import HOUR, PersistentBench

WHY = "no space"


@pytest.fixture
def bench(tmp_path: Path) -> PersistentBench:
    return PersistentBench(tmp_path)


def test_messages_to_store_are_refused_with_0x97_until_there_is_space(bench: PersistentBench) -> None:
    kept, plain = bench.connect("kept", expiry=HOUR), bench.connect("plain")
    kept.subscribe(Subscription("kept/#", 2))
    plain.subscribe(Subscription("#", 2))
    writer = bench.connect("writer", request_problem_information=1)
    assert writer.send(Publish("plain/old", b"x", 1, retain=True, packet_id=1)).only() == PubAck(1)
    bench.broker.refuse_stored(WHY)
    plain.take()
    refused = [
        (Publish("kept/a", b"x", 1, packet_id=2), PubAck(2, 0x97)),
        (Publish("kept/a", b"x", 2, packet_id=3), PubRec(3, 0x97)),
        (Publish("plain/new", b"x", 1, retain=True, packet_id=4), PubAck(4, 0x97)),
    ]
    for publish, answer in refused:
        found = writer.send(publish).only()
        assert isinstance(found, PubAck | PubRec)
        assert (type(found), found.packet_id, found.reason_code) == (type(answer), answer.packet_id, 0x97)
        assert found.properties.reason_string == WHY
    assert writer.send(Publish("plain/new", b"x", retain=True)).take() == []
    assert bench.broker.stats.refused_out_of_space == 4
    assert (plain.take(), kept.take(), bench.broker.retained.count) == ([], [], 1), "what is refused reaches nobody"
    # What needs no space, or frees it.
    assert writer.send(Publish("plain/a", b"1", 1, packet_id=5)).only() == PubAck(5)
    assert writer.send(Publish("kept/a", b"2")).take() == []
    assert writer.send(Publish("plain/old", b"", 1, retain=True, packet_id=6)).only() == PubAck(6)
    assert [publish.payload for publish in plain.publishes()] == [b"1", b"2", b""]
    assert [publish.payload for publish in kept.publishes()] == [b"2"]
    assert bench.broker.retained.count == 0
    bench.broker.refuse_stored("")
    assert writer.send(Publish("kept/a", b"3", 1, packet_id=7)).only() == PubAck(7)


def test_publishes_are_refused_even_after_accepted_ones(bench: PersistentBench) -> None:
    kept, writer = bench.connect("kept", expiry=HOUR), bench.connect("writer", request_problem_information=1)
    kept.subscribe(Subscription("#", 1))
    for number in range(1, 6):
        assert writer.send(Publish("a", b"x", 1, packet_id=number)).only() == PubAck(number)
    bench.broker.refuse_stored(WHY)
    codes = writer.send(*(Publish("a", b"x", 1, packet_id=number) for number in range(6, 9))).take()
    assert [ack.reason_code for ack in codes if isinstance(ack, PubAck)] == [0x97] * 3
    assert {ack.properties.reason_string for ack in codes if isinstance(ack, PubAck)} == {WHY}


def test_messages_for_a_shared_subscription_with_a_persistent_member_are_stored(bench: PersistentBench) -> None:
    bench.connect("kept", expiry=HOUR).subscribe(Subscription("$share/g/#", 1))
    bench.connect("plain").subscribe(Subscription("$share/g/#", 1))
    bench.broker.refuse_stored(WHY)
    ack = bench.connect("writer").send(Publish("a", b"x", 1, packet_id=1)).only()
    assert isinstance(ack, PubAck)
    assert ack.reason_code == 0x97


def test_mqtt_311_has_no_code_so_its_publisher_is_disconnected_and_keeps_the_message(bench: PersistentBench) -> None:
    bench.connect("kept", expiry=HOUR).subscribe(Subscription("#", 1))
    bench.broker.refuse_stored(WHY)
    writer = bench.connect("writer", version=4)
    assert writer.send(Publish("a", b"x", 1, packet_id=1)).take() == []
    assert writer.closed
    assert bench.ended == [0x97]


def test_without_commits_what_waits_for_one_is_refused_and_the_rest_is_answered(bench: PersistentBench) -> None:
    """A full etcd: an answer that waits for a commit would hold all later output of the connection."""
    kept, plain = bench.connect("kept", expiry=HOUR), bench.connect("plain")
    assert plain.send(Publish("old", b"x", 1, retain=True, packet_id=1)).only() == PubAck(1)
    bench.stalled = True
    bench.broker.refuse_stored(WHY)
    bench.broker.refuse_changes(WHY)
    assert kept.send(Subscribe(1, [Subscription("a", 1), Subscription("b", 1)])).only() == SubAck(1, [0x97, 0x97])
    assert plain.send(Subscribe(2, [Subscription("a", 1)])).only() == SubAck(2, [1])
    assert kept.send(Publish("a", b"1", 1, packet_id=2)).only() == PubAck(2)
    assert [publish.payload for publish in plain.publishes()] == [b"1"]
    deletion = plain.send(Publish("old", b"", 1, retain=True, packet_id=3)).only()
    assert isinstance(deletion, PubAck)
    assert (deletion.reason_code, bench.broker.retained.count) == (0x97, 1)
    # A new persistent session, the end of one, and one of MQTT 3.1.1, where the code is 3 (unavailable).
    for client_id, expiry, version, code in (("new", HOUR, 5, 0x97), ("kept", None, 5, 0x97), ("old", None, 4, 0x88)):
        peer = bench.open()
        if version != 5:
            peer.speak_311()
        expires = Properties(session_expiry_interval=expiry)
        peer.send(Connect(client_id, version == 5, properties=expires, protocol_version=version))
        bench.flush()
        refused = peer.only()
        assert isinstance(refused, ConnAck)
        assert (refused.reason_code, peer.closed) == (code, True)
    assert not kept.closed, "a refused CONNECT does not take over the session"
    bench.connect("other")
    assert bench.connack.reason_code == 0
    bench.stalled = False
    bench.broker.refuse_stored("")
    bench.broker.refuse_changes("")
    assert kept.send(Subscribe(4, [Subscription("a", 1)])).only() == SubAck(4, [1])
    bench.connect("new", expiry=HOUR)
    assert bench.connack.reason_code == 0
