"""The token bucket that limits a publish rate."""

from __future__ import annotations

from penstock.mqtt.engine.connections.connection_state import TokenBucket


def test_a_burst_then_the_rate() -> None:
    rate = TokenBucket(10, 3, 0)
    assert [rate.acquire(0) for _ in range(3)] == [True] * 3
    assert rate.ready_at(0) == 100
    assert not rate.acquire(0)
    assert rate.ready_at(0) == 200, "what was taken on credit is paid first"
    assert rate.ready_at(150) == 200
    assert not rate.acquire(199)
    rate.give_back()
    assert rate.acquire(200)


def test_a_pause_fills_it_up_to_the_burst() -> None:
    rate = TokenBucket(1000, 2, 0)
    assert [rate.acquire(60_000) for _ in range(3)] == [True, True, False]


def test_the_debt_is_bounded() -> None:
    rate = TokenBucket(1, 2, 0)
    for _ in range(1_000):
        rate.acquire(0)
    assert rate.ready_at(0) == 3_000
