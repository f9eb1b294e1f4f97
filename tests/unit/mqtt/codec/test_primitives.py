"""Integers, strings and binary data of MQTT [MQTT 5.0 section 1.5]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.mqtt.codec.primitives import (
    MAX_VARINT,
    Reader,
    check_text,
    decode_text,
    encode_binary,
    encode_frame,
    encode_string,
    encode_varint,
    is_plain,
)


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (16_383, "ff7f"),
        (16_384, "808001"),
        (2_097_151, "ffff7f"),
        (2_097_152, "80808001"),
        (268_435_455, "ffffff7f"),
    ],
)
def test_edges_of_the_variable_byte_integer(value: int, wire: str) -> None:
    data = bytes.fromhex(wire)
    assert encode_varint(value) == data
    assert Reader(data, 0, len(data)).varint() == value


@given(st.integers(0, MAX_VARINT))
def test_variable_byte_integers(value: int) -> None:
    data = encode_varint(value)
    assert Reader(data, 0, len(data)).varint() == value


@pytest.mark.parametrize("wire", ["", "80", "8000", "ffff00", "ffffff00", "ffffffff7f", "80808080"])
def test_bad_variable_byte_integers(wire: str) -> None:
    data = bytes.fromhex(wire)
    with pytest.raises(RemoteProtocolError) as caught:
        Reader(data, 0, len(data)).varint()
    assert caught.value.reason_code == 0x81


@pytest.mark.parametrize("value", [-1, MAX_VARINT + 1])
def test_out_of_range(value: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_varint(value)


def test_a_frame_is_its_first_byte_its_length_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encode_frame(0x82, b"\x00\x01", b"ab") == b"\x82\x04\x00\x01ab"
    monkeypatch.setattr("penstock.mqtt.codec.primitives.MAX_VARINT", 4)
    assert len(encode_frame(0x30, b"abc", b"d")) == 6
    with pytest.raises(LocalProtocolError, match="larger than the protocol allows"):
        encode_frame(0x30, b"abcd", b"e")


def test_a_reader_stops_at_its_end() -> None:
    data = b"\x00\x02ab"
    assert Reader(data, 0, 4).binary() == b"ab"
    for end in range(4):
        with pytest.raises(RemoteProtocolError):
            Reader(data, 0, end).binary()
    for read in (Reader.byte, Reader.two_bytes):
        with pytest.raises(RemoteProtocolError):
            read(Reader(data, 4, 4))


def test_binary_is_limited() -> None:
    assert encode_binary(bytes(65_535), "x")[:2] == b"\xff\xff"
    with pytest.raises(LocalProtocolError):
        encode_binary(bytes(65_536), "x")
    assert encode_string("é", "x") == b"\x00\x02\xc3\xa9"


@given(
    st.one_of(
        st.binary(max_size=20),
        st.binary(max_size=20).map(lambda raw: bytes(byte & 127 or 1 for byte in raw)),
        st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    st.sampled_from([b"", b"\0", bytes(9), b"\xff" * 9]),
)
def test_text_is_checked_as_it_is_decoded(raw: bytes, following: bytes) -> None:
    def refusal(check: Callable[[], object]) -> str:
        try:
            check()
        except RemoteProtocolError as error:
            return str(error)
        return ""

    data = b"\xff" + raw + following
    assert refusal(lambda: check_text(data, 1, 1 + len(raw))) == refusal(lambda: decode_text(raw))


@given(
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(lambda raw: bytes(byte & 127 for byte in raw)),
        st.integers(1990, 2060).map(lambda size: bytes(range(128)) * 17 + bytes(size)),
    ),
    st.integers(0, 9),
    st.integers(-1, 1),
)
def test_zero_bytes_of_ascii_are_counted(raw: bytes, before: int, more: int) -> None:
    data = b"\xff" * before + raw + b"\xff\0"
    expected = raw.isascii() and not more
    assert is_plain(data, before, before + len(raw), raw.count(0) + more) == expected
