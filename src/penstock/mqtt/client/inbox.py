"""Where the messages of a client go: to streams, to listeners by topic, to one callback, or to whoever iterates.

A message is acknowledged once everybody it went to is done with it: a listener when it returned, an iteration when it
asks for the next message. So what waits here at QoS 1 and 2 is bounded by the client's Receive Maximum: the server
holds the rest back, and the connection goes on for everything else.

QoS 0 has no such brake. Above ``high_water`` waiting messages the owner is asked to read no more from the network,
unless an operation waits for its answer there; what comes then is dropped beyond ``hard_limit``, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self

from penstock.errors import PenstockError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.topics import SHARE_PREFIX, validate_topic_filter
from penstock.mqtt.engine.filter_tree import FilterTree

__all__ = ["MAX_UNREAD", "Inbox", "Listener", "MessageStream"]

logger = logging.getLogger("penstock.mqtt.client")

MAX_UNREAD: Final = 1000
"""Messages that wait for an iteration before the client stops reading from the network."""
HARD_LIMIT_FACTOR: Final = 10
"""Above so many times ``MAX_UNREAD`` QoS 0 messages are dropped."""

Listener = Callable[[Publish], None]


class _SetReading(Protocol):
    def __call__(self, *, paused: bool) -> None: ...


class MessageStream:
    """Messages that wait for one iteration. Ends once it was closed and everything was read.

    Asking for the next message says that one is done with the last.
    """

    def __init__(
        self, done: Callable[[Publish], None], read: Callable[[], None] = lambda: None, *, manual: bool = False
    ) -> None:
        self.dropped = 0
        """QoS 0 messages that found no room."""
        self._done = done
        self._read = read
        self._manual = manual
        self._waiting: deque[Publish] = deque()
        self._current: Publish | None = None
        self._over = False
        self._error: PenstockError | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Publish:
        self.settle()
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._waiting.popleft()
        if not self._manual:
            self._current = message
        self._read()
        return message

    def settle(self) -> None:
        """Be done with the message that was given last, without asking for the next one."""
        current, self._current = self._current, None
        if current is not None:
            self._done(current)

    def put(self, message: Publish) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._changed.set()

    def close(self, error: PenstockError | None = None) -> None:
        """Let the iteration end after what is there, with ``error`` if there is one."""
        self._over = True
        self._error = error
        self._changed.set()

    def discard(self) -> None:
        """Be done with everything, read or not."""
        self.settle()
        while self._waiting:
            self._done(self._waiting.popleft())
        self._read()
        self.close()


class Inbox:
    """The messages of one client. ``on_message``: gets what nobody else took; None: it waits for :meth:`messages`.

    ``acknowledge`` is called once everybody is done with a message of QoS 1 or 2; not for what :meth:`messages` gives
    where that is ``manual``.
    """

    def __init__(
        self,
        on_message: Listener | None,
        set_reading: _SetReading,
        acknowledge: Callable[[Publish], None],
        *,
        manual: bool = False,
        high_water: int = MAX_UNREAD,
    ) -> None:
        self._on_message = on_message
        self._set_reading = set_reading
        self._acknowledge = acknowledge
        self._high_water = high_water
        self._listeners: FilterTree[Listener] = FilterTree()
        self._streams: FilterTree[MessageStream] = FilterTree()
        self._by_identifier: dict[int, list[MessageStream]] = {}
        self._owners = 0
        self._takers: dict[int, tuple[Publish, int]] = {}
        """Messages that several streams have, by identity: how many are not done with it yet."""
        self._unread = MessageStream(self._done, self._was_read, manual=manual)
        self._all: list[MessageStream] = [self._unread]
        self.dropped = 0
        """QoS 0 messages that found no room."""
        self.paused = False
        """Whether the network is not to be read."""

    def listen(self, topic_filter: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for messages whose topic matches; returns what takes it away again."""
        validate_topic_filter(topic_filter)
        owner = self._new_owner()
        self._listeners.set(topic_filter, owner, listener)

        def remove() -> None:
            self._listeners.remove(topic_filter, owner)

        return remove

    def open_stream(self, filters: Sequence[tuple[str, int | None]]) -> tuple[MessageStream, Callable[[], None]]:
        """A stream of the messages of these subscriptions, and what closes it.

        By their subscription identifier where they have one: then the server says which subscription a message is for,
        also where filters overlap. By the filter else.
        """
        stream = MessageStream(self._done, self._was_read)
        owner = self._new_owner()
        for topic_filter, identifier in filters:
            if identifier is not None:
                self._by_identifier.setdefault(identifier, []).append(stream)
            else:
                self._streams.set(_plain(topic_filter), owner, stream)
        self._all.append(stream)

        def close() -> None:
            for topic_filter, identifier in filters:
                if identifier is None:
                    self._streams.remove(_plain(topic_filter), owner)
                    continue
                streams = self._by_identifier.get(identifier, [])
                if stream in streams:
                    streams.remove(stream)
                if not streams:
                    self._by_identifier.pop(identifier, None)
            if stream in self._all:
                self._all.remove(stream)
            stream.discard()

        return stream, close

    def put(self, message: Publish) -> None:
        """A message came in. What a listener raises is logged: the message is acknowledged, and others follow."""
        streams = self._streams_for(message)
        listeners = self._listeners.match(message.topic) if len(self._listeners) else []
        if not listeners and not streams:
            if self._on_message is not None:
                listeners = [self._on_message]
            else:
                streams = [self._unread]
        for listener in listeners:
            try:
                listener(message)
            except Exception:
                logger.exception("a listener failed on a message to %r", message.topic)
        if not streams:
            if message.qos:
                self._acknowledge(message)
            return
        if message.qos and len(streams) > 1:
            self._takers[id(message)] = (message, len(streams))
        for stream in streams:
            self._put(stream, message)

    def messages(self) -> MessageStream:
        """The messages that nobody took, as they come."""
        return self._unread

    def close(self, error: PenstockError | None) -> None:
        """No message follows; iterations end once they have read what is here, with ``error`` if there is one."""
        for stream in self._all:
            stream.close(error)

    # Inside

    def _new_owner(self) -> str:
        self._owners += 1
        return str(self._owners)

    def _streams_for(self, message: Publish) -> list[MessageStream]:
        found: list[MessageStream] = []
        if self._by_identifier:
            given = message.optional_properties
            if given is not None:
                for identifier in given.subscription_identifiers:
                    found += self._by_identifier.get(identifier, ())
        if len(self._streams):
            found += self._streams.match(message.topic)
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def _put(self, stream: MessageStream, message: Publish) -> None:
        if message.qos == 0 and len(stream) >= self._high_water:
            if len(stream) >= self._high_water * HARD_LIMIT_FACTOR:
                stream.dropped += 1
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("dropping QoS 0 messages, the first to %r: nobody reads them", message.topic)
                return
            if not self.paused:
                self.paused = True
                self._set_reading(paused=True)
        stream.put(message)

    def _was_read(self) -> None:
        if self.paused and all(len(stream) <= self._high_water // 2 for stream in self._all):
            self.paused = False
            self._set_reading(paused=False)

    def _done(self, message: Publish) -> None:
        """One stream is done with a message."""
        if message.qos == 0:
            return
        if self._takers and (entry := self._takers.get(id(message))) is not None:
            if entry[1] > 1:
                self._takers[id(message)] = (message, entry[1] - 1)
                return
            del self._takers[id(message)]
        self._acknowledge(message)


def _plain(topic_filter: str) -> str:
    """The filter that topics match: without ``$share/name/``."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith(SHARE_PREFIX) else topic_filter
