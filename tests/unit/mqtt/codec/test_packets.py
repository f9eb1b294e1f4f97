"""Packets: equality, what they print, properties on demand."""

from __future__ import annotations

from penstock.mqtt.codec.packets import PubAck, PubComp, Publish
from penstock.mqtt.codec.properties import Properties


def test_properties_are_made_on_demand_and_never_shared() -> None:
    first, second = Publish("a"), Publish("a")
    assert first.optional_properties is None
    first.properties.user_properties.append(("k", "v"))
    assert second.properties.user_properties == []
    assert first != second
    ack = PubAck(1)
    ack.properties.reason_string = "x"
    assert ack.optional_properties == Properties(reason_string="x")


def test_no_properties_equal_empty_properties() -> None:
    assert Publish("a") == Publish("a", properties=Properties())
    assert PubAck(1) == PubAck(1, 0, Properties())
    assert PubAck(1) != PubComp(1)
    assert Publish("a") != "a"


def test_packets_have_short_representations() -> None:
    assert repr(Publish("a", b"hi", 1, packet_id=7, retain=True)) == "<PUBLISH 'a' q1 retain id=7 b'hi'>"
    assert len(repr(Publish("a", bytes(100_000)))) < 200
    assert repr(PubAck(3, 0x97)) == "<PUBACK id=3 0x97>"
