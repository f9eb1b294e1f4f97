"""MQTT broker on asyncio: listeners, transports and one timer around the broker engine.

The output of one loop turn for a connection is sent with one write, including messages of other connections: the engine
collects it, :meth:`MqttServer._flush` runs once. System calls and wake-ups cost more than Python code.

No connection delays others by more than its share of a loop turn, in bytes (:data:`LARGE_READ_BYTES`) and in work
(``max_turn_work``). A connection that has used it is not read, and has its next turn after the loop has polled the
others (:class:`TurnQueue`). A large read is handled there as well, after the small reads of its turn.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.reasons import ReasonCode, reason_name
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.access import Access, Origin, Rights
from penstock.mqtt.engine.model.client_events import ClientEvent
from penstock.mqtt.engine.model.journal import Recovered
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.outlet import BrokerOutlet
from penstock.mqtt.engine.sessions.recovery import restore
from penstock.mqtt.engine.sessions.retained import Allows
from penstock.mqtt.engine.sessions.session import NOTIFICATIONS_LOST, SessionConnection
from penstock.mqtt.in_process import InProcessLink
from penstock.mqtt.listener_access import AuthenticatedClient, Certificate
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.service import Service
from penstock.mqtt.transport.connection_limits import Abortable, ConnectionLimiter, ConnectionLimitStats
from penstock.mqtt.transport.link import CLOSE_GRACE_S, END_WORK, ServerLink, ServerLinkOwner
from penstock.mqtt.transport.listener import Listener
from penstock.mqtt.transport.listener_settings import ConnectionLimits, ListenerSettings
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.loop import StallWatch, after_reading, joins_writes, watch_stalls
from penstock.runtime.observability.logs import LogLimiter
from penstock.runtime.turns import LARGE_READ_BYTES, TURN_SHARES, TurnQueue

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["ARRIVAL_SHARES", "BrokerLimits", "BrokerStats", "MqttServer"]

logger = logging.getLogger("penstock.mqtt")

ARRIVAL_SHARES: Final = 2
"""Shares that new connections and ends of connections have of a loop turn together: about a millisecond, as long as
:data:`TURN_SHARES` of other work, because a unit of a CONNECT or of a TLS handshake takes twice as long."""


class MqttServer(ServerLinkOwner):
    """An MQTT 5 broker. ``clock``: wall clock in ms, handed to services; deadlines run on the loop's clock.

    Call everything from the loop's thread. ``services`` receive messages inside the node.
    """

    def __init__(
        self,
        *,
        services: Sequence[Service] = (),
        limits: BrokerLimits | None = None,
        connection_limits: ConnectionLimits | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self.connection_limit_stats = ConnectionLimitStats()
        limiter: ConnectionLimiter[Abortable] = ConnectionLimiter(
            connection_limits or ConnectionLimits(), self.connection_limit_stats
        )
        super().__init__(limits or BrokerLimits(), limiter)
        self._clock = clock
        self.persistence: Persistence | None = None
        """Stores sessions and retained messages after :meth:`recover`; None: in memory only."""
        self._broker = Broker(
            self.limits,
            services=services,
            new_client_id=lambda: f"penstock-{uuid.uuid4().hex}",
            wake=self._wake,
            report=self._log_end,
            report_merged=self._log_merged,
        )
        self.outlet = BrokerOutlet(self._broker, self.now, self._flush)
        """The broker for services: publish, respond, deliver, disconnect."""
        self._broker.report_will = self._log_will
        self._merge_log = LogLimiter()
        self._will_log = LogLimiter()
        self._observer_log = LogLimiter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._time: Callable[[], float] = _not_started
        self._read_at: i64 = -1
        """Time of the last read, in ms of the loop's clock."""
        self._wall_ms: i64 = 0
        """Wall clock at the first read in that millisecond, in ms."""
        self.listeners: list[Listener] = []
        self._links: dict[SessionConnection, ServerLink] = {}
        self._inside: dict[SessionConnection, InProcessLink] = {}
        share = self._broker.max_turn_work
        self._turns: TurnQueue[ServerLink] = TurnQueue(self._take_turn, self._work, TURN_SHARES * share, self._wake)
        """Connections with CONNACK that have used their share of a turn."""
        self._arrivals: TurnQueue[ServerLink] = TurnQueue(
            self._take_turn, self._work, ARRIVAL_SHARES * share, self._wake
        )
        """Connections whose CONNECT or end waits."""
        self._turn_end: i64 = -1
        """Amount of the broker's work after which new connections, and ends of connections, wait for the next turn; -1
        if this turn had neither."""
        self._awake = False
        """Whether :meth:`_next_turn` is scheduled."""
        self._turn: i64 = 0
        """Number of the turn."""
        self._urgent = False
        """True if a connection published without using up its share: its output does not wait for connections that used
        theirs."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._stalls: StallWatch | None = None
        self._empty = asyncio.Event()
        self._closing = False
        self._joins_writes = False
        """True if the event loop itself joins the writes of a turn, so that output is written to the transports without
        :meth:`_flush`."""

    # Called by the owner

    def add_service(self, service: Service) -> None:
        """Add a service, which receives the messages of its topic filters from now on."""
        self._broker.add_service(service)

    def check_retained(self, allows: Allows) -> None:
        """Check the publisher of each retained message with ``allows`` before it is delivered."""
        self._broker.check_retained(allows)

    async def recover(
        self,
        persistence: Persistence,
        *,
        recall: Callable[[str, str], Rights | None] | None = None,
        steady: Callable[[], int] | None = None,
    ) -> Recovered:
        """Store sessions and retained messages, and load stored ones. Call it once, after adding services, before the
        first listener.

        State that expired while the broker was stopped is removed, and wills whose delay has passed are published if
        the current policies permit it: ``recall`` returns the principal for the session's owner and client identifier,
        or None without permissions. Without ``recall`` policies are not checked. ``steady``: clock of stored deadlines
        in ms since 1970, not affected by steps of the system clock; default: the wall clock.

        Raises:
            StorageError: the sessions cannot be read. A single damaged session is quarantined instead.
        """
        self._run_in(asyncio.get_running_loop())
        self.persistence = persistence
        stored = steady or self._clock
        found = await persistence.open(lambda: stored() - self.now())
        now = self.now()
        self._broker.wall_offset = self._clock() - now
        self._broker.recall = recall
        self._broker.set_journal(persistence.journal)
        restore(self._broker, found, now)
        persistence.journal.wake = self._wake
        persistence.start(committed=self._flush, failed=lambda _error: self._broker.storage_failed(self.now()))
        self._broker.tick(now)
        self._wake()
        self._arm()
        return found

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the bound address. May be called for several addresses.

        Raises:
            OSError: the address cannot be bound.
        """
        return await self.listen(ListenerSettings(host=host, port=port))

    async def listen(self, settings: ListenerSettings) -> tuple[str, int]:
        """Listen with these settings; returns the bound address.

        Raises:
            OSError: the address cannot be bound.
            ConfigError: the certificates cannot be used.
        """
        self._run_in(asyncio.get_running_loop())
        listener = Listener(self, settings)
        bound = await listener.start()
        self.listeners.append(listener)
        return bound

    def reauthorise(self) -> int:
        """Authorize all clients again, after the rules or the trusted authorities of a listener changed.

        Clients that may no longer connect are disconnected (0x87); for other clients, subscriptions and queued messages
        that are no longer permitted are removed. Returns the number of disconnected clients.
        """
        now = self.now()
        gone: list[SessionConnection] = []
        for session in self._broker.sessions.values():
            link = None if session.connection is None else self._links.get(session.connection)
            client = None if session.rights is None else session.rights.principal
            if isinstance(client, AuthenticatedClient):
                client.access.refresh(client)  # also of clients that are disconnected below: for their wills
            if session.connection is not None and link is not None and not link.certificate_valid:
                gone.append(session.connection)
                continue
            if not isinstance(client, AuthenticatedClient) or session.connection is None or link is None:
                continue
            anchors = None if link.listener.tls is None else link.listener.tls.anchors
            if not client.access.revalidate(client, anchors):
                gone.append(session.connection)
        for link in list(self._links.values()):
            if link.unauthenticated and not link.certificate_valid:  # before its CONNECT
                link.abort()
        self._broker.policies_changed(now)  # before the wills of these clients are published
        for connection in gone:
            connection.disconnect(ReasonCode.NOT_AUTHORIZED, now, "the access of this client was revoked")
        return len(gone)

    def stop_receiving(self) -> None:
        """Stop accepting connections and reading; output of services is still sent.

        The first half of a shutdown: services finish their messages, then `close` disconnects the clients.
        """
        self.receiving = False
        self._broker.publish_wills(self.now())
        for listener in self.listeners:
            listener.close()
        for link in self._links.values():
            if link.transport is not None and not link.transport.is_closing():
                link.transport.pause_reading()

    def forget_routes(self) -> None:
        """Empty the cache of routes."""
        self._broker.router.forget_all()

    async def close(self) -> None:
        """Stop listening, send DISCONNECT 0x8B, wait for buffered output, then abort remaining connections."""
        if self._closing or self._loop is None:
            return
        self._closing = True
        if self._stalls is not None:
            self._stalls.remove(self._stalled)
        for listener in self.listeners:
            listener.close()
            listener.abort_handshakes()
        self._broker.shut_down(self.now())
        self._flush()
        if self.persistence is not None:  # send output that waits for its commit before DISCONNECT
            await self.persistence.drain()
            self._flush()
        for link in list(self._links.values()):
            link.close(linger=False)
        if self.connection_limiter.connections:
            try:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._empty.wait()
            except TimeoutError:
                logger.warning("aborted %d connections that did not read all output", len(self._links))
                for link in list(self._links.values()):
                    if link.transport is not None:
                        link.transport.abort()
                await self._empty.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.persistence is not None:
            await self.persistence.close()

    @property
    def broker(self) -> Broker:
        """The engine, for views that only read it."""
        return self._broker

    @property
    def stats(self) -> BrokerStats:
        """Counters since the start and current sizes; reading it iterates over all sessions."""
        return self._broker.measure()

    def collect_client_events(self) -> list[ClientEvent]:
        """Return the events of single clients since the last call."""
        return self._broker.client_events.collect()

    def refuse_stored(self, reason: str) -> None:
        """Refuse messages that must be stored (0x97) from now on, for ``reason``; "": accept them again."""
        self._broker.refuse_stored(reason)

    def refuse_changes(self, reason: str) -> None:
        """Refuse requests that wait for a commit (0x97) from now on, for ``reason``; "": accept them again."""
        self._broker.refuse_changes(reason)

    # Called by links

    def now(self) -> int:
        """Milliseconds of the loop's clock."""
        return int(self._time() * 1000)

    def arrived(self, link: ServerLink) -> None:
        """Register an accepted connection, before its TLS handshake."""
        for limiter in (link.listener.connection_limiter, self.connection_limiter):
            victim = limiter.opened(link, link.group)
            if victim is not None:
                victim.abort()
        link.listener.stats.connections += 1

    def opened(self, link: ServerLink) -> BrokerConnection | None:
        """Open a connection that is ready for MQTT."""
        connection = None
        # The handshake began before the authorities changed; an unknown authority is checked by the next reload.
        if not self._closing and self.receiving and (link.certificate_valid or not link.anchor):
            connection = self._open(link)
        if connection is not None:
            if self._joins_writes:
                connection.sink = link
            self._links[connection] = link
            if self._broker.timers.sooner:
                self._arm()
        return connection

    def received(self, connection: BrokerConnection, link: ServerLink, data: bytes) -> None:
        """Handle received bytes. An internal error ends only this connection.

        A large read, or one of a connection that has had a share of this turn, waits for the next turn: the loop calls
        for the sockets in the order in which they became readable, and that of a flood is nearly always the first.
        """
        now: i64 = int(self._time() * 1000)
        try:
            if (len(data) >= LARGE_READ_BYTES or link.turn == self._turn) and not link.unauthenticated:
                connection.keep(data, now)
                self.defer(link)
                return
            if now != self._read_at:  # all reads in a millisecond have the same time
                self._read_at = now
                self._wall_ms = self._clock()
            broker = self._broker
            outbound = broker.outbound
            outbound.begin_read(connection)
            published = broker.stats.publishes_received
            connection.receive(data, now, self._wall_ms)
            if connection.left and outbound.end_connection():
                if not link.defers_end():
                    link.close(linger=False)
            else:
                outbound.end_read(unread=connection.unread)
            if link.unauthenticated and connection.session is not None:
                self.accepted(link)
            if broker.timers.sooner:
                self._arm()
            if connection.holds and not link.reading_paused:
                link.pause_reading()
            if connection.unread or len(data) >= LARGE_READ_BYTES:
                self.defer(link)
            elif broker.stats.publishes_received != published:
                self._urgent = True
        except Exception:
            logger.exception("internal error; closing %r", connection)
            self._abort(link)

    def accepted(self, link: ServerLink) -> None:
        """Handle an accepted CONNECT, before its CONNACK or soon after it."""
        link.unauthenticated = False
        logger.debug("%r connected", link.connection)
        for limiter in (link.listener.connection_limiter, self.connection_limiter):
            limiter.authenticated(link, link.group)

    def admits(self, work: int) -> bool:
        """Return whether this turn has room for a new connection, or for the end of one, and count ``work`` units.

        They have :data:`ARRIVAL_SHARES` of a turn together, of which those that have waited get theirs first.
        """
        broker = self._broker
        if self._turn_end < 0:
            self._begin_arrivals()
        if broker.work >= self._turn_end:
            return False
        broker.work += work
        return True

    def defers(self, link: ServerLink, work: int) -> bool:
        """Return whether bytes of a connection without CONNACK, or its end, must wait for a later turn."""
        if not link.deferred:
            if self.admits(work):
                return False
            link.defer_reading()
            self._arrivals.add(link)
        return True

    def _begin_arrivals(self) -> None:
        """Begin to count new and ended connections of this turn.

        The turn ends with :meth:`_next_turn`, not with the loop's time, which may change within a turn.
        """
        self._turn_end = self._broker.work + ARRIVAL_SHARES * self._broker.max_turn_work
        self._wake()

    def defer(self, link: ServerLink) -> None:
        """Continue with the connection in a later turn."""
        if not link.deferred:
            link.defer_reading()
            self._turns.add(link)

    def _work(self) -> int:
        return self._broker.work

    def _take_turn(self, link: ServerLink) -> bool:
        """Handle another share of a connection, or read it again; returns True if it waits for another turn
        [TurnQueue]."""
        if not link.deferred:  # closed meanwhile
            return False
        broker, connection = self._broker, link.connection
        if connection is not None and connection.unread and self.receiving:
            try:
                broker.outbound.begin_read(connection)
                unread = connection.proceed(self.now(), self._clock())
                broker.outbound.end_read(unread=unread)
            except Exception:
                logger.exception("internal error; closing %r", connection)
                self._abort(link)
                return False
            if unread or link.early or link.lost or link.ended:  # the end follows the output
                return True
            link.turn = self._turn  # a read that follows in this turn would be its second share
            self._wake()
        if link.early and self.receiving:
            broker.work += link.early_work
            link.proceed()
            return False
        link.deferred = False
        if link.lost or link.ended:
            broker.work += END_WORK
        link.end_turn()
        return False

    def _abort(self, link: ServerLink) -> None:
        """Close a connection after an internal error."""
        self._broker.outbound.abandon_read()
        link.abort()

    def lost(self, link: ServerLink) -> None:
        """Handle the end of a connection in any state."""
        listener = link.listener
        for limiter in (listener.connection_limiter, self.connection_limiter):
            limiter.closed(link, link.group)
        listener.stats.connections -= 1
        if self._closing and not self.connection_limiter.connections:
            self._empty.set()
        connection = link.connection
        if connection is not None:
            logger.debug("%r disconnected", connection)
            connection.lost(self.now())
            self._links.pop(connection, None)
            if self._broker.timers.sooner:
                self._arm()
        for each in self.listeners:
            each.connection_closed()

    # Called by in-process links

    def open_inside(self, link: InProcessLink, name: str, access: Access) -> BrokerConnection | None:
        """Open an in-process connection of a component; None if the broker is shutting down."""
        self._run_in(asyncio.get_running_loop())
        connection = None if self._closing else self._broker.open(name, self.now(), access=access)
        if connection is not None:
            self._inside[connection] = link
            self._arm()
        return connection

    def received_inside(self, connection: BrokerConnection, data: bytes) -> None:
        """Handle bytes of a component of the node, without the limit of a share: components are trusted."""
        now, wall_ms = self.now(), self._clock()
        self._urgent = True
        connection.receive(data, now, wall_ms)
        while connection.unread:
            connection.proceed(now, wall_ms)

    def lost_inside(self, connection: BrokerConnection) -> None:
        """Handle the end of an in-process connection."""
        if self._inside.pop(connection, None) is not None:
            connection.lost(self.now())
            self._arm()

    def subscriptions_of(self, client_id: str) -> list[str]:
        """Return the topic filters of the client's session; empty without a session."""
        session = self._broker.sessions.get(client_id)
        return [] if session is None else list(session.subscriptions)

    # Internal

    def _run_in(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._stalls is None:
            self._stalls = watch_stalls(self._stalled)
        self._loop = loop
        self._time = loop.time
        self._joins_writes = joins_writes(loop)

    def _wake(self) -> None:
        """Schedule :meth:`_next_turn` after the reads of this turn."""
        if not self._awake and self._loop is not None:
            self._awake = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Write the output of the last turn, and resume connections that have used their share.

        Connections continue before the write, so that each receiver gets one write; after the write if others
        published.
        """
        self._awake = False
        self._turn += 1
        self._turn_end = -1
        urgent, self._urgent = self._urgent, False
        if urgent:
            self._flush()
        if self._turns.waiting or self._arrivals.waiting:
            self._turns.proceed()
            if self._arrivals.waiting:
                self._begin_arrivals()
                self._arrivals.proceed()
            if self._broker.timers.sooner:
                self._arm()
        if not urgent:
            self._flush()

    def _flush(self) -> None:
        """Write the collected output, one write per connection, and commit the recorded changes."""
        if self.persistence is not None:
            self.persistence.submit()
        for connection, data, close in self._broker.flush(self.now()):
            link = self._links.get(connection)
            if link is None or link.transport is None:
                if (inside := self._inside.get(connection)) is not None:
                    inside.deliver(data, close=close)
                continue
            if data:
                link.write(data)
            if link.unauthenticated and connection.session is not None:
                self.accepted(link)
            if close:
                link.close(linger=not connection.left)
            elif link.reading_paused and not connection.holds:
                link.resume_reading()
        if self._broker.timers.sooner:
            self._arm()

    def _open(self, link: ServerLink) -> BrokerConnection | None:
        settings = link.listener.settings
        certificate = None if link.anchor is None else Certificate(link.certificate, link.anchor)
        limits = settings.publish_limits
        origin = Origin(
            listener=settings.name,
            address=link.address,
            certificate=certificate,
            publish_rate=limits.max_publish_rate,
            publish_burst=limits.max_publish_burst,
        )
        return self._broker.open(link.name, self.now(), origin=origin, access=settings.access)

    def _arm(self) -> None:
        """Set the timer to the engine's next deadline."""
        self._broker.timers.sooner = False
        deadline = self._broker.next_deadline()
        if deadline is None or self._loop is None or self._closing:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline / 1000 + 0.001, self._tick)

    def _tick(self) -> None:
        """Handle a deadline, after reading bytes that were received before it."""
        if self._stalls is not None:
            self._stalls.look()
        if self._loop is not None:
            after_reading(self._loop, self._check_deadlines)

    def _check_deadlines(self) -> None:
        if self._timer is not None:  # an earlier deadline may have been armed meanwhile
            self._timer.cancel()
            self._timer = None
        if not self._closing:
            self._broker.tick(self.now())
            self._arm()

    def _stalled(self, grace_ms: int) -> None:
        self._broker.stalled(self.now(), grace_ms)

    def _log_end(self, connection: SessionConnection, reason_code: int, why: str) -> None:
        """Log errors at a level that is shown by default, orderly connects and disconnects at debug level."""
        if reason_code == ReasonCode.SERVER_SHUTTING_DOWN:
            return
        logger.info("%r closed by the server: %s%s", connection, reason_name(reason_code), f", {why}" if why else "")
        if why == NOTIFICATIONS_LOST and (total := self._observer_log.admit(self.now())):
            logger.warning(
                "observers disconnected because their queues are full count=%d last=%r: "
                "raise max_queued_messages or max_queued_bytes, or observe fewer keys with one client",
                total,
                connection,
            )

    def _log_will(self, client_id: str, topic: str, why: str) -> None:
        if total := self._will_log.admit(self.now()):
            logger.warning("wills not published count=%d last=%r topic=%r: %s", total, client_id, topic, why)

    def _log_merged(self, client_id: str, merged: int) -> None:
        if total := self._merge_log.admit(self.now(), merged):
            logger.warning(
                "state store notifications merged per key because queues are full count=%d last=%r: "
                "the clients are slow; the newest version of each key is delivered",
                total,
                client_id,
            )


def _not_started() -> float:
    raise AssertionError("the server is started first")
