"""A system clock that is set: small steps are followed, large ones once they have lasted."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.runtime.io.clock import CLOCK_IS_SET_MS, SteppedClock, boot_ms, utc

NOW = 1_790_000_000
TEN_YEARS = 10 * 365 * 86_400


class Machine:
    """A system clock and the time since the boot, both in s."""

    def __init__(self, now: float = NOW) -> None:
        self.wall = now
        self.elapsed = 1000.0

    def clock(self, hold_s: float = 300) -> SteppedClock:
        return SteppedClock(hold_s=hold_s, wall=lambda: int(self.wall * 1e9), elapsed=lambda: int(self.elapsed * 1e9))

    def passes(self, seconds: float, clock: SteppedClock) -> None:
        """Time passes, and the clock is looked at every second of it."""
        while seconds > 0:
            self.wall += min(1, seconds)
            self.elapsed += min(1, seconds)
            seconds -= 1
            clock.check()


def test_the_clock_runs_with_the_system_clock() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.passes(3600, clock)
    assert clock() == (NOW + 3600) * 1000
    assert (clock.offset_ms, clock.steps, clock.problem()) == (0, 0, None)


def test_the_clock_is_read_to_the_millisecond() -> None:
    clock = SteppedClock()
    for _ in range(1000):
        before = time.time_ns() // 1_000_000
        booted = boot_ms()
        now, since_boot = clock.now_and_boot_ms()
        assert before - 1 <= now <= time.time_ns() // 1_000_000 + 1
        assert booted <= since_boot <= boot_ms(), "a key that is set now must not expire early"


@pytest.mark.parametrize("step", [29, -29, 0.5])
def test_a_small_step_is_followed(step: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += step
    clock.check()
    assert clock() == (NOW + step) * 1000
    assert (clock.steps, clock.problem()) == (0, None)


@pytest.mark.parametrize("step", [TEN_YEARS, -TEN_YEARS // 10, 31, -31, 3600])
def test_a_step_for_a_moment_changes_nothing(step: int) -> None:
    machine = Machine()
    clock = machine.clock()
    told: list[int] = []
    clock.on_followed.append(lambda: told.append(1))
    machine.wall += step
    assert clock() == NOW * 1000, "also before anybody has looked"
    machine.passes(120, clock)
    assert clock() == (NOW + 120) * 1000
    assert clock.offset_ms == step * 1000
    problem = str(clock.problem())
    assert f"{'ahead' if step > 0 else 'back'} by {abs(step)} s" in problem
    assert utc((NOW + step + 120) * 1000) in problem
    machine.wall -= step
    machine.passes(600, clock)
    assert clock() == (NOW + 720) * 1000
    assert (clock.problem(), clock.steps, told) == (None, 1, [])


@pytest.mark.parametrize("step", [TEN_YEARS, -3600])
def test_a_step_that_lasts_is_followed(step: int) -> None:
    machine = Machine()
    clock = machine.clock(hold_s=300)
    told: list[int] = []
    clock.on_followed.append(lambda: told.append(clock()))
    machine.wall += step
    machine.passes(300, clock)
    assert clock() == (NOW + 300) * 1000
    assert "wait 1 s" in str(clock.problem())
    machine.passes(2, clock)
    assert clock() == (NOW + 302 + step) * 1000
    assert clock.problem() is None
    assert len(told) == 1


def test_another_step_begins_another_wait() -> None:
    machine = Machine()
    clock = machine.clock(hold_s=300)
    machine.wall += TEN_YEARS
    machine.passes(200, clock)
    machine.wall -= TEN_YEARS // 2
    machine.passes(200, clock)
    assert clock() == (NOW + 400) * 1000
    assert clock.steps == 2
    machine.passes(102, clock)
    assert clock() == (NOW + 502 + TEN_YEARS // 2) * 1000


def test_a_machine_without_a_battery_clock_starts_in_1970_and_is_set_later() -> None:
    machine = Machine(now=30)
    clock = machine.clock()
    machine.passes(60, clock)
    machine.wall += NOW
    clock.check()
    assert clock() == (NOW + 90) * 1000, "a clock that was never set has nothing to keep"
    assert clock.problem() is None
    machine.wall = 30
    machine.passes(3600, clock)
    assert clock() == (NOW + 90 + 3600) * 1000, "and never goes back there"
    assert "set it" in str(clock.problem())
    assert CLOCK_IS_SET_MS < NOW * 1000


def test_without_a_wait_every_step_is_followed() -> None:
    machine = Machine()
    clock = machine.clock(hold_s=0)
    machine.wall += TEN_YEARS
    clock.check()
    assert clock() == (NOW + TEN_YEARS) * 1000
    assert clock.problem() is None
    assert clock.steps == 1


def test_a_suspended_machine_has_lost_no_time() -> None:
    """The elapsed time counts suspension, so that the system clock is where it is expected."""
    machine = Machine()
    clock = machine.clock()
    machine.wall += 8 * 3600
    machine.elapsed += 8 * 3600
    clock.check()
    assert clock() == (NOW + 8 * 3600) * 1000
    assert clock.steps == 0


async def test_the_clock_checks_for_steps_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.io.clock._CHECK_S", 0.001)
    machine = Machine()
    clock = machine.clock()
    clock.start()
    machine.wall += TEN_YEARS
    async with asyncio.timeout(60):
        while not clock.steps:
            await asyncio.sleep(0)
    clock.close()
    clock.close()


def test_instants_for_people() -> None:
    assert utc(NOW * 1000) == "2026-09-21 14:13:20+00:00"
    assert utc(10**18) == f"{10**18} ms"
