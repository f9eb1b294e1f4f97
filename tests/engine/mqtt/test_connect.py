"""CONNECT, takeover, sessions, keep alive, DISCONNECT [MQTT 5.0 sections 3.1, 3.2, 3.14, 4.1]."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.primitives import encode_varint
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench


def test_connack_announces_what_differs_from_the_protocols_defaults() -> None:
    bench = Bench(limits=BrokerLimits(receive_maximum=10, max_packet_size=5000))
    bench.connect()
    assert bench.connack == ConnAck(
        properties=Properties(receive_maximum=10, maximum_packet_size=5000, topic_alias_maximum=64)
    )


def test_connack_has_the_limits_of_now() -> None:
    bench = Bench(limits=BrokerLimits(receive_maximum=10))
    for most in (10, 20, 20):
        bench.broker.limits.receive_maximum = most
        bench.connect()
        assert bench.connack.properties.receive_maximum == most
    bench.broker.limits.max_topic_aliases = 0
    bench.connect()
    assert bench.connack == ConnAck(
        properties=Properties(receive_maximum=20, maximum_packet_size=bench.broker.limits.max_packet_size)
    )


def test_an_empty_client_id_is_assigned_and_unique() -> None:
    bench = Bench()
    bench.connect("assigned-1")
    bench.connect("")
    assert bench.connack.properties.assigned_client_identifier == "assigned-2"


def test_server_keep_alive_and_session_expiry_are_lowered() -> None:
    bench = Bench(limits=BrokerLimits(max_keep_alive_s=30, max_session_expiry_s=100, require_keep_alive=True))
    bench.connect(keep_alive=60, expiry=200)
    assert bench.connack.properties.server_keep_alive == 30
    assert bench.connack.properties.session_expiry_interval == 100
    bench.connect(keep_alive=0)
    assert bench.connack.properties.server_keep_alive == 30


@pytest.mark.parametrize(
    "packet",
    [
        PingReq(),
        Publish("a", b""),
        PubAck(1),
        PubRec(1),
        PubRel(1),
        PubComp(1),
        Subscribe(1, [Subscription("a")]),
        Unsubscribe(1, ["a"]),
        Disconnect(),
        Auth(),
    ],
    ids=lambda packet: type(packet).__name__,
)
def test_packets_before_connect_close_the_connection_without_a_response(packet: Packet) -> None:
    peer = Bench().open().send(packet)
    assert peer.take() == []
    assert peer.closed


def test_no_connect_in_time() -> None:
    bench = Bench(limits=BrokerLimits(connect_timeout_ms=5_000))
    peer = bench.open()
    bench.advance(4_999)
    assert not peer.closed
    bench.advance(1)
    assert peer.closed


def test_a_second_connect_is_a_protocol_error() -> None:
    peer = Bench().connect().send(Connect("c"))
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x82
    assert peer.closed


def test_malformed_connect_is_answered_with_connack() -> None:
    peer = Bench().open().send_bytes(bytes.fromhex("100d00044d5154540503000000 0000".replace(" ", "")))
    packet = peer.only()
    assert isinstance(packet, ConnAck)
    assert packet.reason_code == 0x81
    assert peer.closed


@pytest.mark.parametrize("name", [b"MQTT", b"MQIsdp", b"MQTX", b"", b"x" * 300], ids=repr)
@pytest.mark.parametrize("level", [0, 2, 3, 4, 5, 6, 0x83, 0x85, 0xFF])
def test_other_protocol_names_and_levels(name: bytes, level: int) -> None:
    """An unknown level is answered in the form of 3.1.1, which every client knows: CONNACK with return code 1.

    A wrong name gets no answer [MQTT-3.1.4-1 of 3.1.1], except with level 5, where the standard allows 0x84.
    """
    if name == b"MQTT" and level in (4, 5):
        return
    bench = Bench()
    body = len(name).to_bytes(2, "big") + name + bytes((level, 2, 0, 0, 0, 0))
    bench.open().send_bytes(b"\x10" + encode_varint(len(body)) + body)
    ((_, data, close),) = bench.broker.flush(bench.now)
    assert close
    if level == 5:
        assert data[0] == 0x20
        assert data[3] == 0x84
    elif name in (b"MQTT", b"MQIsdp") and level != 4:
        assert data.hex() == "20020001"
    else:
        assert data == b""


def test_a_malformed_connect_of_a_bridge_has_no_answer() -> None:
    bench = Bench()
    body = b"\x00\x04MQTT" + bytes((0x84, 3, 0, 0, 0, 0))  # the reserved flag
    bench.open().send_bytes(bytes((0x10, len(body))) + body)
    ((_, data, close),) = bench.broker.flush(bench.now)
    assert (data, close) == (b"", True)


@pytest.mark.parametrize("level", [0, 3, 6, 0x84], ids=hex)
def test_a_second_connect_of_another_level_is_a_protocol_error(level: int) -> None:
    body = b"\x00\x04MQTT" + bytes((level, 2, 0, 0, 0, 0))
    packet = Bench().connect().send_bytes(bytes((0x10, len(body))) + body).only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x82


def test_enhanced_authentication_is_refused() -> None:
    peer = Bench().open().send(Connect("c", properties=Properties(authentication_method="SCRAM")))
    packet = peer.only()
    assert isinstance(packet, ConnAck)
    assert packet.reason_code == 0x8C
    assert peer.closed
    peer = Bench().connect().send(Auth(0x19, Properties(authentication_method="SCRAM")))
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x82


def test_takeover_ends_the_older_connection() -> None:
    bench = Bench()
    old = bench.connect("c", expiry=60)
    new = bench.connect("c", clean_start=False, expiry=60)
    assert bench.connack.session_present
    assert old.only() == Disconnect(0x8E)
    assert old.closed
    assert new.send(PingReq()).only() == PingResp()


def test_session_present_is_right() -> None:
    bench = Bench()
    bench.connect("c", clean_start=False, expiry=60).drop()
    present = [bench.connack.session_present]
    for clean_start, wait in ((False, 0), (True, 0), (False, 60_000), (False, 60_001)):
        bench.advance(wait)
        bench.connect("c", clean_start=clean_start, expiry=60).drop()
        present.append(bench.connack.session_present)
    assert present == [False, True, False, True, False]


def test_without_expiry_the_session_ends_with_the_connection() -> None:
    bench = Bench()
    peer = bench.connect("c")
    peer.subscribe("a")
    peer.drop()
    assert bench.broker.measure().sessions == 0
    assert bench.broker.measure().subscriptions == 0


def test_a_session_may_last_for_ever() -> None:
    bench = Bench()
    bench.connect("c", expiry=0xFFFFFFFF).drop()
    assert bench.broker.next_deadline() is None
    bench.connect("c", clean_start=False)
    assert bench.connack.session_present


def test_disconnect_may_change_the_expiry() -> None:
    bench = Bench()
    bench.connect("c", expiry=60).send(Disconnect(0, Properties(session_expiry_interval=0)))
    assert bench.broker.measure().sessions == 0
    bench.connect("c", expiry=10).send(Disconnect(0, Properties(session_expiry_interval=100)))
    bench.flush()
    bench.advance(99_000)
    bench.connect("c", clean_start=False, expiry=0)
    assert bench.connack.session_present


def test_disconnect_may_not_invent_an_expiry() -> None:
    peer = Bench().connect("c").send(Disconnect(0, Properties(session_expiry_interval=10)))
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x82


def test_keep_alive_is_one_and_a_half_times() -> None:
    bench = Bench()
    peer = bench.connect(keep_alive=10)
    bench.advance(14_999)
    assert peer.send(PingReq()).only() == PingResp()
    bench.advance(14_999)
    assert not peer.closed
    bench.advance(1)
    assert peer.only() == Disconnect(0x8D)
    assert peer.closed


def test_keep_alive_zero_never_ends() -> None:
    bench = Bench()
    peer = bench.connect(keep_alive=0)
    bench.advance(10_000_000)
    assert not peer.closed


def test_nothing_is_handled_after_disconnect() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    bench.connect("c").send(Disconnect(), Publish("a", b"late"))
    assert subscriber.take() == []


def test_packets_before_an_error_are_handled() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    peer = bench.connect("c").send_bytes(encode(Publish("a", b"x")) + b"\x00")
    assert subscriber.topics() == ["a"]
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x81
    assert bench.ended == [0x81]


def test_too_many_connections_and_sessions() -> None:
    bench = Bench(limits=BrokerLimits(max_connections=2, max_sessions=1))
    bench.connect("a")
    second = bench.open().send(Connect("b"))
    packet = second.only()
    assert isinstance(packet, ConnAck)
    assert packet.reason_code == 0x97
    bench.open()
    assert bench.broker.open("test", 0) is None


def test_a_client_that_takes_no_connack_is_closed() -> None:
    peer = Bench().open().send(Connect("c", properties=Properties(maximum_packet_size=5)))
    assert peer.take() == []
    assert peer.closed


def test_shut_down() -> None:
    bench = Bench()
    peers = [bench.connect(name) for name in "ab"]
    bench.broker.shut_down(bench.now)
    for peer in peers:
        assert peer.only() == Disconnect(0x8B)
        assert peer.closed


@pytest.mark.parametrize("clean", [True, False])
def test_will(*, clean: bool) -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will/#")
    properties = Properties(user_properties=[("k", "1"), ("k", "2")], content_type="t", will_delay_interval=0)
    peer = bench.connect("c", will=Will("will/c", b"gone", 1, properties=properties))
    if clean:
        peer.send(Disconnect())
        assert watcher.take() == []
    else:
        peer.drop()
        (publish,) = watcher.publishes()
        assert (publish.payload, publish.qos, publish.retain) == (b"gone", 1, False)
        assert publish.properties == Properties(user_properties=[("k", "1"), ("k", "2")], content_type="t")


def test_will_after_disconnect_0x04_protocol_error_and_keep_alive() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    bench.connect("c", will=Will("will", b"1")).send(Disconnect(4))
    bench.connect("c", will=Will("will", b"2")).send_bytes(b"\x00")
    bench.connect("c", will=Will("will", b"3"), keep_alive=1)
    bench.advance(1_500)
    assert [publish.payload for publish in watcher.publishes()] == [b"1", b"2", b"3"]


def test_retained_will() -> None:
    bench = Bench()
    bench.connect("c", will=Will("will", b"x", retain=True)).drop()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    assert watcher.publishes()[0].retain


def test_will_delay_is_cancelled_by_a_reconnect() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    will = Will("will", b"x", properties=Properties(will_delay_interval=10))
    bench.connect("c", expiry=100, will=will).drop()
    bench.advance(10_000)
    bench.connect("c", clean_start=False, expiry=100, will=will).drop()
    bench.advance(10_000)
    assert watcher.take() == []
    bench.advance(1)
    assert watcher.topics() == ["will"]
    bench.advance(200_000)
    assert watcher.take() == []


def test_will_delay_ends_with_the_session() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    will = Will("will", b"x", properties=Properties(will_delay_interval=100))
    bench.connect("c", expiry=10, will=will).drop()
    bench.advance(10_001)
    assert watcher.topics() == ["will"]
    bench.connect("c", expiry=50, will=will).drop()
    bench.connect("c", clean_start=True).send(Disconnect())
    assert watcher.topics() == ["will"]
