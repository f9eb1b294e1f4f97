"""What keeps a client connected: one task owns the network connection, makes it again, and moves bytes and timers.

The engine decides; here are sockets, the clock and futures.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, cast

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.mqtt.client import failures
from penstock.mqtt.client.link import Link, LinkOwner
from penstock.mqtt.codec.packets import ConnAck, Publish
from penstock.mqtt.codec.reasons import reason_name
from penstock.mqtt.engine.client import ClientEngine, ClientState
from penstock.mqtt.engine.client_events import Answered, Closed, Connected, Event, Refused, Unsubscribed
from penstock.mqtt.url import BrokerUrl
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.loop import after_reading
from penstock.runtime.io.tls import certificate_file

__all__ = ["Driver", "DriverHooks", "DriverSettings"]

logger = logging.getLogger("penstock.mqtt.client")

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_LAST_S: Final = 10.0
CLOSE_GRACE_S: Final = 2.0
"""How long a server may take to read our last bytes."""
MAX_UNSENT: Final = 256
"""QoS 0 messages of one loop turn before the driver lets the loop run."""
WEBSOCKET_FRAME_BYTES: Final = 16 * 1024 * 1024
"""The largest WebSocket frame that a server may send; packets may be larger, they need no frame of their own."""


@dataclass(slots=True)
class DriverHooks:
    """Who is told what happens, in the loop's thread."""

    message: Callable[[Publish], None]
    """A message came in."""
    connected: Callable[[ConnAck], None]
    """CONNACK accepted us."""
    disconnected: Callable[[PenstockError | None], None]
    """The connection ended; None where that was asked for."""
    over: Callable[[PenstockError | None], None]
    """There will be no connection any more."""


@dataclass(slots=True)
class DriverSettings:
    """How to connect. ``jitter`` gives numbers in [0, 1) that spread the reconnects of many clients."""

    url: BrokerUrl
    tls: ssl.SSLContext | None
    server_name: str | None
    headers: Sequence[tuple[str, str]]
    reconnect: bool
    connect_timeout_s: float
    jitter: Callable[[], float]
    opener: Callable[[LinkOwner], Link] | None = None
    """Makes the connection in place of the network."""


class Driver:
    """The connection of one client. Call from the loop's thread."""

    def __init__(self, engine: ClientEngine, settings: DriverSettings, hooks: DriverHooks) -> None:
        self.engine = engine
        self.url = settings.url
        self.over: PenstockError | None = None
        """Why the client is over."""
        self.leaving = False
        """Whether that was asked for."""
        self._settings = settings
        self._hooks = hooks
        self._online = asyncio.Event()
        self._drained = asyncio.Event()
        """The transport takes bytes again, or there is none."""
        self._closed: PenstockError | None = None
        """Why this connection is being closed."""
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._first: asyncio.Future[ConnAck] | None = None
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    # Life

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._task is not None

    @property
    def done(self) -> bool:
        """Whether there will be no connection any more."""
        return self.leaving or self.over is not None or (self._task is not None and self._task.done())

    @property
    def connected(self) -> bool:
        """Whether the server has accepted us and the connection stands."""
        return self._link is not None and self.engine.state is ClientState.CONNECTED

    async def start(self) -> ConnAck:
        """Connect for the first time; this one is not tried again."""
        if self._task is not None:
            raise LocalProtocolError("mqtt: this client was connected before", do="make a new MqttClient")
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"mqtt client {self.engine.connect.client_id or '(new)'}")
        try:
            return await asyncio.shield(self._first)
        except BaseException:
            await self._stop()
            raise

    async def stop(self, session_expiry_s: int | None, reason_code: int) -> None:
        """Send DISCONNECT and close."""
        if self._task is None or self.leaving:
            return
        self.leaving = True
        link = self._link
        if link is not None and link.open:
            self.engine.disconnect(self.now(), reason_code, session_expiry_s)
            self.flush()
            link.close()
            _done, late = await asyncio.wait([link.ended], timeout=CLOSE_GRACE_S)
            if late:
                link.abort()
        await self._stop()

    def check_open(self) -> None:
        """Raise where no answer can come any more."""
        if self._task is None:
            raise LocalProtocolError("mqtt: the client is not connected", do="await client.connect() first")
        if self.leaving or self._task.done():
            raise self.over or UnavailableError("mqtt: the client was disconnected", applied=False)

    async def wait_connected(self) -> None:
        """Wait until the connection stands, or raise why it never will."""
        self.check_open()
        await self._online.wait()
        self.check_open()

    async def wait_writable(self) -> None:
        """Wait until there is a connection that takes bytes; let the loop run where much is written at once."""
        await self.wait_connected()
        if self.engine.unsent >= MAX_UNSENT:
            self.flush()
            await asyncio.sleep(0)  # uvloop says only then that a transport is full
        while not self.engine.writable:
            await self._drained.wait()
            await self.wait_connected()

    # Operations

    @contextmanager
    def operation(self) -> Iterator[asyncio.Future[Answered]]:
        """The future of an operation's answer; an operation that nobody waits for any more is withdrawn.

        While one waits the network is read, whoever asked for a pause: its answer comes from there.
        """
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
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
        """Send what the engine has at the end of this loop turn."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what the engine has, in one write; arm its timer."""
        self._flush_scheduled = False
        events = self.engine.take_events()
        if events:
            self._perform(events)
        link = self._link
        if link is not None and link.open:
            data = self.engine.take()
            if data:
                link.write(data)
        if self._timer is None or self.engine.state is not ClientState.CONNECTED:
            self._arm()

    def set_reading(self, *, paused: bool) -> None:
        """Read from the network, or do so only while an operation waits for its answer."""
        self._paused = paused
        if not paused or not self.engine.open_operations:
            self._apply_reading(paused=paused)

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        return int(asyncio.get_running_loop().time() * 1000)

    # For its links

    def received(self, link: Link, data: bytes) -> None:
        """Bytes came in."""
        if link is self._link:
            if self.engine.state is ClientState.CONNECTING and data.startswith(b"HTTP/"):
                self._close(failures.http_server(self.url, data))
                return
            self._perform(self.engine.receive(data, self.now()))
            self.flush()

    def pause_writing(self, link: Link) -> None:
        """The transport is full."""
        if link is self._link:
            self.engine.writable = False
            self._drained.clear()

    def resume_writing(self, link: Link) -> None:
        """The transport takes bytes again."""
        if link is self._link:
            self.engine.resume_writing(self.now())
            self._drained.set()
            self.schedule_flush()

    # Inside

    async def _run(self) -> None:
        """Own the network connection until it is over."""
        settings = self._settings
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_LAST_S, settings.jitter)
        try:
            while True:
                error = await self._connection()
                was_online = self._online.is_set()
                self._online.clear()
                self.engine.lost()
                self._drained.set()
                self._arm()
                if was_online:
                    backoff.reset()
                    self._hooks.disconnected(None if self.leaving else error)
                if self.leaving:
                    return
                if self._first is not None and not self._first.done():
                    self.over = error
                    self._first.set_exception(error)
                    return
                if not settings.reconnect or not error.retriable:
                    self.over = error
                    return
                delay = backoff.failed()
                logger.info("%s; next try in %.1f s", error.what, delay)
                await asyncio.sleep(delay)
        except Exception as error:
            # Of our own making: whoever waits for the client is told so instead of being cancelled without a reason.
            logger.exception("internal error; the client of %s is over", self.url)
            self.over = LocalProtocolError("mqtt: the client failed", why=f"internal error: {error!r}")
            if self._first is not None and not self._first.done():
                self._first.set_exception(self.over)
        finally:
            self._end()

    async def _connection(self) -> PenstockError:
        """One network connection from its start to its end; why it ended."""
        self._closed = None
        timeout_s = self._settings.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                link = self._link = await self._open()
        except (OSError, TimeoutError) as e:
            return failures.not_connected(self.url, e, certificate_file(self._settings.tls))
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(link.ready)
                    if link.failure is None and link.open:
                        self.engine.begin(self.now())
                        self.flush()
                        await asyncio.shield(link.answered)
            except TimeoutError:
                return failures.no_answer(self.url, timeout_s)
            if link.failure is None:
                await asyncio.shield(link.ended)
        except PenstockError as e:  # the authentication method has nothing to begin with
            return e
        finally:
            self._link = None
            link.abort()
        rejected = failures.rejected(self.url, link.error, certificate_file(self._settings.tls))
        if rejected is not None:
            return rejected
        if link.failure is not None:
            return link.failure
        return self._why_closed() or failures.lost(self.url, accepted=self._online.is_set())

    async def _open(self) -> Link:
        settings = self._settings
        url = self.url
        if settings.opener is not None:
            return settings.opener(self)

        def link() -> Link:
            if not url.websocket:
                return Link(self)
            from penstock.mqtt.client.websocket import WebSocketLink

            return WebSocketLink(self, url, settings.headers, WEBSOCKET_FRAME_BYTES)

        name = None if settings.tls is None else settings.server_name or url.host
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(link, url.host, url.port, ssl=settings.tls, server_hostname=name)
        return made

    def _why_closed(self) -> PenstockError | None:
        return self._closed

    def _perform(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Publish:
                self._hooks.message(event)
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
                self._close(failures.connect_refused(self.url, event.packet))
            elif isinstance(event, Closed):
                self._close(failures.closed(self.url, event, self.engine.connect.client_id))
            elif isinstance(event, Unsubscribed):
                logger.error(
                    "%s lost the session and does not make the subscription to %r again: %s",
                    *(self.url, event.topic_filter, reason_name(event.reason_code)),
                )

    def _accept(self, packet: ConnAck) -> None:
        self._online.set()
        if self._link is not None and not self._link.answered.done():
            self._link.answered.set_result(None)
        if self._first is not None and not self._first.done():
            self._first.set_result(packet)
        self._hooks.connected(packet)
        self.set_reading(paused=self._paused)

    def _apply_reading(self, *, paused: bool) -> None:
        self.engine.reading = not paused
        if self._link is not None:
            self._link.set_reading(paused=paused)

    def _close(self, error: PenstockError) -> None:
        self._closed = error
        self.flush()
        if self._link is not None:
            self._link.close()

    def _arm(self) -> None:
        """Have one timer for the engine's deadline; with a connection that only moves on, and a tick looks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.engine.next_deadline()
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline / 1000 + 0.001, self._tick)

    def _tick(self) -> None:
        """A deadline has come; what arrived before it is read first, since this process may have been stopped."""
        after_reading(asyncio.get_running_loop(), self._judge)

    def _judge(self) -> None:
        if self._timer is None:  # the client is over
            return
        self._timer.cancel()
        self._timer = None
        self._perform(self.engine.tick(self.now()))
        self.flush()

    async def _stop(self) -> None:
        self.leaving = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    def _end(self) -> None:
        """The client is over: nothing will be answered any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._online.set()  # wakes who waits for it, to be told
        self._drained.set()
        self._hooks.over(None if self.leaving else self.over)
        if self._first is not None and not self._first.done():
            self._first.cancel()
        for token, sent in self.engine.abandon():
            future = cast("asyncio.Future[Answered]", token)
            if not future.done():
                future.set_exception(failures.given_up(self.over, sent=sent))
