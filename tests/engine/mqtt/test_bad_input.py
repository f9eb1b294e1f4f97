"""Bytes and values of clients that mean no good, or know no better: the right answer, and everything goes on."""

from __future__ import annotations

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as Properties5

from penstock.mqtt.codec.encoder import encode
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
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.primitives import encode_varint
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer
from tests.engine.mqtt.test_access import Gate
from tests.unit.mqtt.codec.vectors import Vector, load


def code(peer: Peer) -> int:
    packet = peer.take()[-1]
    assert isinstance(packet, ConnAck | Disconnect), packet
    assert peer.closed
    return packet.reason_code


def text(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def subscribe(*filters: bytes, version: int = 5) -> bytes:
    body = b"\x00\x01" + (b"\x00" if version == 5 else b"") + b"".join(text(f) + b"\x01" for f in filters)
    return b"\x82" + encode_varint(len(body)) + body


def others_go_on(bench: Bench) -> bool:
    peer = bench.connect("another")
    return peer.send(PingReq()).only() == PingResp()


MALFORMED = [vector for vector in load("malformed") if vector.role != "client"]


@pytest.mark.parametrize("vector", [v for v in MALFORMED if v.data[0] >> 4 not in (0, 1)], ids=lambda v: v.name)
def test_every_malformed_packet_on_an_accepted_connection(vector: Vector) -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    peer = bench.connect("c", will=Will("will", b""))
    sent_by_servers = vector.data[0] >> 4 in (2, 9, 11, 13)
    assert code(peer.send_bytes(vector.data)) in ((0x82, 0x81) if sent_by_servers else (vector.reason_code,))
    assert watcher.topics() == ["will"], "it counts as lost"
    assert others_go_on(bench)


@pytest.mark.parametrize("vector", [v for v in MALFORMED if v.data[0] == 0x10], ids=lambda v: v.name)
def test_every_malformed_connect(vector: Vector) -> None:
    bench = Bench()
    peer = bench.open()
    if vector.data[8:9] == b"\x06":
        peer.speak_311()  # an unknown level is answered in that form
    packets = peer.send_bytes(vector.data).take()
    assert peer.closed
    assert bench.broker.sessions == {}
    for packet in packets:
        assert isinstance(packet, ConnAck)
        assert packet.reason_code == vector.reason_code
    assert others_go_on(bench)


def test_256_megabytes_announced_and_nothing_sent() -> None:
    bench = Bench()
    assert code(bench.connect("c").send_bytes(b"\x30\xff\xff\xff\x7f")) == 0x95
    stranger = bench.open().send_bytes(b"\x10\xff\xff\xff\x7f")
    assert stranger.take() == []
    assert stranger.closed
    assert others_go_on(bench)


def property_bytes(identifier: int, kind: str) -> bytes:
    """A property with a value that would be good where it belongs."""
    if "Byte" in kind and "Integer" not in kind:
        value = b"\x01"
    elif kind == "Variable Byte Integer":
        value = b"\x05"
    else:
        value = {
            "Two Byte Integer": b"\x00\x05",
            "Four Byte Integer": b"\x00\x00\x10\x00",
            "Binary Data": text(b"x"),
            "UTF-8 Encoded String": text(b"x"),
            "UTF-8 String Pair": text(b"x") + text(b"y"),
        }[kind]
    return bytes((identifier,)) + value


def with_property(packet_type: int, prop: bytes) -> bytes:
    """A packet of a client that would be good but for ``prop``."""
    block = encode_varint(len(prop)) + prop
    connect = text(b"MQTT") + b"\x05"
    bodies = {
        PacketTypes.CONNECT: connect + b"\x02\x00\x00" + block + text(b"c"),
        PacketTypes.WILLMESSAGE: connect + b"\x06\x00\x00\x00" + text(b"c") + block + text(b"w") + text(b""),
        PacketTypes.PUBLISH: text(b"a") + block,
        PacketTypes.SUBSCRIBE: b"\x00\x01" + block + text(b"a") + b"\x00",
        PacketTypes.UNSUBSCRIBE: b"\x00\x01" + block + text(b"a"),
        PacketTypes.DISCONNECT: b"\x00" + block,
        PacketTypes.AUTH: b"\x19" + block,
    }
    body = bodies.get(packet_type, b"\x00\x01\x00" + block)
    flags = 2 if packet_type in (PacketTypes.SUBSCRIBE, PacketTypes.UNSUBSCRIBE, PacketTypes.PUBREL) else 0
    first = PacketTypes.CONNECT if packet_type == PacketTypes.WILLMESSAGE else packet_type
    return bytes((first << 4 | flags,)) + encode_varint(len(body)) + body


THEIRS = Properties5(PacketTypes.PUBLISH)
"""Another implementation's table of properties: which packets may carry which."""
CLIENTS_PACKETS = {
    name: getattr(PacketTypes, name)
    for name in (
        "CONNECT", "WILLMESSAGE", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP",
        "SUBSCRIBE", "UNSUBSCRIBE", "DISCONNECT", "AUTH",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS_PACKETS)
def test_every_property_in_the_wrong_packet_and_in_the_right_one_twice(name: str) -> None:
    """The connection ends with what is malformed (0x81) or against the protocol (0x82); nothing is taken over."""
    packet_type = CLIENTS_PACKETS[name]
    first = packet_type in (PacketTypes.CONNECT, PacketTypes.WILLMESSAGE)
    good = with_property(packet_type, property_bytes(THEIRS.names["User Property"], "UTF-8 String Pair"))
    bench = Bench()
    peer = bench.open() if first else bench.connect("c")
    answers = peer.send_bytes(good).take()
    refusals = [p for p in answers if isinstance(p, ConnAck | Disconnect) and p.reason_code >= 0x80]
    # AUTH is good only after a CONNECT with a method; of the others it is the property that is wrong below.
    assert len(refusals) == (packet_type == PacketTypes.AUTH)
    wrong = 0
    for identifier, (kind, carriers) in THEIRS.properties.items():
        prop = property_bytes(identifier, THEIRS.types[kind])
        repeats = identifier == THEIRS.names["User Property"]
        if packet_type in carriers:
            if repeats:
                continue
            prop += prop
        wrong += 1
        bench = Bench()
        watcher = bench.connect("w")
        watcher.subscribe("#")
        peer = bench.open() if first else bench.connect("c")
        assert code(peer.send_bytes(with_property(packet_type, prop))) in (0x81, 0x82), (name, identifier)
        assert watcher.take() == []
        assert others_go_on(bench)
    assert wrong == 26, "all but user properties"


def test_a_response_topic_that_the_publisher_may_not_use_is_left_to_who_answers() -> None:
    """It is only text for the broker; who publishes the response needs the right to do so."""
    bench = Bench(access=Gate(("ann", "publish", "secret"), ("bob", "publish", "secret")))
    responder = bench.connect("r", username="bob")
    responder.subscribe("a")
    properties = Properties(response_topic="secret", correlation_data=b"1")
    asking = bench.connect("c", username="ann").send(Publish("a", b"", 1, packet_id=1, properties=properties))
    assert asking.only() == PubAck(1)
    (request,) = responder.publishes()
    assert request.properties.response_topic == "secret"
    (answer,) = responder.send(Publish("secret", b"", 1, packet_id=1)).take()
    assert isinstance(answer, PubAck)
    assert answer.reason_code == 0x87


def test_topics_at_their_limits() -> None:
    bench = Bench(limits=BrokerLimits(max_topic_levels=128))
    watcher = bench.connect("w")
    watcher.subscribe("#")
    long, deep = "x" * 65_535, "/".join("x" * 201)
    peer = bench.connect("c")
    peer.send(Publish(long, b"", 1, packet_id=1), Publish(deep, b"", 1, packet_id=2), Publish("/", b"", 1, packet_id=3))
    assert peer.take() == [PubAck(1), PubAck(2, 0x90), PubAck(3)]
    assert watcher.topics() == [long, "/"]
    assert peer.subscribe(long, deep, "/", "//", "+//+") == [1, 0x8F, 1, 1, 1]


def unsubscribe(version: int, *filters: bytes) -> bytes:
    body = b"\x00\x01" + (b"\x00" if version == 5 else b"") + b"".join(text(f) for f in filters)
    return b"\xa2" + encode_varint(len(body)) + body


ILL_FORMED = ["#/a", "a/#/b", "a#", "a/b#", "##", "a+", "+a/b", "a/++", "", "$share/g/a+"]


@pytest.mark.parametrize("topic_filter", ILL_FORMED)
@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("kind", ["SUBSCRIBE", "UNSUBSCRIBE"])
def test_ill_formed_filters_end_the_connection(topic_filter: str, version: int, kind: str) -> None:
    """Malformed in 5.0, where 0x8F is for well-formed filters; [MQTT-4.7.3-1] with [MQTT-4.8.0-1] in 3.1.1."""
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    peer = bench.connect("c", version=version, will=Will("will", b""))
    filters = (b"fine", topic_filter.encode())
    if kind == "UNSUBSCRIBE":
        peer.send_bytes(unsubscribe(version, *filters))
    else:
        peer.send_bytes(subscribe(*filters, version=version))
    packets = peer.take()
    assert peer.closed
    if version == 5:
        (packet,) = packets
        assert isinstance(packet, Disconnect)
        assert packet.reason_code == 0x81
        assert repr(topic_filter) in (packet.properties.reason_string or "")
    else:
        assert packets == []
    assert watcher.topics() == ["will"], "the connection failed"
    assert bench.broker.measure().subscriptions == 1, "no filter of the packet was granted"


def test_an_error_quotes_the_beginning_of_a_long_filter() -> None:
    (packet,) = Bench().connect("c").send_bytes(subscribe(b"x" * 65_000 + b"#")).take()
    assert isinstance(packet, Disconnect)
    reason = packet.properties.reason_string or ""
    assert "x" * 64 in reason
    assert "[MQTT-4.7.1-1]" in reason
    assert len(reason) < 250


@pytest.mark.parametrize("topic_filter", ["$share/g/#", "$share", "+", "/+/#", "$SYS/+/a b/größe/\U0001f30a"])
def test_filters(topic_filter: str) -> None:
    bench = Bench()
    peer = bench.connect("c").send_bytes(subscribe(topic_filter.encode(), b"fine"))
    ack = peer.take()[0]
    assert isinstance(ack, SubAck)
    assert ack.reason_codes == [1, 1]


@pytest.mark.parametrize("client_id", ["a#b", "+", "/", "$share/x", "\ufeff", "größe", "\U0001f30a", "x" * 65_535])
def test_client_ids_are_just_text(client_id: str) -> None:
    bench = Bench()
    peer = bench.connect(client_id, expiry=100)
    peer.subscribe("a", "$share/g/a")
    peer.drop()
    bench.connect("p").send(Publish("a", b"", 1, packet_id=1))
    assert 1 <= len(bench.connect(client_id, clean_start=False).publishes()) <= 2
    assert bench.connack.session_present


def test_correlation_data_of_64_kilobytes_and_properties_that_fill_the_packet() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("a")
    properties = Properties(
        correlation_data=bytes(65_535), response_topic="r", user_properties=[("k" * 1000, "v" * 1000)] * 100
    )
    bench.connect("c").send(Publish("a", b"", 1, packet_id=1, properties=properties))
    (message,) = watcher.publishes()
    assert message.properties == properties


def test_a_will_to_a_forbidden_topic_or_with_wildcards() -> None:
    bench = Bench(access=Gate(("anonymous", "publish", "secret")))
    assert code(bench.open().send(Connect("c", will=Will("secret", b"")))) == 0x87
    assert code(bench.open().send(Connect("c", will=Will("$SYS/x", b"")))) == 0x90
    vector = next(v for v in load("malformed") if v.name == "connect-will-topic-wildcard")
    assert code(bench.open().send_bytes(vector.data)) == 0x90
    assert bench.broker.sessions == {}


def test_every_packet_identifier_of_a_client_with_a_quota_of_one() -> None:
    """One message in flight at a time, more messages than there are identifiers."""
    bench = Bench()
    subscriber = bench.connect("s", receive_maximum=1)
    subscriber.subscribe(Subscription("a", 2))
    assert subscriber.connection.session is not None
    subscriber.connection.session.inflight._last = 65_500
    sender = bench.connect("p")
    seen = []
    for n in range(100):
        qos = 1 + n % 2
        sender.send(Publish("a", b"", qos, packet_id=1), PubRel(1))
        (message,) = subscriber.publishes()
        seen.append(message.packet_id)
        if qos == 1:
            subscriber.send(PubAck(message.packet_id))
        else:
            subscriber.send(PubRec(message.packet_id), PubComp(message.packet_id)).take()
    assert seen == [*range(65_501, 65_536), *range(1, 66)]


def test_qos_2_without_ever_a_pubrel() -> None:
    bench = Bench(limits=BrokerLimits(receive_maximum=3))
    watcher = bench.connect("w")
    watcher.subscribe("a")
    peer = bench.connect("c")
    for _ in range(50):
        assert peer.send(Publish("a", b"same", 2, packet_id=5)).only() == PubRec(5)
    assert len(watcher.publishes()) == 1
    peer.send(*(Publish("a", b"more", 2, packet_id=n) for n in (6, 7, 8)))
    assert code(peer) == 0x93


@pytest.mark.parametrize("keep_alive", [0, 1, 65_535])
def test_keep_alives(keep_alive: int) -> None:
    bench = Bench(limits=BrokerLimits(max_keep_alive_s=0))
    peer = bench.connect("c", keep_alive=keep_alive)
    assert bench.connack.properties.server_keep_alive is None
    if keep_alive:
        bench.advance(keep_alive * 1500 - 1)
        assert not peer.closed
        bench.advance(1)
        assert code(peer) == 0x8D
    else:
        bench.advance(10**9)
        assert not peer.closed


def test_takeover_ping_pong_with_messages_loses_none_and_orders_them() -> None:
    bench = Bench()
    sender = bench.connect("p")
    seen: list[int] = []
    peer = bench.connect("same", expiry=60)
    peer.subscribe(Subscription("a", 1))
    for n in range(1, 101):
        sender.send(Publish("a", b"%d" % n, 1, packet_id=n))
        if n % 3 == 0:
            peer = bench.connect("same", clean_start=False, expiry=60)
        seen += [int(p.payload) for p in peer.take() if isinstance(p, Publish)]
    assert list(dict.fromkeys(seen)) == list(range(1, 101))
    assert bench.broker.measure().connections == 2


def test_a_packet_in_pieces_of_one_byte_and_all_at_once() -> None:
    whole = b"".join(
        encode(packet)
        for packet in (
            Connect("c"),
            Subscribe(1, [Subscription("a", 2)]),
            Publish("a", b"x", 2, packet_id=1, properties=Properties(content_type="t")),
            PubRel(1),
            Unsubscribe(2, ["a"]),
            PingReq(),
        )
    )
    answers = []
    for pieces in ([whole], [bytes((byte,)) for byte in whole]):
        peer = Bench().open()
        for piece in pieces:
            peer.send_bytes(piece)
        answers.append([type(packet).__name__ for packet in peer.take()])
    assert answers[0] == answers[1] == ["ConnAck", "SubAck", "Publish", "PubRec", "PubComp", "UnsubAck", "PingResp"]
