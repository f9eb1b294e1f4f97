"""Coroutines run for other threads: results, errors, and the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.errors import LocalProtocolError
from penstock.runtime.loop_thread import LoopThread


async def where() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise ValueError("no")


def test_runs_in_its_own_thread_and_hands_errors_on() -> None:
    thread = LoopThread("mine")
    assert thread.run(where()) == "mine"
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    thread.close()
    thread.close()
    with pytest.raises(LocalProtocolError, match="mine: nothing can be run here"):
        thread.run(where())


def test_close_cancels_what_is_under_way() -> None:
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
    assert started.wait(10)
    thread.close()
    caller.join(10)
    assert ended.is_set()
    assert "was cancelled" in str(errors[0])


def test_a_call_from_the_loops_own_thread_is_refused() -> None:
    thread = LoopThread("mine")

    async def nested() -> str:
        return thread.run(where())

    with pytest.raises(LocalProtocolError, match="would wait for itself"):
        thread.run(nested())
    thread.close()


def test_work_that_nobody_waits_for_can_be_cancelled() -> None:
    thread = LoopThread("mine")
    assert thread.submit(where()).result(10) == "mine"
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    future = thread.submit(wait())
    thread.run(where())
    future.cancel()
    assert cancelled.wait(10)
    thread.close()
