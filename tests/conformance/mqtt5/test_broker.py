"""Statements of MQTT 5.0 that no test of the broker's parts shows by itself."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, RecordingService


def test_dup_of_the_publisher_is_not_forwarded() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    bench.connect("p").send(Publish("a", b"", 1, dup=True, packet_id=1))
    assert [p.dup for p in subscriber.publishes()] == [False]


def test_an_identifier_is_free_again_after_its_puback() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    sender = bench.connect("p")
    for n in range(3):
        sender.send(Publish("a", b"%d" % n, 1, dup=n > 0, packet_id=7))
        assert sender.only() == PubAck(7)
    assert [p.payload for p in subscriber.publishes()] == [b"0", b"1", b"2"], "new messages, whatever DUP says"


def test_a_refusal_by_the_subscriber_settles_the_message() -> None:
    bench = Bench()
    subscriber = bench.connect("s", expiry=100)
    subscriber.subscribe("a")
    bench.connect("p").send(Publish("a", b"", 1, packet_id=1))
    (publish,) = subscriber.publishes()
    subscriber.send(PubAck(publish.packet_id, 0x87)).drop()
    assert bench.connect("s", expiry=100, clean_start=False).take() == []


def test_inflight_messages_are_completed_after_unsubscribe() -> None:
    bench = Bench()
    subscriber = bench.connect("s", expiry=100)
    subscriber.subscribe("a")
    sender = bench.connect("p").send(Publish("a", b"begun", 1, packet_id=1))
    assert len(subscriber.publishes()) == 1
    subscriber.send(Unsubscribe(2, ["A"]), Unsubscribe(3, ["a"]))
    assert subscriber.take() == [UnsubAck(2, [0x11]), UnsubAck(3, [0])]
    sender.send(Publish("a", b"late", 1, packet_id=2))
    subscriber.drop()
    again = bench.connect("s", expiry=100, clean_start=False).publishes()
    assert [(p.payload, p.dup) for p in again] == [(b"begun", True)]


def test_a_subscription_is_replaced_without_losing_a_message() -> None:
    bench = Bench()
    subscriber = bench.connect("s", receive_maximum=1)
    subscriber.subscribe("a")
    sender = bench.connect("p")
    sender.send(*(Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 4)))
    (first,) = subscriber.publishes()
    assert subscriber.subscribe(Subscription("a", 0)) == [0]
    sender.send(Publish("a", b"4", 1, packet_id=4))
    got = subscriber.publishes()
    assert [(p.payload, p.qos) for p in got] == [(b"4", 0)], "one subscription, of the new QoS"
    rest = []
    while True:
        subscriber.send(PubAck(first.packet_id))
        if not (more := subscriber.publishes()):
            break
        (first,) = more
        rest.append(first.payload)
    assert rest == [b"2", b"3"]


@pytest.mark.parametrize(
    "client_id", ["a", "0123456789ABCDEFGHIJKLM", "abcdefghijklmnopqrstuvw", "größe/#+", "x" * 65_535]
)
def test_client_identifiers(client_id: str) -> None:
    bench = Bench()
    bench.connect(client_id)
    assert bench.connack.properties.assigned_client_identifier is None
    assert client_id in bench.broker.sessions


def test_response_information_is_not_given() -> None:
    bench = Bench()
    for asked in (0, 1):
        bench.connect(request_response_information=asked)
        assert bench.connack.properties.response_information is None
        assert bench.connack.properties.authentication_method is None
        assert bench.connack.properties.server_keep_alive is None


def test_a_long_reason_string_goes_before_the_packet_does() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect("c", maximum_packet_size=60)
    peer.send(Publish("a", b"", 1, packet_id=1))
    service.taken[0].settle(0x97, "x" * 100)
    assert peer.only() == PubAck(1, 0x97)
    bench.broker.disconnect("c", 0x98, bench.now, "y" * 100)
    assert peer.only() == Disconnect(0x98)
    refused = bench.open().send(
        Connect("d", will=Will("$SYS/w", b"", 2), properties=Properties(maximum_packet_size=10))
    )
    packet = refused.only()
    assert isinstance(packet, ConnAck)
    assert (packet.reason_code, packet.properties) == (0x90, Properties())


def test_order_of_a_topic_holds_for_each_publisher_and_qos() -> None:
    bench = Bench()
    subscriber = bench.connect("s", receive_maximum=2)
    subscriber.subscribe("t")
    senders = [bench.connect(f"p{n}") for n in range(2)]
    for n in range(1, 21):
        for sender in senders:
            sender.send(Publish("t", b"%d" % n, 1, packet_id=n))
    got: list[int] = []
    while more := subscriber.publishes():
        got += [int(p.payload) for p in more]
        subscriber.send(*(PubAck(p.packet_id) for p in more))
    assert got == [n for n in range(1, 21) for _ in senders]


@pytest.mark.parametrize("keep_alive", [0, 60])
def test_a_session_is_not_discarded_while_it_is_connected(keep_alive: int) -> None:
    bench = Bench()
    peer = bench.connect("c", expiry=1, keep_alive=keep_alive)
    peer.subscribe("a")
    bench.advance(30_000)
    bench.connect("p").send(Publish("a", b""))
    assert peer.topics() == ["a"]


def test_no_packet_follows_a_disconnect_of_the_broker() -> None:
    bench = Bench()
    peer = bench.connect("c", expiry=10)
    peer.subscribe("a")
    peer.send(PubAck(1), Connect("c"), PingReq(), Subscribe(2, [Subscription("b")]))
    bench.connect("p").send(Publish("a", b"", 1, packet_id=1))
    (packet,) = peer.take()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x82
    assert peer.closed


@pytest.mark.parametrize(
    "packet", [PingReq(), Subscribe(1, [Subscription("a")]), Unsubscribe(1, ["a"])], ids=lambda p: type(p).__name__
)
def test_nothing_is_held_back_with_the_quota_used_up(packet: Packet) -> None:
    bench = Bench()
    peer = bench.connect("c", receive_maximum=1)
    peer.subscribe("a")
    bench.connect("p").send(*(Publish("a", b"", 1, packet_id=n) for n in (1, 2)))
    assert len(peer.publishes()) == 1
    assert len(peer.send(packet).take()) == 1


def test_bytes_of_an_accepted_and_of_a_refused_connack() -> None:
    bench = Bench()
    peer = bench.open()
    peer.send(Connect("c", clean_start=True))
    ((_, data, close),) = bench.broker.flush(bench.now)
    assert (data[0], data[2], data[3], close) == (0x20, 0, 0, False)
    assert encode(PingResp()) == b"\xd0\x00"
    (connack,) = Decoder().feed(data)
    assert isinstance(connack, ConnAck)
    assert connack.reason_code == 0


def test_response_information_is_returned_on_request() -> None:
    bench = Bench(limits=BrokerLimits(response_information="answers/{clientId}"))
    for asked, given in ((None, None), (0, None), (1, "answers/c")):
        bench.connect("c", request_response_information=asked)
        assert bench.connack.properties.response_information == given


@pytest.mark.parametrize(("size", "code"), [(10, 0), (11, 0x85)])
def test_a_client_identifier_that_is_too_long_is_refused(size: int, code: int) -> None:
    bench = Bench(limits=BrokerLimits(max_client_id_bytes=10))
    peer = bench.open().send(Connect("x" * size))
    packet = peer.only()
    assert isinstance(packet, ConnAck)
    assert packet.reason_code == code
    assert peer.closed == bool(code)


def test_retained_messages_are_always_there_so_announced_as_such() -> None:
    bench = Bench()
    bench.connect("c")
    assert bench.connack.properties.retain_available is None
    assert bench.connack.properties.maximum_qos is None
    assert bench.connack.properties.shared_subscription_available is None
