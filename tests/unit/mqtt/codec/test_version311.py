"""MQTT 3.1.1: golden bytes both ways, whole and split; what it cannot say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PubAck,
    Publish,
    PubRec,
    SubAck,
    UnsubAck,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType
from penstock.mqtt.codec.version311 import encode_311, return_code
from tests.unit.mqtt.codec.vectors import Vector, load, parametrize


def drain(role: Role, *pieces: bytes) -> tuple[list[Packet], int]:
    decoder = Decoder(4096, role=role, version=4)
    packets: list[Packet] = []
    try:
        for piece in pieces:
            packets += decoder.feed(piece)
        decoder.feed(b"")
    except RemoteProtocolError as e:
        return packets, e.reason_code
    return packets, 0


@parametrize("packets", version="mqtt311")
def test_whole_split_and_with_trailing_bytes(vector: Vector) -> None:
    pieces = [bytes((byte,)) for byte in vector.data]
    assert drain(Role.EITHER, vector.data) == ([vector.packet], 0)
    assert drain(Role.EITHER, *pieces) == ([vector.packet], 0)
    assert drain(Role.EITHER, vector.data + b"\xc0", b"\x00") == ([vector.packet, PingReq()], 0)
    for size in range(len(vector.data)):
        assert drain(Role.EITHER, vector.data[:size]) == ([], 0)


@parametrize("packets", version="mqtt311")
def test_encoded(vector: Vector) -> None:
    assert vector.packet is not None
    assert encode_311(vector.packet) == vector.data


@parametrize("malformed", version="mqtt311")
def test_malformed(vector: Vector) -> None:
    pieces = [bytes((byte,)) for byte in vector.data]
    for given_pieces in ([vector.data], pieces):
        packets, code = drain(Role.EITHER, *given_pieces)
        assert (packets, f"0x{code:02X}") == ([], f"0x{vector.reason_code:02X}")


def test_a_connect_chooses_the_version_for_what_follows() -> None:
    connect = next(v for v in load("packets", version="mqtt311") if v.name == "connect-clean")
    decoder = Decoder(role=Role.SERVER)
    packets = decoder.feed(connect.data + bytes.fromhex("3005 0001 61 6869".replace(" ", "")))
    assert packets[1] == Publish("a", b"hi")
    assert decoder.version == 4
    assert Decoder(role=Role.SERVER).feed(connect.data)[0] == connect.packet


def test_fields_that_3_1_1_lacks_are_left_out() -> None:
    properties = Properties(reason_string="why", user_properties=[("k", "v")])
    assert encode_311(PubAck(1, 0x87, properties)) == b"\x40\x02\x00\x01"
    assert encode_311(PubRec(1, 0x97, properties)) == b"\x50\x02\x00\x01"
    assert encode_311(SubAck(1, [0, 0x87, 0x97], properties)) == b"\x90\x05\x00\x01\x00\x80\x80"
    assert encode_311(UnsubAck(1, [0x11], properties)) == b"\xb0\x02\x00\x01"
    assert encode_311(Disconnect(4, properties)) == b"\xe0\x00"
    assert encode_311(ConnAck(True, 0, Properties(receive_maximum=5))) == b"\x20\x02\x01\x00"
    assert encode_311(Publish("a", b"x", properties=Properties(content_type="t"))) == bytes.fromhex("300400016178")


@pytest.mark.parametrize("packet", [Auth(), Connect("c", username=None, password=b"x", protocol_version=4)])
def test_packets_that_3_1_1_lacks_are_not_encoded(packet: Packet) -> None:
    with pytest.raises(LocalProtocolError):
        encode_311(packet)


def test_every_refusal_has_a_return_code() -> None:
    codes = {code: return_code(code) for code in ALLOWED[PacketType.CONNACK]}
    assert codes[0] == 0
    assert {code for code in codes if codes[code] == 0} == {0}
    assert (codes[0x84], codes[0x85], codes[0x86], codes[0x87], codes[0x8A]) == (1, 2, 4, 5, 5)
    assert set(codes.values()) == {0, 1, 2, 3, 4, 5}


_CORPUS = [v.data for v in load("packets", "malformed", version="mqtt311")]


@given(
    st.lists(st.sampled_from(_CORPUS), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    st.sampled_from(list(Role)),
)
def test_any_bytes_give_packets_or_our_error_however_split(
    chosen: list[bytes], damage: list[tuple[int, int]], role: Role
) -> None:
    data = bytearray(b"".join(chosen))
    for position, byte in damage:
        data[position % len(data)] = byte
    expected = drain(role, bytes(data))
    assert drain(role, *(bytes((byte,)) for byte in data)) == expected
