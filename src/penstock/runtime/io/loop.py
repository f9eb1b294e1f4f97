"""Event loops: create and tune a loop, run it in a thread, stop it on signals, detect stalls.

A server process shuts down on SIGTERM or SIGINT, also during its start; a second signal stops it immediately.

A loop stalls when the process is stopped, the machine is migrated or a disk blocks. Requests of clients wait in sockets
meanwhile. Two rules keep servers from mistaking the delay for idle clients:

* :func:`after_reading`: timeouts of clients are checked after the loop has polled every socket once. This is enough for
  short stalls.
* :class:`StallWatch`: after a stall of more than :data:`STALL_S`, every timeout is extended by its length, at most by
  :data:`MAX_GRACE_S`. A frozen machine received nothing, and its peers retransmit at intervals that have doubled up to
  the length of the pause. A client that is really unreachable is detected one grace period later.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from penstock.errors import LocalProtocolError

__all__ = [
    "FORCED",
    "MAX_GRACE_S",
    "STALL_S",
    "CallLater",
    "LoopThread",
    "RunsInLoopThread",
    "StallWatch",
    "after_reading",
    "blocking",
    "freeze_memory",
    "install_signal_handlers",
    "joins_writes",
    "loop_factory",
    "loop_name",
    "run",
    "run_until",
    "tune_process",
    "watch_stalls",
]

T = TypeVar("T")
P = ParamSpec("P")
Client = TypeVar("Client")
Client_co = TypeVar("Client_co", covariant=True)

MOST_DESCRIPTORS = 1 << 20
"""Upper limit of file descriptors: larger kernel tables cost memory without a benefit for clients."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


class CallLater(Protocol):
    """Schedules a callback after a delay in seconds, as :meth:`asyncio.loop.call_later` does."""

    def __call__(self, delay: float, callback: Callable[[], None], /) -> object: ...


def loop_name() -> str:
    """``uvloop`` if it is installed, unless ``PENSTOCK_LOOP=asyncio``."""
    if os.environ.get("PENSTOCK_LOOP", "uvloop") != "asyncio":
        with contextlib.suppress(ImportError):
            import uvloop  # noqa: F401 - whether it is there

            return "uvloop"
    return "asyncio"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Factory of the loop: uvloop processes 12 to 27 % more packets, with the same results."""
    if loop_name() == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def joins_writes(loop: asyncio.AbstractEventLoop) -> bool:
    """True if the loop's transports collect writes of a turn and send them together."""
    return type(loop).__module__ == "uvloop"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in a new loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def tune_process() -> None:
    """Set process-wide options of a server. Call once, before large allocations.

    glibc returns large buffers to the kernel and faults them in again; keeping them doubled the throughput of a TubeMQ
    consumer (1 KiB messages). :mod:`~penstock.runtime.io.memory` returns them when the server becomes idle.

    The shorter switch interval gives commit threads the interpreter sooner while the loop is busy (+7 % of durable SETs
    measured; a tenth of it costs more than it gains).

    The limit of file descriptors is raised to the hard limit, since each client needs one.
    """
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        import ctypes

        # musl has no mallopt.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024 * 1024)
            libc.mallopt(M_TRIM_THRESHOLD, 1024 * 1024 * 1024)
    sys.setswitchinterval(0.0005)
    _raise_descriptor_limit()


def _raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors: shells set 1,024, which would limit the clients.

    That default exists for ``select()``, which is not used here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_memory() -> None:
    """Exclude all current objects from garbage collection; call once after start and recovery.

    A full collection of 300,000 recovered objects would stop the loop for 32 ms. The oldest generation is then
    collected less often, since the hot path keeps bytes objects, which form no cycles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)


_STOP_S = 5.0
"""Time limit for cancelled tasks to end."""


class RunsInLoopThread(Protocol[Client_co]):
    """A blocking wrapper of an asyncio client that runs in a :class:`LoopThread`."""

    def _opened(self) -> tuple[LoopThread, Client_co]:
        """Return the thread and the client. Raises LocalProtocolError if closed."""


def blocking(
    method: Callable[Concatenate[Client, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[RunsInLoopThread[Client], P], T]:
    """Derive a blocking method from a coroutine method, with its parameters and docstring."""

    @functools.wraps(method)
    def call(self: RunsInLoopThread[Client], /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread, client = self._opened()
        return thread.run(method(client, *args, **kwargs))

    return call


class LoopThread:
    """Runs coroutines for other threads, until :meth:`close`. The thread is a daemon: a program may exit without
    closing it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = loop_factory()()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._closed = False
        self._closing = threading.Lock()
        """Held while work is submitted, so that no work is submitted after the end, where it would never complete."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and wait for its result; from any other thread.

        An interrupt (Ctrl-C) cancels it.

        Raises:
            LocalProtocolError: closed, or called from the thread of the loop, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise self._refused("it was called from its own thread, which would wait for itself")
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise LocalProtocolError(f"{self._name}: the call was cancelled", why="another thread closed it") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the loop without waiting for it; cancelling the future cancels the work.

        Raises:
            LocalProtocolError: closed.
        """
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise self._refused("it was closed")

    def close(self) -> None:
        """Cancel running work and stop the thread; may be called again."""
        if threading.current_thread() is self._thread:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                # Runs after all submitted work has begun; that work is then cancelled.
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _refused(self, why: str) -> LocalProtocolError:
        return LocalProtocolError(f"{self._name}: the call was refused", why=why)

    def _main(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


_log = logging.getLogger("penstock.loop")

BEAT_S: Final = 1.0
STALL_S: Final = 1.5
"""Time between two timer callbacks that counts as a stall."""
MAX_GRACE_S: Final = 60.0
"""Longest extension of timeouts: about the longest retransmission interval of TCP."""


def after_reading(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the loop has polled all sockets once and read their data.

    asyncio polls before scheduled callbacks, uvloop after them: the second turn follows a poll in both.
    """
    loop.call_soon(loop.call_soon, callback)


class StallWatch:
    """Detects stalls of a loop; created by :func:`watch_stalls`. ``stalls`` counts them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.stalls = 0
        self._loop = loop
        self._clock = clock
        self._beat = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[int], None]] = []

    def add(self, on_stall: Callable[[int], None]) -> None:
        """Call ``on_stall`` after each stall with the extension in ms, until it is removed."""
        self._callbacks.append(on_stall)
        if self._timer is None:
            self._beat = self._clock()
            self._timer = self._loop.call_later(BEAT_S, self._next)

    def remove(self, on_stall: Callable[[int], None]) -> None:
        """Remove a callback; may be called twice."""
        if on_stall in self._callbacks:
            self._callbacks.remove(on_stall)
        if not self._callbacks and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Detect a stall that has just ended; call it before timeouts are checked."""
        if self._clock() - self._beat > STALL_S and self._timer is not None:
            self._stalled()

    def _next(self) -> None:
        self.look()
        self._beat = self._clock()
        self._timer = self._loop.call_later(BEAT_S, self._next)

    def _stalled(self) -> None:
        now = self._clock()
        stall_s, self._beat = now - self._beat, now
        self.stalls += 1
        grace_s = min(stall_s, MAX_GRACE_S)
        _log.warning(
            "the process did not run for up to %.1f s; timeouts of clients are extended by %.1f s", stall_s, grace_s
        )
        for on_stall in list(self._callbacks):
            on_stall(int(grace_s * 1000))


_watches: WeakValueDictionary[asyncio.AbstractEventLoop, StallWatch] = WeakValueDictionary()
"""Weak: the servers of a loop own its watch. A watch refers to its loop, so this map must not keep either alive."""


def watch_stalls(on_stall: Callable[[int], None]) -> StallWatch:
    """Stall watch of the running loop, shared by its servers; it calls ``on_stall`` with the extension in ms."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = StallWatch(loop)
    watch.add(on_stall)
    return watch


_node_log = logging.getLogger("penstock.node")

FORCED = 1
"""Exit status after a second signal."""


def install_signal_handlers() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. A second signal stops the process immediately."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop)
    return stop


async def run_until(stop: asyncio.Event, starting: Coroutine[Any, Any, T]) -> T | None:
    """Result of ``starting``; None if ``stop`` is set first, after ``starting`` was cancelled."""
    task = asyncio.create_task(starting, name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        task.cancel()  # no effect if it is done
        await asyncio.wait((task,))
    return None if task.cancelled() else task.result()


def _on_signal(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        _node_log.warning("second signal, stopping immediately", extra={"fields": {"signal": name}})
        os._exit(FORCED)
    _node_log.info("draining", extra={"fields": {"signal": name}})
    stop.set()
