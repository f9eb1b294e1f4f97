"""The reason code table against the standard's [MQTT 5.0 section 2.4, table 2-6]."""

from __future__ import annotations

from penstock.mqtt.codec.reasons import ALLOWED, CLIENT_DISCONNECT, PacketType, ReasonCode, reason_name


def test_every_code_is_carried_by_some_packet_and_every_packet_carries_known_codes() -> None:
    carried = frozenset[int]().union(*ALLOWED.values())
    assert carried == {int(code) for code in ReasonCode}
    assert len(ReasonCode) == 43


def test_numbers_of_codes() -> None:
    assert {PacketType(t).name: len(codes) for t, codes in ALLOWED.items()} == {
        "CONNACK": 22,
        "PUBACK": 9,
        "PUBREC": 9,
        "PUBREL": 2,
        "PUBCOMP": 2,
        "SUBACK": 12,
        "UNSUBACK": 7,
        "DISCONNECT": 30,
        "AUTH": 3,
    }
    assert ALLOWED[PacketType.DISCONNECT] >= CLIENT_DISCONNECT


def test_names() -> None:
    assert reason_name(0x87) == "0x87 not authorized"
    assert reason_name(0x03) == "0x03"
