"""Statements that bind a client, shown by our client's engine where its own tests do not."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Packet,
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
from penstock.mqtt.engine.client.client import ClientEngine, ClientState
from penstock.mqtt.engine.client.events import Closed


def started(connect: Connect | None = None) -> ClientEngine:
    engine = ClientEngine(connect or Connect("c", properties=Properties(session_expiry_interval=60)))
    engine.begin(0)
    return engine


def accepted(properties: Properties | None = None) -> ClientEngine:
    engine = started()
    engine.take_output()
    engine.receive(encode(ConnAck(properties=properties or Properties())), 0)
    return engine


def sent(engine: ClientEngine) -> list[Packet]:
    return Decoder().feed(engine.take_output())


def test_connect_is_sent_before_pending_packets() -> None:
    engine = ClientEngine(Connect("c"))
    engine.publish(Publish("a", b"", 1), "p", 0)
    engine.subscribe([Subscription("a")], Properties(), "s", 0)
    engine.begin(0)
    assert sent(engine) == [Connect("c")]
    engine.receive(encode(ConnAck()), 0)
    assert {type(packet) for packet in sent(engine)} == {Publish, Subscribe}


def test_a_session_that_we_do_not_have_ends_the_connection() -> None:
    engine = started()
    engine.take_output()
    events = engine.receive(encode(ConnAck(session_present=True)), 0)
    assert isinstance(events[-1], Closed)
    assert engine.state is ClientState.OFFLINE


@pytest.mark.parametrize("maximum", [None, 0])
def test_no_alias_where_the_server_allows_none(maximum: int | None) -> None:
    engine = accepted(Properties(topic_alias_maximum=maximum))
    for n in range(3):
        engine.publish(Publish("a", b"", 1), n, 0)
    packets = sent(engine)
    assert len(packets) == 3
    assert all(isinstance(p, Publish) and p.topic == "a" and p.optional_properties is None for p in packets)


def test_with_the_quota_used_up_everything_else_still_leaves() -> None:
    engine = accepted(Properties(receive_maximum=1))
    for n in range(3):
        engine.publish(Publish("a", b"", 1), n, 0)
    engine.subscribe([Subscription("a")], Properties(), "s", 0)
    engine.unsubscribe(["a"], Properties(), "u", 0)
    assert [type(packet) for packet in sent(engine)] == [Publish, Subscribe, Unsubscribe]


def test_identifiers_are_free_and_not_zero() -> None:
    engine = accepted()
    for n in range(5):
        engine.publish(Publish("a", b"", 1 + n % 2), n, 0)
        engine.subscribe([Subscription(f"s{n}")], Properties(), f"s{n}", 0)
        engine.unsubscribe([f"s{n}"], Properties(), f"u{n}", 0)
    ids = [packet.packet_id for packet in sent(engine) if isinstance(packet, Publish | Subscribe | Unsubscribe)]
    assert len(ids) == len(set(ids)) == 15
    assert 0 not in ids
    engine.receive(encode(SubAck(ids[1], [1])) + encode(UnsubAck(ids[2], [0])), 0)


def test_pubrels_leave_in_the_order_of_the_pubrecs() -> None:
    engine = accepted()
    for n in range(4):
        engine.publish(Publish("a", b"", 2), n, 0)
    ids = [packet.packet_id for packet in sent(engine) if isinstance(packet, Publish)]
    order = [ids[2], ids[0], ids[3], ids[1]]
    engine.receive(b"".join(encode(PubRec(packet_id)) for packet_id in order), 0)
    assert sent(engine) == [PubRel(packet_id) for packet_id in order]
    engine.receive(b"".join(encode(PubComp(packet_id)) for packet_id in ids), 0)
    assert sent(engine) == []


def test_only_a_pubrec_below_0x80_is_answered_with_pubrel() -> None:
    engine = accepted()
    engine.receive(encode(PubRec(9, 0x97)) + encode(PubRec(8)), 0)
    assert sent(engine) == [PubRel(8, 0x92)], "neither identifier is known"


def test_messages_leave_again_in_their_order() -> None:
    engine = accepted()
    for n in range(6):
        engine.publish(Publish("a", b"%d" % n, 1 + n % 2), n, 0)
    first = [p.payload for p in sent(engine) if isinstance(p, Publish)]
    engine.lost()
    engine.begin(1)
    engine.take_output()
    engine.receive(encode(ConnAck(session_present=True)), 1)
    again = [(p.payload, p.dup) for p in sent(engine) if isinstance(p, Publish)]
    assert again == [(payload, True) for payload in first]
