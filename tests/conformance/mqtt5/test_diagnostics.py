"""Reason String and User Properties go before a packet gets too large for its receiver, and a packet too large goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode, encode_within
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Disconnect,
    Packet,
    PubAck,
    PubComp,
    PubRec,
    PubRel,
    SubAck,
    UnsubAck,
)
from penstock.mqtt.codec.properties import Properties

Make = Callable[[Properties], Packet]

PACKETS: dict[str, tuple[str, str, Make]] = {
    "ConnAck": ("MQTT-3.2.2-19", "MQTT-3.2.2-20", lambda p: ConnAck(False, 0x87, p)),
    "PubAck": ("MQTT-3.4.2-2", "MQTT-3.4.2-3", lambda p: PubAck(1, 0x87, p)),
    "PubRec": ("MQTT-3.5.2-2", "MQTT-3.5.2-3", lambda p: PubRec(1, 0x87, p)),
    "PubRel": ("MQTT-3.6.2-2", "MQTT-3.6.2-3", lambda p: PubRel(1, 0x92, p)),
    "PubComp": ("MQTT-3.7.2-2", "MQTT-3.7.2-3", lambda p: PubComp(1, 0x92, p)),
    "SubAck": ("MQTT-3.9.2-1", "MQTT-3.9.2-2", lambda p: SubAck(1, [0x87], p)),
    "UnsubAck": ("MQTT-3.11.2-1", "MQTT-3.11.2-2", lambda p: UnsubAck(1, [0x11], p)),
    "Disconnect": ("MQTT-3.14.2-3", "MQTT-3.14.2-4", lambda p: Disconnect(0x87, p)),
    "Auth": ("MQTT-3.15.2-2", "MQTT-3.15.2-3", lambda p: Auth(0x18, p)),
}
REASON = {statement: make for statement, _, make in PACKETS.values()}
USER = {statement: make for _, statement, make in PACKETS.values()}


def sent(packet: Packet, maximum: int) -> Packet:
    data = encode_within(packet, maximum)
    assert data is not None
    assert len(data) <= maximum
    (decoded,) = Decoder().feed(data)
    return decoded


@pytest.mark.parametrize("statement", REASON)
def test_the_reason_string_is_left_out(statement: str) -> None:
    make = REASON[statement]
    with_it = len(encode(make(Properties(reason_string="why"))))
    assert sent(make(Properties(reason_string="why")), with_it) == make(Properties(reason_string="why"))
    assert sent(make(Properties(reason_string="why")), with_it - 1) == make(Properties())


@pytest.mark.parametrize("statement", USER)
def test_user_properties_are_left_out_before_the_reason_string(statement: str) -> None:
    make = USER[statement]

    def given() -> Properties:
        return Properties(reason_string="why", user_properties=[("k", "v")])

    with_them = len(encode(make(given())))
    assert sent(make(given()), with_them) == make(given())
    assert sent(make(given()), with_them - 1) == make(Properties(reason_string="why"))


@pytest.mark.parametrize("name", PACKETS)
def test_a_packet_that_is_too_large_without_them_is_not_sent(name: str) -> None:
    make = PACKETS[name][2]
    bare = len(encode(make(Properties())))
    assert encode_within(make(Properties(reason_string="why")), bare - 1) is None
