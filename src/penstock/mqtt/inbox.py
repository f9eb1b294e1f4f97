"""Where the messages of a client go: to listeners by topic, to one callback, or to whoever iterates.

What nobody took yet waits here, bounded: above a mark ``set_reading(paused=True)`` asks the owner to read no more from
the network, below half of it ``set_reading(paused=False)`` to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.topics import validate_topic_filter
from penstock.mqtt.engine.subscriptions import FilterTree

__all__ = ["MAX_UNREAD", "Inbox", "Listener"]

logger = logging.getLogger("penstock.mqtt.client")

MAX_UNREAD: Final = 1000
"""Messages that wait for an iteration before the client stops reading from the network."""

Listener = Callable[[Publish], None]


class _SetReading(Protocol):
    def __call__(self, *, paused: bool) -> None: ...


class Inbox:
    """The messages of one client. ``on_message``: gets what no listener took; None: it waits for :meth:`messages`."""

    def __init__(self, on_message: Listener | None, set_reading: _SetReading) -> None:
        self._on_message = on_message
        self._set_reading = set_reading
        self._listeners: FilterTree[Listener] = FilterTree()
        self._listener_ids = 0
        self._unread: deque[Publish] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self.paused = False
        """Whether the network is not to be read."""

    def listen(self, topic_filter: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for messages whose topic matches; returns what takes it away again."""
        validate_topic_filter(topic_filter)
        self._listener_ids += 1
        owner = str(self._listener_ids)
        self._listeners.set(topic_filter, owner, listener)

        def remove() -> None:
            self._listeners.remove(topic_filter, owner)

        return remove

    def put(self, message: Publish) -> None:
        """A message came in. What a listener raises is logged: the message is acknowledged, and others follow."""
        listeners = self._listeners.match(message.topic) if len(self._listeners) else []
        if not listeners and self._on_message is not None:
            listeners = [self._on_message]
        for listener in listeners:
            try:
                listener(message)
            except Exception:
                logger.exception("a listener failed on a message to %r", message.topic)
        if listeners:
            return
        self._unread.append(message)
        self._changed.set()
        if len(self._unread) >= MAX_UNREAD and not self.paused:
            self.paused = True
            self._set_reading(paused=True)

    def close(self) -> None:
        """No message follows; iterations end once they have read what is here."""
        self._over = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[Publish]:
        """The messages that nobody took, as they come; ends after :meth:`close`."""
        while True:
            while self._unread:
                message = self._unread.popleft()
                if self.paused and len(self._unread) <= MAX_UNREAD // 2:
                    self.paused = False
                    self._set_reading(paused=False)
                yield message
            if self._over:
                return
            self._changed.clear()
            await self._changed.wait()
