"""A server returns free memory when it becomes idle after work."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.runtime.io import memory
from penstock.runtime.io.memory import INTERVAL_S, IdleRelease, release_memory


def test_memory_is_released_once_after_work() -> None:
    used_s = 0.0

    def passed(seconds: float) -> bool:
        nonlocal used_s
        used_s += seconds
        return release.is_due()

    release = IdleRelease(processor_s=lambda: used_s)
    assert not passed(0.0)
    assert not passed(INTERVAL_S), "busy"
    assert passed(0.01)
    assert not passed(0.01)
    assert [passed(0.025) for _ in range(8)] == [False, False, False, True] * 2, "a little work adds up"
    assert passed(0.9 * INTERVAL_S * 0.1), "clients that came and left within an interval"


async def test_memory_is_released_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "INTERVAL_S", 0.001)
    monkeypatch.setattr(memory, "_IDLE", 1e9)
    used_s = 0.0
    released = asyncio.Event()
    loop = asyncio.get_running_loop()
    threads: list[int] = []

    def release() -> None:
        threads.append(threading.get_ident())
        loop.call_soon_threadsafe(released.set)

    forgotten: list[int] = []
    found = IdleRelease(lambda: forgotten.append(threading.get_ident()), release=release, processor_s=lambda: used_s)
    found.start()
    used_s = 100.0
    await released.wait()
    found.close()
    assert forgotten == [threading.get_ident()]
    assert threads != forgotten


def test_memory_can_be_released_anywhere() -> None:
    release_memory()
