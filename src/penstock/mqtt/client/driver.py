"""Connection of an MQTT client: one task connects and reconnects, and moves bytes, timers and results.

The protocol is in :mod:`penstock.mqtt.engine.client.client`; this module has the sockets, the clock and the futures.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.mqtt.client import errors
from penstock.mqtt.client.link import ClientLink, ClientLinkOwner
from penstock.mqtt.codec.packets import ConnAck, Publish
from penstock.mqtt.codec.reasons import reason_name
from penstock.mqtt.engine.client.client import ClientEngine, ClientState
from penstock.mqtt.engine.client.events import Closed, Connected, ConnectRefused, Event, OperationDone, Unsubscribed
from penstock.mqtt.url import BrokerUrl
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.loop import after_reading

__all__ = ["ConnectedHook", "Driver", "DriverSettings", "call_hook"]

logger = logging.getLogger("penstock.mqtt.client")

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_LAST_S: Final = 10.0
CLOSE_GRACE_S: Final = 2.0
"""Time for the server to read the last bytes after :meth:`Driver.stop`."""
MAX_UNSENT: Final = 256
"""QoS 0 messages that are written before the event loop runs again."""
_TLS_ALERT: Final = b"\x15\x03"
"""Record type and major version [RFC 8446 section 5.1]; as MQTT, a packet type that servers do not send."""
WEBSOCKET_FRAME_BYTES: Final = 16 * 1024 * 1024
"""The largest WebSocket frame that is accepted; a packet may span several frames."""


ConnectedHook = Callable[[bool], Awaitable[None] | None]
"""Called with Session Present after each successful CONNACK; an awaitable that it returns becomes a task."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class DriverSettings:
    """Connection settings. ``jitter`` returns numbers in [0, 1) that spread the reconnects of many clients."""

    url: BrokerUrl
    tls: ssl.SSLContext | None
    server_name: str | None
    headers: Sequence[tuple[str, str]]
    reconnect: bool
    connect_timeout_s: float
    jitter: Callable[[], float]
    opener: Callable[[ClientLinkOwner], ClientLink] | None = None
    """Creates the connection instead of the network."""


class Driver:
    """The connection of one client. Call from the loop's thread."""

    def __init__(self, engine: ClientEngine, settings: DriverSettings) -> None:
        self.engine = engine
        self.url = settings.url
        self.failure: PenstockError | None = None
        """The error after which the client does not connect again."""
        self.stopping = False
        """:meth:`stop` was called."""
        self.on_message: Callable[[Publish], None] = lambda _message: None
        """Called with each received message."""
        self.on_closed: Callable[[PenstockError | None], None] = lambda _error: None
        """Called once when the client will not connect again; None after :meth:`stop`."""
        self.connected_hooks: list[ConnectedHook] = []
        self.disconnected_hooks: list[Callable[[PenstockError | None], None]] = []
        """Called after each end of a connection; None after :meth:`stop`."""
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._settings = settings
        self._online = asyncio.Event()
        self._online_at = 0
        """Time (ms) of the last CONNACK."""
        self._drained = asyncio.Event()
        """Set while the write buffer has room, or there is no connection."""
        self._close_reason: PenstockError | None = None
        """The error for which the current connection is being closed."""
        self._task: asyncio.Task[None] | None = None
        self._link: ClientLink | None = None
        self._first: asyncio.Future[ConnAck] | None = None
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    # Start and stop

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._task is not None

    @property
    def closed(self) -> bool:
        """Whether the client will not connect again."""
        return self.stopping or self.failure is not None or (self._task is not None and self._task.done())

    @property
    def connected(self) -> bool:
        """Whether the server accepted the current connection."""
        return self._link is not None and self.engine.state is ClientState.CONNECTED

    async def start(self) -> ConnAck:
        """Connect; the first attempt is not repeated."""
        if self._task is not None:
            raise LocalProtocolError("mqtt: this client was connected before", hint="create a new MqttClient")
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"mqtt client {self.engine.connect.client_id or '(new)'}")
        try:
            return await asyncio.shield(self._first)
        except BaseException:
            await self._stop()
            raise

    async def stop(self, session_expiry_s: int | None, reason_code: int) -> None:
        """Send DISCONNECT and close."""
        if self._task is None or self.stopping:
            return
        self.stopping = True
        link = self._link
        try:
            if link is not None and link.open:
                self.engine.disconnect(self.now(), reason_code, session_expiry_s)
                self.flush()
                link.close()
                await asyncio.wait([link.closed], timeout=CLOSE_GRACE_S)
        finally:  # also if this call was cancelled: a later one has no effect
            if link is not None and not link.closed.done():
                link.abort()
            await self._stop()
            for task in list(self._hook_tasks):
                if task is not asyncio.current_task():
                    task.cancel()

    def check_open(self) -> None:
        """Raise if operations cannot be completed any more."""
        if self._task is None:
            raise LocalProtocolError("mqtt: the client is not connected", hint="await client.connect() first")
        if self.stopping or self._task.done():
            raise self.failure or _disconnected()

    async def wait_connected(self) -> None:
        """Wait until the client is connected, or raise why it will not connect again."""
        self.check_open()
        await self._online.wait()
        self.check_open()

    async def wait_writable(self) -> None:
        """Wait for a connection with room in its write buffer; after many writes, let the event loop run."""
        await self.wait_connected()
        if self.engine.unsent >= MAX_UNSENT:
            self.flush()
            await asyncio.sleep(0)  # uvloop reports a full buffer only after the loop has run
        while not self.engine.writable:
            await self._drained.wait()
            await self.wait_connected()

    # Operations

    @contextmanager
    def operation(self) -> Iterator[asyncio.Future[OperationDone]]:
        """Create the future of an operation; if the operation is cancelled, it is withdrawn.

        The network is read while an operation waits for its answer, even if reading is paused.
        """
        future: asyncio.Future[OperationDone] = asyncio.get_running_loop().create_future()
        if self._paused:
            self._apply_reading(paused=False)
        try:
            yield future
        except asyncio.CancelledError:
            self.engine.withdraw(future)
            raise
        finally:
            if self._paused and not self.engine.open_operations:
                self._apply_reading(paused=True)

    def schedule_flush(self) -> None:
        """Call :meth:`flush` at the end of this loop turn."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Perform the engine's events, write its output at once and set its timer."""
        self._flush_scheduled = False
        events = self.engine.take_events()
        if events:
            self._perform(events)
        link = self._link
        if link is not None and link.open:
            data = self.engine.take_output()
            if data:
                link.write(data)
        if self._timer is None or self.engine.state is not ClientState.CONNECTED:
            self._arm()

    def set_reading(self, *, paused: bool) -> None:
        """Pause or resume reading; while paused, the network is read only if an operation waits for its answer."""
        self._paused = paused
        if not paused or not self.engine.open_operations:
            self._apply_reading(paused=paused)

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        return int(asyncio.get_running_loop().time() * 1000)

    # Called by its links

    def received(self, link: ClientLink, data: bytes) -> None:
        """Bytes were received."""
        if link is self._link:
            if self.engine.state is ClientState.CONNECTING and data.startswith(b"HTTP/"):
                self._close(errors.http_server(self.url, data))
                return
            if self.engine.state is ClientState.CONNECTING and data.startswith(_TLS_ALERT):
                self._close(errors.tls_server(self.url))
                return
            self._perform(self.engine.receive(data, self.now()))
            self.flush()

    def pause_writing(self, link: ClientLink) -> None:
        """The write buffer is full."""
        if link is self._link:
            self.engine.writable = False
            self._drained.clear()

    def resume_writing(self, link: ClientLink) -> None:
        """The write buffer has drained."""
        if link is self._link:
            self.engine.resume_writing(self.now())
            self._drained.set()
            self.schedule_flush()

    # Internal

    async def _run(self) -> None:
        """Connect and reconnect until the client is closed."""
        settings = self._settings
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_LAST_S, settings.jitter)
        try:
            while True:
                error = await self._connection()
                was_online = self._online.is_set()
                self._online.clear()
                self.engine.lost()
                self._perform(self.engine.take_events())
                self._drained.set()
                self._arm()
                if was_online:
                    backoff.ended((self.now() - self._online_at) / 1000)
                    self._call_disconnected_hooks(None if self.stopping else error)
                if self.stopping:
                    return
                if self._first is not None and not self._first.done():
                    self.failure = error
                    self._first.set_exception(error)
                    return
                if not settings.reconnect or not error.retriable:
                    self.failure = error
                    return
                delay = backoff.failed()
                logger.info("%s; next try in %.1f s", error.what, delay)
                await asyncio.sleep(delay)
        except Exception as error:
            # An internal error: operations fail with this error instead of being cancelled without a reason.
            logger.exception("internal error; the client of %s is closed", self.url)
            self.failure = LocalProtocolError("mqtt: the client failed", why=f"internal error: {error!r}")
            if self._first is not None and not self._first.done():
                self._first.set_exception(self.failure)
        finally:
            self._finish()

    def _certificate(self) -> str | None:
        """File of the client certificate, for errors."""
        if self._settings.tls is None:
            return None
        from penstock.runtime.io.tls import certificate_file

        return certificate_file(self._settings.tls)

    async def _connection(self) -> PenstockError:
        """Run one connection until it is closed; return why it was closed."""
        self._close_reason = None
        timeout_s = self._settings.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                link = self._link = await self._open()
        except (OSError, TimeoutError) as e:
            return errors.not_connected(self.url, e, self._certificate())
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(link.ready)
                    if link.failure is None and link.open:
                        self.engine.begin(self.now())
                        self.flush()
                        await asyncio.shield(link.answered)
            except TimeoutError:
                return errors.no_answer(self.url, timeout_s)
            if link.failure is None:
                await asyncio.shield(link.closed)
        except PenstockError as e:  # an error of the authentication method
            return e
        finally:
            self._link = None
            link.abort()
        rejected = errors.rejected(self.url, link.error, self._certificate())
        if rejected is not None:
            return rejected
        if link.failure is not None:
            return link.failure
        return self._why_closed() or errors.lost(self.url, accepted=self._online.is_set())

    async def _open(self) -> ClientLink:
        settings = self._settings
        url = self.url
        if settings.opener is not None:
            return settings.opener(self)

        def link() -> ClientLink:
            if not url.websocket:
                return ClientLink(self)
            from penstock.mqtt.client.websocket import WebSocketClientLink

            return WebSocketClientLink(self, url, settings.headers, WEBSOCKET_FRAME_BYTES)

        name = None if settings.tls is None else settings.server_name or url.host
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(link, url.host, url.port, ssl=settings.tls, server_hostname=name)
        return made

    def _why_closed(self) -> PenstockError | None:
        """A method, because mypy does not know that callbacks set the attribute during an await."""
        return self._close_reason

    def _perform(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Publish:
                self.on_message(event)
            elif isinstance(event, OperationDone):
                future = cast("asyncio.Future[OperationDone]", event.token)
                if future.done():
                    continue
                if event.error is not None:
                    future.set_exception(event.error)
                else:
                    future.set_result(event)
            elif isinstance(event, Connected):
                self._accept(event.packet)
            elif isinstance(event, ConnectRefused):
                self._close(errors.connect_refused(self.url, event.packet))
            elif isinstance(event, Closed):
                self._close(errors.closed(self.url, event, self.engine.connect.client_id))
            elif isinstance(event, Unsubscribed):
                logger.error(
                    "%s lost the session and refused to renew the subscription to %r: %s",
                    *(self.url, event.topic_filter, reason_name(event.reason_code)),
                )

    def _accept(self, packet: ConnAck) -> None:
        self._online.set()
        self._online_at = self.now()
        if self._link is not None and not self._link.answered.done():
            self._link.answered.set_result(None)
        if self._first is not None and not self._first.done():
            self._first.set_result(packet)
        self._call_connected_hooks(packet)
        self.set_reading(paused=self._paused)
        self._arm()  # for keep alive: the timer may be set for the expiry of a waiting message

    def _call_connected_hooks(self, packet: ConnAck) -> None:
        for hook in list(self.connected_hooks):
            result = call_hook(hook, packet.session_present)
            if inspect.isawaitable(result):
                task = asyncio.create_task(_await(result))
                self._hook_tasks.add(task)
                task.add_done_callback(self._hook_done)

    def _call_disconnected_hooks(self, error: PenstockError | None) -> None:
        for hook in list(self.disconnected_hooks):
            call_hook(hook, error)

    def _hook_done(self, task: asyncio.Task[None]) -> None:
        self._hook_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a hook of the client failed", exc_info=task.exception())

    def _apply_reading(self, *, paused: bool) -> None:
        self.engine.reading = not paused
        if self._link is not None:
            self._link.set_reading(paused=paused)

    def _close(self, error: PenstockError) -> None:
        self._close_reason = error
        self.flush()
        if self._link is not None:
            self._link.close()

    def _arm(self) -> None:
        """Set the timer to the engine's next deadline; traffic only postpones the deadline, so a set timer is not
        changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.engine.next_deadline()
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline / 1000 + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        """Check deadlines after received bytes were read: the process may have been suspended."""
        after_reading(asyncio.get_running_loop(), self._check_deadlines)

    def _check_deadlines(self) -> None:
        if self._timer is None:  # closed meanwhile
            return
        self._timer.cancel()
        self._timer = None
        self._perform(self.engine.tick(self.now()))
        self.flush()

    async def _stop(self) -> None:
        self.stopping = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    def _finish(self) -> None:
        """Fail all operations: the client will not connect again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._online.set()  # wakes waiting operations, which then raise
        self._drained.set()
        self.on_closed(None if self.stopping else self.failure)
        first = self._first
        if first is not None and not first.done():
            first.set_exception(self.failure or _disconnected())
            first.exception()  # retrieved: the call of start() may have been cancelled
        for token, sent in self.engine.abandon():
            future = cast("asyncio.Future[OperationDone]", token)
            if not future.done():
                future.set_exception(errors.abandoned(self.failure, sent=sent))


def call_hook(hook: Callable[[T], R], argument: T) -> R | None:
    """Call a hook; log its exceptions, which must not end the connection."""
    try:
        return hook(argument)
    except Exception:
        logger.exception("a hook of the client failed")
        return None


def _disconnected() -> UnavailableError:
    return UnavailableError("mqtt: the client was disconnected", applied=False)


async def _await(result: Awaitable[None]) -> None:
    await result
