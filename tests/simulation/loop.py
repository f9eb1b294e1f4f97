"""An event loop with virtual time: an iteration takes little, and when nothing is ready, the next timer is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
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


class _Clock:
    """In the place of a selector: waiting for input takes no time but lets it pass."""

    def __init__(self, start_s: float) -> None:
        self.now_s = start_s
        self.on_turn: Callable[[], None] = lambda: None

    def select(self, timeout_s: float | None) -> list[Any]:
        self.on_turn()
        if timeout_s is None:
            raise Deadlock
        self.now_s += max(TURN_S, timeout_s)
        return []

    def close(self) -> None: ...


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


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop of one life of a node. asyncio promises the order of ready callbacks, so it is not permuted.

    Work for threads (``run_in_executor``) runs in the loop after a random delay. An exception that nobody handles is
    kept in ``failures``, and stops the loop.
    """

    def __init__(self, random: Random, start_s: float = 1_000.0) -> None:
        super().__init__()
        self._selector = _Clock(start_s)
        self._clock_resolution = 1e-9
        self.random = random
        self.network = VirtualNetwork(self, random)
        self.failures: list[str] = []
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._selector.now_s

    def true_ms(self) -> int:
        """The time that histories are measured on, in ms; the clock of all clients."""
        return WALL_MS + int(self.time() * 1000)

    def on_turn(self, call: Callable[[], None]) -> None:
        """Call after each iteration, in place of what was called before."""
        self._selector.on_turn = call

    def pause(self, seconds: float) -> None:
        """Let nothing run for a time: every timer that becomes due meanwhile is late."""
        self._selector.now_s += seconds

    def soon(self, most_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
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
        # The map of stall watches refers to the loop as long as the node exists: the loop must not refer to the node.
        self.on_turn(lambda: None)
        self.network = VirtualNetwork(self, self.random)

    def _process_events(self, event_list: list[Any]) -> None:
        """There is no input but that of timers."""

    def _write_to_self(self) -> None:
        """There are no other threads to wake the loop."""

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(str(context.get("exception") or context["message"]))
        self.stop()
