"""The state of a broker and the path of a message: from its publisher to retained messages, services and sessions.

Source: MQTT 5.0 sections 3.3, 4.8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.decoder import TopicNames
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.property_blocks import HAS_USER_PROPERTY
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import validate_topic_name
from penstock.mqtt.engine.model.access import Rights, has_high_priority
from penstock.mqtt.engine.model.client_events import QUEUE_REFUSED
from penstock.mqtt.engine.model.journal import Journal, Source
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.model.message import Message, Notification, message_of
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.model.sys_topics import SysTopics
from penstock.mqtt.engine.model.timers import Timers
from penstock.mqtt.engine.routing.router import Route, Router
from penstock.mqtt.engine.routing.subscriptions import SharedGroup, Subscriber
from penstock.mqtt.engine.sessions.retained import Retained
from penstock.mqtt.engine.sessions.session import Session, SessionConnection, SessionOwner
from penstock.mqtt.engine.sessions.shared_delivery import deliver_shared, take_over
from penstock.mqtt.service import Inbound, Service
from penstock.runtime.turns import TURN_SHARES

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["RETAINED_FULL", "WRITE_WORK", "BrokerCore"]

WRITE_WORK: Final = 4
"""Units of work for the write of a message to a connection if the message has many receivers (see
``max_turn_work``)."""
NODE: Final = "penstock"
"""Client identifier of messages that the node itself publishes, for the services that receive them."""


# Plain numbers: comparing members of an IntEnum calls Python code.
_NOT_AUTHORIZED: Final = 0x87
_NO_MATCHING_SUBSCRIBERS: Final = 0x10

RETAINED_FULL: Final = (
    "the broker stores no more retained messages: delete some, or raise max_retained_messages or max_retained_bytes"
)
"""Reason String for a retained message that would exceed the limits."""


class BrokerCore(SessionOwner):
    """Sessions, subscriptions and retained messages, and the delivery of messages to them.

    ``report(connection, reason code, reason)`` is called for every connection that the broker ends or refuses;
    ``report_merged(client identifier, count)`` when notifications are merged in a full queue;
    ``report_will(client identifier, topic, reason)`` for every will that is refused when it is to be published.
    """

    def __init__(
        self,
        limits: BrokerLimits,
        journal: Journal | None,
        new_client_id: Callable[[], str],
        report: Callable[[SessionConnection, int, str], None],
        report_merged: Callable[[str, int], None],
    ) -> None:
        super().__init__(
            Retained(limits.max_retained_messages, limits.max_retained_bytes, journal),
            limits.max_turn_work,
            report_merged,
        )
        self.limits = limits
        self.stats = BrokerStats()
        self.topics = TopicNames()
        self.timers = Timers()
        self.sessions: dict[str, Session] = {}
        self.ending: deque[Session] = deque()
        """Ended sessions with many subscriptions, which are removed in shares of loop turns. Their clients may have
        later sessions already."""
        self.wake: Callable[[], None] = _noop
        """Requests a call of :meth:`Broker.flush` in the next turn."""
        self.journal = journal or Journal(enabled=False)
        self.router = Router(limits)
        self.sys_topics = SysTopics(
            self.timers,
            limits,
            wanted=lambda: self.router.sys_topics_wanted,
            measure=self.measure,
            publish=self._publish_sys_topic,
        )
        self.report = report
        self.report_will: Callable[[str, str, str], None] = _report_nothing
        self.connections = 0
        """Open network connections."""
        self.wall_offset = 0
        """Wall clock minus ``now``, in ms."""
        self.reading_since = 0
        """``now`` of the bytes that are being handled."""
        self.reads = 0
        """Number of the current read: incremented each time a connection receives bytes."""
        self.grace_until = 0
        """Instant before which no keep alive, session expiry or similar deadline expires."""
        self.services: list[Service] = []
        self.fans_out = False
        """True while a message is delivered to more receivers than a turn writes to: their output is written in
        shares."""
        self.writes_per_turn: i64 = TURN_SHARES * limits.max_turn_work // WRITE_WORK
        """Maximum writes per loop turn for messages with more receivers than that."""
        self.out_of_space = ""
        """Reason for refusing messages that must be stored; empty: they are accepted."""
        self.no_commits = ""
        """Reason why no commit can end, for refusing what would wait for one; empty: commits end."""
        self.recall: Callable[[str, str], Rights | None] | None = None
        """Returns the rights of a restored session that no client has resumed, by its owner and client identifier; None
        for no rights. Not set: no access control."""
        self._new_client_id = new_client_id
        self._routes = self.router.routes
        self._refuses_overflow = limits.queue_overflow is QueueOverflowPolicy.REFUSE

    @abstractmethod
    def connection_ended(self, connection: SessionConnection, now: int) -> None:
        """Take the session of a closing or closed connection offline."""

    def new_client_id(self) -> str:
        """Return a client identifier that no session has [MQTT-3.2.2-16]."""
        client_id = self._new_client_id()
        while client_id in self.sessions:
            client_id = self._new_client_id()
        return client_id

    def measure(self) -> BrokerStats:
        """Update the gauges of the statistics, and return the statistics; visits every session."""
        stats = self.stats
        stats.packets_sent = stats.publishes_sent + stats.answers_sent
        stats.connections = self.connections
        stats.sessions = len(self.sessions)
        stats.subscriptions = len(self.router)
        stats.retained = self.retained.count
        stats.retained_bytes = self.retained.bytes
        stats.retained_withheld = self.retained.withheld
        stats.inflight = sum(len(session.inflight) for session in self.sessions.values())
        stats.queued = self.queue_totals.messages
        stats.queued_bytes = self.queue_totals.bytes
        connections = (session.connection for session in self.sessions.values())
        stats.unacknowledged = sum(c.unacknowledged for c in connections if c is not None)
        return stats

    # Messages of the node

    def publish(self, publish: Publish, now: int) -> None:
        """Route a message of the node itself: to subscribers, retained, and to services that are not exclusive.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        validate_topic_name(publish.topic)
        message = message_of(publish, now)
        if publish.retain and not self.retained.store(publish.topic, message):
            raise LocalProtocolError("mqtt: no room for another retained message", hint="raise max_retained_messages")
        route = self.router.route(publish.topic)
        self.fan_out(route, message, None, now)
        for service in route.services:
            # Exclusive services receive requests of clients: a response must not become a request.
            if not service.exclusive:
                service.receive(Inbound(publish, NODE, now + self.wall_offset))

    def respond(
        self,
        client_id: str,
        topic: str,
        payload: bytes,
        properties_wire: bytes,
        expiry_s: i64,
        now: i64,
        request: Inbound | None = None,
    ) -> bool:
        """Route a message of the node to one session's subscriptions; False if none matches [Outlet.respond].

        Raises:
            LocalProtocolError: the topic cannot be sent.
        """
        route = self._routes.get(topic)
        if route is None:
            validate_topic_name(topic)
            route = self.router.route(topic)
        for target in route.targets:
            session = target.session
            if session.client_id == client_id:
                if request is not None:
                    request.settle()
                expires_at = now + expiry_s * 1000 if expiry_s else 0
                message = Message(topic, route.topic_wire, payload, properties_wire, 1, now, expires_at=expires_at)
                route.topic_wire = (
                    message.topic_wire
                )  # so that the next response to the client does not encode it again
                session.deliver(message, min(target.qos, 1), 0, target.identifiers, now)
                return True
        return False

    def undelivered_reason(self, client_id: str, topic: str) -> str:
        """Return the reason why :meth:`respond` did not reach the client."""
        if client_id not in self.sessions:
            return "the client has no session any more"
        return self.router.route(topic).undelivered_reason()

    def deliver(self, client_id: str, publish: Publish, now: int, *, deletes: bool = False) -> bool:
        """Deliver a notification to one session, subscribed or not; ``deletes`` as in :class:`Notification`.

        It has the identifiers of the session's matching subscriptions. Returns False if the session does not exist or
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
        """Deliver a message between the node and ``client_id`` to other subscribers that may observe requests.

        For exclusive services that have this enabled.
        """
        topic = publish.topic
        message = message_of(publish, now)
        for target in self.router.route(topic).targets:
            session = target.session
            rights = session.rights
            if session.client_id != client_id and rights is not None and rights.may_observe_requests(topic):
                session.deliver(message, min(target.qos, publish.qos), 0, target.identifiers, now)

    def _publish_sys_topic(self, topic: str, text: str, now: int) -> None:
        message = message_of(Publish(topic, text.encode(), retain=True), now)
        self.retained.store(topic, message)
        self.fan_out(self.router.route(topic), message, None, now)

    # Messages of clients

    def route(self, publish: Publish, publisher: Session, now: i64) -> tuple[list[Service], i64, str]:
        """Route a client's message.

        Returns the services that receive it, and reason code and Reason String for its PUBACK or PUBREC; the string is
        empty unless a quota is exceeded.
        """
        route = self._routes.get(publish.topic)
        if route is None:
            route = self.router.route(publish.topic)
        if route.exclusive:
            if route.refusal == _NOT_AUTHORIZED:
                self.stats.refused_unauthorized += 1
            return route.services, route.refusal, ""
        if route.nobody and not publish.retain:
            return route.services, 0 if route.services else _NO_MATCHING_SUBSCRIBERS, ""
        message = _message(publish, publisher, now)
        if self.out_of_space and self._must_store(route, publish, publisher):
            self.stats.refused_out_of_space += 1
            return [], ReasonCode.QUOTA_EXCEEDED, self.out_of_space
        if self._refuses_overflow and publish.qos and (full := _full_receiver(route, message, publisher)) is not None:
            self.stats.refused_queue_full += 1
            full.count_events(QUEUE_REFUSED, 1)
            return [], ReasonCode.QUOTA_EXCEEDED, full.overflow_reason(message)
        if publish.retain:
            source = Source(publisher.owner, publisher.client_id)
            if not self.retained.store(publish.topic, message, source):
                return [], ReasonCode.QUOTA_EXCEEDED, RETAINED_FULL
        self.fan_out(route, message, publisher, now)
        return route.services, 0, ""

    def services_for(self, publish: Publish) -> list[Service]:
        """Return the services for a repeated message that subscribers have received."""
        return self.router.route(publish.topic).services

    def shared_group(self, topic_filter: str) -> SharedGroup | None:
        """Return the members of a shared subscription; None without members."""
        return self.router.groups.get(topic_filter)

    def take_over(self, groups: Iterable[SharedGroup], now: int) -> None:
        """Deliver messages that are queued for disconnected members of ``groups`` to members with room for them."""
        take_over(groups, now)

    def fan_out(self, route: Route, message: Message, publisher: Session | None, now: i64) -> None:
        """Deliver a message to the subscribers of its route."""
        qos = message.qos
        retain: i64
        if route.many:
            message.stored = -1  # once for all receivers
            message.encode()
            self.fans_out = route.receivers > self.writes_per_turn
            # Eight receivers count as one unit: the message is encoded once. With a whole unit each, shares would be
            # so short that most of the time went into writes of a few messages to many receivers.
            self.work += (len(route.targets) + len(route.shared)) >> 3
        for target in route.targets:
            session = target.session
            chosen = target.for_publisher() if session is publisher else target
            if chosen is None:
                continue
            granted = chosen.qos
            retain = 0
            if message.retain and chosen.retain_as_published:  # [MQTT-3.3.1-12], [MQTT-3.3.1-13]
                retain = 1
            session.deliver(message, min(granted, qos), retain, chosen.identifiers, now)  # [MQTT-3.8.4-8]
        message.encoded = None  # the message may wait in queues
        for shared in route.shared:
            member = shared.group.choose(message, shared.members)
            if member is not None:
                deliver_shared(member, shared.group, message, now)
        self.fans_out = False

    def _must_store(self, route: Route, publish: Publish, publisher: Session) -> bool:
        """Return whether the message needs disk space: it is retained, or for a persistent session."""
        if publish.retain and (publish.payload or self.no_commits) and self.journal.enabled:
            return True
        if not publish.qos:
            return False
        for target in route.targets:
            chosen = target.for_publisher() if target.session is publisher else target
            if chosen is not None and chosen.qos and target.session.is_persistent():
                return True
        return any(member.qos and member.session.is_persistent() for each in route.shared for member in each.members)


def _message(publish: Publish, publisher: Session, now: i64) -> Message:
    message = message_of(publish, now)
    block = publish.block
    if block is not None and block.seen & HAS_USER_PROPERTY:
        message.urgent = has_high_priority(publish, publisher.rights)
    return message


def _full_receiver(route: Route, message: Message, publisher: Session) -> Subscriber | None:
    """Return a receiver without room for the message; None if all have room."""
    for target in route.targets:
        session = target.session
        chosen = target.for_publisher() if session is publisher else target
        if chosen is not None and chosen.qos and not session.has_room(message):
            return session
    for shared in route.shared:
        if not any(member.session.has_room(message) for member in shared.members):
            return shared.members[0].session
    return None


def _report_nothing(_client_id: str, _topic: str, _why: str) -> None:
    """Default of ``report_will``: does nothing."""


def _noop() -> None:
    """Default of callbacks before a shell sets them: does nothing."""
