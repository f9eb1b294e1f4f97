from __future__ import annotations

import pytest

from penstock.statestore.codec.commands import ttl_of
from penstock.statestore.hlc import Hlc, parse_wire


@pytest.mark.parametrize("digits", [b"1", b"60000", b"31536000000000"])
def test_expiry_times_are_parsed(digits: bytes) -> None:
    assert ttl_of(digits) == int(digits)


@pytest.mark.parametrize(
    "digits",
    [
        b"",
        b"0",
        b"05",
        b"-1",
        b"+1",
        b" 5",
        b"1e3",
        b"31536000000001",
        b"9223372036854775807",
        b"1" * 20,
        "\u0665".encode(),
    ],
)
def test_invalid_expiry_times_are_zero(digits: bytes) -> None:
    assert ttl_of(digits) == 0


def test_versions() -> None:
    assert parse_wire(b"000000000000005:00001:n") == Hlc(5, 1, "n")
    for text in (b"", b"5", b"5:x:n", b"\xff:1:n"):
        assert parse_wire(text) is None
