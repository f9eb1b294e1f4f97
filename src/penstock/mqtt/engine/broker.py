"""The interface of the broker engine, which does no IO, for the asyncio server (the shell).

The shell opens a :class:`BrokerConnection` for each network connection, feeds it bytes, and after each loop turn takes
its output from :meth:`Broker.flush`. The time is the argument ``now``, milliseconds of a clock that never jumps;
:meth:`next_deadline` returns when :meth:`tick` is due. ``wake`` is called when there is output for the first time since
the last flush, so that an acknowledgement is sent although no bytes were received.

Source: MQTT 5.0 chapters 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import validate_topic_filter
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.connections.output import BrokerOutput, PendingWrite
from penstock.mqtt.engine.model.access import LOCAL, Access, Origin
from penstock.mqtt.engine.model.journal import Journal
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.retained import Allows
from penstock.mqtt.engine.sessions.session import Session, SessionConnection
from penstock.mqtt.engine.sessions.session_manager import SessionManager
from penstock.mqtt.service import Service

__all__ = ["Broker"]


class Broker(BrokerCore):
    """One broker: the interface of the shell.

    ``journal`` records persistent state; without a journal no state survives a restart. ``new_client_id`` returns an
    unguessable identifier for clients without one. ``wake`` is called for the first output since the last flush.
    ``report`` is called with every connection that the broker ends or refuses, the reason code and the reason, for
    logs; an :class:`Access` logs its own decisions. ``report_merged`` is called with a client identifier and the number
    of notifications that were merged in its queue.
    """

    def __init__(
        self,
        limits: BrokerLimits | None = None,
        *,
        services: Sequence[Service] = (),
        access: Access | None = None,
        journal: Journal | None = None,
        new_client_id: Callable[[], str],
        wake: Callable[[], None] = lambda: None,
        report: Callable[[SessionConnection, int, str], None] = lambda _connection, _code, _why: None,
        report_merged: Callable[[str, int], None] = lambda _client_id, _count: None,
    ) -> None:
        super().__init__(limits or BrokerLimits(), journal, new_client_id, report, report_merged)
        self._access = access
        self.wake = wake
        self.outbound = BrokerOutput(self, wake)
        self._session_manager = SessionManager(self)
        for service in services:
            self.add_service(service)

    def set_journal(self, journal: Journal) -> None:
        """Record persistent state in ``journal``; call it before the first connection."""
        self.journal = self.retained.journal = journal

    def check_retained(self, allows: Allows) -> None:
        """Check the publisher of each retained message with ``allows`` before it is delivered."""
        self.retained.allows = allows

    def add_service(self, service: Service) -> None:
        """Add a service, which receives the messages of its topic filters from now on."""
        for topic_filter in (*service.filters, *service.reserved):
            validate_topic_filter(topic_filter)
        self.services.append(service)
        self.router.add_service(service)

    def open(
        self,
        name: str,
        now: int,
        *,
        origin: Origin = LOCAL,
        access: Access | None = None,
    ) -> BrokerConnection | None:
        """Open a network connection; None if there are too many, and the shell closes it.

        ``access`` replaces the broker's access control for this connection.
        """
        if self.connections >= self.limits.max_connections:
            self.stats.connections_refused += 1
            return None
        if self.sys_topics.started_at is None:
            self.sys_topics.started_at = now
        self.connections += 1
        self.stats.connections_opened += 1
        connection = BrokerConnection(
            self,
            self._session_manager,
            self.outbound,
            name,
            now,
            origin=origin,
            access=self._access if access is None else access,
        )
        self.timers.arm(connection, now + self.limits.connect_timeout_ms)
        return connection

    def flush(self, now: int) -> list[PendingWrite]:
        """Write the output of connections with a transport; return that of other and of closing ones.

        That is one piece per connection. If there is more for the next turn, ``wake`` was called.
        """
        if self.ending:
            self._session_manager.remove_subscriptions()
        return self.outbound.flush(now)

    def refuse_stored(self, reason: str) -> None:
        """Refuse messages that must be stored (0x97) from now on, for ``reason``; "": accept them again.

        MQTT 3.1.1 has no reason code for it: its publishers are disconnected without an acknowledgement.
        """
        self.out_of_space = reason

    def refuse_changes(self, reason: str) -> None:
        """Refuse requests of clients whose answers wait for a commit (0x97) from now on, for ``reason``, because none
        can end; "": accept them again. Call it with :meth:`refuse_stored`.

        These are CONNECT and SUBSCRIBE with a persistent session and deletions of retained messages. Otherwise all
        later output of the connection would wait, too.
        """
        self.no_commits = reason

    def storage_failed(self, now: int) -> None:
        """Handle the failure of the storage: end the connections whose output waits for a commit."""
        self.outbound.storage_failed(now)

    def stalled(self, now: int, grace_ms: int) -> None:
        """Extend deadlines after the process did not run for a while: none expires before ``now + grace_ms``.

        Packets that clients sent meanwhile have not been read yet. Later deadlines do not change.
        """
        self.grace_until = max(self.grace_until, now + grace_ms)

    def next_deadline(self) -> int | None:
        """Return the instant at which :meth:`tick` is due; None without a deadline."""
        return self.timers.next_deadline()

    def tick(self, now: int) -> None:
        """Handle deadlines that have passed: keep alive, will delay, session expiry."""
        self.timers.tick(now)

    def publish_wills(self, now: int) -> None:
        """Publish the wills of connected clients before a shutdown, while services still run; delayed wills stay."""
        self._session_manager.publish_wills(now)

    def policies_changed(self, now: int) -> None:
        """Authorize subscriptions and queued messages again, after the decisions of an Access changed.

        Subscriptions and messages that are no longer permitted are removed. The Access disconnects clients that may no
        longer connect, with :meth:`disconnect`.
        """
        self._session_manager.policies_changed(now)

    def shut_down(self, now: int) -> None:
        """End every connection with DISCONNECT 0x8B."""
        for session in list(self.sessions.values()):
            if session.connection is not None:
                session.connection.disconnect(ReasonCode.SERVER_SHUTTING_DOWN, now)

    def disconnect(self, client_id: str, reason_code: int, now: int, reason_string: str = "") -> None:
        """End a client's network connection, if it has one."""
        session = self.sessions.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(reason_code, now, reason_string)

    # For sessions and connections

    def connection_ended(self, connection: SessionConnection, now: int) -> None:
        """Take the session of a closing or closed connection offline."""
        self._session_manager.connection_ended(connection, now)

    def session_due(self, session: Session, now: int) -> None:
        """Handle the will delay or the expiry of an offline session."""
        self._session_manager.session_due(session, now)
