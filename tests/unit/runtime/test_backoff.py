"""Pauses between attempts: they double up to a limit, begin anew after a success, and are spread by jitter."""

from __future__ import annotations

from penstock.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [round(backoff.failed(), 3) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert backoff.failures == 5


def test_a_success_starts_the_series_again() -> None:
    backoff = Backoff(0.1, 0.5)
    backoff.failed()
    backoff.failed()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.failed() == 0.1


def test_a_success_that_ends_before_the_next_pause_would_have_ended_is_none() -> None:
    backoff = Backoff(0.1, 0.5)
    backoff.failed()
    backoff.ended(0.19)
    assert backoff.failed() == 0.2
    backoff.ended(0.4)
    assert backoff.failed() == 0.1


def test_jitter_takes_up_to_half_of_a_pause() -> None:
    numbers = iter([0.0, 0.5, 0.999])
    backoff = Backoff(1.0, 1.0, random=lambda: next(numbers))
    assert [backoff.failed(), backoff.failed()] == [0.5, 0.75]
    assert 0.99 < backoff.failed() < 1.0


def test_a_series_never_overflows() -> None:
    backoff = Backoff(0.1, 10.0)
    for _ in range(5_000):
        backoff.failed()
    assert backoff.failed() == 10.0
