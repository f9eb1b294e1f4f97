"""The property table against the standard's [MQTT 5.0 section 2.2.2.2, table 2-4]."""

from __future__ import annotations

from dataclasses import fields

from penstock.mqtt.codec.properties import (
    ALLOWED_IN,
    BY_IDENTIFIER,
    PROPERTIES,
    WILL,
    Properties,
    WireType,
    context_of,
)
from penstock.mqtt.codec.reasons import PacketType


def test_there_are_27_and_each_has_an_attribute() -> None:
    assert len(PROPERTIES) == len(BY_IDENTIFIER) == 27
    assert [spec.identifier for spec in PROPERTIES] == sorted(BY_IDENTIFIER)
    assert {spec.attribute for spec in PROPERTIES} == {f.name for f in fields(Properties)}


def test_user_properties_go_everywhere_but_with_ping() -> None:
    user = BY_IDENTIFIER[0x26]
    everywhere = [t for t in PacketType if t not in (PacketType.PINGREQ, PacketType.PINGRESP)]
    assert all(user.contexts & context_of(t) for t in everywhere)
    assert user.contexts & WILL
    assert not ALLOWED_IN[context_of(PacketType.PINGREQ)]


def test_what_a_publish_may_carry() -> None:
    assert [spec.identifier for spec in ALLOWED_IN[context_of(PacketType.PUBLISH)]] == [
        0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26,
    ]  # fmt: skip
    assert [spec.identifier for spec in ALLOWED_IN[WILL]] == [0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26]


def test_only_user_properties_and_subscription_identifiers_repeat() -> None:
    assert [spec.identifier for spec in PROPERTIES if spec.repeats] == [0x0B, 0x26]
    assert BY_IDENTIFIER[0x0B].wire_type is WireType.VARIABLE_BYTE_INTEGER


def test_for_people() -> None:
    properties = Properties(content_type="text/plain", user_properties=[("a", "1"), ("a", "2")])
    assert repr(properties) == "Properties(content_type='text/plain', user_properties=[('a', '1'), ('a', '2')])"
    assert properties.user_property("a") == "1"
    assert properties.user_property("b") is None
