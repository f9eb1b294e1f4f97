"""Chaos: the Spark driver and the node are killed, once each, while messages flow, and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from penstock.demo.sender import Sender

__all__ = ["chaos"]

FIRST_PART = 0.25
DRIVER_AT = 0.4
SECOND_PART = 0.6
NODE_AT = 0.75

Reached = Callable[[Callable[[], bool], str], Awaitable[None]]
"""Waits until the condition holds; the text says what for."""


async def chaos(
    sender: Sender,
    total: int,
    *,
    reached: Reached,
    batches: Callable[[], int],
    kill_driver: Callable[[], Awaitable[None]],
    restart_driver: Callable[[], Coroutine[Any, Any, None]],
    kill_node: Callable[[], Awaitable[None]],
    restart_node: Callable[[], Awaitable[None]],
) -> None:
    """Kill both in mid-run; ``batches`` says how many batches the pipeline has reported.

    The meter holds twice, until the pipeline works: otherwise all would be sent while Spark warms up, and nothing would
    flow when the kills come. While the driver is away messages keep coming.
    """
    await _hold_until(sender, FIRST_PART * total, reached, lambda: batches() > 0, "the first batch")
    await reached(lambda: len(sender.acknowledged) >= DRIVER_AT * total, "messages before the driver is killed")
    await kill_driver()
    before = batches()
    back = asyncio.create_task(restart_driver(), name="restart-driver")
    try:
        await _hold_until(
            sender,
            SECOND_PART * total,
            reached,
            lambda: back.done() and batches() > before,
            "a batch of the new driver",
        )
        await back
    finally:
        back.cancel()
    await reached(lambda: len(sender.acknowledged) >= NODE_AT * total, "messages before the node is killed")
    await kill_node()
    await restart_node()


async def _hold_until(sender: Sender, count: float, reached: Reached, condition: Callable[[], bool], text: str) -> None:
    """Let the sender come to ``count`` messages, and go on when ``condition`` holds."""
    try:
        await reached(lambda: len(sender.sent) >= count, "messages to be sent")
        sender.hold()
        await reached(condition, text)
    finally:
        sender.release()
