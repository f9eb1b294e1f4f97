"""Chaos: the Spark driver and the node are killed, once each, while messages flow, and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from penstock.demo.sender import Sender

__all__ = ["chaos"]

DRIVER_AT = 0.25
HOLD_AT = 0.6
NODE_AT = 0.75

Reached = Callable[[Callable[[], bool], str], Awaitable[None]]
"""Waits until the condition holds; the text says what for."""


async def chaos(
    sender: Sender,
    total: int,
    *,
    reached: Reached,
    has_rows: Callable[[], bool],
    kill_driver: Callable[[], Awaitable[None]],
    restart_driver: Callable[[], Coroutine[Any, Any, None]],
    kill_node: Callable[[], Awaitable[None]],
    restart_node: Callable[[], Awaitable[None]],
) -> None:
    """Kill both in mid-run.

    The driver dies when a quarter is acknowledged and rows are in the table; messages keep coming while it is away.
    The meter then holds, so that the node too is killed while messages flow and the new driver reads them.
    """
    await reached(lambda: len(sender.acknowledged) >= DRIVER_AT * total and has_rows(), "rows in the table")
    await kill_driver()
    back = asyncio.create_task(restart_driver(), name="restart-driver")
    try:
        await reached(lambda: back.done() or len(sender.sent) >= HOLD_AT * total, "messages while the driver is away")
        sender.hold()
        await back
    finally:
        back.cancel()
        sender.release()
    await reached(lambda: len(sender.acknowledged) >= NODE_AT * total, "messages for the new driver")
    await kill_node()
    await restart_node()
