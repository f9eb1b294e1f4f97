"""The check that a payload is UTF-8 text."""

from __future__ import annotations

import pytest

from penstock.mqtt.engine.connections.publish import is_text


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", True),
        (b"plain\0text", True),
        ("größer \U0001f30a".encode(), True),
        (b"\xff\xfe", False),
        (b"\xed\xa0\x80", False),
        (b"\xc0\xaf", False),
        ("ö".encode()[:1], False),
    ],
    ids=["empty", "ascii", "utf-8", "bytes", "surrogate", "overlong", "cut"],
)
def test_is_text(payload: bytes, *, expected: bool) -> None:
    assert is_text(payload) is expected
