"""The broker without IO: sessions, routing, retained messages, wills, services.

The shell opens a :class:`BrokerConnection` for each network connection, feeds it bytes, and after each loop turn takes
what is to be written from :meth:`Broker.flush`. Time comes in as ``now``, milliseconds of a clock that never jumps;
:meth:`next_deadline` says when :meth:`tick` wants to be called. ``wake`` is called when there is output and there was
none before, so that a settled message leaves although no bytes came in.

Source: MQTT 5.0 chapters 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.decoder import TopicNames
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.property_blocks import HAS_USER_PROPERTY
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import validate_topic_filter, validate_topic_name
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.connections.outbound import Outbound, PendingWrite
from penstock.mqtt.engine.model.access import LOCAL, Access, Origin, Rights, may_hurry
from penstock.mqtt.engine.model.journal import Journal, Source
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.model.message import Message, Notification
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.model.sys_topics import SysTopics
from penstock.mqtt.engine.model.timers import Timers
from penstock.mqtt.engine.routing.router import Route, Router
from penstock.mqtt.engine.routing.shared_groups import SharedGroup
from penstock.mqtt.engine.sessions.message_queue import QueueTotals
from penstock.mqtt.engine.sessions.retained import Allows, Retained
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.session_manager import SessionManager
from penstock.mqtt.engine.sessions.shared_delivery import deliver_shared, take_over
from penstock.mqtt.service import Inbound, Service

__all__ = ["Broker"]

NODE: Final = "penstock"
"""Client identifier of what the node itself publishes, for the services that take it."""


class Broker:
    """All sessions and messages of one broker.

    ``journal`` collects what is to outlive the process; without one nothing does. ``new_client_id`` gives an
    unguessable identifier for clients that bring none. ``report`` is told of every connection that the
    broker ends or refuses, with the reason code and words, for logs; who decides about access tells of its own.
    ``report_merged`` is called with a client identifier and the number of notifications that were merged in its queue.
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
        report: Callable[[BrokerConnection, int, str], None] = lambda _connection, _code, _why: None,
        report_merged: Callable[[str, int], None] = lambda _client_id, _count: None,
    ) -> None:
        self.limits = limits or BrokerLimits()
        self.stats = BrokerStats()
        self.topics = TopicNames()
        self.timers = Timers()
        self.sessions: dict[str, Session] = {}
        self.journal = journal or Journal(enabled=False)
        self.retained = Retained(self.limits.max_retained_messages, self.limits.max_retained_bytes, journal)
        self.router = Router(self.limits)
        self.waiting_totals = QueueTotals()
        self.figures = SysTopics(
            self.timers,
            self.limits.sys_interval_s * 1000,
            wanted=lambda: self.router.figures_wanted,
            measure=self.measure,
            publish=self._publish_figure,
        )
        self.report = report
        self.report_merged = report_merged
        self.wall_offset = 0
        self.reading_since = 0
        """``now`` of the bytes that are being handled."""
        self.grace_until = 0
        """Before that nobody's silence is judged."""
        self._access = access
        self._new_client_id = new_client_id
        self.services: list[Service] = []
        self._routes = self.router.routes
        self.refusing = self.limits.queue_overflow is QueueOverflowPolicy.REFUSE
        self.out_of_space = ""
        """Why messages that must be stored are refused; empty: they are not."""
        self.recall: Callable[[str, str], Rights | None] | None = None
        """Asked, where there is somebody to ask, for the rights of a session that a start brought back and nobody has
        resumed: by its owner and its client identifier. None: whoever that was may do nothing any more."""
        self.outbound = Outbound(self, wake)
        self.lifecycle = SessionManager(self)
        self._connections = 0
        for service in services:
            self.add_service(service)

    # The shell's side

    def keep_in(self, journal: Journal) -> None:
        """Record in ``journal`` what is to outlive the process; before the first connection."""
        self.journal = self.retained.journal = journal

    def check_retained(self, allows: Allows) -> None:
        """Ask ``allows`` for the publisher of each retained message that is to be delivered."""
        self.retained.allows = allows

    def add_service(self, service: Service) -> None:
        """Hand the messages of the service's filters to it from now on."""
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
        """A network connection came in; None when there are too many: close it.

        ``access`` decides for this one in place of the broker's.
        """
        if self._connections >= self.limits.max_connections:
            self.stats.connections_refused += 1
            return None
        if self.figures.started_at is None:
            self.figures.started_at = now
        self._connections += 1
        self.stats.connections_opened += 1
        connection = BrokerConnection(self, name, now, origin=origin, access=self._access if access is None else access)
        self.timers.arm(connection, now + self.limits.connect_timeout_ms)
        return connection

    def flush(self, now: int) -> list[PendingWrite]:
        """What is to be written, one piece a connection. ``wake`` was called when there is more in the next turn."""
        return self.outbound.flush(now)

    def refuse_stored(self, reason: str) -> None:
        """Refuse messages that must be stored (0x97) from now on, ``reason`` says why; "": refuse them no more.

        MQTT 3.1.1 has no code for it: there the publisher's connection ends without an acknowledgement.
        """
        self.out_of_space = reason

    def storage_failed(self, now: int) -> None:
        """No commit will be done any more: end the connections whose output waits for one."""
        self.outbound.storage_failed(now)

    def stalled(self, now: int, grace_ms: int) -> None:
        """The shell did not run for a while: judge keep alive, session expiry and the like ``grace_ms`` later.

        What clients sent meanwhile is on its way; deadlines that come after the grace stay as they are.
        """
        self.grace_until = max(self.grace_until, now + grace_ms)

    def next_deadline(self) -> int | None:
        """When :meth:`tick` has something to do, or None."""
        return self.timers.next_deadline()

    def tick(self, now: int) -> None:
        """Do what time asks for: keep alive, will delay, session expiry."""
        self.timers.tick(now)

    def measure(self) -> BrokerStats:
        """The counters, with the sizes as they are now; walks the sessions."""
        stats = self.stats
        stats.packets_sent = stats.publishes_sent + stats.answers_sent
        stats.connections = self._connections
        stats.sessions = len(self.sessions)
        stats.subscriptions = len(self.router)
        stats.retained = self.retained.count
        stats.retained_bytes = self.retained.bytes
        stats.retained_withheld = self.retained.withheld
        stats.inflight = sum(len(session.inflight) for session in self.sessions.values())
        stats.queued = self.waiting_totals.messages
        stats.queued_bytes = self.waiting_totals.bytes
        connections = (session.connection for session in self.sessions.values())
        stats.unacknowledged = sum(c.unacknowledged for c in connections if c is not None)
        return stats

    def publish_wills(self, now: int) -> None:
        """The broker ends: publish the wills of connected clients that are not to wait, while services still run."""
        self.lifecycle.publish_wills(now)

    def policies_changed(self, now: int) -> None:
        """Who decides about access decides otherwise from now on: ask again, also for what waits.

        Subscriptions and waiting messages that are not allowed any more go; a client that may not connect any more is
        the Access's to :meth:`disconnect`.
        """
        self.lifecycle.policies_changed(now)

    def shut_down(self, now: int) -> None:
        """End every connection with DISCONNECT 0x8B."""
        for session in list(self.sessions.values()):
            if session.connection is not None:
                session.connection.disconnect(ReasonCode.SERVER_SHUTTING_DOWN, now)

    # The node's side

    def publish(self, publish: Publish, now: int) -> None:
        """Route a message of the node itself: to subscribers, retained, and to services that are not exclusive.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        validate_topic_name(publish.topic)
        message = Message(publish, now)
        if publish.retain and not self.retained.store(publish.topic, message):
            raise LocalProtocolError("mqtt: no room for another retained message", do="raise max_retained_messages")
        route = self.router.route(publish.topic)
        self.fan_out(route, message, None, now)
        for service in route.services:
            if not service.exclusive:  # those are asked by clients; an answer must not come back as a question
                service.receive(Inbound(publish, NODE, now + self.wall_offset))

    def respond(self, client_id: str, publish: Publish, now: int, request: Inbound | None = None) -> bool:
        """Route a message of the node itself to one session's subscriptions; False where none matches [Outlet.respond].

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        route = self._routes.get(publish.topic)
        if route is None:
            validate_topic_name(publish.topic)
            route = self.router.route(publish.topic)
        for target in route.targets:
            session = target.session
            if session.client_id == client_id:
                if request is not None:
                    request.settle()
                publish.topic_wire = route.topic_wire  # the next answer to the client need not encode it again
                message = Message(publish, now)
                route.topic_wire = message.topic_wire
                session.deliver(message, min(target.qos, publish.qos), 0, target.identifiers, now)
                return True
        return False

    def unheard(self, client_id: str, topic: str) -> str:
        """Why :meth:`respond` did not reach the client."""
        if client_id not in self.sessions:
            return "the client has no session any more"
        return self.router.route(topic).unheard()

    def deliver(self, client_id: str, publish: Publish, now: int, *, deletes: bool = False) -> bool:
        """Put a notification straight into one session, subscribed or not; ``deletes`` as in :class:`Notification`.

        It carries the identifiers of the session's subscriptions that match. False where there is no such session, or
        its client may not receive the topic.
        """
        session = self.sessions.get(client_id)
        if session is None:
            return False
        if not session.may_receive(publish.topic):
            self.stats.dropped_unauthorized += 1
            return False
        identifiers = b""
        for target in self.router.route(publish.topic).targets:
            if target.session is session:
                identifiers = target.identifiers
        session.deliver(Notification(publish, now, deletes=deletes), publish.qos, 0, identifiers, now)
        return True

    def copy_to_subscribers(self, client_id: str, publish: Publish, now: int) -> None:
        """Give what the node and ``client_id`` say to each other to the other sessions that subscribe to it and may.

        For an exclusive service that was told to: nothing else looks for such sessions.
        """
        topic = publish.topic
        message = Message(publish, now)
        for target in self.router.route(topic).targets:
            session = target.session
            rights = session.rights
            if session.client_id != client_id and rights is not None and rights.may_observe_requests(topic):
                session.deliver(message, min(target.qos, publish.qos), 0, target.identifiers, now)

    def disconnect(self, client_id: str, reason_code: int, now: int, reason_string: str = "") -> None:
        """End a client's network connection, if it has one."""
        session = self.sessions.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(reason_code, now, reason_string)

    # The connections' side

    def new_client_id(self) -> str:
        """A client identifier that no session has [MQTT-3.2.2-16]."""
        client_id = self._new_client_id()
        while client_id in self.sessions:
            client_id = self._new_client_id()
        return client_id

    def connection_lost(self, connection: BrokerConnection, now: int) -> None:
        """The network connection is gone for good; called once a connection."""
        self._connections -= 1
        self.outbound.forget(connection)
        self.lifecycle.connection_ended(connection, now)
        connection.closing = True
        connection.decoder.discard()  # the entry in the timers may keep the connection for a while
        connection.out.clear()
        self.timers.remove(connection)

    def route(self, publish: Publish, publisher: Session, now: int) -> tuple[list[Service], int]:
        """Route a client's message; the services that take it, and the reason code for its PUBACK or PUBREC."""
        route = self._routes.get(publish.topic)
        if route is None:
            route = self.router.route(publish.topic)
        if route.exclusive:
            if route.refusal == ReasonCode.NOT_AUTHORIZED:
                self.stats.refused_unauthorized += 1
            return route.services, route.refusal
        if route.nobody and not publish.retain:
            return route.services, 0 if route.services else ReasonCode.NO_MATCHING_SUBSCRIBERS
        message = self.message(publish, publisher, now)
        if self.out_of_space and self._must_store(route, publish, publisher):
            self.stats.refused_out_of_space += 1
            return [], ReasonCode.QUOTA_EXCEEDED
        if self.refusing and publish.qos and not _has_room(route, message, publisher):
            self.stats.refused_queue_full += 1
            return [], ReasonCode.QUOTA_EXCEEDED
        if publish.retain:
            source = Source(publisher.owner, publisher.client_id)
            if not self.retained.store(publish.topic, message, source):
                return [], ReasonCode.QUOTA_EXCEEDED
        self.fan_out(route, message, publisher, now)
        return route.services, 0

    def message(self, publish: Publish, publisher: Session, now: int) -> Message:
        """What a client published, as it goes to its receivers."""
        message = Message(publish, now)
        block = publish.block
        if block is not None and block.seen & HAS_USER_PROPERTY:
            message.urgent = may_hurry(publish, publisher.rights)
        return message

    def services_for(self, publish: Publish) -> list[Service]:
        """The services that take a message whose subscribers have it already."""
        return self.router.route(publish.topic).services

    def take_over(self, group: SharedGroup, now: int) -> None:
        """A member of the group has room again for what waits for members that are away."""
        take_over(group, now)

    def fan_out(self, route: Route, message: Message, publisher: Session | None, now: int) -> None:
        """Hand a message to the subscribers of its route."""
        qos = message.qos
        retain = 1 if message.retain else 0
        if route.many:
            message.stored = -1  # once for all receivers
        for target in route.targets:
            session = target.session
            chosen = target.as_publisher if session is publisher else target
            if chosen is None:
                continue
            granted = chosen.qos
            session.deliver(
                message,
                min(qos, granted),  # [MQTT-3.8.4-8]
                retain if chosen.retain_as_published else 0,  # [MQTT-3.3.1-12], [MQTT-3.3.1-13]
                chosen.identifiers,
                now,
            )
        for shared in route.shared:
            member = shared.group.choose(message.publish, shared.members)
            if member is not None:
                deliver_shared(member, shared.group, message, now)

    # Inside

    def _must_store(self, route: Route, publish: Publish, publisher: Session) -> bool:
        """Whether the message needs space on the disk: it is retained, or for a session that outlives the process."""
        if publish.retain and publish.payload and self.journal.enabled:
            return True
        if not publish.qos:
            return False
        for target in route.targets:
            chosen = target.as_publisher if target.session is publisher else target
            if chosen is not None and chosen.qos and target.session.kept is not None:
                return True
        return any(member.qos and member.session.kept is not None for each in route.shared for member in each.members)

    def _publish_figure(self, topic: str, text: str, now: int) -> None:
        message = Message(Publish(topic, text.encode(), retain=True), now)
        self.retained.store(topic, message)
        self.fan_out(self.router.route(topic), message, None, now)


def _has_room(route: Route, message: Message, publisher: Session) -> bool:
    """Whether every receiver would get the message: where the publisher is to hear of the first who would not."""
    for target in route.targets:
        session = target.session
        chosen = target.as_publisher if session is publisher else target
        if chosen is not None and chosen.qos and not session.has_room(message):
            return False
    return all(any(member.session.has_room(message) for member in shared.members) for shared in route.shared)
