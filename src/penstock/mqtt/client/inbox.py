"""Received messages of a client: dispatched to streams, to listeners by topic, to a callback, or to an iterator.

A message is acknowledged after all its receivers processed it: a listener when it returns, an iterator when it requests
the next message. The Receive Maximum therefore limits waiting QoS 1 and 2 messages: the server holds back the rest
while the connection stays usable for other operations.

QoS 0 has no such limit. Above ``high_water`` waiting messages the client stops reading from the network, unless an
operation waits for an answer; beyond ten times as many, messages are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self

from penstock.errors import PenstockError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.topics import SHARE_PREFIX, matches, validate_topic_filter
from penstock.mqtt.engine.routing.filter_tree import FilterTree

__all__ = ["FIRST_IDENTIFIER", "MAX_UNREAD", "Inbox", "MessageListener", "MessageStream", "StreamIdentifiers"]

logger = logging.getLogger("penstock.mqtt.client")

MAX_UNREAD: Final = 1000
"""Waiting QoS 0 messages of a stream above which the client stops reading from the network."""
HARD_LIMIT_FACTOR: Final = 10
"""QoS 0 messages are dropped above this multiple of ``MAX_UNREAD``."""
FIRST_IDENTIFIER: Final = 1_000_001
"""The first subscription identifier of streams; the caller may use smaller ones."""

MessageListener = Callable[[Publish], None]


class _PauseReading(Protocol):
    def __call__(self, *, paused: bool) -> None: ...


class StreamIdentifiers:
    """Subscription identifiers of message streams: one per topic filter, because a session has each filter once."""

    def __init__(self) -> None:
        self._by_filter: dict[str, tuple[int, int]] = {}
        """Topic filter -> identifier, and the number of streams that use it."""
        self._next = FIRST_IDENTIFIER

    def acquire(self, topic_filter: str) -> int:
        """Return the identifier for a new stream of the filter."""
        identifier, streams = self._by_filter.get(topic_filter, (self._next, 0))
        if not streams:
            self._next += 1
        self._by_filter[topic_filter] = (identifier, streams + 1)
        return identifier

    def release(self, topic_filter: str) -> bool:
        """Remove a stream of the filter; return True if it was the last."""
        identifier, streams = self._by_filter[topic_filter]
        if streams > 1:
            self._by_filter[topic_filter] = (identifier, streams - 1)
            return False
        del self._by_filter[topic_filter]
        return True

    def issued(self, identifier: int) -> bool:
        """Return whether the identifier is, or was, that of a stream."""
        return FIRST_IDENTIFIER <= identifier < self._next

    def __contains__(self, topic_filter: str) -> bool:
        """Return whether a stream uses the filter."""
        return topic_filter in self._by_filter


class MessageStream:
    """An iterator over waiting messages. It ends after it was closed and all messages were read.

    Requesting the next message acknowledges the last one.
    """

    def __init__(
        self, done: Callable[[Publish], None], read: Callable[[], None] = lambda: None, *, manual: bool = False
    ) -> None:
        self.dropped = 0
        """QoS 0 messages that were dropped because too many waited."""
        self._done = done
        self._read = read
        self._manual = manual
        self._waiting: deque[Publish] = deque()
        self._current: Publish | None = None
        self._closed = False
        self._error: PenstockError | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """The number of waiting messages."""
        return len(self._waiting)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Publish:
        self.acknowledge_current()
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._waiting.popleft()
        if not self._manual:
            self._current = message
        self._read()
        return message

    def acknowledge_current(self) -> None:
        """Acknowledge the last message that was returned, without requesting the next one."""
        current, self._current = self._current, None
        if current is not None:
            self._done(current)

    def put(self, message: Publish) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._changed.set()

    def close(self, error: PenstockError | None = None) -> None:
        """End the iteration after the waiting messages, with ``error`` if given."""
        self._closed = True
        self._error = error
        self._changed.set()

    def discard(self) -> None:
        """Acknowledge all messages, read or not, and close."""
        self.acknowledge_current()
        while self._waiting:
            self._done(self._waiting.popleft())
        self._read()
        self.close()


class Inbox:
    """Received messages of one client.

    ``on_message`` gets messages without another receiver; if it is None, they wait in ``unread``. Messages that the
    server had queued for a stream that was closed are dropped, unless one of ``subscriptions()``, the current topic
    filters, matches that is not of a stream.
    ``acknowledge`` is called when all receivers of a QoS 1 or 2 message are done; with ``manual``, not for messages of
    ``unread``.
    """

    def __init__(
        self,
        on_message: MessageListener | None,
        set_reading: _PauseReading,
        acknowledge: Callable[[Publish], None],
        *,
        manual: bool = False,
        high_water: int = MAX_UNREAD,
        subscriptions: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._on_message = on_message
        self._subscriptions = subscriptions
        self._set_reading = set_reading
        self._acknowledge = acknowledge
        self._high_water = high_water
        self._listeners: FilterTree[MessageListener] = FilterTree()
        self._streams: FilterTree[MessageStream] = FilterTree()
        self._by_identifier: dict[int, list[MessageStream]] = {}
        self._owners = 0
        self._receivers: dict[int, tuple[Publish, int]] = {}
        """Messages in several streams, by identity: how many streams have not processed it yet."""
        self.identifiers = StreamIdentifiers()
        self.unread = MessageStream(self._done, self._was_read, manual=manual)
        """Messages without another receiver."""
        self._all: list[MessageStream] = [self.unread]
        self.dropped = 0
        """QoS 0 messages that were dropped because too many waited."""
        self.paused = False
        """Whether reading from the network is paused."""

    def listen(self, topic_filter: str, listener: MessageListener) -> Callable[[], None]:
        """Call ``listener`` with messages whose topic matches; return a function that removes it."""
        validate_topic_filter(topic_filter)
        owner = self._new_owner()
        self._listeners.set(topic_filter, owner, listener)

        def remove() -> None:
            self._listeners.remove(topic_filter, owner, listener)

        return remove

    def open_stream(self, filters: Sequence[tuple[str, int | None]]) -> tuple[MessageStream, Callable[[], None]]:
        """Return a stream of the messages of these subscriptions, and a function that closes it.

        Messages are matched by subscription identifier if there is one, so that the server decides even if filters
        overlap; otherwise by topic filter.
        """
        stream = MessageStream(self._done, self._was_read)
        owner = self._new_owner()
        for topic_filter, identifier in filters:
            if identifier is not None:
                self._by_identifier.setdefault(identifier, []).append(stream)
            else:
                self._streams.set(_without_share(topic_filter), owner, stream)
        self._all.append(stream)

        def close() -> None:
            for topic_filter, identifier in filters:
                if identifier is None:
                    self._streams.remove(_without_share(topic_filter), owner, stream)
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
        """Dispatch a received message. Exceptions of listeners are logged, and the message is acknowledged."""
        streams = self._streams_for(message)
        listeners = self._listeners.match(message.topic) if len(self._listeners) else []
        if not listeners and not streams:
            if self._is_left_over(message):
                if message.qos:
                    self._acknowledge(message)
                return
            if self._on_message is not None:
                listeners = [self._on_message]
            else:
                streams = [self.unread]
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
            self._receivers[id(message)] = (message, len(streams))
        for stream in streams:
            self._put(stream, message)

    def close(self, error: PenstockError | None) -> None:
        """End all streams after their waiting messages, with ``error`` if given."""
        for stream in self._all:
            stream.close(error)

    # Internal

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

    def _is_left_over(self, message: Publish) -> bool:
        """Return whether only closed streams subscribed to the message: as an unread one, it would take a place of
        Receive Maximum forever."""
        given = message.optional_properties
        identifiers = [] if given is None else given.subscription_identifiers
        return (
            len(identifiers) > 0
            and all(map(self.identifiers.issued, identifiers))
            and not any(
                each not in self.identifiers and matches(_without_share(each), message.topic)
                for each in self._subscriptions()
            )
        )

    def _put(self, stream: MessageStream, message: Publish) -> None:
        if message.qos == 0 and len(stream) >= self._high_water:
            if len(stream) >= self._high_water * HARD_LIMIT_FACTOR:
                stream.dropped += 1
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("dropping QoS 0 messages because they are not read, the first to %r", message.topic)
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
        """Count down the streams that have the message; acknowledge it after the last."""
        if message.qos == 0:
            return
        if self._receivers and (entry := self._receivers.get(id(message))) is not None:
            if entry[1] > 1:
                self._receivers[id(message)] = (message, entry[1] - 1)
                return
            del self._receivers[id(message)]
        self._acknowledge(message)


def _without_share(topic_filter: str) -> str:
    """Return the filter without ``$share/name/``."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith(SHARE_PREFIX) else topic_filter
