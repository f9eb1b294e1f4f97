"""Shut a server process down on SIGTERM or SIGINT, also during its start; a second signal stops it immediately."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["FORCED", "install_signal_handlers", "run_until"]

_log = logging.getLogger("penstock.node")

FORCED = 1
"""Exit status after a second signal."""

T = TypeVar("T")


def install_signal_handlers() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. A second signal stops the process immediately."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _tell, number, stop)
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


def _tell(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        _log.warning("second signal, stopping immediately", extra={"fields": {"signal": name}})
        os._exit(FORCED)
    _log.info("draining", extra={"fields": {"signal": name}})
    stop.set()
