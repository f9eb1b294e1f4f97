"""MQTT connections of the console to its own node: live messages, publish, and changes of keys, for a user.

They are in-process clients of the broker with the permissions of the user by the policies, so that limits, rules,
fencing and durability apply as to any client. The administration token has all permissions.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

from penstock.console.payload_schemas import NO_SCHEMAS, PayloadSchemas
from penstock.console.payloads import MAX_PAYLOAD_BYTES, show_payload
from penstock.console.snapshots import Header, KeyVersion, MessageSnapshot, as_json
from penstock.errors import RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.access import Access
from penstock.mqtt.in_process import AllowAll, InProcessLink
from penstock.mqtt.server import MqttServer
from penstock.node.security import CONSOLE
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.writes import Write
from penstock.statestore.codec.commands import Condition
from penstock.statestore.errors import InvalidRequestError, StateStoreError
from penstock.statestore.hlc import MAX_COUNTER, Hlc

__all__ = ["MAX_STREAMS", "ChangedMeanwhileError", "ConsoleClients", "LiveSubscription", "message_snapshot"]

MAX_STREAMS: Final = 16
"""Maximum number of live subscriptions: each receives every matching message once more."""
MAX_WAITING: Final = 500
"""Messages of a live subscription that wait to be sent; further ones are dropped and counted."""
MAX_DECODING_S: Final = 0.1
"""Processor time for the payloads of a list of messages, as those with many values take; further messages are dropped
and counted."""
INTERVAL_S: Final = 0.25
"""Time between two lists of messages that are sent to a browser: at most 2,000 messages per second."""
TOPICS_INTERVAL_S: Final = 1.0
"""Time between two lists of topics that are sent to a browser."""
MAX_TOPICS: Final = 1000
"""Topics of a list; messages of further ones are only counted."""
MAX_LAST: Final = 512
"""Bytes of the last payload of a topic in such a list."""
_MAX_KEPT: Final = 16 * 1024
"""Longest payload that is kept as a whole until the list is sent."""
SILENCE_S: Final = 15.0
"""Time without messages after which an empty list is sent, so that a closed browser is noticed."""
MAX_VERSIONS: Final = 50
"""Maximum number of versions in the history of a key."""


class ChangedMeanwhileError(RefusedError):
    """A key has another version than the one that the user saw."""


class _Stream(Protocol):
    """Messages of a live subscription, or data about them, which are sent as lines of JSON."""

    interval_s: float
    """Time between two lines in seconds."""
    arrived: asyncio.Event

    def receive(self, publish: Publish) -> None:
        """Accept a message."""

    def next_line(self) -> bytes:
        """Return what arrived since the last line."""


class _Messages:
    """Messages that wait, and the numbers of those that were left out."""

    def __init__(self, text: str, schemas: PayloadSchemas) -> None:
        self._schemas = schemas
        self.interval_s = INTERVAL_S
        self.text = text
        self.waiting: list[MessageSnapshot] = []
        self.arrived = asyncio.Event()
        self.dropped = 0
        self.filtered = 0
        self._decoding_s = 0.0

    def receive(self, publish: Publish) -> None:
        """Accept a message."""
        if self.text and not _contains(publish, self.text):
            self.filtered += 1
        elif len(self.waiting) >= MAX_WAITING or self._decoding_s >= MAX_DECODING_S:
            self.dropped += 1
        else:
            began_s = time.thread_time()
            self.waiting.append(message_snapshot(publish, wall_clock_ms(), schemas=self._schemas))
            self._decoding_s += time.thread_time() - began_s
        self.arrived.set()

    def next_line(self) -> bytes:
        """Return the waiting messages and the counts since the last line, as a line of JSON."""
        line = {"rows": as_json(tuple(self.waiting)), "dropped": self.dropped, "filtered": self.filtered}
        self.waiting.clear()
        self.arrived.clear()
        self.dropped = self.filtered = 0
        self._decoding_s = 0.0
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


class _TopicCounts:
    """Counts of messages by topic since the last line, and the last message of each topic.

    Topics above ``MAX_TOPICS`` are counted in ``dropped`` only, so that memory and lines are bounded at any rate.
    """

    def __init__(self, schemas: PayloadSchemas) -> None:
        self._schemas = schemas
        self.interval_s = TOPICS_INTERVAL_S
        self.arrived = asyncio.Event()
        self._topics: dict[str, _TopicCount] = {}
        self._dropped = 0

    def receive(self, publish: Publish) -> None:
        """Count a message."""
        found = self._topics.get(publish.topic)
        if found is None:
            if len(self._topics) >= MAX_TOPICS:
                self._dropped += 1
                return
            found = self._topics[publish.topic] = _TopicCount(self._schemas)
        found.add(publish)
        self.arrived.set()

    def next_line(self) -> bytes:
        """Return the counts since the last line as JSON: ``rows`` by topic, and the number of dropped messages."""
        at = wall_clock_ms()
        rows = [
            {"messages": each.messages, "bytes": each.bytes, "last": as_json(each.last(at))}
            for each in self._topics.values()
        ]
        line = {"at": at, "rows": rows, "dropped": self._dropped}
        self._topics.clear()
        self.arrived.clear()
        self._dropped = 0
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


class _TopicCount:
    __slots__ = ("_last", "_schemas", "bytes", "messages")

    def __init__(self, schemas: PayloadSchemas) -> None:
        self._schemas = schemas
        self.messages = 0
        self.bytes = 0
        self._last: Publish | MessageSnapshot | None = None

    def add(self, publish: Publish) -> None:
        self.messages += 1
        self.bytes += len(publish.payload)
        # Payloads may be large, so only their beginning is kept.
        is_large = len(publish.payload) > _MAX_KEPT
        self._last = self._shown(publish, wall_clock_ms()) if is_large else publish

    def last(self, at: int) -> MessageSnapshot:
        """Return the last message; ``at``: the time in ms."""
        assert self._last is not None
        return self._last if isinstance(self._last, MessageSnapshot) else self._shown(self._last, at)

    def _shown(self, publish: Publish, at: int) -> MessageSnapshot:
        return message_snapshot(publish, at, MAX_LAST, self._schemas)


class LiveSubscription:
    """A subscription whose messages are lines of JSON."""

    def __init__(self, client: MqttClient, stream: _Stream, close: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._stream = stream
        self.close = close
        """Ends the subscription."""

    async def lines(self) -> AsyncIterator[bytes]:
        """Return a line for the messages that arrived since the last one, until the broker closes the connection."""
        while not self._client.closed:
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._stream.arrived.wait()
            except TimeoutError:
                pass  # an empty line
            yield self._stream.next_line()
            await asyncio.sleep(self._stream.interval_s)


class ConsoleClients:
    """Opens connections to ``server``. ``access`` returns the permissions of a user ("": all), None for all.

    ``schemas``: those of the payloads of messages.
    """

    def __init__(
        self,
        server: MqttServer,
        access: Callable[[str], Access | None] = lambda _: None,
        schemas: PayloadSchemas = NO_SCHEMAS,
    ) -> None:
        self.schemas = schemas
        self._server = server
        self._access = access
        self._streams = 0

    @asynccontextmanager
    async def _connected(
        self, user: str, on_message: Callable[[Publish], None] | None = None
    ) -> AsyncIterator[MqttClient]:
        client_id = f"console-{secrets.token_hex(6)}"
        access = self._access(user) or AllowAll(CONSOLE)
        client = MqttClient(
            "console.invalid",  # not used: the connection is inside the process
            client_id=client_id,
            reconnect=False,
            on_message=on_message,
            topic_alias_maximum=0,
            opener=lambda owner: InProcessLink(owner, self._server, client_id, access),
        )
        async with client:
            yield client

    async def publish(
        self, user: str, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int:
        """Publish a message; return the reason code.

        Raises:
            PenstockError: the broker refused it, or it is invalid.
        """
        async with self._connected(user) as client:
            return await client.publish(topic, payload, qos=qos, retain=retain, properties=properties)

    async def subscribe(self, user: str, topic_filter: str, text: str = "") -> LiveSubscription:
        """Subscribe to messages that contain ``text`` in topic or payload; close the subscription when done.

        Raises:
            PenstockError: the broker refused it, or there are too many.
        """
        return await self._subscribe(user, topic_filter, _Messages(text.casefold(), self.schemas))

    async def subscribe_topics(self, user: str, topic_filter: str) -> LiveSubscription:
        """Like :meth:`subscribe`, with counts of messages by topic instead of the messages."""
        return await self._subscribe(user, topic_filter, _TopicCounts(self.schemas))

    async def _subscribe(self, user: str, topic_filter: str, stream: _Stream) -> LiveSubscription:
        if self._streams >= MAX_STREAMS:
            raise UnavailableError(
                f"{self._streams} live subscriptions are open", applied=False, do="close one in another tab, or wait"
            )
        async with AsyncExitStack() as stack:
            self._streams += 1
            stack.callback(self._closed)
            client = await stack.enter_async_context(self._connected(user, stream.receive))
            await client.subscribe(Subscription(topic_filter, qos=0, retain_as_published=True))
            return LiveSubscription(client, stream, stack.pop_all().aclose)

    def _closed(self) -> None:
        self._streams -= 1

    # Keys

    async def set_key(
        self, user: str, key: bytes, value: bytes, *, version: str | None, ttl_ms: int | None, fencing_token: Hlc | None
    ) -> None:
        """Set a key that has ``version``; None: that does not exist.

        Raises:
            ChangedMeanwhileError: it has another version.
            PenstockError: the store refused the change.
        """
        async with self._store(user) as store:
            expected = await _expected(store, key, version)
            condition = Condition.NX if expected is None else Condition.NEX
            write = Write.set(key, value, condition=condition, expected=expected, ttl_ms=ttl_ms)
            (applied,) = await store.write_many([write], fencing_token=fencing_token)
        if not applied:
            raise _changed(key)

    async def delete_key(self, user: str, key: bytes, *, version: str, fencing_token: Hlc | None) -> None:
        """Delete a key that has ``version``. Raises as :meth:`set_key`."""
        async with self._store(user) as store:
            expected = await _expected(store, key, version)
            assert expected is not None, "a key with a version has a value"
            if await store.vdelete(key, expected, fencing_token=fencing_token) != 1:
                raise _changed(key)

    async def versions(self, user: str, key: bytes) -> tuple[Sequence[KeyVersion], str]:
        """Return the versions of an existing key in the history of the store, newest first, and why there are no more.

        The reason is ``complete`` (the key did not exist before), ``limit`` (:data:`MAX_VERSIONS`), ``history`` (it
        does not reach further) or ``disabled`` (the store does not have the extension ``as-of``). Raises PenstockError.
        """
        found: list[KeyVersion] = []
        async with self._store(user) as store:
            entry = await store.get(key)
            while entry is not None and len(found) < MAX_VERSIONS:
                shown, version = show_payload(entry.value), entry.version
                found.append(
                    KeyVersion(
                        str(version), version.wall_ms, len(entry.value), shown.format, shown.value, shown.base64,
                        shown.truncated,
                    )
                )  # fmt: skip
                try:
                    entry = await store.get(key, as_of=_before(version))
                except InvalidRequestError:
                    return found, "disabled"
                except StateStoreError:
                    return found, "history"
        return found, "complete" if entry is None else "limit"

    @asynccontextmanager
    async def _store(self, user: str) -> AsyncIterator[StateStoreClient]:
        async with self._connected(user) as client, StateStoreClient(client) as store:
            yield store


async def _expected(store: StateStoreClient, key: bytes, version: str | None) -> bytes | None:
    """Return the value of the key at ``version``, which must be the current one."""
    entry = await store.get(key)
    if (None if entry is None else str(entry.version)) != version:
        raise _changed(key)
    return None if entry is None else entry.value


def _changed(key: bytes) -> ChangedMeanwhileError:
    shown = key.decode(errors="backslashreplace")
    return ChangedMeanwhileError(
        f"key {shown!r} was changed meanwhile", do="load the key again, and compare the values"
    )


def _before(version: Hlc) -> Hlc:
    """Return a version of the same node that precedes ``version`` and follows all older ones of its key."""
    if version.counter > 0:
        return Hlc(version.wall_ms, version.counter - 1, version.node)
    return Hlc(version.wall_ms - 1, MAX_COUNTER, version.node)


def _contains(publish: Publish, text: str) -> bool:
    return text in publish.topic.casefold() or text in publish.payload.decode("utf-8", "ignore").casefold()


def message_snapshot(
    publish: Publish, at: int, limit: int = MAX_PAYLOAD_BYTES, schemas: PayloadSchemas = NO_SCHEMAS
) -> MessageSnapshot:
    """Return a message as the console shows it; ``at``: its arrival in ms; ``limit``: payload bytes that are shown."""
    given = publish.properties
    shown = show_payload(publish.payload, given.content_type or "", limit, topic=publish.topic, schemas=schemas)
    correlation = given.correlation_data
    return MessageSnapshot(
        at=at,
        topic=publish.topic,
        retain=bool(publish.retain),
        bytes=len(publish.payload),
        format=shown.format,
        value=shown.value,
        value_base64=shown.base64,
        truncated=shown.truncated,
        content_type=given.content_type,
        response_topic=given.response_topic,
        correlation_base64=None if correlation is None else base64.b64encode(correlation).decode(),
        expires_in_s=given.message_expiry_interval,
        text_payload=given.payload_format_indicator == 1,
        user_properties=tuple(Header(name, value) for name, value in given.user_properties),
        problem=shown.problem,
    )
