"""The client's clock: greater stamps, a clock that was wrong or set back, and going by the server's."""

from __future__ import annotations

import pytest

from penstock.statestore.client.requests import RequestClock
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc


class Wall:
    def __init__(self, ms: int) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


def test_stamps_grow_and_follow_what_was_seen() -> None:
    clock = RequestClock("me", Wall(1000))
    first, second = clock.stamp(), clock.stamp()
    assert (first, second) == (Hlc(1000, 0, "me"), Hlc(1000, 1, "me"))
    assert clock.receive("1500:7:StateStore") == Hlc(1500, 7, "StateStore")
    assert clock.stamp() > Hlc(1500, 7, "StateStore")
    assert clock.behind_ms == 500


@pytest.mark.parametrize("text", [None, "", "1:2", "x:1:n"])
def test_an_invalid_version_changes_nothing(text: str | None) -> None:
    clock = RequestClock("me", Wall(1000))
    assert clock.receive(text) is None
    assert clock.behind_ms is None
    assert clock.stamp() == Hlc(1000, 0, "me")


def test_a_version_far_ahead_does_not_move_the_clock_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = RequestClock("me", Wall(1000))
    for _ in range(3):
        assert clock.receive("100000:0:StateStore") == Hlc(100_000, 0, "StateStore")
    assert clock.stamp() == Hlc(1000, 0, "me")
    assert caplog.text.count("ahead of the local clock") == 1
    assert clock.behind_ms == 99_000


def test_a_clock_that_was_set_back_does_not_stay_in_the_future() -> None:
    wall = Wall(10_000_000)
    clock = RequestClock("me", wall)
    clock.stamp()
    wall.ms -= MAX_DRIFT_MS
    assert clock.stamp().wall_ms == 10_000_000
    wall.ms -= 1
    assert clock.stamp() == Hlc(wall.ms, 0, "me")


def test_the_skew_is_computed_from_the_newest_version() -> None:
    wall = Wall(100_000)
    clock = RequestClock("me", wall)
    assert clock.skew()[0] is None
    assert "more than 60 s ahead" in clock.skew()[1]
    clock.receive("100000:0:StateStore")
    wall.ms = 220_000
    ahead, why = clock.skew()
    assert ahead == 120_000
    assert why.startswith("this machine's clock is 120 s ahead of the newest version received")


def test_by_the_servers_clock_no_time_of_this_machine_is_sent() -> None:
    clock = RequestClock("me", Wall(10**15), server_clock=True)
    assert clock.stamp() == Hlc(0, 1, "me")
    clock.receive("5000:3:StateStore")
    assert clock.stamp() == Hlc(5000, 4, "me")
    clock.receive("4000:9:StateStore")
    assert clock.stamp() == Hlc(5000, 5, "me")
