"""Varints as protobuf writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.varint import RisingVarints, decode_varint, encode_varint


@pytest.mark.parametrize(
    ("value", "data"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16383, "ff7f"), (16384, "808001"), (-1, "ffffffffffffffffff01")],
)
def test_known_values(value: int, data: str) -> None:
    assert encode_varint(value) == bytes.fromhex(data)
    assert decode_varint(bytes.fromhex(data), 0) == (value % 2**64, len(data) // 2)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_round_trip(value: int, before: bytes) -> None:
    data = before + encode_varint(value)
    assert decode_varint(data, len(before)) == (value, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11])
def test_unfinished(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_varint(data, 0)


@given(
    st.one_of(st.integers(0, 3 << 14), st.integers(0, 1 << 62)),
    st.sampled_from([1, 28]),
    st.sampled_from([0, 1, 2, 50, 700]),
)
def test_rising_numbers_are_each_number(first: int, step: int, count: int) -> None:
    numbers = RisingVarints()
    for value in range(first, first + count * step, step):
        assert numbers.encode(value) == encode_varint(value)
