"""An event loop with virtual time: an iteration takes little, and when nothing is ready, the next timer is due."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from heapq import heappop, heappush
from random import Random
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

from tests.simulation.network import NetworkEnd, VirtualNetwork, VirtualServer

__all__ = ["TURN_S", "WALL_MS", "Deadlock", "MachineClock", "VirtualLoop"]

P = TypeVar("P", bound=asyncio.Protocol)
T = TypeVar("T")
Args = TypeVarTuple("Args")

WALL_MS = 1_800_000_000_000
"""The true time at time 0 of the loop."""


class Deadlock(BaseException):
    """Nothing is ready and no timer is armed, so that nothing will ever happen."""


TURN_S = 0.00002
"""Time of an iteration, so that other bytes may arrive while a connection waits for its next share."""


class MachineClock:
    """The clocks of the node's machine: they run slow, and the wall clock jumps."""

    def __init__(self, slow: float = 0.0) -> None:
        self._slow = slow
        self._step_s = 0.0
        self.true_s: Callable[[], float] = lambda: 0.0
        """The true time, of the loop of this life."""

    def elapsed_ns(self) -> int:
        """A clock without jumps."""
        return int(self.true_s() * (1.0 - self._slow) * 1e9)

    def wall_ns(self) -> int:
        """The wall clock, since 1970."""
        return WALL_MS * 1_000_000 + self.elapsed_ns() + int(self._step_s * 1e9)

    def steady_ms(self) -> int:
        """The wall clock without its jumps, in ms."""
        return WALL_MS + self.elapsed_ns() // 1_000_000

    def step(self, seconds: float) -> None:
        """Let the wall clock jump."""
        self._step_s += seconds

    def set_right(self) -> None:
        """Take back all jumps, as a time server does while a machine boots."""
        self._step_s = 0.0


class Callback:
    """In the place of ``asyncio.Handle`` and ``asyncio.TimerHandle``, which copy the context for each callback.

    A callback runs in the context of the loop, unless it was given another one, as those of tasks are.
    """

    __slots__ = ("_when", "args", "call", "context", "is_cancelled")

    def __init__(
        self, call: Callable[..., object], args: tuple[Any, ...], context: Context | None, when: float
    ) -> None:
        self.call = call
        self.args = args
        self.context = context
        self.is_cancelled = False
        self._when = when

    def cancel(self) -> None:
        """Do not call [asyncio.Handle]."""
        self.is_cancelled = True
        self.call, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


def _nothing() -> None: ...


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop of one life of a node. asyncio promises the order of ready callbacks, so it is not permuted.

    Work for threads (``run_in_executor``) runs in the loop after a random delay. An exception that nobody handles is
    kept in ``failures``, and stops the loop.
    """

    _ready: deque[Callback]  # of asyncio.BaseEventLoop, as the next two
    _stopping: bool
    _closed: bool

    def __init__(self, random: Random, start_s: float = 1_000.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._timers: list[tuple[float, int, Callback]] = []
        self._armed = 0
        self._check: Callable[[], None] = lambda: None
        self.random = random
        self.network = VirtualNetwork(self, random)
        self.failures: list[str] = []
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Callback:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = Callback(callback, args, context, 0.0)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no other threads

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Callback:
        handle = Callback(callback, args, context, when)
        self._armed += 1
        # Python compares tuples faster than handles: half of the callbacks of a simulation are timers.
        heappush(self._timers, (when, self._armed, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Callback:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def true_ms(self) -> int:
        """The time that histories are measured on, in ms; the clock of all clients."""
        return WALL_MS + int(self.time() * 1000)

    def on_turn(self, call: Callable[[], None]) -> None:
        """Call after each iteration, in place of what was called before."""
        self._check = call

    def pause(self, seconds: float) -> None:
        """Let nothing run for a time: every timer that becomes due meanwhile is late."""
        self._now_s += seconds

    def soon(self, most_s: float, call: Callable[..., object], *args: Any) -> Callback:
        """Call after a random delay; most are short."""
        return self.call_later(most_s * self.random.random() ** 3, call, *args)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self.soon(0.01, work)
        return future

    async def create_server(  # type: ignore[override]
        self, accept: Callable[[], asyncio.Protocol], host: str, port: int, **_options: Any
    ) -> VirtualServer:
        return self.network.listen((host, port), accept)

    async def create_connection(  # type: ignore[override]
        self, create: Callable[[], P], host: str, port: int, **_options: Any
    ) -> tuple[NetworkEnd, P]:
        protocol = create()
        return self.network.connect((host, port), protocol), protocol

    def close(self) -> None:
        """End, with everything that still waits: nothing of it runs any more."""
        if not self.is_closed():
            self.set_exception_handler(lambda *_: None)
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                if isinstance(coroutine, CoroutineType) and coroutine.__name__ == "run_asgi":
                    coroutine.close()  # it answers with an error when it ends, which needs an open loop
        super().close()
        self._timers.clear()
        # The map of stall watches refers to the loop as long as the node exists: the loop must not refer to the node.
        self.on_turn(lambda: None)
        self.network = VirtualNetwork(self, self.random)

    def _run_once(self) -> None:
        """Do what asyncio's loop does in an iteration. Waiting for input takes no time but lets it pass."""
        self._check()
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].is_cancelled:
            heappop(timers)
        next_s = self._now_s + TURN_S
        if not (ready or self._stopping):
            if not timers:
                raise Deadlock
            next_s = max(next_s, timers[0][0])
        self._now_s = next_s
        while timers and timers[0][0] <= next_s:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            try:
                if handle.context is None:
                    handle.call(*handle.args)
                else:
                    handle.context.run(handle.call, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's handles
                self.call_exception_handler({"message": f"exception in {handle.call}", "exception": error})

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(str(context.get("exception") or context["message"]))
        self.stop()
