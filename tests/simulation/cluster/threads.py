"""Processes with threads in virtual time: a thread is a greenlet, and only one runs until it waits.

Code of production finds :data:`THREADING` and :data:`TIME` in the place of the modules ``threading`` and ``time``. A
thread may also lose the processor when it reads a clock: there other threads run, and the process may be paused there.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from greenlet import getcurrent, greenlet

from tests.simulation.history import Violation
from tests.simulation.loop import MachineClock

__all__ = ["THREADING", "TIME", "Event", "Killed", "Process", "Simulator", "Thread", "boot_ms", "wall_ms"]

SWITCH_S: Final = 0.00005
"""Longest time until a thread runs that was woken."""


class Killed(SystemExit):
    """The process of this thread was killed: nothing of it runs any more but the ends of ``with`` and ``finally``.

    asyncio lets this exception out of a loop at once, as it does no other of ours.
    """


class Process:
    """A process on ``machine``: its threads end together, and are paused together."""

    def __init__(self, simulator: Simulator, name: str, machine: MachineClock) -> None:
        self.name = name
        self.machine = machine
        self.is_alive = True
        self.resumed_s = 0.0
        """Time until which the process is paused."""
        self._simulator = simulator
        self._threads: list[Thread] = []

    def start_thread(self, target: Callable[..., object], *args: object) -> Thread:
        """Start a thread that calls ``target``."""
        thread = Thread(target, args, process=self)
        thread.start()
        return thread

    def add(self, thread: Thread) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)

    def kill(self) -> None:
        """End all threads; not called by one of them."""
        self.is_alive = False
        for thread in self._threads:
            thread.kill()
        self._threads.clear()

    def pause(self, seconds: float) -> None:
        """Let no thread run for a time."""
        self.resumed_s = max(self.resumed_s, self._simulator.now_s + seconds)


class Simulator:
    """Virtual time, and all threads that wait for it. Only one exists at a time; the one that runs is ``running``."""

    running: Simulator

    def __init__(self, random: Random) -> None:
        self.now_s = 1_000.0
        self.random = random
        self.thread: Thread | None = None
        """The thread that runs; None: a callback of :meth:`later`."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0
        self._hub = getcurrent()
        self._failure: BaseException | None = None
        Simulator.running = self

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call after a delay, outside of all threads."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._number, call, args))

    def run(self, until_s: float) -> None:
        """Run until the time ``until_s``. Raises the exception that a thread did not handle."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, call, args = heapq.heappop(queue)
            call(*args)
            if self._failure is not None:
                raise self._failure
        self.now_s = until_s

    def wait(self, seconds: float | None) -> None:
        """Let other threads run until this one is woken or ``seconds`` have passed."""
        thread = self.thread
        assert thread is not None, "only threads wait"
        if not thread.process.is_alive:
            raise Killed
        thread.turn += 1
        if seconds is not None:
            self.later(seconds, self._resume, thread, thread.turn)
        # asyncio knows one running loop of a thread, and all of these run in one.
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self._hub.switch()
        finally:
            asyncio._set_running_loop(loop)

    def wake(self, thread: Thread) -> None:
        """Let ``thread`` run soon, if it waits then."""
        self.later(SWITCH_S * self.random.random(), self._resume, thread, thread.turn)

    def point(self) -> None:
        """Let other threads run at times, as an operating system does."""
        if self.thread is not None and self.random.random() < 0.02:
            self.wait(self.random.choice((SWITCH_S, 0.001, 0.02)))

    def failed(self, error: BaseException) -> None:
        """End the simulation with the first ``error``."""
        if self._failure is None:
            self._failure = error

    def _resume(self, thread: Thread, turn: int) -> None:
        if thread.turn != turn or not thread.is_alive():
            return
        if (left_s := thread.process.resumed_s - self.now_s) > 0:
            self.later(left_s + SWITCH_S * self.random.random(), self._resume, thread, turn)
            return
        thread.turn += 1
        self.thread = thread
        thread.greenlet.switch()
        self.thread = None


class Thread:
    """A thread of a process, by default of the one that creates it [threading.Thread]."""

    def __init__(
        self,
        target: Callable[..., object],
        args: tuple[object, ...] = (),
        name: str = "",
        daemon: bool = True,
        *,
        process: Process | None = None,
    ) -> None:
        simulator = Simulator.running
        if process is None:
            assert simulator.thread is not None
            process = simulator.thread.process
        self.process: Process = process
        self.turn = 0
        """Number of waits and resumptions: a timer of an earlier wait has no effect."""
        self.greenlet = greenlet(self._run, simulator._hub)
        self._target, self._args = target, args
        self._simulator = simulator
        self._has_ended = False
        self._has_started = False
        self._joining: list[Thread] = []

    def start(self) -> None:
        if not self.process.is_alive:
            raise Killed
        self._has_started = True
        self.process.add(self)
        self._simulator.wake(self)

    def is_alive(self) -> bool:
        return self._has_started and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        simulator = self._simulator
        end_s = None if timeout is None else simulator.now_s + timeout
        while self.is_alive() and (end_s is None or end_s > simulator.now_s):
            assert simulator.thread is not None
            self._joining.append(simulator.thread)
            simulator.wait(None if end_s is None else end_s - simulator.now_s)

    def kill(self) -> None:
        """End it where it waits."""
        if not self._has_ended and self.greenlet:  # it has begun
            simulator = self._simulator
            before, simulator.thread = simulator.thread, self
            self.greenlet.throw(Killed)
            simulator.thread = before
        self._has_ended = True

    def _run(self, *_: object) -> None:
        try:
            self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the simulation raises it
            self._simulator.failed(error)
        self._has_ended = True
        for thread in self._joining:
            self._simulator.wake(thread)


class Event:
    """[threading.Event]."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            Simulator.running.wake(thread)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        simulator = Simulator.running
        end_s = None if timeout is None else simulator.now_s + timeout
        while not self._is_set and (end_s is None or end_s > simulator.now_s):
            assert simulator.thread is not None
            self._waiting.append(simulator.thread)
            simulator.wait(None if end_s is None else end_s - simulator.now_s)
        return self._is_set


class Condition:
    """A lock and a condition [threading.Lock, threading.Condition]."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._free = Event()
        self._changed = Event()

    def __enter__(self) -> None:
        while self._owner is not None:
            self._free.clear()
            self._free.wait()
        self._owner = Simulator.running.thread

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._free.set()

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> bool:
        end_s = Simulator.running.now_s + timeout
        while not ready() and end_s > Simulator.running.now_s:
            self._changed.clear()
            self.__exit__()
            try:
                self._changed.wait(end_s - Simulator.running.now_s)
            finally:
                self.__enter__()
        return ready()

    def notify_all(self) -> None:
        self._changed.set()


def _process() -> Process:
    thread = Simulator.running.thread
    if thread is None:
        raise Violation("a clock is read outside of all processes")
    return thread.process


def boot_ms() -> int:
    """The clock of the machine that never steps, in ms [penstock.runtime.io.clock]."""
    Simulator.running.point()
    return _process().machine.elapsed_ns() // 1_000_000


def wall_ms() -> int:
    """The system clock of the machine, in ms [penstock.runtime.io.clock.wall_clock_ms]."""
    return _time_ns() // 1_000_000


def _monotonic() -> float:
    return _process().machine.elapsed_ns() / 1e9


def _time_ns() -> int:
    return _process().machine.wall_ns()


def _sleep(seconds: float) -> None:
    end_s = Simulator.running.now_s + seconds
    while (left_s := end_s - Simulator.running.now_s) > 0:
        Simulator.running.wait(left_s)


THREADING: Final = SimpleNamespace(Thread=Thread, Event=Event, Lock=Condition, Condition=Condition)
"""In the place of the module ``threading``."""
TIME: Final = SimpleNamespace(monotonic=_monotonic, sleep=_sleep, time_ns=_time_ns)
"""In the place of the module ``time``."""
