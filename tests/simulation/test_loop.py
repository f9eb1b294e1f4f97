"""Virtual time passes only while nothing is ready, and a loop without a future says so."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, copy_context
from random import Random

import pytest

from tests.simulation.loop import WALL_MS, Deadlock, MachineClock, VirtualLoop


def test_a_day_passes_at_once_and_in_order() -> None:
    loop = VirtualLoop(Random(0))
    seen: list[str] = []

    async def sleep(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        seen.append(name)

    async def main() -> None:
        await asyncio.gather(sleep(86_400, "day"), sleep(1, "second"), sleep(3_600, "hour"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await loop.create_future()

    started = loop.time()
    loop.run_until_complete(main())
    assert seen == ["second", "hour", "day"]
    assert loop.time() - started == pytest.approx(86_460)
    loop.close()


def test_work_for_threads_runs_in_the_loop() -> None:
    loop = VirtualLoop(Random(0))

    def work(result: int) -> int:
        if not result:
            raise LookupError
        return result

    async def main() -> None:
        started = loop.time()
        assert await asyncio.to_thread(work, 1) == 1
        assert loop.time() > started
        with pytest.raises(LookupError):
            await asyncio.to_thread(work, 0)

    loop.run_until_complete(main())
    loop.close()


def test_a_lost_wake_up_is_a_deadlock() -> None:
    loop = VirtualLoop(Random(0))
    waiting = loop.create_future()
    with pytest.raises(Deadlock):
        loop.run_until_complete(waiting)
    waiting.cancel()
    loop.close()


def test_an_unhandled_exception_stops_the_loop() -> None:
    loop = VirtualLoop(Random(0))

    def fail() -> None:
        raise LookupError("planted")

    loop.call_later(1, fail)
    loop.call_later(2, loop.failures.append, "too late")
    loop.run_forever()
    assert loop.failures == ["planted"]
    loop.close()


def test_a_pause_makes_timers_late() -> None:
    loop = VirtualLoop(Random(0))
    seen: list[float] = []
    started = loop.time()
    loop.call_later(1, loop.pause, 60)
    loop.call_later(2, lambda: seen.append(loop.time() - started))
    loop.call_later(3, loop.stop)
    loop.run_forever()
    assert seen == [pytest.approx(61)]
    loop.close()


def test_the_wall_clock_jumps_and_the_others_run_on() -> None:
    machine = MachineClock(slow=0.01)
    machine.true_s = lambda: 100.0
    assert machine.steady_ms() == machine.wall_ns() // 1_000_000 == WALL_MS + 99_000
    machine.step(-5.0)
    assert machine.wall_ns() // 1_000_000 == WALL_MS + 94_000
    assert machine.elapsed_ns() == 99_000_000_000
    assert machine.steady_ms() == WALL_MS + 99_000
    machine.set_right()
    assert machine.wall_ns() // 1_000_000 == WALL_MS + 99_000


def test_callbacks_that_were_cancelled_are_not_called_and_others_run_in_their_context() -> None:
    loop = VirtualLoop(Random(0))
    name = ContextVar("name", default="the loop's")
    other = copy_context()
    other.run(name.set, "another one")
    seen: list[str] = []

    def note() -> None:
        seen.append(name.get())

    for handle in (loop.call_soon(note), loop.call_later(1, note), loop.call_at(loop.time() + 2, note)):
        handle.cancel()
        assert handle.cancelled()
    timer = loop.call_later(3, note)
    assert timer.when() == loop.time() + 3
    loop.call_later(4, note, context=other)
    loop.call_soon_threadsafe(note)
    loop.call_later(5, loop.stop)
    loop.run_forever()
    assert seen == ["the loop's", "the loop's", "another one"]
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(note)
