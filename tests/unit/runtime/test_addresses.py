"""HOST:PORT in, HOST:PORT out, and what a listener that cannot open says."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from penstock.runtime.io.network import Address, bind_error, is_host, parse_address

GOOD = [
    ("127.0.0.1:1883", Address("127.0.0.1", 1883)),
    ("localhost:0", Address("localhost", 0)),
    (" edge-1.example:65535 ", Address("edge-1.example", 65535)),
    ("[::1]:8080", Address("::1", 8080)),
    ("0.0.0.0:1", Address("0.0.0.0", 1)),
]
BAD = [
    "", "1883", ":1883", "host", "host:", "host:-1", "host:65536", "host:http", "host:\u0661", "::1:80", "[]:1",
    "a b:1", "mqtt://h:1", "h/p:1", "a..b:1", f"{'a' * 64}.example:1",
]  # fmt: skip


@pytest.mark.parametrize(("text", "address"), GOOD)
def test_addresses_parse_and_print(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize("text", BAD)
def test_invalid_addresses_are_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_address(text)


@pytest.mark.parametrize(
    "host",
    ["", ".", "a", "a.", ".a", "a..b", "a b", "xn--a", "-", "a" * 63, "a" * 64, f"b.{'a' * 63}.", f"{'a' * 64}.b"],
)
def test_a_host_name_is_valid_if_the_resolver_can_encode_it(host: str) -> None:
    try:
        encoded = bool(host.encode("idna"))
    except UnicodeError:
        encoded = False
    assert is_host(host) is encoded


def test_wildcards_are_known() -> None:
    assert Address("0.0.0.0", 1).is_wildcard
    assert Address("::", 1).is_wildcard
    assert not Address("127.0.0.1", 1).is_wildcard


def test_loopback_is_known() -> None:
    assert all(Address(host, 1).is_loopback for host in ("localhost", "127.0.0.1", "127.8.9.1", "::1"))
    assert not any(Address(host, 1).is_loopback for host in ("0.0.0.0", "::", "10.0.0.1", "edge-1", "localhost.x"))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EADDRINUSE, "another process listens there"),
        (errno.EACCES, "this user may not use that port"),
        (errno.EADDRNOTAVAIL, "this machine has no such address"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_a_listener_that_cannot_open_reports_cause_and_remedy(number: int, why: str) -> None:
    error = bind_error(OSError(number, os.strerror(number)), "mqtt", Address("127.0.0.1", 1883))
    assert error.what == "mqtt: cannot listen on 127.0.0.1:1883"
    assert error.why == why
    assert error.hint is not None
    assert "--mqtt" in error.hint


def test_an_unknown_host_name_is_reported() -> None:
    error = bind_error(socket.gaierror(-2, "Name or service not known"), "http", Address("nowhere.invalid", 1))
    assert error.why == "the host name is unknown"
