"""Payload, attributes, checksum and filter key; the literals are the reference's."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.tube.codec import message
from penstock.tube.codec.framing import FrameDecoder
from penstock.tube.codec.message import Marker, decode_marker, encode_marker
from penstock.tube.codec.proto import broker_pb2
from tests.unit.tube.stored_messages import encode_stored
from tests.unit.tube.vectors import frames

ATTRIBUTES = "$msgType$=abc,$msgTime$=202401010101,k=v"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("abc", 96354),
        ("order_created", 848461559),
        ("polygenelubricants", -2147483648),
        ("", 0),
        ("\N{SNOWMAN}", 0x2603),
        ("\N{PILE OF POO}", 31 * 0xD83D + 0xDCA9),
    ],
)
def test_java_hash(text: str, value: int) -> None:
    assert message.java_hash(text) == value


def test_filter_key() -> None:
    assert message.filter_key(" abc\t") == 96354
    assert message.filter_key(None) == message.filter_key("  ") == -1


def test_check_sum_and_data_of_the_hand_made_send() -> None:
    data, flag = message.encode_data(b"hello", ATTRIBUTES)
    assert flag == 1
    assert message.check_sum(data) == 1396529631
    [frame] = [f for f in frames("section-22") if f.name == "send-request"]
    [(_, body)] = FrameDecoder().feed(frame.data)
    assert data in body
    assert message.split_data(data, flag) == (ATTRIBUTES, b"hello")
    assert message.parse_attributes(ATTRIBUTES) == [("$msgType$", "abc"), ("$msgTime$", "202401010101"), ("k", "v")]


def test_no_attributes_means_no_flag() -> None:
    assert message.encode_data(b"x") == (b"x", 0)
    assert message.split_data(b"x", 0) == ("", b"x")


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0\0\0\2a", b"\xff\xff\xff\xffabc"])
def test_attribute_length_that_does_not_fit(data: bytes) -> None:
    assert message.split_data(data, 1) is None


def test_foreign_attribute_texts() -> None:
    assert message.parse_attributes("a=b=c,alone,,x=") == [("a", "b"), ("x", "")]
    assert message.split_data(b"\0\0\0\1\xff" + b"body", 1) == ("\N{REPLACEMENT CHARACTER}", b"body")


@pytest.mark.parametrize("pair", [("", "v"), ("k", " "), ("k,", "v"), ("k", "a=b")])
def test_attribute_that_cannot_be_written(pair: tuple[str, str]) -> None:
    with pytest.raises(LocalProtocolError):
        message.format_attributes([pair])


@pytest.mark.parametrize("size", [1, 127, 128, 70_000])
@pytest.mark.parametrize("marker", [Marker(1, 0, 1), Marker((1 << 62) + 5, 1 << 40, 8192)])
def test_a_marker_is_found_behind_any_payload(size: int, marker: Marker) -> None:
    data = bytes(size)
    (plain,) = encode_stored(1 << 60, [5], [data], [1])
    marked, next_one = encode_stored(1 << 60, [5, 5], [data, data], [1, 1], encode_marker(*marker))
    assert decode_marker(next_one) is None
    assert (decode_marker(plain), decode_marker(marked)) == (None, marker)
    answer = broker_pb2.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + marked)
    (found,) = answer.messages
    assert (found.payLoadData, found.producerId, found.sequence, found.batchCount) == (data, *marker)
