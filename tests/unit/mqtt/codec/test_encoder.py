"""Encoded packets have the standard's layout and decode to the same packet."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from librt.strings import BytesWriter

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode, encode_within, head_size, write_publish_head
from penstock.mqtt.codec.packets import (
    Auth,
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
    Will,
)
from penstock.mqtt.codec.primitives import write_two_bytes
from penstock.mqtt.codec.properties import ALLOWED_IN, WILL, Properties, PropertySpec, WireType
from penstock.mqtt.codec.reasons import ALLOWED, PacketType
from tests.unit.mqtt.codec.vectors import ROUND_TRIP_FILES, Vector, parametrize


@parametrize(*ROUND_TRIP_FILES)
def test_vector(vector: Vector) -> None:
    assert vector.packet is not None
    assert encode(vector.packet) == vector.data


text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
topic_name = text.filter(lambda t: t != "" and "+" not in t and "#" not in t)
topic_filter = topic_name | st.sampled_from(["#", "+", "a/+/b", "/#", "$share/g/+/a"])
packet_id = st.integers(1, 65_535)


def _property(spec: PropertySpec, context: int) -> st.SearchStrategy[object]:
    if spec.wire_type is WireType.STRING_PAIR:
        return st.lists(st.tuples(text, text), max_size=3)
    if spec.wire_type is WireType.VARIABLE_BYTE_INTEGER:
        return st.lists(st.integers(spec.low, spec.high), max_size=3 if spec.repeats & context else 1)
    if spec.attribute == "response_topic":
        return st.none() | topic_name
    if spec.wire_type is WireType.STRING:
        return st.none() | text
    if spec.wire_type is WireType.BINARY:
        return st.none() | st.binary(max_size=12)
    high = {WireType.BYTE: 0xFF, WireType.TWO_BYTE_INTEGER: 0xFFFF}.get(spec.wire_type, 0xFFFFFFFF)
    return st.none() | st.integers(spec.low, min(spec.high, high))


def properties_of(context: int) -> st.SearchStrategy[Properties]:
    given_values = {spec.attribute: _property(spec, context) for spec in ALLOWED_IN[context]}

    def build(values: dict[str, Any]) -> Properties:
        if values.get("authentication_method") is None:
            values.pop("authentication_data", None)
        return Properties(**values)

    return st.fixed_dictionaries(given_values).map(build)


def _of(packet_type: PacketType) -> st.SearchStrategy[Properties]:
    return properties_of(1 << packet_type)


def _code(packet_type: PacketType) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(ALLOWED[packet_type]))


will = st.builds(Will, topic_name, st.binary(max_size=20), st.integers(0, 2), st.booleans(), properties_of(WILL))
subscription = st.builds(
    Subscription, topic_filter, st.integers(0, 2), st.just(False), st.booleans(), st.integers(0, 2)
)
packets: st.SearchStrategy[Packet] = st.one_of(
    st.builds(
        Connect,
        text,
        st.booleans(),
        st.integers(0, 65_535),
        st.none() | text,
        st.none() | st.binary(max_size=10),
        st.none() | will,
        _of(PacketType.CONNECT),
    ),
    st.builds(ConnAck, st.just(False), _code(PacketType.CONNACK), _of(PacketType.CONNACK)),
    st.builds(
        Publish,
        topic_name,
        st.binary(max_size=300),
        st.just(0),
        retain=st.booleans(),
        properties=st.none() | _of(PacketType.PUBLISH),
    ),
    st.builds(
        Publish,
        topic_name,
        st.binary(max_size=20),
        st.integers(1, 2),
        retain=st.booleans(),
        dup=st.booleans(),
        packet_id=packet_id,
        properties=_of(PacketType.PUBLISH),
    ),
    st.builds(PubAck, packet_id, _code(PacketType.PUBACK), _of(PacketType.PUBACK)),
    st.builds(PubRec, packet_id, _code(PacketType.PUBREC), _of(PacketType.PUBREC)),
    st.builds(PubRel, packet_id, _code(PacketType.PUBREL), _of(PacketType.PUBREL)),
    st.builds(PubComp, packet_id, _code(PacketType.PUBCOMP), _of(PacketType.PUBCOMP)),
    st.builds(Subscribe, packet_id, st.lists(subscription, min_size=1, max_size=3), _of(PacketType.SUBSCRIBE)),
    st.builds(SubAck, packet_id, st.lists(_code(PacketType.SUBACK), min_size=1), _of(PacketType.SUBACK)),
    st.builds(Unsubscribe, packet_id, st.lists(topic_filter, min_size=1, max_size=3), _of(PacketType.UNSUBSCRIBE)),
    st.builds(UnsubAck, packet_id, st.lists(_code(PacketType.UNSUBACK), min_size=1), _of(PacketType.UNSUBACK)),
    st.builds(Disconnect, _code(PacketType.DISCONNECT), _of(PacketType.DISCONNECT)),
    st.builds(Auth, _code(PacketType.AUTH), _of(PacketType.AUTH)),
)


@given(packets)
def test_round_trip(packet: Packet) -> None:
    assert Decoder().feed(encode(packet)) == [packet]


@pytest.mark.parametrize(
    "packet",
    [
        Publish("a", b"", 3),
        Publish("a", b"", 1),
        Publish("a", b"", 0, dup=True),
        Publish("a\0", b""),
        Publish("\ud800", b""),
        Publish("a" * 65_536, b""),
        Publish("a", b"", properties=Properties(payload_format_indicator=2)),
        Publish("a", b"", properties=Properties(subscription_identifiers=[0])),
        PubAck(0),
        PubAck(65_536),
        PubAck(1, 0x92),
        PubAck(1, 0, Properties(content_type="x")),
        Connect(keep_alive=65_536),
        Connect(properties=Properties(receive_maximum=0)),
        Connect(properties=Properties(receive_maximum=65_536)),
        Subscribe(1, []),
        Subscribe(1, [Subscription("a", 0, retain_handling=3)]),
        Subscribe(1, [Subscription("a")], Properties(subscription_identifiers=[1, 2])),
        Unsubscribe(1, []),
        SubAck(1, [0x10]),
        Disconnect(0x01),
    ],
    ids=repr,
)
def test_packets_that_the_protocol_forbids_are_not_encoded(packet: Packet) -> None:
    with pytest.raises(LocalProtocolError):
        encode(packet)


def test_diagnostics_are_left_out_when_they_make_an_answer_too_large() -> None:
    def answer() -> PubAck:
        return PubAck(1, 0x97, Properties(reason_string="full", user_properties=[("k", "v" * 50)]))

    whole = encode(answer())
    assert encode_within(answer(), len(whole)) == whole
    without_user_properties = encode_within(answer(), len(whole) - 1)
    assert without_user_properties == encode(PubAck(1, 0x97, Properties(reason_string="full")))
    assert encode_within(answer(), 8) == b"\x40\x03\x00\x01\x97"
    assert encode_within(answer(), 4) is None


def test_publish_head_is_the_fixed_header() -> None:
    for first in (0x30, 0x32, 0x33):
        for remaining in (0, 127, 128, 2047, 2048, 16_384, 268_435_455):
            data = encode_head_by_hand(first, remaining)
            out = BytesWriter()
            write_publish_head(out, first, remaining)
            assert out.getvalue() == data
            assert head_size(remaining) == len(data)


@pytest.mark.parametrize("packet_id", [1, 255, 256, 32_768, 65_535])
def test_packet_identifiers_are_two_bytes(packet_id: int) -> None:
    out = BytesWriter()
    write_two_bytes(out, packet_id)
    assert out.getvalue() == packet_id.to_bytes(2, "big")


def encode_head_by_hand(first: int, remaining: int) -> bytes:
    out = [first]
    while True:
        remaining, low = divmod(remaining, 128)
        out.append(low + (128 if remaining else 0))
        if not remaining:
            return bytes(out)
