"""MQTT 3.1.1 on the same broker: its sessions, its silences, and both versions talking to each other."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    PingReq,
    PingResp,
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
from penstock.mqtt.engine.model.limits import BrokerLimits, RateLimitPolicy
from tests.engine.mqtt.harness import Bench, Peer, RecordingService


def old(bench: Bench, client_id: str = "old", *, clean: bool = True, keep_alive: int = 0) -> Peer:
    return bench.connect(client_id, clean_start=clean, keep_alive=keep_alive, version=4)


def test_clean_session_and_its_opposite() -> None:
    bench = Bench()
    old(bench).drop()
    assert bench.broker.sessions == {}
    present = []
    for clean in (False, False, True):
        old(bench, clean=clean).drop()
        present.append(bench.connack.session_present)
        if not clean:
            assert bench.broker.next_deadline() is None, "it lasts without end"
    assert present == [False, True, False]
    assert bench.broker.measure().sessions == 0


def test_the_expiry_of_a_persistent_session_may_be_limited() -> None:
    bench = Bench(limits=BrokerLimits(max_session_expiry_s=60))
    old(bench, clean=False).drop()
    bench.advance(60_000)
    assert bench.broker.measure().sessions == 1
    bench.advance(1)
    assert bench.broker.measure().sessions == 0


@pytest.mark.parametrize("first", [4, 5])
def test_one_session_under_both_versions(first: int) -> None:
    bench = Bench()
    versions = (first, 9 - first, first)
    sender = bench.connect("p")
    for turn, version in enumerate(versions):
        peer = bench.connect("c", clean_start=False, version=version, expiry=1000)
        assert bench.connack.session_present == (turn > 0)
        if turn == 0:
            peer.subscribe("a")
        assert len(peer.publishes()) == (turn > 0)
        if turn:
            peer.send(PubAck(turn))
        peer.drop()
        sender.send(Publish("a", b"x", 1, packet_id=1, properties=Properties(content_type="t")))


def test_every_packet_is_answered_in_its_own_form() -> None:
    bench = Bench()
    peer = old(bench)
    assert bench.connack == ConnAck()
    peer.send(
        Subscribe(1, [Subscription("a", 2), Subscription("a/" * 200, 0)]),
        Publish("nobody", b"", 1, packet_id=2),
        Publish("nobody", b"", 2, packet_id=3),
        PubRel(3),
        PubRel(99),
        Unsubscribe(4, ["a", "none"]),
        PingReq(),
    )
    assert peer.take() == [
        SubAck(1, [2, 0x80]),
        PubAck(2),
        PubRec(3),
        PubComp(3),
        PubComp(99),
        UnsubAck(4, []),
        PingResp(),
    ]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_between_the_versions(qos: int) -> None:
    bench = Bench()
    new_client, old_client = bench.connect("new", topic_alias_maximum=5), old(bench)
    new_client.subscribe(Subscription("#", 2), identifier=7)
    old_client.subscribe(Subscription("#", 2))
    properties = Properties(user_properties=[("k", "v")], message_expiry_interval=60, content_type="t")
    new_client.send(Publish("größe/1", b"new", qos, packet_id=qos, properties=properties))
    old_client.send(Publish("größe/2", b"old", qos, packet_id=qos))
    of_old = [p for p in old_client.take() if isinstance(p, Publish)]
    of_new = [p for p in new_client.take() if isinstance(p, Publish)]
    assert [(p.topic, p.payload, p.qos, p.optional_properties) for p in of_old] == [
        ("größe/1", b"new", qos, None),
        ("größe/2", b"old", qos, None),
    ]
    assert [(p.topic, p.payload, p.qos) for p in of_new] == [("größe/1", b"new", qos), ("größe/2", b"old", qos)]
    assert of_new[0].properties.user_properties == [("k", "v")]
    assert of_new[1].properties == Properties(subscription_identifiers=[7], topic_alias=2)


def test_a_message_expires_inside_the_broker() -> None:
    bench = Bench()
    peer = old(bench, clean=False)
    peer.subscribe("a")
    peer.drop()
    bench.connect("p").send(
        Publish("a", b"short", 1, packet_id=1, properties=Properties(message_expiry_interval=1)),
        Publish("a", b"long", 1, packet_id=2, properties=Properties(message_expiry_interval=100)),
    )
    bench.advance(2_000)
    assert [p.payload for p in old(bench, clean=False).publishes()] == [b"long"]


def test_retained_messages_come_with_every_subscribe() -> None:
    bench = Bench()
    bench.connect("p").send(Publish("a", b"kept", retain=True))
    peer = old(bench)
    for _ in range(2):
        peer.subscribe(Subscription("a", 0))
        assert [(p.payload, p.retain) for p in peer.publishes()] == [(b"kept", True)]
    bench.connect("p").send(Publish("a", b"live", retain=True))
    assert [p.retain for p in peer.publishes()] == [False]


def test_redelivery_with_dup() -> None:
    bench = Bench()
    peer = old(bench, clean=False)
    peer.subscribe(Subscription("a", 2))
    bench.connect("p").send(Publish("a", b"1", 1, packet_id=1), Publish("a", b"2", 2, packet_id=2))
    one, two = peer.publishes()
    peer.send(PubRec(two.packet_id)).drop()
    again = old(bench, clean=False)
    released, repeated = again.take()
    assert released == PubRel(two.packet_id)
    assert isinstance(repeated, Publish)
    assert (repeated.packet_id, repeated.dup) == (one.packet_id, True)


def test_a_shared_subscription_is_one_for_3_1_1_too() -> None:
    bench = Bench()
    members = [old(bench, f"m{n}") for n in range(2)]
    for member in members:
        assert member.subscribe("$share/g/a") == [1]
    bench.connect("p").send(*(Publish("a", b"", 1, packet_id=n) for n in range(1, 5)))
    assert [len(member.publishes()) for member in members] == [2, 2]


@pytest.mark.parametrize(
    "cause", ["takeover", "shutdown", "keep alive", "malformed", "second connect", "kicked", "auth", "with properties"]
)
def test_a_server_closes_without_a_disconnect(cause: str) -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    peer = bench.open().speak_311()
    peer.send(Connect("c", True, 10, will=Will("will", b"x"), protocol_version=4)).take()
    if cause == "takeover":
        bench.connect("c")
    elif cause == "shutdown":
        bench.broker.disconnect("c", 0x8B, bench.now)
    elif cause == "keep alive":
        bench.advance(15_000)
    elif cause == "malformed":
        peer.send_bytes(b"\x00")
    elif cause == "second connect":
        peer.send(Connect("c", protocol_version=4))
    elif cause == "auth":
        peer.send_bytes(b"\xf0\x00")
    elif cause == "with properties":
        peer.send_bytes(b"\x40\x04\x00\x01\x00\x00")
    else:
        bench.broker.disconnect("c", 0x98, bench.now, "maintenance")
    assert peer.take() == []
    assert peer.closed
    assert watcher.topics() == ["will"]


def test_disconnect_removes_the_will() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    peer = bench.open().speak_311()
    peer.send(Connect("c", will=Will("will", b"x"), protocol_version=4), Disconnect())
    assert watcher.take() == []


def test_an_empty_client_id_needs_a_clean_session() -> None:
    bench = Bench()
    refused = bench.open().speak_311().send(Connect("", False, protocol_version=4))
    assert refused.take() == [ConnAck(reason_code=0x85)]
    assert refused.closed
    peer = bench.open().speak_311().send(Connect("", True, protocol_version=4))
    assert peer.take() == [ConnAck()]
    assert list(bench.broker.sessions) == ["assigned-1"]


def test_a_malformed_connect_is_closed_without_connack() -> None:
    bench = Bench()
    for data in ("100d00044d515454040300000001 63", "100f00044d5154540442003c000163 0000"):
        peer = bench.open().send_bytes(bytes.fromhex(data.replace(" ", "")))
        assert bench.broker.flush(bench.now) == [(peer.connection, b"", True)]


def test_its_keep_alive_cannot_be_lowered() -> None:
    bench = Bench(limits=BrokerLimits(max_keep_alive_s=10, require_keep_alive=True))
    peer, forever = old(bench, "a", keep_alive=100), old(bench, "b", keep_alive=0)
    ended = []
    for wait in (149_999, 1):
        bench.advance(wait)
        ended.append((peer.closed, forever.closed))
    assert ended == [(False, False), (True, False)]


def test_a_3_1_1_client_has_no_receive_maximum() -> None:
    service = RecordingService("a")
    bench = Bench(service, limits=BrokerLimits(receive_maximum=2))
    peer = old(bench)
    peer.send(*(Publish("a", b"", 1, packet_id=n) for n in range(1, 6)))
    assert len(service.taken) == 5
    holds = [peer.connection.holds]
    for message in service.taken:
        message.settle()
    holds.append(peer.connection.holds)
    assert holds == [1, 0], "it is read again when there is room"
    assert peer.take() == [PubAck(n) for n in range(1, 6)]


def test_a_refused_message_is_answered_as_usual() -> None:
    bench = Bench(
        limits=BrokerLimits(max_retained_messages=0, max_publish_rate=2, rate_limit_action=RateLimitPolicy.REFUSE)
    )
    peer = old(bench)
    peer.send(*(Publish("a", b"x", 1, retain=True, packet_id=n) for n in range(1, 4)))
    assert peer.take() == [PubAck(1), PubAck(2), PubAck(3)]
    assert (bench.broker.measure().retained, bench.broker.stats.rate_exceeded) == (0, 1)
