"""Stop a server process on SIGTERM or SIGINT, also while it starts; a second signal ends it at once."""

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
"""Exit status of a process that was told twice."""

T = TypeVar("T")


def install_signal_handlers() -> asyncio.Event:
    """Event that SIGTERM and SIGINT set from now on, in the running loop. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _tell, number, stop)
    return stop


async def run_until(stop: asyncio.Event, starting: Coroutine[Any, Any, T]) -> T | None:
    """What ``starting`` gives; None where ``stop`` is set before: then it is cancelled, and has ended."""
    task = asyncio.create_task(starting, name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        task.cancel()  # nothing where it is done
        await asyncio.wait((task,))
    return None if task.cancelled() else task.result()


def _tell(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        _log.warning("told to end again, ending at once", extra={"fields": {"signal": name}})
        os._exit(FORCED)
    _log.info("draining", extra={"fields": {"signal": name}})
    stop.set()
