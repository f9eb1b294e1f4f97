"""Event loops: create and tune one, run one in a thread, notice when one stalled.

A loop stalls when the process is stopped, the machine is migrated or a disk blocks. Requests of clients wait in sockets
meanwhile. Two rules keep servers from taking the delay for silence of the clients:

* :func:`after_reading`: timeouts of clients are checked after the loop has polled every socket once. This is enough for
  short stalls.
* :class:`StallWatch`: after a stall of more than :data:`STALL_S`, every timeout is extended by its length, at most by
  :data:`MAX_GRACE_S`. A frozen machine received nothing, and its peers retransmit at intervals that have doubled up to
  the length of the pause. A client that is really gone is noticed one grace period later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from penstock.errors import LocalProtocolError

__all__ = [
    "MAX_GRACE_S",
    "STALL_S",
    "CallLater",
    "LoopThread",
    "RunsInLoopThread",
    "StallWatch",
    "after_reading",
    "blocking",
    "freeze_memory",
    "joins_writes",
    "loop_factory",
    "loop_name",
    "run",
    "tune_process",
    "watch_stalls",
]

T = TypeVar("T")
P = ParamSpec("P")
Client = TypeVar("Client")
Client_co = TypeVar("Client_co", covariant=True)

MOST_DESCRIPTORS = 1 << 20
"""Beyond that, tables of the kernel cost more than anybody has clients."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


class CallLater(Protocol):
    """Schedules a callback after a delay in seconds, as :meth:`asyncio.loop.call_later` does."""

    def __call__(self, delay: float, callback: Callable[[], None], /) -> object: ...


def loop_name() -> str:
    """``uvloop`` where it is installed, unless ``PENSTOCK_LOOP=asyncio`` asks for the plain loop."""
    if os.environ.get("PENSTOCK_LOOP", "uvloop") != "asyncio":
        with contextlib.suppress(ImportError):
            import uvloop  # noqa: F401 - whether it is there

            return "uvloop"
    return "asyncio"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the loop: 12 to 27 % more packets with uvloop, nothing else differs."""
    if loop_name() == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def joins_writes(loop: asyncio.AbstractEventLoop) -> bool:
    """True if the loop's transports collect writes until the end of the turn and send them as one."""
    return type(loop).__module__ == "uvloop"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in a new loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def tune_process() -> None:
    """Set what a server process wants before it allocates much. Call once, early.

    glibc gives large buffers back to the kernel and faults them in again; keeping them doubled what a tube consumer
    got (1 KiB messages). The price: the resident size stays at its peak.

    The shorter switch interval lets a commit thread have the interpreter sooner while the loop is busy (+7 % of
    durable SETs measured; ten times shorter costs more than it gives).

    Descriptors: as many as the system lets the process have, since each client is one.
    """
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # A C library without mallopt (musl) simply keeps its own ways.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024 * 1024)
            libc.mallopt(M_TRIM_THRESHOLD, 1024 * 1024 * 1024)
    sys.setswitchinterval(0.0005)
    _raise_descriptor_limit()


def _raise_descriptor_limit() -> None:
    """Let the process have as many descriptors as it may: shells give 1,024, which is as many clients.

    Nothing here uses ``select()``, for whose sake that number is so low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_memory() -> None:
    """Take everything allocated so far out of garbage collection; call once after start and recovery.

    A full collection of 300,000 recovered objects stops the loop for 32 ms; frozen, for none. The oldest generation is
    then collected less often, because what the hot path keeps is bytes, which hold no cycles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)


_STOP_S = 5.0
"""Seconds that cancelled tasks may take to end."""


class RunsInLoopThread(Protocol[Client_co]):
    """A blocking wrapper of an asyncio client that runs in a :class:`LoopThread`."""

    def _opened(self) -> tuple[LoopThread, Client_co]:
        """The thread and the client; raises LocalProtocolError where it is closed."""


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
    """Runs coroutines for other threads, until :meth:`close`. A daemon: a program may end without closing it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = loop_factory()()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._closed = False
        self._closing = threading.Lock()
        """Held while work is submitted, so that none comes behind the end, where nobody would ever answer it."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and wait for what it gives; from any thread but the loop's own.

        An interrupt (Ctrl-C) cancels it.

        Raises:
            LocalProtocolError: closed, or called from the loop's thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise self._refused("this call comes from its own thread, which would wait for itself")
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
        """Cancel what is under way and end the thread; may be called again."""
        if threading.current_thread() is self._thread:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                # Behind all that was submitted, which has begun then, and is cancelled.
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _refused(self, why: str) -> LocalProtocolError:
        return LocalProtocolError(f"{self._name}: nothing can be run here", why=why)

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
"""Time between two beats that makes a stall."""
MAX_GRACE_S: Final = 60.0
"""The longest grace: the longest interval at which TCP sends again, about."""


def after_reading(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call back when the loop has looked at all its sockets once and read what was there.

    asyncio looks before it calls what was scheduled, uvloop after: the second turn is behind one look in both.
    """
    loop.call_soon(loop.call_soon, callback)


class StallWatch:
    """Notices stalls of one loop; made by :func:`watch_stalls`. ``stalls`` counts them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.stalls = 0
        self._loop = loop
        self._clock = clock
        self._beat = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._told: list[Callable[[int], None]] = []

    def add(self, told: Callable[[int], None]) -> None:
        """Call ``told`` with the grace in ms after each stall, until it is removed."""
        self._told.append(told)
        if self._timer is None:
            self._beat = self._clock()
            self._timer = self._loop.call_later(BEAT_S, self._next)

    def remove(self, told: Callable[[int], None]) -> None:
        """Call it no more; twice is harmless."""
        if told in self._told:
            self._told.remove(told)
        if not self._told and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Notice a stall that has just ended; before anybody's silence is judged."""
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
            "the process did not run for up to %.1f s; the silence of clients is judged %.1f s later", stall_s, grace_s
        )
        for told in list(self._told):
            told(int(grace_s * 1000))


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, StallWatch] = WeakKeyDictionary()


def watch_stalls(told: Callable[[int], None]) -> StallWatch:
    """The watch of the running loop, which all servers in it share; it calls ``told`` with the grace in ms."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = StallWatch(loop)
    watch.add(told)
    return watch
