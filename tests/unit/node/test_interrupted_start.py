"""An interrupted start: its task is cancelled and has ended."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import StorageError
from penstock.runtime.io.loop import run_until


class Start:
    """A start that takes until the test lets it go on, and some more turns to clean up."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.cleaned = False
        self.error: Exception | None = None

    async def __call__(self) -> str:
        try:
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
            return "ready"
        finally:
            await asyncio.sleep(0)
            self.cleaned = True


async def test_a_start_that_finishes_in_time_is_returned() -> None:
    start = Start()
    start.may_end.set()
    assert await run_until(asyncio.Event(), start()) == "ready"


async def test_an_error_of_the_start_is_raised() -> None:
    start = Start()
    start.may_end.set()
    start.error = StorageError("disk")
    with pytest.raises(StorageError, match="disk"):
        await run_until(asyncio.Event(), start())


async def test_an_interrupted_start_has_ended() -> None:
    start, stop = Start(), asyncio.Event()
    running = asyncio.create_task(run_until(stop, start()))
    await asyncio.sleep(0)
    stop.set()
    assert await running is None
    assert start.cleaned


async def test_waiting_for_the_start_can_be_cancelled() -> None:
    start = Start()
    running = asyncio.create_task(run_until(asyncio.Event(), start()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert start.cleaned
