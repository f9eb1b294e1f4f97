"""The property table against the standard's [MQTT 5.0 section 2.2.2.2, table 2-4]."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.primitives import encode_varint
from penstock.mqtt.codec.properties import (
    ALLOWED_IN,
    BY_IDENTIFIER,
    PROPERTIES,
    WILL,
    Properties,
    WireType,
    context_of,
)
from penstock.mqtt.codec.property_blocks import (
    LastResponseTopic,
    block_of,
    decode_properties,
    decode_publish_properties,
)
from penstock.mqtt.codec.reasons import PacketType

_VALUES = {
    WireType.BYTE: 0,
    WireType.TWO_BYTE_INTEGER: 0,
    WireType.FOUR_BYTE_INTEGER: 0,
    WireType.VARIABLE_BYTE_INTEGER: [1],
    WireType.BINARY: b"",
    WireType.STRING: "",
    WireType.STRING_PAIR: [("", "")],
}


def test_there_are_27_and_each_has_an_attribute() -> None:
    assert len(PROPERTIES) == len(BY_IDENTIFIER) == 27
    assert [spec.identifier for spec in PROPERTIES] == sorted(BY_IDENTIFIER)
    empty = Properties()
    assert all(getattr(empty, spec.attribute) in (None, []) for spec in PROPERTIES)


def test_properties_with_one_of_them_are_not_empty() -> None:
    assert Properties().is_empty()
    for spec in PROPERTIES:
        given = Properties()
        setattr(given, spec.attribute, _VALUES[spec.wire_type])
        assert not given.is_empty(), spec.name


def test_user_properties_go_everywhere_but_with_ping() -> None:
    user = BY_IDENTIFIER[0x26]
    everywhere = [t for t in PacketType if t not in (PacketType.PINGREQ, PacketType.PINGRESP)]
    assert all(user.contexts & context_of(t) for t in everywhere)
    assert user.contexts & WILL
    assert not ALLOWED_IN[context_of(PacketType.PINGREQ)]


def test_publish_and_will_allow_the_properties_of_the_specification() -> None:
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


_PUBLISH = context_of(PacketType.PUBLISH)
_TEXTS = st.sampled_from(["", "a", "clients/c/response", "a+b", "#", "\N{SNOWMAN}", "application/json", "x" * 200])


@st.composite
def _blocks(draw: st.DrawFn) -> bytes:
    """Property blocks of a PUBLISH: right ones, repeated, out of range, cut off, with bytes changed."""
    out = bytearray()
    for identifier in draw(st.lists(st.sampled_from([0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26, 0x11, 0x7F]))):
        out.append(identifier)
        if identifier == 0x01:
            out.append(draw(st.integers(0, 2)))
        elif identifier == 0x02:
            out += draw(st.integers(0, 2**32 - 1)).to_bytes(4, "big")
        elif identifier == 0x23:
            out += draw(st.integers(0, 65_535)).to_bytes(2, "big")
        elif identifier == 0x0B:
            out += draw(st.sampled_from([b"\x00", b"\x01", b"\xff\x7f", b"\x80\x00", b"\xff\xff\xff\xff\x01"]))
        else:
            for _ in range(2 if identifier == 0x26 else 1):
                raw = draw(st.one_of(_TEXTS.map(str.encode), st.binary(max_size=6)))
                out += len(raw).to_bytes(2, "big") + raw
    if out and draw(st.booleans()):
        del out[draw(st.integers(0, len(out) - 1)) :]
    if out and draw(st.booleans()):
        out[draw(st.integers(0, len(out) - 1))] = draw(st.integers(0, 255))
    return bytes(out)


def _expected(properties: Properties, name: str) -> bytes | None:
    found = [value for key, value in properties.user_properties if key == name]
    return None if not found else found[0].encode() if len(found) == 1 else b""


@given(_blocks())
@settings(max_examples=400)
def test_properties_of_a_publish_are_those_that_the_table_gives(block: bytes) -> None:
    data = encode_varint(len(block)) + block
    start = len(data) - len(block)
    refusal: RemoteProtocolError | None = None
    try:
        properties = decode_properties(data, start, len(data), _PUBLISH)
    except RemoteProtocolError as error:
        refusal = error
    if refusal is not None:
        with pytest.raises(RemoteProtocolError) as raised:
            decode_publish_properties(data, start, LastResponseTopic())
        assert raised.value.reason_code == refusal.reason_code
        return
    for found in (decode_publish_properties(data, start, LastResponseTopic()), block_of(properties)):
        for spec in ALLOWED_IN[_PUBLISH]:
            value = getattr(properties, spec.attribute)
            assert (found.seen >> spec.identifier & 1 == 1) is (value not in (None, [])), spec.name
        assert found.payload_format_indicator == (properties.payload_format_indicator or 0)
        assert found.message_expiry_interval == (properties.message_expiry_interval or 0)
        assert found.topic_alias == (properties.topic_alias or 0)
        assert found.response_topic == (properties.response_topic or "")
        assert found.correlation_data == (properties.correlation_data or b"")
        assert found.content_type() == properties.content_type
        assert found.user_properties() == properties.user_properties
        for name in {"absent", *(name for name, _ in properties.user_properties)}:
            expected = _expected(properties, name)
            assert found.user_property(name.encode()) == expected
            assert found.four_user_properties(b"absent 1", b"", b"absent 2", b"absent 3", name.encode())[3] == expected
            for usual in (b"", b"a", expected or b"absent"):
                of_four = found.four_user_properties(name.encode(), usual, b"absent 1", b"absent 2", b"absent 3")
                assert of_four[0] == expected
