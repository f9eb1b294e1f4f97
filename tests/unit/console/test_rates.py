"""Rates and their history, from samples of counters."""

from __future__ import annotations

from penstock.console.rates import SAMPLES, Rates


def test_a_rate_is_the_increase_of_the_last_seconds() -> None:
    values: dict[str, float] = {"n": 0, "depth": 3}
    rates = Rates(lambda: values, gauges=["depth"])
    assert rates.rate("n") == 0
    for second in range(1, 21):
        rates.sample(second)
        values["n"] += 10 if second < 10 else 40
        values["depth"] = second
    assert rates.rate("n") == 40
    assert rates.rate("unknown") == 0
    times, series = rates.history(["n", "depth"], after_s=17)
    assert times == [18, 19, 20]
    assert series == {"n": [40, 40, 40], "depth": [17, 18, 19]}


def test_a_restarted_counter_has_no_negative_rate_and_the_history_is_bounded() -> None:
    values: dict[str, float] = {"n": 1000}
    rates = Rates(lambda: values)
    rates.sample(1)
    values["n"] = 5
    rates.sample(2)
    assert rates.rate("n") == 0
    for second in range(3, 1000):
        rates.sample(second)
    assert SAMPLES <= len(rates.history(["n"])[0]) <= SAMPLES + 6
