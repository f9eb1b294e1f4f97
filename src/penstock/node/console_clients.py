"""MQTT connections of the console to its own node: live messages and changes of keys, publish, and writes, for a user.

They are in-process clients of the broker with the permissions of the user by the policies, so that limits, rules,
fencing and durability apply as to any client. The administration token has all permissions.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, Protocol

from penstock.console.payload_schemas import NO_SCHEMAS, PayloadSchemas
from penstock.console.payloads import MAX_PAYLOAD_BYTES, show_payload
from penstock.console.snapshots import Header, KeyChangeSnapshot, KeyVersion, MessageSnapshot, as_json
from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.access import Access
from penstock.mqtt.in_process import AllowAll, InProcessLink
from penstock.mqtt.server import MqttServer
from penstock.node.security import CONSOLE
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.observations import Entry, KeyChange, Observation
from penstock.statestore.client.writes import Write
from penstock.statestore.codec.commands import Condition
from penstock.statestore.engine.record import Record
from penstock.statestore.errors import InvalidRequestError, StateStoreError
from penstock.statestore.hlc import MAX_COUNTER, Hlc

__all__ = ["MAX_STREAMS", "ChangedMeanwhileError", "ConsoleClients", "LiveSubscription", "message_snapshot"]

_HOST: Final = "console.invalid"
MAX_STREAMS: Final = 16
"""Maximum number of live subscriptions and observations: each receives every matching message once more."""
MAX_WAITING: Final = 500
"""Messages or changes that wait to be sent to a browser; further ones are dropped and counted."""
MAX_DECODING_S: Final = 0.1
"""Processor time for the payloads of a list of messages or changes, as those with many values take; further ones are
dropped and counted."""
INTERVAL_S: Final = 0.25
"""Time between two lists of messages or changes that are sent to a browser: at most 2,000 per second."""
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
MAX_EXPIRIES: Final = 10_000
"""Keys of an observed prefix whose expiry is remembered, to distinguish it from a deletion."""
MAX_VERSIONS: Final = 50
"""Maximum number of versions in the history of a key."""


class ChangedMeanwhileError(RefusedError):
    """A key has another version than the one that the user saw."""


class _Records(Protocol):
    """The records of the store."""

    def record(self, key: bytes) -> Record | None:
        """Return the record of a key; None if it does not exist."""

    def steady(self) -> int:
        """Return the current time in ms on the clock of expiries."""


class _Stream(Protocol):
    """Messages or changes, or data about them, which are sent as lines of JSON."""

    interval_s: float
    """Time between two lines in seconds."""
    arrived: asyncio.Event

    def next_line(self) -> bytes:
        """Return what arrived since the last line."""


class _Rows:
    """Rows that wait, and the numbers of those that were left out."""

    def __init__(self) -> None:
        self.interval_s = INTERVAL_S
        self.waiting: list[MessageSnapshot | KeyChangeSnapshot] = []
        self.arrived = asyncio.Event()
        self.dropped = 0
        self.filtered = 0
        self._decoding_s = 0.0

    def add(self, decode: Callable[[], MessageSnapshot | KeyChangeSnapshot]) -> None:
        """Add the row that ``decode`` returns, unless too many wait or their decoding took too long."""
        if len(self.waiting) >= MAX_WAITING or self._decoding_s >= MAX_DECODING_S:
            self.dropped += 1
        else:
            began_s = time.thread_time()
            self.waiting.append(decode())
            self._decoding_s += time.thread_time() - began_s
        self.arrived.set()

    def next_line(self) -> bytes:
        """Return the waiting rows and the counts since the last line, as a line of JSON."""
        line = {"rows": as_json(tuple(self.waiting)), "dropped": self.dropped, "filtered": self.filtered}
        self.waiting.clear()
        self.arrived.clear()
        self.dropped = self.filtered = 0
        self._decoding_s = 0.0
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


class _Messages(_Rows):
    """Messages with ``text``; the others are counted in ``filtered``."""

    def __init__(self, text: str, schemas: PayloadSchemas) -> None:
        super().__init__()
        self.text = text
        self._schemas = schemas

    def receive(self, publish: Publish) -> None:
        """Accept a message."""
        if self.text and not _contains(publish, self.text):
            self.filtered += 1
            self.arrived.set()
        else:
            self.add(lambda: message_snapshot(publish, wall_clock_ms(), schemas=self._schemas))


class _KeyChanges(_Rows):
    """Changes of a key or of the keys with a prefix. ``records``: those of the store, without permissions."""

    def __init__(self, records: _Records) -> None:
        super().__init__()
        self._records = records
        self._expire: dict[bytes, int] = {}
        """When keys expire whose value was seen. A notification does not distinguish an expiry from a deletion."""

    async def follow(self, changes: Observation) -> None:
        """Accept changes until the observation ends with its connection, which ends the stream."""
        with suppress(PenstockError):
            async for change in changes:
                self.receive(change)
        self.arrived.set()

    def begin(self, key: bytes, entry: Entry) -> None:
        """Accept the entry of a key when its observation begins."""
        self._add(KeyChange(key, "ENTRY", entry.value, entry.version))

    def receive(self, change: KeyChange) -> None:
        """Accept a change."""
        if change.value is not None:
            self._add(change)
        else:
            expires_at = self._expire.pop(change.key, 0)
            has_expired = 0 < expires_at <= self._records.steady()
            self._add(change._replace(operation="EXPIRE") if has_expired else change)

    def _add(self, change: KeyChange) -> None:
        record = None if change.value is None else self._records.record(change.key)
        if record is not None and record.version != change.version:
            record = None  # of a later change, which follows
        if change.value is not None:
            self._expire.pop(change.key, None)
            if record is not None and record.expires_at:
                if len(self._expire) >= MAX_EXPIRIES:
                    del self._expire[next(iter(self._expire))]
                self._expire[change.key] = record.expires_at
        steady = self._records.steady()
        self.add(lambda: _change_snapshot(change, record, wall_clock_ms(), steady))


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
    """A subscription or an observation whose messages or changes are lines of JSON."""

    def __init__(self, client: MqttClient, stream: _Stream, resources: AsyncExitStack) -> None:
        self._client = client
        self._stream = stream
        self._resources = resources
        self._revoked = False

    async def close(self) -> None:
        """End the subscription."""
        await self._resources.aclose()

    def revoke(self) -> None:
        """End the lines at once, because the access of the reader was revoked."""
        self._revoked = True
        self._stream.arrived.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Return a line for the messages that arrived since the last one, until the broker closes the connection."""
        while not self._client.closed:
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._stream.arrived.wait()
            except TimeoutError:
                pass  # an empty line
            if self._revoked:
                return
            yield self._stream.next_line()
            await asyncio.sleep(self._stream.interval_s)


class ConsoleClients:
    """Opens connections to ``server``. ``access`` returns the permissions of a user ("": all), None for all.

    ``schemas``: those of the payloads of messages. ``account`` returns what a reload may change of a reader, credential
    and role, to compare it.
    """

    def __init__(
        self,
        server: MqttServer,
        access: Callable[[str], Access | None] = lambda _: None,
        schemas: PayloadSchemas = NO_SCHEMAS,
        account: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.schemas = schemas
        self._server = server
        self._access = access
        self._account = account
        self._streams = 0
        self._live: dict[LiveSubscription, tuple[str, object]] = {}
        """Open subscriptions with their readers, and the accounts of these before they were opened."""

    def end_revoked(self) -> None:
        """End the subscriptions of readers whose account has changed, after a reload."""
        for subscription, (reader, account) in self._live.items():
            if self._account(reader) != account:
                subscription.revoke()

    @asynccontextmanager
    async def _connected(
        self, user: str, on_message: Callable[[Publish], None] | None = None
    ) -> AsyncIterator[MqttClient]:
        client_id = f"console-{secrets.token_hex(6)}"
        access = self._access(user) or AllowAll(CONSOLE)
        client = MqttClient(
            _HOST,  # not used: the connection is inside the process
            client_id=client_id,
            reconnect=False,
            on_message=on_message,
            topic_alias_maximum=0,
            opener=lambda owner: InProcessLink(owner, self._server, client_id, access),
        )
        try:
            async with client:
                yield client
        except RefusedError as error:
            error.what = error.what.replace(f"{_HOST}:1883", "this node")
            raise

    async def publish(
        self, user: str, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int:
        """Publish a message; return the reason code.

        Raises:
            PenstockError: the broker refused it, or it is invalid.
        """
        async with self._connected(user) as client:
            return await client.publish(topic, payload, qos=qos, retain=retain, properties=properties)

    async def subscribe(self, user: str, topic_filter: str, text: str = "", *, reader: str) -> LiveSubscription:
        """Subscribe to messages that contain ``text`` in topic or payload; close the subscription when done.

        ``reader``: the user to whom the messages are sent, "" for the administration token.

        Raises:
            PenstockError: the broker refused it, or there are too many.
        """
        messages = _Messages(text.casefold(), self.schemas)
        return await self._subscribe(user, topic_filter, messages, messages.receive, reader)

    async def subscribe_topics(self, user: str, topic_filter: str, *, reader: str) -> LiveSubscription:
        """Like :meth:`subscribe`, with counts of messages by topic instead of the messages."""
        counts = _TopicCounts(self.schemas)
        return await self._subscribe(user, topic_filter, counts, counts.receive, reader)

    async def _subscribe(
        self, user: str, topic_filter: str, stream: _Stream, receive: Callable[[Publish], None], reader: str
    ) -> LiveSubscription:
        account = self._account(reader)
        async with self._limited() as stack:
            client = await stack.enter_async_context(self._connected(user, receive))
            try:
                await client.subscribe(Subscription(topic_filter, qos=0, retain_as_published=True))
            except RefusedError as error:
                if error.needs_grant and set(topic_filter) & {"#", "+"}:
                    error.hint = f"use a narrower topic filter that the policies permit to the user; or {error.hint}"
                raise
            return self._opened(client, stream, stack, reader, account)

    def _opened(
        self, client: MqttClient, stream: _Stream, stack: AsyncExitStack, reader: str, account: object
    ) -> LiveSubscription:
        """Return the subscription of ``reader``, whose ``account`` was this one before it was opened."""
        resources = stack.pop_all()
        subscription = LiveSubscription(client, stream, resources)
        self._live[subscription] = reader, account
        resources.callback(self._live.pop, subscription)
        if self._account(reader) != account:  # a reload meanwhile
            subscription.revoke()
        return subscription

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[AsyncExitStack]:
        """Count a stream until the stack is closed. Raises UnavailableError."""
        if self._streams >= MAX_STREAMS:
            raise UnavailableError(
                f"{self._streams} live subscriptions are open", applied=False, hint="close one in another tab, or wait"
            )
        async with AsyncExitStack() as stack:
            self._streams += 1
            stack.callback(self._closed)
            yield stack

    def _closed(self) -> None:
        self._streams -= 1

    # Keys

    async def watch(self, user: str, name: bytes, records: _Records, *, prefix: bool, reader: str) -> LiveSubscription:
        """Observe a key, or all keys with a prefix (extension ``prefix-observe``); close the observation when done.

        The first row of an existing key is its entry. Raises as :meth:`subscribe`.
        """
        account = self._account(reader)
        async with self._limited() as stack:
            client = await stack.enter_async_context(self._connected(user))
            store = await stack.enter_async_context(StateStoreClient(client, reconnect=False))
            observing = store.observe_prefix(name) if prefix else store.observe(name)
            observation = await stack.enter_async_context(observing)
            stream = _KeyChanges(records)
            if observation.entry is not None:
                stream.begin(name, observation.entry)
            stack.push_async_callback(_cancel, asyncio.create_task(stream.follow(observation)))
            return self._opened(client, stream, stack, reader, account)

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
        async with self._connected(user) as client, StateStoreClient(client, reconnect=False) as store:
            yield store


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _expected(store: StateStoreClient, key: bytes, version: str | None) -> bytes | None:
    """Return the value of the key at ``version``, which must be the current one."""
    entry = await store.get(key)
    if (None if entry is None else str(entry.version)) != version:
        raise _changed(key)
    return None if entry is None else entry.value


def _changed(key: bytes) -> ChangedMeanwhileError:
    shown = key.decode(errors="backslashreplace")
    return ChangedMeanwhileError(
        f"key {shown!r} was changed meanwhile", hint="load the key again, and compare the values"
    )


def _before(version: Hlc) -> Hlc:
    """Return a version of the same node that precedes ``version`` and follows all older ones of its key."""
    if version.counter > 0:
        return Hlc(version.wall_ms, version.counter - 1, version.node)
    return Hlc(version.wall_ms - 1, MAX_COUNTER, version.node)


def _contains(publish: Publish, text: str) -> bool:
    return text in publish.topic.casefold() or text in publish.payload.decode("utf-8", "ignore").casefold()


def _change_snapshot(change: KeyChange, record: Record | None, at: int, steady: int) -> KeyChangeSnapshot:
    value = change.value
    shown = None if value is None else show_payload(value)
    try:
        key = change.key.decode()
    except UnicodeDecodeError:
        key = None
    return KeyChangeSnapshot(
        at=at,
        key=key,
        key_base64=base64.b64encode(change.key).decode(),
        operation=change.operation,
        version=None if change.version is None else str(change.version),
        expires_in_s=(record.expires_at - steady) / 1000 if record is not None and record.expires_at else None,
        fencing_token=None if record is None or record.fence is None else str(record.fence),
        owner=None if record is None else record.owner,
        value_bytes=None if value is None else len(value),
        format=None if shown is None else shown.format,
        value=None if shown is None else shown.value,
        value_base64=None if shown is None else shown.base64,
        truncated=shown is not None and shown.truncated,
    )


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
