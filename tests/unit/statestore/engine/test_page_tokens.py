"""Tokens of SCAN: plain where the client may know the key, sealed where not."""

from __future__ import annotations

import pytest

from penstock.statestore.engine.scan import PageTokens

OURS = PageTokens(b"secret of a store")


def test_a_readable_key_is_written_as_the_original_does() -> None:
    assert OURS.write(b"a*", b"a;b", readable=True) == b"1;2;a;b"
    assert OURS.read(b"a*", b"1;2;a;b") == b"a;b"


@pytest.mark.parametrize("key", [b"", b"k", b"tenant/secret", bytes(range(256)) * 40])
def test_a_sealed_key_is_read_by_its_store_alone(key: bytes) -> None:
    token = OURS.write(b"*", key, readable=False)
    assert len(key) < 4 or key not in token
    assert OURS.read(b"*", token) == key
    assert PageTokens(b"another").read(b"*", token) is None


@pytest.mark.parametrize("token", [b"", b"1", b"1;1", b"3;1;a", b"1;2;a", b"2;1;", b"2;1;" + bytes(20), b"2;;a"])
def test_page_tokens_of_other_stores_are_refused(token: bytes) -> None:
    assert OURS.read(b"*", token) is None
