"""Shapes: a decoder that has seen like messages decodes the next one to what a new decoder makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec import decoder as decoders
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import LikeProperties, Properties
from penstock.mqtt.codec.shapes import Form, LikePublish

_TEXTS = st.text(st.sampled_from("aé\x7f:0"), max_size=4)


def _request(number: int, *, stamp: str | None = None, topic: str = "a/b", qos: int = 1, expiry: int = 10) -> Publish:
    properties = Properties(
        payload_format_indicator=0,
        message_expiry_interval=expiry,
        content_type="application/octet-stream",
        response_topic="answers/here",
        correlation_data=number.to_bytes(16, "big"),
        user_properties=[("__ts", stamp or f"{number:020}:client"), ("same", "é"), ("__ts", "again")],
    )
    return Publish(topic, b"payload %d" % number, qos, packet_id=number if qos else 0, properties=properties)


def _whole(packet: object) -> tuple[object, ...]:
    assert isinstance(packet, Publish)
    return (packet, packet.topic_wire, packet.properties_wire, packet.retain, packet.dup)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_the_third_like_message_is_read_by_its_shape_and_is_the_same(qos: int) -> None:
    decoder = Decoder(role=Role.SERVER)
    for number in range(1, 6):
        (packet,) = decoder.feed(encode(_request(number, qos=qos)))
        assert packet == _request(number, qos=qos)
        assert isinstance(packet, Publish)
        assert isinstance(packet.properties, LikeProperties) is (number > 2)
        assert packet.properties.content_type == "application/octet-stream"
        assert packet.properties.assigned_client_identifier is None


def test_values_that_change_only_from_read_to_read_are_found_to_change() -> None:
    """A client with 16 requests in flight gives those of one read the same time stamp."""
    decoder = Decoder(role=Role.SERVER)
    missed = 0
    for batch in range(20):
        requests = [_request(16 * batch + n + 1, stamp=f"{batch:020}:client") for n in range(16)]
        packets = decoder.feed(b"".join(map(encode, requests)))
        assert packets == requests
        missed += sum(type(p.properties) is not LikeProperties for p in packets if isinstance(p, Publish))
    assert missed <= 6, "two to learn the shape, and a few to learn that the time stamp changes"


def test_every_value_that_changes_now_and_then_is_found_to_change() -> None:
    decoder = Decoder(role=Role.SERVER)
    missed = 0
    for number in range(400):
        users = [(f"u{n}", f"{number // (n + 3):09}") for n in range(5)]
        sent = Publish("a", b"", 1, packet_id=number + 1, properties=Properties(user_properties=users))
        (packet,) = decoder.feed(encode(sent))
        assert packet == sent
        assert isinstance(packet, Publish)
        missed += type(packet.properties) is not LikeProperties
    assert missed <= 50


def test_a_shape_is_not_learned_where_packets_are_handed_to_users() -> None:
    decoder = Decoder(role=Role.CLIENT)
    for number in range(1, 6):
        (packet,) = decoder.feed(encode(_request(number)))
        assert isinstance(packet, Publish)
        assert type(packet.properties) is not LikeProperties


def test_properties_of_one_message_do_not_change_those_of_another() -> None:
    decoder = Decoder(role=Role.SERVER)
    packets = [decoder.feed(encode(_request(number)))[0] for number in range(1, 6)]
    assert packets == [_request(number) for number in range(1, 6)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"again", b"ag\x00in"),  # U+0000 in a text that did not change
        (b"00000004:client", b"0000\x000004:clien"[:15]),
        (b"00000004:client", b"\xff0000004:client"),
        (b"answers/here", b"answers/+ere"),
        (b"\x32", b"\x36"),  # QoS 3
        (b"\x00\x04\x76\x01", b"\x00\x00\x76\x01"),  # packet identifier 0
    ],
)
def test_what_is_wrong_is_found_also_in_a_message_that_looks_like_the_one_before(before: bytes, after: bytes) -> None:
    wire = encode(_request(4)).replace(before, after, 1)
    decoder = Decoder(role=Role.SERVER)
    for number in range(1, 4):
        decoder.feed(encode(_request(number)))
    _same(decoder, wire)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a/b", "a/c"]),
            st.integers(0, 2),
            st.sampled_from([1, 2, 0xABCD]),
            _TEXTS,
            st.sampled_from([10, 11]),
            st.binary(max_size=3),
        ),
        max_size=12,
    ),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 150), st.integers(0, 255)), max_size=3),
)
def test_any_sequence_decodes_as_with_a_new_decoder_for_each(
    sequence: list[tuple[str, int, int, str, int, bytes]], damage: list[tuple[int, int, int]]
) -> None:
    decoder = Decoder(role=Role.SERVER)
    for position, (topic, qos, number, stamp, expiry, payload) in enumerate(sequence):
        publish = _request(number, stamp=stamp or None, topic=topic, qos=qos, expiry=expiry)
        publish.payload = payload
        wire = bytearray(encode(publish))
        for at, offset, value in damage:
            if at == position and 2 < offset < len(wire):
                wire[offset] = value
        if not _same(decoder, bytes(wire)):
            break


def _same(decoder: Decoder, wire: bytes) -> bool:
    """Hold ``decoder`` against a new one; whether the bytes were legal."""
    expected = _outcome(Decoder(role=Role.SERVER), wire)
    assert _outcome(decoder, wire) == expected
    return isinstance(expected, list)


def _outcome(decoder: Decoder, wire: bytes) -> list[tuple[object, ...]] | tuple[str, int]:
    try:
        packets = [_whole(packet) for packet in decoder.feed(wire)]
    except RemoteProtocolError as error:
        return error.what, error.reason_code
    return packets if decoder.error is None else (decoder.error.what, decoder.error.reason_code)


def test_nothing_is_learned_from_long_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "LONGEST", 50)
    decoder = Decoder(role=Role.SERVER)
    for number in range(1, 6):
        (packet,) = decoder.feed(encode(_request(number)))
        assert isinstance(packet, Publish)
        assert type(packet.properties) is not LikeProperties


def test_messages_of_one_length_with_and_without_an_identifier_are_not_alike() -> None:
    """The one at QoS 0 has two bytes more of properties instead."""
    decoder = Decoder(role=Role.SERVER)
    for topic_user in ("xx", "xxyy", "xx", "xxyy"):
        qos = 1 if topic_user == "xx" else 0
        sent = Publish("a", b"", qos, packet_id=qos, properties=Properties(user_properties=[("n", topic_user)]))
        assert decoder.feed(encode(sent)) == [sent]


def _with_taker() -> tuple[Decoder, LikePublish]:
    """A decoder whose shape has a taker, and what it gave for a like message."""
    decoder = Decoder(role=Role.SERVER)
    for number in range(1, 4):
        (packet,) = decoder.feed(encode(_request(number)))
    assert isinstance(packet, Publish)
    assert isinstance(packet.properties, LikeProperties)
    packet.properties.shape.taker = lambda *_: False
    (like,) = decoder.feed(encode(_request(4)))
    assert isinstance(like, LikePublish)
    return decoder, like


def _form(like: LikePublish) -> Form:
    """Of which the correlation data, the digits of the stamp and the last byte of the payload change."""
    size = len(like.body)
    (_, start, end, _), (_, stamp, _, _) = like.shape.values[:2]
    places = [(start, end), (stamp, stamp + 20), (size - 1, size)]
    return Form(like, places, lambda *_: False)


def test_a_form_takes_the_whole_packet_apart() -> None:
    _, like = _with_taker()
    form = _form(like)
    assert form.head == encode(_request(5))[:3]
    for publish in (_request(5), _request(6)):
        wire = encode(publish)
        assert form.fits(wire)
        parts = form.cut(b"before" + wire, 6)
        assert parts[1] == publish.packet_id
        assert parts[3] == publish.properties.correlation_data
        assert parts[7] == publish.payload[-1:]
        assert b"".join((parts[0], parts[1].to_bytes(2, "big"), *parts[2:])) == wire


@given(st.integers(0, 300), st.integers(0, 255))
def test_another_byte_outside_the_places_is_not_of_the_form(at: int, byte: int) -> None:
    _, like = _with_taker()
    form = _form(like)
    wire = bytearray(encode(_request(5)))
    at %= len(wire)
    changes = [False] * len(wire)
    position = 0
    for number, part in enumerate(form.cut(bytes(wire), 0)):
        size = 2 if number == 1 else len(part)
        changes[position : position + size] = [number % 2 == 1] * size
        position += size
    same = wire[at] == byte
    wire[at] = byte
    assert form.fits(bytes(wire)) is (same or changes[at])
    assert not form.fits(bytes(wire) + b"x")


@given(st.integers(0, 200), st.integers(0, 255), st.integers(1, 400))
def test_what_has_a_taker_is_decoded_as_with_a_new_decoder(at: int, byte: int, cut: int) -> None:
    decoder, _ = _with_taker()
    wire = bytearray(encode(_request(5)) + encode(_request(0x0A0A)))
    if at < len(wire):
        wire[at] = byte
    expected = _outcome(Decoder(role=Role.SERVER), bytes(wire))
    if not isinstance(expected, list):
        return  # what is wrong in one packet is found by its full decoding, which a shape only ever puts off
    found = [packet for piece in (wire[:cut], wire[cut:]) for packet in decoder.feed(bytes(piece))]
    for packet in found:
        if isinstance(packet, LikePublish):
            packet.complete()
    assert list(map(_whole, found)) == expected
