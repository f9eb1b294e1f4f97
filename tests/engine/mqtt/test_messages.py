"""Messages through the broker: QoS, ordering, limits, retained, expiry, options [MQTT 5.0 3.3, 3.8, 4.3 to 4.9]."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Disconnect,
    Packet,
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
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from tests.engine.mqtt.harness import Bench, RecordingService


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 100, 200, 2000])
@pytest.mark.parametrize("properties", [Properties(), Properties(content_type="t" * 40, message_expiry_interval=60)])
def test_a_message_to_many_is_what_each_would_get_alone(qos: int, size: int, properties: Properties) -> None:
    """Receivers of every kind: it is encoded once for most of them."""
    clients: list[dict[str, Any]] = [{}, {}, {"version": 4}, {"topic_alias_maximum": 5}, {"maximum_packet_size": 150}]
    subscriptions = [(2, 0), (1, 0), (0, 0), (2, 3)]

    def received(kinds: list[tuple[dict[str, Any], int, int]]) -> list[list[Packet]]:
        bench = Bench()
        peers = []
        for number, (client, granted, identifier) in enumerate(kinds):
            peers.append(bench.connect(f"c{number}", **client))
            peers[-1].subscribe(Subscription("a/b", granted), identifier=0 if client.get("version") else identifier)
        sender = bench.connect("p")
        sender.send(Publish("a/b", bytes(size), qos, packet_id=7, properties=properties))
        sender.send(Publish("a/b", bytes(size), qos, packet_id=8, properties=properties))
        return [peer.take() for peer in peers]

    kinds = [(client, *subscription) for client in clients for subscription in subscriptions]
    assert received(kinds) == [received([kind])[0] for kind in kinds]


@pytest.mark.parametrize(
    ("published", "granted", "delivered"),
    [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 1), (1, 2, 1), (2, 0, 0), (2, 1, 1), (2, 2, 2)],
)
def test_delivery_qos_is_the_lower(published: int, granted: int, delivered: int) -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    assert subscriber.subscribe(Subscription("a/+", granted)) == [granted]
    sender = bench.connect("p").send(Publish("a/b", b"x", published, packet_id=7 if published else 0))
    (publish,) = subscriber.publishes()
    assert (publish.topic, publish.payload, publish.qos, publish.dup) == ("a/b", b"x", delivered, False)
    assert sender.take() == [[], [PubAck(7)], [PubRec(7)]][published]


def test_a_publish_without_subscribers_returns_no_matching_subscribers() -> None:
    peer = Bench().connect().send(Publish("a", b"", 1, packet_id=1))
    assert peer.only() == PubAck(1, 0x10)


def test_properties_pass_unchanged_and_in_order() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    properties = Properties(
        payload_format_indicator=1,
        content_type="application/json",
        response_topic="r/s",
        correlation_data=bytes(range(16)),
        user_properties=[("__ts", "1"), ("k", "b"), ("k", "a"), ("k", "b"), ("$high_priority", "")],
        message_expiry_interval=10,
    )
    bench.connect("p").send(Publish("a", b"{}", 1, packet_id=1, properties=properties))
    (publish,) = subscriber.publishes()
    assert publish.properties == properties


def test_order_is_kept_and_identifiers_are_free() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    sender = bench.connect("p")
    sender.send(*(Publish("a", str(n).encode(), 1, packet_id=n) for n in range(1, 101)))
    got = subscriber.publishes()
    assert [p.payload for p in got] == [str(n).encode() for n in range(1, 101)]
    assert len({p.packet_id for p in got}) == 100
    assert [p.packet_id for p in sender.take() if isinstance(p, PubAck)] == list(range(1, 101))


def test_receive_maximum_of_the_client() -> None:
    bench = Bench()
    subscriber = bench.connect("s", receive_maximum=2)
    subscriber.subscribe("a", Subscription("zero", 0))
    sender = bench.connect("p")
    sender.send(*(Publish("a", str(n).encode(), 1, packet_id=n) for n in range(1, 6)), Publish("zero", b""))
    got = subscriber.publishes()
    assert [p.payload for p in got] == [b"1", b"2", b""], "QoS 0 is not held back"
    subscriber.send(PubAck(got[1].packet_id))
    assert [p.payload for p in subscriber.publishes()] == [b"3"]
    subscriber.send(PubAck(4711))
    assert subscriber.take() == []


def test_receive_maximum_of_the_broker() -> None:
    service = RecordingService("a")
    bench = Bench(service, limits=BrokerLimits(receive_maximum=2))
    peer = bench.connect()
    peer.send(*(Publish("a", b"", 1, packet_id=n) for n in (1, 2)))
    assert peer.take() == []
    peer.send(Publish("a", b"", 1, packet_id=3))
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x93


def test_offline_session_gets_qos_1_later_and_unacknowledged_again_with_dup() -> None:
    bench = Bench()
    subscriber = bench.connect("s", expiry=100)
    subscriber.subscribe("a")
    sender = bench.connect("p")
    sender.send(Publish("a", b"1", 1, packet_id=1), Publish("a", b"2", 1, packet_id=2))
    first, second = subscriber.publishes()
    subscriber.send(PubAck(first.packet_id))
    subscriber.drop()
    sender.send(Publish("a", b"3", 1, packet_id=3), Publish("a", b"lost", 0))
    again = bench.connect("s", clean_start=False, expiry=100)
    assert bench.connack.session_present
    got = again.publishes()
    assert [(p.payload, p.dup) for p in got] == [(b"2", True), (b"3", False)]
    assert got[0].packet_id == second.packet_id
    assert bench.broker.stats.dropped_offline == 1
    again.send(*(PubAck(p.packet_id) for p in got))
    again.drop()
    assert bench.connect("s", clean_start=False).take() == [], "acknowledged is never sent again"


def test_a_smaller_receive_maximum_after_the_reconnect() -> None:
    bench = Bench()
    subscriber = bench.connect("s", expiry=100)
    subscriber.subscribe("a")
    bench.connect("p").send(*(Publish("a", str(n).encode(), 1, packet_id=n) for n in range(1, 5)))
    assert len(subscriber.publishes()) == 4
    subscriber.drop()
    again = bench.connect("s", clean_start=False, expiry=100, receive_maximum=1)
    order = []
    while got := again.publishes():
        (publish,) = got
        order.append(publish.payload)
        again.send(PubAck(publish.packet_id))
    assert order == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [(QueueOverflowPolicy.DROP_NEWEST, [b"1", b"2"]), (QueueOverflowPolicy.DROP_OLDEST, [b"3", b"4"])],
)
def test_a_full_queue(policy: QueueOverflowPolicy, kept: list[bytes]) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=2, queue_overflow=policy))
    bench.connect("s", expiry=100).subscribe("a")
    bench.peers[next(iter(bench.peers))].drop()
    bench.connect("p").send(*(Publish("a", str(n).encode(), 1, packet_id=n) for n in range(1, 5)))
    assert [p.payload for p in bench.connect("s", clean_start=False).publishes()] == kept
    assert bench.broker.stats.dropped_queue_full == 2


def test_a_queue_is_bounded_in_bytes() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_bytes=250))
    subscriber = bench.connect("s", expiry=100)
    subscriber.subscribe("a")
    subscriber.drop()
    bench.connect("p").send(*(Publish("a", bytes(100), 1, packet_id=n) for n in range(1, 5)))
    assert len(bench.connect("s", clean_start=False).publishes()) == 2


def test_a_full_transport_makes_messages_wait() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a", Subscription("b", 0))
    subscriber.connection.pause(bench.now)
    bench.connect("p").send(Publish("a", b"1", 1, packet_id=1), Publish("b", b"0"), Publish("a", b"2", 1, packet_id=2))
    assert subscriber.take() == []
    assert bench.broker.measure().queued == 3
    subscriber.connection.unpause(bench.now)
    assert [p.payload for p in subscriber.publishes()] == [b"1", b"2", b"0"]
    assert bench.broker.measure().queued == 0


def test_maximum_packet_size_of_the_client() -> None:
    bench = Bench()
    packet = Publish("a", b"x" * 100, 1, packet_id=1)
    size = len(encode(packet))
    for maximum, expected in ((size, 1), (size - 1, 0)):
        subscriber = bench.connect("s", maximum_packet_size=maximum)
        subscriber.subscribe("a")
        bench.connect("p").send(packet)
        assert len(subscriber.publishes()) == expected
        assert bench.broker.measure().inflight == expected
        bench.connect("p2").send(Publish("a", b"small", 1, packet_id=1))
        assert len(subscriber.publishes()) == 1


def test_too_large_for_the_broker() -> None:
    peer = Bench(limits=BrokerLimits(max_packet_size=100)).connect().send_bytes(b"\x30\x63")
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x95


def test_no_local_and_overlapping_subscriptions() -> None:
    bench = Bench()
    peer = bench.connect("c")
    peer.subscribe(Subscription("a/#", 1, no_local=True), identifier=1)
    peer.send(Publish("a/b", b"own"))
    assert peer.take() == []
    bench.connect("d").send(Publish("a/b", b"foreign"))
    assert [p.properties.subscription_identifiers for p in peer.publishes()] == [[1]]
    peer.subscribe(Subscription("a/b", 0), identifier=2)
    peer.send(Publish("a/b", b"own", 1, packet_id=9))
    own, ack = peer.take()
    assert isinstance(own, Publish)
    assert (own.qos, own.properties.subscription_identifiers) == (0, [2])
    assert ack == PubAck(9)
    bench.connect("d").send(Publish("a/b", b"foreign", 1, packet_id=1))
    (publish,) = peer.publishes()
    assert publish.qos == 1, "the highest QoS of the subscriptions that match"
    assert sorted(publish.properties.subscription_identifiers) == [1, 2]


def test_no_local_does_not_withhold_retained_messages_of_the_client_itself() -> None:
    """As in Mosquitto: the option concerns messages when they are published."""
    peer = Bench().connect("c")
    peer.send(Publish("a/b", b"own", retain=True))
    peer.subscribe(Subscription("a/#", no_local=True))
    assert [p.retain for p in peer.publishes()] == [True]


def test_a_message_after_the_subscription_is_not_sent_as_retained_again() -> None:
    """Its subscription waits until the retained messages of another one are sent."""
    bench = Bench()
    sender = bench.connect("p")
    sender.send(Publish("a/1", b"1", 1, retain=True, packet_id=1), Publish("a/2", b"2", 1, retain=True, packet_id=2))
    peer = bench.connect("s", receive_maximum=1)
    peer.subscribe(Subscription("a/#", 1), Subscription("b/#", 1))
    (first,) = peer.publishes()
    sender.send(Publish("b/1", b"3", 1, retain=True, packet_id=3))
    found, sent = [first], [first]
    while sent:
        peer.send(PubAck(sent[0].packet_id))
        sent = peer.publishes()
        found += sent
    assert [(p.topic, p.retain) for p in found] == [("a/1", True), ("b/1", False), ("a/2", True)]


def test_retain_as_published() -> None:
    bench = Bench()
    plain, keeping = bench.connect("s"), bench.connect("k")
    plain.subscribe("a")
    keeping.subscribe(Subscription("a", retain_as_published=True))
    bench.connect("p").send(Publish("a", b"1", retain=True), Publish("a", b"2"))
    assert [p.retain for p in plain.publishes()] == [False, False]
    assert [p.retain for p in keeping.publishes()] == [True, False]


def test_retained_messages_and_retain_handling() -> None:
    bench = Bench()
    sender = bench.connect("p")
    sender.send(
        Publish("a/1", b"old", retain=True),
        Publish("a/1", b"new", 1, retain=True, packet_id=1, properties=Properties(user_properties=[("k", "v")])),
        Publish("a/2", b"x", retain=True),
        Publish("a/2", b"", retain=True),
        Publish("a/3", b"not retained"),
        Publish("$a/1", b"hidden", retain=True),
    )
    peer = bench.connect("s")
    for handling, times in ((0, 1), (0, 1), (1, 0), (2, 0)):
        peer.subscribe(Subscription("a/#", 1, retain_handling=handling), identifier=3)
        got = peer.publishes()
        assert len(got) == times
        for publish in got:
            assert (publish.topic, publish.payload, publish.qos, publish.retain) == ("a/1", b"new", 1, True)
            assert publish.properties.subscription_identifiers == [3]
            assert publish.properties.user_properties == [("k", "v")]
            peer.send(PubAck(publish.packet_id))
    peer.subscribe(Subscription("+/1", 0, retain_handling=1))
    assert [(p.topic, p.qos) for p in peer.publishes()] == [("a/1", 0)]
    peer.subscribe("#")
    assert peer.topics() == ["a/1"]


def test_retained_messages_are_bounded() -> None:
    bench = Bench(limits=BrokerLimits(max_retained_messages=1))
    watcher = bench.connect("w")
    watcher.subscribe("#")
    peer = bench.connect()
    peer.send(
        Publish("a", b"1", 1, retain=True, packet_id=1),
        Publish("b", b"1", 1, retain=True, packet_id=2),
        Publish("a", b"2", 1, retain=True, packet_id=3),
    )
    assert peer.take() == [PubAck(1), PubAck(2, 0x97), PubAck(3)]
    assert watcher.topics() == ["a", "a"], "a refused message is not delivered either"


def test_message_expiry_counts_down_and_deletes() -> None:
    bench = Bench()
    subscriber = bench.connect("s", expiry=1000)
    subscriber.subscribe("a")
    subscriber.drop()
    for seconds in (60, 40):
        bench.connect("p").send(
            Publish("a", b"", 1, packet_id=1, properties=Properties(message_expiry_interval=seconds, content_type="x"))
        )
    bench.advance(40_500)
    (publish,) = bench.connect("s", clean_start=False, expiry=1000).publishes()
    assert publish.properties == Properties(message_expiry_interval=20, content_type="x")
    assert bench.broker.stats.dropped_expired == 1


def test_messages_with_expiry_zero_reach_connected_clients() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    bench.connect("p").send(Publish("a", b"", 1, packet_id=1, properties=Properties(message_expiry_interval=0)))
    assert len(subscriber.publishes()) == 1


def test_retained_messages_expire() -> None:
    bench = Bench()
    bench.connect("p").send(Publish("a", b"x", retain=True, properties=Properties(message_expiry_interval=5)))
    bench.advance(4_001)
    peer = bench.connect("s")
    peer.subscribe("a")
    assert peer.publishes()[0].properties.message_expiry_interval == 1
    bench.advance(1_000)
    peer.subscribe("#")
    assert peer.take() == []
    assert bench.broker.measure().retained == 0


def test_refused_filters_are_answered_one_by_one() -> None:
    bench = Bench(limits=BrokerLimits(max_subscriptions=2))
    peer = bench.connect()
    codes = peer.subscribe("a", "a/" * 200, "$share/g/a", "b", "c", "a")
    assert codes == [1, 0x8F, 1, 0x97, 0x97, 1]
    assert bench.broker.stats.refused_subscriptions == 2


def test_subscribe_and_unsubscribe_in_one_piece() -> None:
    bench = Bench()
    peer = bench.connect()
    peer.send(Subscribe(1, [Subscription("a"), Subscription("b", 0)]), Unsubscribe(2, ["a", "zzz", "b/"]))
    assert peer.take() == [SubAck(1, [1, 0]), UnsubAck(2, [0, 0x11, 0x11])]
    bench.connect("p").send(Publish("a", b""), Publish("b", b""))
    assert peer.topics() == ["b"]


def test_unknown_identifiers_of_qos_2() -> None:
    peer = Bench().connect().send(PubRel(5), PubRec(6), PubComp(7))
    assert peer.take() == [PubComp(5, 0x92), PubRel(6, 0x92)]


@pytest.mark.parametrize("reason_code", [0x80, 0x87, 0x97])
def test_a_pubrec_of_failure_for_an_unknown_identifier_has_no_answer(reason_code: int) -> None:
    """PUBREL answers a PUBREC below 0x80 [MQTT-4.3.3-4]."""
    peer = Bench().connect().send(PubRec(6, reason_code), PingReq())
    assert peer.take() == [PingResp()]


def test_wildcards_do_not_reach_dollar_topics() -> None:
    bench = Bench()
    peer = bench.connect()
    peer.subscribe("#", "+/x")
    bench.connect("p").send(Publish("$other/x", b""), Publish("a/x", b""))
    assert peer.topics() == ["a/x"]
    peer.subscribe("$other/#")
    bench.connect("p").send(Publish("$other/x", b""))
    assert peer.topics() == ["$other/x"]


def test_one_message_to_many_with_identifiers_of_their_own() -> None:
    bench = Bench()
    peers = [bench.connect(f"s{n}") for n in range(5)]
    for n, peer in enumerate(peers):
        peer.subscribe("a", identifier=n + 200)
    properties = Properties(user_properties=[("k", "v" * 200)])
    bench.connect("p").send(Publish("a", b"x", 1, packet_id=1, properties=properties))
    for n, peer in enumerate(peers):
        (publish,) = peer.publishes()
        assert publish.properties.subscription_identifiers == [n + 200]
        assert publish.properties.user_properties == properties.user_properties


def test_packet_identifiers_go_round() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    assert subscriber.connection.session is not None
    subscriber.connection.session.inflight._last = 65_534
    sender = bench.connect("p")
    for n in range(1, 5):
        sender.send(Publish("a", b"", 1, packet_id=n))
    assert [p.packet_id for p in subscriber.publishes()] == [65_535, 1, 2, 3]


def test_an_answer_of_the_node_waits_like_any_message() -> None:
    bench = Bench()
    peer = bench.connect("c", expiry=100, receive_maximum=1)
    peer.subscribe(Subscription("answers/c", 1))
    for n in range(3):
        assert bench.broker.respond("c", "answers/c", b"%d" % n, b"\0", 0, bench.now)
    (first,) = peer.publishes()
    peer.drop()
    back = bench.connect("c", expiry=100, clean_start=False)
    again = back.publishes()
    assert [(message.topic, message.payload) for message in again] == [("answers/c", b"%d" % n) for n in range(3)]
    assert again[0].packet_id == first.packet_id
