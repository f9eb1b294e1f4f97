"""Any bytes give packets or RemoteProtocolError, the same in one piece or split."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, Role, TopicNames
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Packet, PingReq, PubAck, Publish
from penstock.mqtt.codec.reasons import PacketType
from tests.unit.mqtt.codec.vectors import ROUND_TRIP_FILES, Vector, load, parametrize


def drain(decoder: Decoder, *pieces: bytes) -> tuple[list[Packet], int]:
    """Feed all pieces; the packets and the reason code of the error (0: none)."""
    packets: list[Packet] = []
    try:
        for piece in pieces:
            packets += decoder.feed(piece)
        decoder.feed(b"")
    except RemoteProtocolError as e:
        return packets, e.reason_code
    return packets, 0


@parametrize(*ROUND_TRIP_FILES, "accepted-forms")
def test_whole(vector: Vector) -> None:
    assert drain(Decoder(), vector.data) == ([vector.packet], 0)


@parametrize(*ROUND_TRIP_FILES, "accepted-forms")
def test_byte_by_byte(vector: Vector) -> None:
    decoder = Decoder()
    assert drain(decoder, *(bytes((byte,)) for byte in vector.data)) == ([vector.packet], 0)


@parametrize(*ROUND_TRIP_FILES, "accepted-forms")
def test_with_trailing_bytes(vector: Vector) -> None:
    decoder = Decoder()
    assert decoder.feed(vector.data + b"\xc0") == [vector.packet]
    assert decoder.feed(b"\x00\xc0\x00") == [PingReq(), PingReq()]


@parametrize(*ROUND_TRIP_FILES)
def test_cut_short_is_incomplete(vector: Vector) -> None:
    for size in range(len(vector.data)):
        assert drain(Decoder(), vector.data[:size]) == ([], 0)


@parametrize("malformed")
def test_malformed(vector: Vector) -> None:
    roles = list(Role) if vector.role == "either" else [Role(vector.role)]
    for role in roles:
        if role is not Role.EITHER and _wrong_side(vector.data[0] >> 4, role):
            continue
        packets, code = drain(Decoder(role=role), vector.data)
        assert (packets, f"0x{code:02X}") == ([], f"0x{vector.reason_code:02X}"), role
        pieces = [bytes((byte,)) for byte in vector.data]
        assert drain(Decoder(role=role), *pieces) == ([], code)


def _wrong_side(packet_type: int, role: Role) -> bool:
    from_server = (PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP)
    from_client = (PacketType.CONNECT, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE, PacketType.PINGREQ)
    return packet_type in (from_server if role is Role.SERVER else from_client)


def test_packets_before_an_error_are_returned_then_the_error_stays() -> None:
    decoder = Decoder()
    assert decoder.feed(b"\xc0\x00\x00") == [PingReq()]
    assert decoder.error is not None
    for _ in range(2):
        with pytest.raises(RemoteProtocolError) as caught:
            decoder.feed(b"\xc0\x00")
        assert caught.value.reason_code == 0x81


def test_a_packet_above_the_limit_is_refused_at_its_header() -> None:
    packet = encode(Publish("a", b"x" * 96))
    assert len(packet) == 102
    assert Decoder(102).feed(packet) == [Publish("a", b"x" * 96)]
    for piece in (packet, packet[:2]):
        with pytest.raises(RemoteProtocolError) as caught:
            Decoder(101).feed(piece)
        assert caught.value.reason_code == 0x95


def test_the_first_packet_has_its_own_size_limit() -> None:
    connect, publish = encode(Connect("c")), encode(Publish("a", bytes(200)))
    decoder = Decoder(1000, role=Role.SERVER, max_connect_size=len(connect))
    assert len(decoder.feed(connect + publish)) == 2, "the wider limit holds for the rest of the same bytes"
    for first in (encode(Connect("longer")), publish):
        with pytest.raises(RemoteProtocolError) as caught:
            Decoder(1000, role=Role.SERVER, max_connect_size=len(connect)).feed(first)
        assert caught.value.reason_code == 0x95


def test_the_largest_length_waits_for_its_body() -> None:
    assert Decoder().feed(b"\x30\xff\xff\xff\x7f") == []


def test_an_unfinished_large_packet_is_joined_once() -> None:
    body = bytes(1_000_000)
    packet = encode(Publish("a", body))
    decoder = Decoder()
    started = time.process_time()
    packets = [p for i in range(0, len(packet), 100) for p in decoder.feed(packet[i : i + 100])]
    assert packets == [Publish("a", body)]
    assert time.process_time() - started < 2, "quadratic in the number of pieces"


def test_wire_parts_of_a_publish_are_kept_for_forwarding() -> None:
    vector = next(v for v in load("publish") if v.name == "publish-all-properties-from-server")
    (publish,) = Decoder().feed(vector.data)
    assert isinstance(publish, Publish)
    assert b"\x30\x3a" + publish.topic_wire + publish.properties_wire + publish.payload == vector.data


def test_short_puback_makes_no_properties() -> None:
    (ack,) = Decoder().feed(b"\x40\x02\x00\x01")
    assert isinstance(ack, PubAck)
    assert ack.optional_properties is None


def test_level_of_a_refused_connect_is_known() -> None:
    decoder = Decoder()
    with pytest.raises(RemoteProtocolError):
        decoder.feed(bytes.fromhex("100d00044d515454030200000001 61".replace(" ", "") + "00"))
    assert (decoder.protocol_name, decoder.protocol_level) == (b"MQTT", 3)


def test_topic_names_are_shared_and_bounded() -> None:
    topics = TopicNames(limit=2)
    first, second = (Decoder(topics=topics).feed(encode(Publish("a/b", b"")))[0] for _ in range(2))
    assert isinstance(first, Publish)
    assert isinstance(second, Publish)
    assert first.topic is second.topic
    for n in range(5):
        Decoder(topics=topics).feed(encode(Publish(f"t{n}", b"")))
        assert len(topics.names) <= 2


@given(st.binary(max_size=64), st.lists(st.integers(0, 64), max_size=4), st.sampled_from(list(Role)))
def test_any_bytes(data: bytes, cuts: list[int], role: Role) -> None:
    _same_however_split(data, cuts, role)


_CORPUS = [v.data for v in load(*ROUND_TRIP_FILES, "malformed")]


@given(
    st.lists(st.sampled_from(_CORPUS), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from(list(Role)),
)
def test_damaged_vectors(chosen: list[bytes], damage: list[tuple[int, int]], cuts: list[int], role: Role) -> None:
    data = bytearray(b"".join(chosen))
    for position, byte in damage:
        data[position % len(data)] = byte
    _same_however_split(bytes(data), cuts, role)


def _same_however_split(data: bytes, cuts: list[int], role: Role) -> None:
    expected = drain(Decoder(4096, role=role), data)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert drain(Decoder(4096, role=role), *pieces) == expected
    assert drain(Decoder(4096, role=role), *(bytes((byte,)) for byte in data)) == expected
