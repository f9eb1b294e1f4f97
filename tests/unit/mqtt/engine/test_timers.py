"""One entry an owner, called when due; owners that are gone do not pile up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.engine.model.timers import DeadlineOwner, Timers, after_s


class Owner(DeadlineOwner):
    __slots__ = ("again", "calls", "timers")

    def __init__(self, timers: Timers, again: int = 0) -> None:
        super().__init__()
        self.timers = timers
        self.again = again
        self.calls: list[int] = []

    def due(self, now: int) -> None:
        self.calls.append(now)
        if self.again:
            self.timers.arm(self, now + self.again)


def test_called_once_when_due() -> None:
    timers = Timers()
    owner = Owner(timers)
    timers.arm(owner, 10)
    timers.tick(9)
    assert owner.calls == []
    assert timers.next_deadline() == 10
    timers.tick(10)
    timers.tick(11)
    assert owner.calls == [10]
    assert timers.next_deadline() is None


def test_an_earlier_entry_is_kept_and_a_later_one_ignored() -> None:
    timers = Timers()
    owner = Owner(timers)
    timers.arm(owner, 20)
    timers.arm(owner, 30)
    assert len(timers) == 1
    timers.arm(owner, 10)
    timers.tick(40)
    assert owner.calls == [40], "the entry it had before says nothing any more"


def test_arming_again_from_within() -> None:
    timers = Timers()
    owner = Owner(timers, again=5)
    timers.arm(owner, 5)
    for now in range(21):
        timers.tick(now)
    assert owner.calls == [5, 10, 15, 20]


def test_gone_owners_are_swept() -> None:
    timers = Timers()
    kept = Owner(timers)
    timers.arm(kept, 10**9)
    for n in range(1000):
        owner = Owner(timers)
        timers.arm(owner, 1000 + n)
        timers.remove(owner)
        timers.remove(owner)
    assert len(timers) < 200
    assert timers.next_deadline() == 10**9
    timers.tick(10**9)
    assert kept.calls == [10**9]
    assert len(timers) == 0


def test_it_says_when_an_entry_comes_before_all_others() -> None:
    timers = Timers()
    owners = [Owner(timers) for _ in range(3)]
    timers.arm(owners[0], 100)
    assert timers.sooner
    timers.sooner = False
    timers.arm(owners[1], 200)
    assert not timers.sooner, "the shell's timer is early enough"
    timers.arm(owners[2], 50)
    assert timers.sooner


@given(start_us=st.integers(0, 10**9), seconds=st.integers(0, 3), late_us=st.integers(-2_000, 2_000))
def test_a_time_in_seconds_never_ends_early(start_us: int, seconds: int, late_us: int) -> None:
    due_ms = after_s(start_us // 1_000, seconds)
    now_us = start_us + seconds * 1_000_000 + late_us
    if late_us < 0 and seconds:
        assert now_us // 1_000 < due_ms
    if late_us >= 1_000:
        assert now_us // 1_000 >= due_ms
