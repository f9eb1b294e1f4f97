"""MQTT 5 client on asyncio: reconnects, keeps what has no answer, and calls nobody twice for one message.

    async with MqttClient("127.0.0.1", 1883, client_id="pump-3") as client:
        await client.subscribe("line/+/alarm")
        await client.publish("line/3/flow", b"12.5")
        async for message in client.messages():
            ...

One task owns the network connection. Everything is called from the loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar, cast

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode, reason_name
from penstock.mqtt.codec.topics import validate_topic_filter, validate_topic_name
from penstock.mqtt.engine.client import (
    Answered,
    ClientEngine,
    ClientState,
    Closed,
    Connected,
    Event,
    Refused,
    Unsubscribed,
)
from penstock.mqtt.inbox import Inbox, Listener
from penstock.mqtt.link import Link
from penstock.mqtt.url import DEFAULT_PORT, parse_url

__all__ = ["MqttClient", "parse_url"]

logger = logging.getLogger("penstock.mqtt.client")

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_LAST_S: Final = 10.0
MAX_UNSENT: Final = 256
"""QoS 0 messages of one loop turn before :meth:`MqttClient.publish` lets the loop run."""

_TRANSIENT: Final = frozenset(
    (
        ReasonCode.SERVER_UNAVAILABLE,
        ReasonCode.SERVER_BUSY,
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.CONNECTION_RATE_EXCEEDED,
    )
)
"""Refusals of CONNECT that may be over at the next try."""

Hook = Callable[[bool], Awaitable[None] | None]
T = TypeVar("T")
R = TypeVar("R")


class MqttClient:
    """One MQTT 5 client: QoS 0 and 1.

    ``on_message`` gets every message that no listener took; without it they wait for :meth:`messages`. With
    ``reconnect`` a lost connection comes back by itself and what had no answer is sent again; operations then wait.
    ``jitter`` gives numbers in [0, 1) that spread the reconnects of many clients. ``max_pending`` bounds the messages
    without PUBACK: :meth:`publish` waits beyond it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        client_id: str = "",
        keep_alive_s: int = 60,
        session_expiry_s: int = 0,
        clean_start: bool = True,
        receive_maximum: int = 1000,
        user_properties: Sequence[tuple[str, str]] = (),
        username: str | None = None,
        password: bytes | None = None,
        will: Will | None = None,
        reconnect: bool = True,
        on_message: Listener | None = None,
        connect_timeout_s: float = 10.0,
        max_pending: int = 10_000,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        properties = Properties(
            session_expiry_interval=session_expiry_s or None,
            receive_maximum=receive_maximum,
            user_properties=list(user_properties),
        )
        connect = Connect(client_id, clean_start, keep_alive_s, username, password, will, properties)
        encode(connect)  # what cannot be sent is known here, not after a connection was made
        self.host = host
        self.port = port
        self._engine = ClientEngine(connect)
        self._reconnect = reconnect
        self._inbox = Inbox(on_message, self._set_reading)
        self._connect_timeout_s = connect_timeout_s
        self._jitter = jitter
        self._room = asyncio.Semaphore(max_pending)
        self._on_connected: list[Hook] = []
        self._on_disconnected: list[Callable[[PenstockError | None], None]] = []
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._online = asyncio.Event()
        self._drained = asyncio.Event()
        """The transport takes bytes again, or there is none."""
        self._closed: PenstockError | None = None
        """Why this connection is being closed."""
        self._over: PenstockError | None = None
        """Why the client is over."""
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._first: asyncio.Future[ConnAck] | None = None
        self._leaving = False
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def from_url(cls, url: str, *, client_id: str = "", reconnect: bool = True) -> Self:
        """A client for ``mqtt://host[:port]``."""
        host, port = parse_url(url)
        return cls(host, port, client_id=client_id, reconnect=reconnect)

    # Life

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    @property
    def client_id(self) -> str:
        """The client identifier in use; the server's choice where none was given."""
        return self._engine.connect.client_id

    @property
    def connected(self) -> bool:
        """Whether the server has accepted us and the connection stands."""
        return self._link is not None and self._engine.state is ClientState.CONNECTED

    @property
    def server(self) -> ConnAck:
        """The last CONNACK: what the server announced."""
        return self._engine.server

    async def connect(self) -> ConnAck:
        """Connect for the first time; this one is not tried again.

        Raises:
            UnavailableError: nobody answers there (in time).
            RefusedError: the server refused; ``code`` is its reason code.
        """
        if self._task is not None:
            raise LocalProtocolError("mqtt: this client was connected before", do="make a new MqttClient")
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"mqtt client {self.client_id or '(new)'}")
        try:
            return await asyncio.shield(self._first)
        except BaseException:
            await self._stop()
            raise

    async def disconnect(self, *, session_expiry_s: int | None = None) -> None:
        """Send DISCONNECT and close. What still has no answer fails with UnavailableError. May be called again."""
        if self._task is None or self._leaving:
            return
        self._leaving = True
        link = self._link
        if link is not None and link.transport is not None:
            self._engine.disconnect(self._now(), session_expiry_s=session_expiry_s)
            self._flush()
            link.transport.close()
            _done, late = await asyncio.wait([link.ended], timeout=2)
            if late:
                link.transport.abort()
        await self._stop()

    async def wait_connected(self) -> None:
        """Wait until the connection stands.

        Raises:
            PenstockError: it will not stand again.
        """
        self._check_open()
        await self._online.wait()
        self._check_open()

    # Operations

    async def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties | None = None,
    ) -> int:
        """Publish; at QoS 1 return after the PUBACK with its reason code (0, or 0x10: nobody is subscribed).

        At QoS 0 return when it is on its way, waiting for a connection first, and for room in its transport. A Message
        Expiry Interval runs from the call: the message leaves with what is left of it. Cancelled, it is not sent unless
        it has been.

        Raises:
            RefusedError: reason code 0x80 or above.
            UnavailableError: the connection is gone for good, or the message expired; ``applied`` None = the server may
                have taken it.
            LocalProtocolError: it cannot be sent, or the server announced that it does not take it.
        """
        validate_topic_name(topic)
        if not 0 <= qos <= 1:
            raise LocalProtocolError(f"mqtt: this client publishes at QoS 0 and 1, not {qos}")
        publish = Publish(
            topic, payload.encode() if isinstance(payload, str) else payload, qos, retain=retain, properties=properties
        )
        if qos == 0:
            await self._wait_writable()
            self._engine.publish_qos0(publish, self._now())
            self._schedule_flush()
            return 0
        self._check_open()
        since = self._now()
        async with self._room:
            self._check_open()
            with self._operation() as future:
                self._engine.publish(publish, future, self._now(), since=since)
                self._schedule_flush()
                answer = await future
        code = int(answer.reason_codes[0])
        if code >= 0x80:
            raise self._refused(f"publish to {topic!r}", code, answer.reason_string)
        return code

    async def subscribe(
        self,
        filters: str | Subscription | Sequence[str | Subscription],
        *,
        qos: int = 1,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int | None = None,
    ) -> list[int]:
        """Subscribe; the QoS granted to each filter. Made again by itself when the server loses the session.

        The options hold for filters given as text.

        Raises:
            RefusedError: the server refused one of them; the others are in force.
            UnavailableError: the connection is gone for good.
        """
        given = [filters] if isinstance(filters, str | Subscription) else list(filters)
        wanted = [
            Subscription(f, qos, no_local, retain_as_published, retain_handling) if isinstance(f, str) else f
            for f in given
        ]
        for subscription in wanted:
            validate_topic_filter(subscription.topic_filter)
            if subscription.qos > 1:
                raise LocalProtocolError(f"mqtt: this client subscribes at QoS 0 and 1, not {subscription.qos}")
        self._check_open()
        properties = Properties(subscription_identifiers=[] if identifier is None else [identifier])
        with self._operation() as future:
            self._engine.subscribe(wanted, properties, future, self._now())
            self._schedule_flush()
            answer = await future
        for subscription, code in zip(wanted, answer.reason_codes, strict=True):
            if code >= 0x80:
                raise self._refused(f"subscription to {subscription.topic_filter!r}", code, answer.reason_string)
        return [int(code) for code in answer.reason_codes]

    async def unsubscribe(self, filters: str | Sequence[str]) -> list[int]:
        """End subscriptions; a reason code each (0x11: there was none)."""
        topic_filters = [filters] if isinstance(filters, str) else list(filters)
        self._check_open()
        with self._operation() as future:
            self._engine.unsubscribe(topic_filters, Properties(), future, self._now())
            self._schedule_flush()
            return [int(code) for code in (await future).reason_codes]

    # Messages and hooks

    def listen(self, topic_filter: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for messages whose topic matches; they do not reach ``on_message`` or :meth:`messages`.

        Returns what takes it away again. It subscribes to nothing.
        """
        return self._inbox.listen(topic_filter, listener)

    async def messages(self) -> AsyncIterator[Publish]:
        """The messages that no listener took, as they come; ends with the client.

        Reading from the network pauses while 1,000 wait, so iterate steadily, or the connection will fall silent.

        Raises:
            PenstockError: the client ended by an error.
        """
        if self._task is None:
            return
        async for message in self._inbox.messages():
            yield message
        if self._over is not None and not self._leaving:
            raise self._over

    def on_connected(self, hook: Hook) -> None:
        """Call ``hook(session_present)`` after each CONNACK that accepts us; an awaitable it returns becomes a task."""
        self._on_connected.append(hook)

    def on_disconnected(self, hook: Callable[[PenstockError | None], None]) -> None:
        """Call ``hook(error)`` whenever the connection ended; None after :meth:`disconnect`."""
        self._on_disconnected.append(hook)

    # For its links

    def received(self, link: Link, data: bytes) -> None:
        """Bytes came in."""
        if link is self._link:
            self._perform(self._engine.receive(data, self._now()))
            self._flush()

    def pause_writing(self, link: Link) -> None:
        """The transport is full."""
        if link is self._link:
            self._engine.writable = False
            self._drained.clear()

    def resume_writing(self, link: Link) -> None:
        """The transport takes bytes again."""
        if link is self._link:
            self._engine.resume_writing(self._now())
            self._drained.set()
            self._schedule_flush()

    # Inside

    async def _run(self) -> None:
        """Own the network connection until it is over."""
        failures = 0
        try:
            while True:
                error = await self._connection()
                was_online = self._online.is_set()
                self._online.clear()
                self._engine.lost()
                self._drained.set()
                self._arm()
                if was_online:
                    failures = 0
                    for hook in self._on_disconnected:
                        self._tell(hook, None if self._leaving else error)
                if self._leaving:
                    return
                if self._first is not None and not self._first.done():
                    self._over = error
                    self._first.set_exception(error)
                    return
                if not self._reconnect or not error.retriable:
                    self._over = error
                    return
                failures += 1
                delay = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 10)) * (0.5 + self._jitter() / 2)
                logger.info("%s; next try in %.1f s", error.what, delay)
                await asyncio.sleep(delay)
        finally:
            self._end()

    async def _connection(self) -> PenstockError:
        """One network connection from its start to its end; why it ended."""
        loop = asyncio.get_running_loop()
        where = f"{self.host}:{self.port}"
        self._closed = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, link = await loop.create_connection(lambda: Link(self), self.host, self.port)
        except (OSError, TimeoutError) as e:
            return UnavailableError(
                f"mqtt: no connection to {where}", applied=False, why=str(e) or "no answer in time", do="is it running?"
            )
        self._link = link
        assert link.transport is not None
        try:
            self._engine.begin(self._now())
            self._flush()
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await asyncio.shield(link.answered)
            except TimeoutError:
                return UnavailableError(f"mqtt: {where} does not answer CONNECT", applied=False)
            await asyncio.shield(link.ended)
        finally:
            self._link = None
            link.transport.abort()
        return self._why_closed() or UnavailableError(f"mqtt: the connection to {where} was lost")

    def _why_closed(self) -> PenstockError | None:
        return self._closed

    def _perform(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Publish:
                self._inbox.put(event)
            elif isinstance(event, Answered):
                future = cast("asyncio.Future[Answered]", event.token)
                if future.done():
                    continue
                if event.error is not None:
                    future.set_exception(event.error)
                else:
                    future.set_result(event)
            elif isinstance(event, Connected):
                self._accept(event.packet)
            elif isinstance(event, Refused):
                self._close(self._connect_refused(event.packet))
            elif isinstance(event, Closed):
                self._close(self._closed_error(event))
            elif isinstance(event, Unsubscribed):
                logger.error(
                    "%s:%d lost the session and does not make the subscription to %r again: %s",
                    *(self.host, self.port, event.topic_filter, reason_name(event.reason_code)),
                )

    def _accept(self, packet: ConnAck) -> None:
        self._online.set()
        if self._link is not None and not self._link.answered.done():
            self._link.answered.set_result(None)
        if self._first is not None and not self._first.done():
            self._first.set_result(packet)
        for hook in self._on_connected:
            result = self._tell(hook, packet.session_present)
            if inspect.isawaitable(result):
                task = asyncio.create_task(_await(result))
                self._hook_tasks.add(task)
                task.add_done_callback(self._hook_done)
        self._set_reading(paused=self._inbox.paused)

    def _tell(self, hook: Callable[[T], R], what: T) -> R | None:
        """Call a hook; what it raises is its owner's affair, not the connection's."""
        try:
            return hook(what)
        except Exception:
            logger.exception("a hook of the client failed")
            return None

    def _hook_done(self, task: asyncio.Task[None]) -> None:
        self._hook_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a hook of the client failed", exc_info=task.exception())

    def _set_reading(self, *, paused: bool) -> None:
        if self._link is not None:
            self._link.set_reading(paused=paused)

    def _close(self, error: PenstockError) -> None:
        self._closed = error
        self._flush()
        if self._link is not None and self._link.transport is not None:
            self._link.transport.close()

    def _connect_refused(self, packet: ConnAck) -> PenstockError:
        error = self._refused("CONNECT", packet.reason_code, packet.properties.reason_string or "")
        error.retriable = packet.reason_code in _TRANSIENT
        return error

    def _closed_error(self, event: Closed) -> PenstockError:
        who = "the server" if event.by_server else "the client"
        what = f"mqtt: {who} ended the connection to {self.host}:{self.port}: {reason_name(event.reason_code)}"
        if event.by_server and event.reason_code == ReasonCode.SESSION_TAKEN_OVER:
            return RefusedError(  # coming back would throw the other one out, and so on
                what,
                code=event.reason_code,
                text=event.reason_string,
                peer=f"{self.host}:{self.port}",
                why=f"another client connected with the client identifier {self.client_id!r}",
                do="give each client its own",
            )
        return UnavailableError(what, why=event.reason_string or None)

    def _refused(self, what: str, code: int, text: str) -> RefusedError:
        peer = f"{self.host}:{self.port}"
        return RefusedError(
            f"mqtt: {peer} refused {what}: {reason_name(code)}", code=code, text=text, peer=peer, why=text
        )

    def _check_open(self) -> None:
        if self._task is None:
            raise LocalProtocolError("mqtt: the client is not connected", do="await client.connect() first")
        if self._leaving or self._task.done():
            raise self._over or UnavailableError("mqtt: the client was disconnected", applied=False)

    @contextmanager
    def _operation(self) -> Iterator[asyncio.Future[Answered]]:
        """The future of an operation's answer; an operation that nobody waits for any more is withdrawn."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        try:
            yield future
        except asyncio.CancelledError:
            self._engine.withdraw(future)
            raise

    async def _wait_writable(self) -> None:
        """Wait until there is a connection that takes bytes; let the loop run where much is written at once."""
        await self.wait_connected()
        if self._engine.unsent >= MAX_UNSENT:
            self._flush()
            await asyncio.sleep(0)  # uvloop says only then that a transport is full
        while not self._engine.writable:
            await self._drained.wait()
            await self.wait_connected()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what the engine has, in one write; arm its timer."""
        self._flush_scheduled = False
        events = self._engine.take_events()
        if events:
            self._perform(events)
        link = self._link
        if link is not None and link.transport is not None and link.open:
            data = self._engine.take()
            if data:
                link.transport.write(data)
        if self._timer is None or self._engine.state is not ClientState.CONNECTED:
            self._arm()

    def _arm(self) -> None:
        """Have one timer for the engine's deadline; with a connection that only moves on, and a tick looks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._engine.next_deadline()
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline / 1000 + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._engine.tick(self._now()))
        self._flush()

    async def _stop(self) -> None:
        self._leaving = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for task in list(self._hook_tasks):
            task.cancel()

    def _end(self) -> None:
        """The client is over: nothing will be answered any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._online.set()  # wakes who waits for it, to be told
        self._drained.set()
        self._inbox.close()
        if self._first is not None and not self._first.done():
            self._first.cancel()
        for token, sent in self._engine.abandon():
            future = cast("asyncio.Future[Answered]", token)
            if not future.done():
                future.set_exception(
                    UnavailableError(
                        "mqtt: the connection is gone for good, and there was no answer",
                        applied=None if sent else False,
                        why=self._over.what if self._over is not None else "the client was disconnected",
                    )
                )

    def _now(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)


async def _await(result: Awaitable[None]) -> None:
    await result
