"""Load averages: what they come to at a steady rate, and after a time when nobody asked."""

from __future__ import annotations

import pytest

from penstock.mqtt.engine.loads import Loads


def averages(loads: Loads, total: int, now: int) -> list[float]:
    return [float(text) for _, text in loads.measure({"x": total}, now)]


@pytest.mark.parametrize("every_s", [1, 10, 60, 1800])
def test_a_steady_rate_is_all_three_in_the_end_however_often_it_is_asked(every_s: int) -> None:
    loads = Loads(began=5_000)
    found: list[float] = []
    for second in range(every_s, 3 * 3600 + 1, every_s):
        found = averages(loads, 2 * second, 5_000 + second * 1000)
    assert found == pytest.approx([120.0, 120.0, 120.0], abs=0.02)


def test_how_often_it_is_asked_changes_nothing_between() -> None:
    often, once = Loads(began=0), Loads(began=0)
    for second in range(1, 91):
        found = averages(often, 10 * second, second * 1000)
    assert found == pytest.approx(averages(once, 900, 90_000), abs=0.01)


def test_at_the_same_moment_nothing_changes() -> None:
    loads = Loads(began=0)
    assert loads.measure({"x": 3}, 0) == []
    before = averages(loads, 3, 1_000)
    assert averages(loads, 9, 1_000) == before
    assert [name for name, _ in loads.measure({"x": 9}, 1_000)] == ["x/1min", "x/5min", "x/15min"]
