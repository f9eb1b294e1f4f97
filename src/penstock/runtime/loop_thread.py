"""An event loop in a thread of its own, for programs without one: asyncio inside, plain calls outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from penstock.errors import LocalProtocolError
from penstock.runtime.loop import loop_factory

__all__ = ["LoopThread"]

T = TypeVar("T")

_STOP_S = 5.0
"""Seconds that cancelled tasks may take to end."""


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
