"""Processor time of the broker's loop turns while a client floods it, measured in this process.

A message of another client waits for the turn in progress and is handled in the next one. Unlike the latencies of
``isolation``, this does not include the time in which the broker waits for a processor that other processes use.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time

from benchmarks.figures import Figure, Settings
from benchmarks.isolation import LOADS, Load, flooding
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.loop import freeze_memory

__all__ = ["turns"]

_SHARES = (0.5, 0.99, 0.999)


class _TimedSelector(selectors.DefaultSelector):
    """Notes the processor time between two waits of an asyncio loop in ``turns_ms``, once it is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.turns_ms: list[float] | None = None
        self._began = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.turns_ms is not None:
            self.turns_ms.append((time.thread_time() - self._began) * 1000)
        found = super().select(timeout)
        self._began = time.thread_time()
        return found


def turns(settings: Settings) -> list[Figure]:
    """The p50, p99 and p99.9 of a turn's processor time under each load of MQTT, in memory."""
    figures: list[Figure] = []
    for name, load in LOADS.items():
        if not load.has_peer:
            continue
        of_load = [Figure(name, "penstock", f"p{100 * share:g} ms of a turn") for share in _SHARES]
        for _ in range(settings.repeats):
            found = turn_times(load, settings.seconds)
            for figure, share in zip(of_load, _SHARES, strict=True):
                figure.runs.append(found[int(len(found) * share)])
        figures += of_load
    return figures


def turn_times(load: Load, seconds: float) -> list[float]:
    """Return the processor time in ms of each turn in which the broker ran, sorted."""
    selector = _TimedSelector()

    async def measure() -> list[float]:
        server = MqttServer()
        host, port = await server.start("127.0.0.1", 0)
        freeze_memory()
        flood = flooding(f"{host}:{port}", load)
        # Starting and stopping its processes blocks, and its clients connect meanwhile.
        await asyncio.to_thread(flood.__enter__)
        try:
            found: list[float] = []
            selector.turns_ms = found
            await asyncio.sleep(seconds)
            selector.turns_ms = None
        finally:
            await asyncio.to_thread(flood.__exit__, None, None, None)
        await server.close()
        return sorted(found)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        try:
            return runner.run(measure())
        finally:
            gc.unfreeze()
