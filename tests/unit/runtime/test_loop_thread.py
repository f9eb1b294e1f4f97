"""Coroutines run for other threads: results, errors, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.errors import LocalProtocolError
from penstock.runtime.io.loop import LoopThread


async def where() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def forever() -> str:
    await asyncio.Event().wait()
    return "never"


async def fail() -> None:
    raise ValueError("no")


def test_runs_in_its_own_thread_and_hands_errors_on() -> None:
    thread = LoopThread("mine")
    assert thread.run(where()) == "mine"
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    thread.close()
    thread.close()
    with pytest.raises(LocalProtocolError, match="mine: the call was refused"):
        thread.run(where())


def test_close_cancels_running_coroutines() -> None:
    thread = LoopThread("mine")
    started, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    errors: list[Exception] = []

    def call() -> None:
        try:
            thread.run(wait())
        except LocalProtocolError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(60)
    thread.close()
    caller.join(60)
    assert ended.is_set()
    assert "was cancelled" in str(errors[0])


def test_a_call_from_the_loops_own_thread_is_refused() -> None:
    thread = LoopThread("mine")

    async def nested() -> str:
        return thread.run(where())

    with pytest.raises(LocalProtocolError, match="would wait for itself"):
        thread.run(nested())
    thread.close()


def test_work_without_a_waiter_can_be_cancelled() -> None:
    thread = LoopThread("mine")
    assert thread.submit(where()).result(60) == "mine"
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    future = thread.submit(wait())
    thread.run(where())
    future.cancel()
    assert cancelled.wait(60)
    thread.close()


def test_work_that_comes_while_it_closes_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the end of the loop nobody would: the caller would wait for ever."""
    thread = LoopThread("mine")
    closer = threading.Thread(target=thread.close)
    submit = asyncio.run_coroutine_threadsafe

    def late(work: Coroutine[Any, Any, str], loop: asyncio.AbstractEventLoop) -> Future[str]:
        closer.start()
        closer.join(0.1)
        return submit(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with pytest.raises(LocalProtocolError, match="another thread closed it"):
        thread.run(forever())
    closer.join(60)
    with pytest.raises(LocalProtocolError, match="it was closed"):
        thread.submit(where())
