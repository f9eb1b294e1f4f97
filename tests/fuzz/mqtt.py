"""Targets of MQTT: decoder, properties, topic filters, and packets against the broker engine."""

from __future__ import annotations

from itertools import count

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Packet, PingReq, PingResp, Publish
from penstock.mqtt.codec.primitives import Reader, encode_varint
from penstock.mqtt.codec.properties import context_of
from penstock.mqtt.codec.property_blocks import read_properties
from penstock.mqtt.codec.topics import filter_problem, matches, name_problem
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.routing.filter_tree import FilterTree
from tests.fuzz.data_provider import head, in_pieces, records

ROLES = (Role.SERVER, Role.CLIENT, Role.EITHER)
MAX_PACKET = 4096


def _decode(decoder: Decoder, pieces: list[bytes]) -> tuple[list[Packet], str]:
    """All packets in ``pieces``, and the error after them ("": none)."""
    packets: list[Packet] = []
    for piece in pieces:
        try:
            packets += decoder.feed(piece)
        except RemoteProtocolError as error:
            return packets, f"{error.reason_code}: {error}"
        if decoder.error is not None:
            return packets, f"{decoder.error.reason_code}: {decoder.error}"
        assert decoder.buffered < MAX_PACKET, "an incomplete packet is held beyond the limit"
    return packets, ""


def fuzz_decoder(data: bytes) -> object:
    """Role and version (1 byte), sizes of the pieces (1), a stream: in one piece and in several it means the same."""
    (kind, seed), stream = head(data, 2)
    role, version = ROLES[kind % 3], 5 if kind & 8 == 0 else 4

    def decoder() -> Decoder:
        return Decoder(MAX_PACKET, role=role, version=version)

    whole = _decode(decoder(), [stream])
    assert _decode(decoder(), list(in_pieces(stream, seed))) == whole
    if version == 5:
        for packet in whole[0]:
            if getattr(packet, "protocol_version", 5) == 5:
                try:
                    again = encode(packet)
                except LocalProtocolError:
                    continue  # after a CONNECT of MQTT 3.1.1 other rules apply
                assert Decoder(role=role).feed(again) == [packet]
    return whole


def fuzz_properties(data: bytes) -> object:
    """Packet type (1 byte), a property block. Those of a PUBLISH have a decoder of their own: both agree."""
    (kind,), block = head(data, 1)
    wire = encode_varint(len(block)) + block
    try:
        read: object = read_properties(Reader(wire, 0, len(wire)), context_of(kind % 16))
    except RemoteProtocolError as error:
        read = f"{error.reason_code}"
    publish: object
    body = b"\0\1t" + wire
    try:
        (packet,) = Decoder(role=Role.EITHER).feed(b"\x30" + encode_varint(len(body)) + body)
        assert isinstance(packet, Publish)
        publish = packet.properties
        assert Decoder().feed(encode(Publish("t", properties=packet.properties))) == [Publish("t", properties=publish)]
    except RemoteProtocolError as error:
        publish = f"{error.reason_code}"
    if kind % 16 == 3:
        assert isinstance(read, str) == isinstance(publish, str), (read, publish)
        if not isinstance(read, str):
            assert read == publish
    return read, publish


def _is_filter(text: str) -> bool:
    """The rules of MQTT 5.0 sections 4.7 and 4.8.2, level by level."""
    if text.startswith("$share/"):
        _, _, text = text.partition("/")
        name, slash, text = text.partition("/")
        if not name or not slash or "+" in name or "#" in name:
            return False
    levels = text.split("/")
    return (
        len(text) > 0
        and "\0" not in text
        and all(level in {"+", "#"} or not set(level) & {"+", "#"} for level in levels)
        and "#" not in levels[:-1]
    )


def _matches(wanted: list[str], levels: list[str]) -> bool:
    """Recursive definition of matching, without the rule for ``$``."""
    if wanted[:1] == ["#"]:
        return True
    if not wanted or not levels:
        return wanted in (levels, ["#"])
    return wanted[0] in {"+", levels[0]} and _matches(wanted[1:], levels[1:])


def fuzz_topics(data: bytes) -> object:
    """Lines of text, the first a topic name, the others filters: validity and matching by a reference."""
    topic, *filters = data[:512].decode("utf-8", "replace").split("\n")[:20]
    assert (name_problem(topic) is None) == (bool(topic) and not set(topic) & set("+#\0"))
    tree = FilterTree[int]()
    expected = set()
    added: list[tuple[str, str, int]] = []
    for number, text in enumerate(filters):
        assert (filter_problem(text) is None) == (_is_filter(text) and "\0" not in text), text
        if filter_problem(text) is None and not text.startswith("$share/") and name_problem(topic) is None:
            tree.set(text, f"{number}", number)
            added.append((text, f"{number}", number))
            reference = _matches(text.split("/"), topic.split("/"))
            if topic.startswith("$") and text[0] in "+#":
                reference = False
            assert matches(text, topic) == reference, (text, topic)
            if reference:
                expected.add(number)
    found = tree.match(topic) if name_problem(topic) is None else []
    assert sorted(found) == sorted(expected)
    for each in added:
        assert tree.remove(*each)
    assert len(tree) == 0
    return sorted(found)


class _Client:
    """A connection of the broker, whose output is decoded in the version that the client chose."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self.decoder = Decoder(role=Role.CLIENT)
        self.received: list[Packet] = []
        self.closed = False

    def read(self, data: bytes) -> None:
        # CONNACK of MQTT 3.1.1 has two bytes, one of MQTT 5 at least three.
        if not self.received and data[:2] == b"\x20\x02":
            self.decoder.version = 4
        self.received += self.decoder.feed(data)
        assert self.decoder.error is None


def fuzz_broker(data: bytes) -> object:
    """Limits (1 byte), then records: bytes for one of four connections, time that passes, a lost connection.

    Nothing but packets comes out, nothing after a close, queues keep their limits, and the broker still serves others.
    """
    (kind,), rest = head(data, 1)
    limits = BrokerLimits(
        max_packet_size=(200, MAX_PACKET)[kind & 1],
        receive_maximum=(2, 10)[kind >> 1 & 1],
        max_topic_aliases=(3, 65_535)[kind >> 2 & 1],
        max_queued_messages=(5, 100)[kind >> 3 & 1],
    )
    ids = count(1)
    broker = Broker(limits, new_client_id=lambda: f"assigned-{next(ids)}")
    clients: dict[int, _Client] = {}
    by_connection: dict[object, _Client] = {}
    every: list[_Client] = []
    now = 1000

    def client(slot: int) -> _Client:
        found = clients.get(slot)
        if found is None or found.closed:
            connection = broker.open(f"c{slot}", now)
            assert connection is not None
            found = clients[slot] = by_connection[connection] = _Client(connection)
            every.append(found)
        return found

    def flush() -> None:
        for _ in range(1000):
            outputs = broker.flush(now)
            if not outputs:
                return
            for connection, written, close in outputs:
                peer = by_connection[connection]
                assert not peer.closed or not written, "nothing is sent after the close"
                if written:
                    peer.read(written)
                if close and not peer.closed:
                    peer.closed = True
                    peer.connection.lost(now)
        raise AssertionError("the output has no end")

    for number, content in records(rest):
        peer = client(number & 3)
        if number & 0x40:
            now += int.from_bytes(content[:3], "big")
            broker.tick(now)
        elif number & 0x80:
            peer.closed = True
            peer.connection.lost(now)
        else:
            for piece in in_pieces(content, number) if number & 4 else [content]:
                if not peer.closed:
                    peer.connection.receive(piece, now, 1_000_000 + now)
                    while peer.connection.unread:
                        peer.connection.proceed(now, 1_000_000 + now)
                if number & 8:
                    flush()
        flush()
        for session in broker.sessions.values():
            assert session.queued() <= limits.max_queued_messages
    assert len(broker.sessions) <= len(every)
    last = client(4)
    last.connection.receive(b"\x10\x12\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x05after\xc0\x00", now, now)
    flush()
    assert PingResp() in last.received, last.received
    assert PingReq() not in last.received
    return [each.received for each in every]
