"""Addresses of masters."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.tube.client.arguments import local_ipv4, parse_masters
from penstock.tube.codec.strings import ipv4_to_int


def test_list_of_masters() -> None:
    assert parse_masters(" a:1, [::1]:8715 ,") == [("a", 1), ("::1", 8715)]
    assert parse_masters([("h", 2)]) == [("h", 2)]


@pytest.mark.parametrize("text", ["", ",", "host", ":1", "host:", "host:x", "host:0", "host:65536", "a..b:1"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_masters(text)


def test_own_address_is_ipv4() -> None:
    assert ipv4_to_int(local_ipv4()) != 0
