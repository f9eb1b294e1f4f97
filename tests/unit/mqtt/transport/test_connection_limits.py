"""Limits of connections: by address, by rate, and of unauthenticated clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.transport.connection_limits import (
    ConnectionLimiter,
    ConnectionLimitStats,
    ConnectionRefusal,
    address_group,
)
from penstock.mqtt.transport.listener_settings import ConnectionLimits


def admission(*, max_connections: int = 0, **limits: int) -> ConnectionLimiter[int]:
    return ConnectionLimiter(
        ConnectionLimits(**{"max_unauthenticated": 0, **limits}),
        ConnectionLimitStats(),
        max_connections=max_connections,
    )


def test_per_address() -> None:
    it = admission(max_connections_per_address=2)
    for n in range(2):
        assert it.refusal("a", 0) is None
        it.opened(n, "a")
    assert it.refusal("a", 0) is ConnectionRefusal.ADDRESS
    assert it.refusal("b", 0) is None
    it.closed(0, "a")
    assert it.refusal("a", 0) is None
    assert ConnectionRefusal.ADDRESS.reason_code == 0x97


def test_on_the_listener() -> None:
    it = admission(max_connections=1)
    it.opened(1, "a")
    assert it.refusal("b", 0) is ConnectionRefusal.LISTENER


def test_rate() -> None:
    it = admission(connect_rate_per_address=2, connect_burst_per_address=3)
    assert [it.refusal("a", 1000) for _ in range(4)] == [None, None, None, ConnectionRefusal.RATE]
    assert it.refusal("b", 1000) is None
    assert it.refusal("a", 1499) is ConnectionRefusal.RATE
    assert it.refusal("a", 1500) is None
    assert [it.refusal("a", 100_000) for _ in range(4)] == [None, None, None, ConnectionRefusal.RATE]
    assert ConnectionRefusal.RATE.reason_code == 0x9F


def test_rates_of_many_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mqtt.transport.connection_limits.RATES_KEPT", 10)
    it = admission(connect_rate_per_address=1)
    for n in range(100):
        assert it.refusal(str(n), 0) is None
    assert len(it._tokens) == 10


def test_a_flood_of_strangers_pushes_out_its_own() -> None:
    it = admission(max_unauthenticated=3)
    assert it.opened(1, "quiet") is None
    assert it.opened(2, "flood") is None
    assert it.opened(3, "flood") is None
    assert it.opened(4, "flood") == 2
    assert it.opened(5, "flood") == 3, "each makes room once, also before its end is noticed"
    assert (it.unauthenticated, it.connections) == (3, 5)
    it.closed(2, "flood")
    it.closed(3, "flood")
    it.authenticated(1, "quiet")
    assert it.opened(6, "flood") is None
    assert it.opened(7, "other") == 4
    assert (it.unauthenticated, it.connections) == (3, 5)


@given(st.lists(st.tuples(st.sampled_from("ocA"), st.integers(0, 5), st.sampled_from("xyz")), max_size=60))
def test_counts_agree_with_what_is_there(steps: list[tuple[str, int, str]]) -> None:
    it = admission(max_unauthenticated=2)
    there: dict[int, tuple[str, bool]] = {}
    for step, link, group in steps:
        if step == "o" and link not in there:
            victim = it.opened(link, group)
            there[link] = (group, True)
            if victim is not None:
                assert there[victim][1]
                assert victim != link
                it.closed(victim, there.pop(victim)[0])
        elif step == "c" and link in there:
            it.closed(link, there.pop(link)[0])
        elif step == "A" and link in there:
            it.authenticated(link, there[link][0])
            there[link] = (there[link][0], False)
        assert it.connections == len(there)
        assert it.unauthenticated == sum(stranger for _, stranger in there.values()) <= 2


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::1", "::/64"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a:b", "a:b"),
    ],
)
def test_address_groups(address: str, group: str) -> None:
    assert address_group(address) == group
