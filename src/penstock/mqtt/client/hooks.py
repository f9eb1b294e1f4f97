"""What a client's owner wants to be told of its connection."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.mqtt.codec.packets import ConnAck

__all__ = ["Hook", "Hooks"]

logger = logging.getLogger("penstock.mqtt.client")

Hook = Callable[[bool], Awaitable[None] | None]
"""``hook(session_present)``; an awaitable that it returns becomes a task."""
T = TypeVar("T")
R = TypeVar("R")


class Hooks:
    """The hooks of one client, and the tasks that they became."""

    def __init__(self) -> None:
        self.on_connected: list[Hook] = []
        self.on_disconnected: list[Callable[[PenstockError | None], None]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def connected(self, packet: ConnAck) -> None:
        """A CONNACK accepted us."""
        for hook in self.on_connected:
            result = self._tell(hook, packet.session_present)
            if inspect.isawaitable(result):
                task = asyncio.create_task(_await(result))
                self.tasks.add(task)
                task.add_done_callback(self._done)

    def disconnected(self, error: PenstockError | None) -> None:
        """The connection ended."""
        for hook in self.on_disconnected:
            self._tell(hook, error)

    def _tell(self, hook: Callable[[T], R], what: T) -> R | None:
        """Call a hook; what it raises is its owner's affair, not the connection's."""
        try:
            return hook(what)
        except Exception:
            logger.exception("a hook of the client failed")
            return None

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a hook of the client failed", exc_info=task.exception())


async def _await(result: Awaitable[None]) -> None:
    await result
