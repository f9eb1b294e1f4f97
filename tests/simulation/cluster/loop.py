"""Event loops in virtual threads: that of a node's process, and the clock and timers of all clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from inspect import CORO_CREATED, getcoroutinestate
from random import Random
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

from tests.simulation.cluster.threads import THREADING, Event, Simulator, Thread
from tests.simulation.loop import TURN_S, WALL_MS

__all__ = ["ClientLoop", "ProcessLoop", "VirtualQueue"]

T = TypeVar("T")
Args = TypeVarTuple("Args")


class _Selector:
    """In the place of a selector: the thread of the loop waits, and others run."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def select(self, timeout_s: float | None) -> list[Any]:
        self._simulator.wait(None if timeout_s is None else max(TURN_S, timeout_s))
        return []

    def close(self) -> None: ...


class ProcessLoop(asyncio.BaseEventLoop):
    """The loop of a process, in the virtual thread that creates it. Executors are virtual threads of the process.

    An exception that nobody handles ends the simulation.
    """

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        assert simulator.thread is not None
        self._simulator = simulator
        self._own_thread: Thread = simulator.thread
        self._selector = _Selector(simulator)
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._simulator.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                self.call_soon_threadsafe(_end, future, error)
            else:
                self.call_soon_threadsafe(_end, future, None, result)

        THREADING.Thread(work).start()
        return future

    def close(self) -> None:
        """End, with everything that still waits: nothing of it runs any more."""
        if not self.is_closed():
            self.set_exception_handler(lambda *_: None)
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                if isinstance(coroutine, CoroutineType) and getcoroutinestate(coroutine) == CORO_CREATED:
                    coroutine.close()  # otherwise Python warns that it never ran
        super().close()

    def _process_events(self, event_list: list[Any]) -> None:
        """There is no input but that of timers."""

    def _write_to_self(self) -> None:
        self._simulator.wake(self._own_thread)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._simulator.failed(error if error is not None else AssertionError(context["message"]))


def _end(future: asyncio.Future[T], error: Exception | None, result: Any = None) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class ClientLoop:
    """The clock and timers of clients and network [tests.simulation.loop.VirtualLoop]; no thread runs in a callback."""

    def __init__(self, simulator: Simulator) -> None:
        self.random: Random = simulator.random
        self._simulator = simulator

    def time(self) -> float:
        return self._simulator.now_s

    def true_ms(self) -> int:
        """The true time, in ms."""
        return WALL_MS + int(self._simulator.now_s * 1000)

    def call_at(self, when_s: float, call: Callable[..., object], *args: Any) -> None:
        self._simulator.later(max(0.0, when_s - self._simulator.now_s), call, *args)

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self._simulator.later(delay_s, call, *args)

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        self._simulator.later(0.0, call, *args)

    def soon(self, most_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call after a random delay; most are short."""
        self._simulator.later(most_s * self.random.random() ** 3, call, *args)


class VirtualQueue:
    """[queue.SimpleQueue], of the batches of one commit thread."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._arrived = Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._arrived.set()

    def get(self) -> Any:
        while not self._items:
            self._arrived.clear()
            self._arrived.wait()
        return self._items.popleft()
