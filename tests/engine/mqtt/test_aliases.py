"""Topic aliases both ways [MQTT 5.0 section 3.3.2.3.4]."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Disconnect, PubAck, Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer


def aliased(topic: str, alias: int, payload: bytes = b"", qos: int = 0) -> Publish:
    return Publish(topic, payload, qos, packet_id=qos, properties=Properties(topic_alias=alias))


def code(peer: Peer) -> int:
    packet = peer.only()
    assert isinstance(packet, Disconnect), packet
    assert peer.closed
    return packet.reason_code


def test_every_alias_of_a_client_up_to_the_maximum() -> None:
    bench = Bench(limits=BrokerLimits(max_topic_aliases=3))
    watcher = bench.connect("w")
    watcher.subscribe(Subscription("#", 1))
    peer = bench.connect("c")
    assert bench.connack.properties.topic_alias_maximum == 3
    for alias in (1, 2, 3):
        peer.send(aliased(f"größe/{alias}", alias), aliased("", alias, b"x", 1))
        assert peer.only() == PubAck(1)
    got = watcher.publishes()
    assert [(p.topic, p.payload) for p in got] == [(f"größe/{n}", x) for n in (1, 2, 3) for x in (b"", b"x")]
    assert {p.properties.topic_alias for p in got} == {None}, "the alias ends here"
    peer.send(aliased("other", 2), aliased("", 2))
    assert watcher.topics() == ["other", "other"], "set anew"


def test_an_aliased_message_is_retained_and_passes_its_properties() -> None:
    bench = Bench()
    peer = bench.connect("c")
    properties = Properties(topic_alias=1, content_type="t", user_properties=[("k", "1"), ("k", "2")])
    peer.send(aliased("a", 1), Publish("", b"kept", retain=True, properties=properties))
    watcher = bench.connect("w")
    watcher.subscribe("a")
    (message,) = watcher.publishes()
    assert message.properties == Properties(content_type="t", user_properties=[("k", "1"), ("k", "2")])


def test_aliases_of_a_client_die_with_the_connection() -> None:
    bench = Bench()
    bench.connect("c", expiry=60).send(aliased("a", 1)).drop()
    peer = bench.connect("c", expiry=60, clean_start=False)
    assert bench.connack.session_present
    assert code(peer.send(aliased("", 1))) == 0x82


@pytest.mark.parametrize(("maximum", "alias"), [(3, 4), (3, 65_535), (0, 1)])
def test_an_alias_above_the_maximum(maximum: int, alias: int) -> None:
    peer = Bench(limits=BrokerLimits(max_topic_aliases=maximum)).connect()
    assert code(peer.send(aliased("a", alias))) == 0x94


def test_a_lower_limit_applies_to_later_connections() -> None:
    bench = Bench(limits=BrokerLimits(max_topic_aliases=3))
    peer = bench.connect()
    bench.broker.limits.max_topic_aliases = 1
    assert peer.send(aliased("a", 3, qos=1)).only() in (PubAck(1), PubAck(1, 0x10))
    bench.connect("later")
    assert bench.connack.properties.topic_alias_maximum == 1


def test_alias_zero_and_one_that_was_never_set() -> None:
    bench = Bench()
    assert code(bench.connect("a").send_bytes(bytes.fromhex("3007000161") + bytes.fromhex("03230000"))) == 0x94
    assert code(bench.connect("b").send(aliased("", 5))) == 0x82
    assert code(bench.connect("c").send_bytes(bytes.fromhex("3003000000"))) == 0x82, "neither topic nor alias"


@pytest.mark.parametrize("maximum", [1, 2, 10])
def test_aliases_towards_a_client(maximum: int) -> None:
    bench = Bench()
    peer = bench.connect("s", topic_alias_maximum=maximum)
    peer.subscribe(Subscription("t/#", 2), identifier=9)
    sender = bench.connect("p")
    for _ in range(2):
        for topic in ("t/1", "t/2", "t/3"):
            sender.send(Publish(topic, b"", 1, packet_id=1), Publish(topic, b"", 0))
    known: dict[int, str] = {}
    topics = []
    for publish in peer.publishes():
        alias = publish.properties.topic_alias
        assert publish.properties.subscription_identifiers == [9]
        if alias is not None:
            assert 1 <= alias <= maximum
            if publish.topic:
                assert alias not in known, "told once"
                known[alias] = publish.topic
            else:
                publish.topic = known[alias]
        assert publish.topic
        topics.append(publish.topic)
    assert topics == ["t/1", "t/1", "t/2", "t/2", "t/3", "t/3"] * 2
    assert len(known) == min(maximum, 3)


@pytest.mark.parametrize("maximum", [None, 0])
def test_no_alias_towards_a_client_that_allows_none(maximum: int | None) -> None:
    bench = Bench()
    peer = bench.connect("s", topic_alias_maximum=maximum)
    peer.subscribe("a")
    bench.connect("p").send(Publish("a"), Publish("a"))
    assert [(p.topic, p.optional_properties) for p in peer.publishes()] == [("a", None)] * 2


def test_a_message_too_large_to_send_sets_no_alias() -> None:
    bench = Bench()
    peer = bench.connect("s", topic_alias_maximum=5, maximum_packet_size=60)
    peer.subscribe("a")
    bench.connect("p").send(Publish("a", bytes(100)), Publish("a", b"1"), Publish("a", b"2"))
    first, second = peer.publishes()
    assert (first.topic, first.properties.topic_alias) == ("a", 1)
    assert (second.topic, second.properties.topic_alias) == ("", 1)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_an_alias_does_not_make_a_message_too_large(room: int) -> None:
    """The alias of "a" is longer than the topic, so with fewer bytes of room only the topic fits."""
    bench = Bench()
    maximum = len(encode(Publish("a", bytes(50), 1, packet_id=1))) + room
    peer = bench.connect("s", topic_alias_maximum=5, maximum_packet_size=maximum)
    peer.subscribe("a")
    for n in (1, 2):
        bench.connect("p").send(Publish("a", bytes(50), 1, packet_id=n))
    seen = [(publish.topic, publish.properties.topic_alias) for publish in peer.publishes()]
    assert seen == ([("a", 1), ("", 1)] if room == 3 else [("a", None)] * 2)
    assert bench.broker.stats.dropped_too_large == 0


def test_redelivered_messages_carry_their_topic_on_a_new_connection() -> None:
    bench = Bench()
    peer = bench.connect("s", topic_alias_maximum=5, expiry=60)
    peer.subscribe("a")
    bench.connect("p").send(*(Publish("a", b"", 1, packet_id=n) for n in (1, 2)))
    assert [p.topic for p in peer.publishes()] == ["a", ""]
    peer.drop()
    again = bench.connect("s", topic_alias_maximum=5, expiry=60, clean_start=False)
    assert [(p.topic, p.dup) for p in again.publishes()] == [("a", True), ("", True)]
    again.drop()
    plain = bench.connect("s", expiry=60, clean_start=False)
    assert [p.topic for p in plain.publishes()] == ["a", "a"]
