"""The broker without IO: sessions, routing, retained messages, wills, services.

The shell opens a :class:`BrokerConnection` for each network connection, feeds it bytes, and after each loop turn takes
what is to be written from :meth:`Broker.flush`. Time comes in as ``now``, milliseconds of a clock that never jumps;
:meth:`next_deadline` says when :meth:`tick` wants to be called. ``wake`` is called when there is output and there was
none before, so that a settled message leaves although no bytes came in.

Source: MQTT 5.0 chapters 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.mqtt.codec.decoder import TopicNames
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscribe, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import (
    SHARE_PREFIX,
    filter_problem,
    has_wildcard,
    validate_topic_filter,
    validate_topic_name,
)
from penstock.mqtt.engine.connection import BrokerConnection, is_text
from penstock.mqtt.engine.limits import BrokerLimits, BrokerStats
from penstock.mqtt.engine.message import Message, identifier_block
from penstock.mqtt.engine.retained import Retained
from penstock.mqtt.engine.session import NEVER, Session, SessionSubscription
from penstock.mqtt.engine.subscriptions import FilterTree
from penstock.mqtt.engine.timers import Timers
from penstock.mqtt.service import Inbound, Service

__all__ = ["Broker", "Output"]

MAX_QOS: Final = 1
ROUTES_KEPT: Final = 10_000
"""Topics whose receivers are remembered; a lookup in the tree costs thirty times as much."""
TARGETS_KEPT: Final = 200_000
"""Receivers in all of them: many sessions may be subscribed to everything."""

Output = tuple[BrokerConnection, bytes, bool]
"""Write the bytes to the connection, then close it if the flag says so."""


class _Target:
    """One session that gets a topic: all its matching subscriptions as one [MQTT-3.3.4-2 to -4]."""

    __slots__ = ("as_publisher", "identifiers", "qos", "retain_as_published", "session")

    def __init__(self, subscriptions: list[SessionSubscription]) -> None:
        self.session = subscriptions[0].session
        self.qos = max(s.qos for s in subscriptions)
        self.retain_as_published = any(s.retain_as_published for s in subscriptions)
        self.identifiers = b"".join([s.identifier for s in subscriptions])
        foreign = [s for s in subscriptions if not s.no_local]
        self.as_publisher: _Target | None = self
        """What holds for messages that the session itself published [MQTT-3.8.3-3]; None: nothing."""
        if len(foreign) < len(subscriptions):
            self.as_publisher = _Target(foreign) if foreign else None


class _Route:
    """Who gets a topic. ``exclusive``: the services and nobody else; with a ``refusal`` there are none of them."""

    __slots__ = ("exclusive", "refusal", "services", "targets")

    def __init__(self, targets: list[_Target], services: list[Service], refusal: int = 0) -> None:
        self.targets = targets
        self.services = services
        self.refusal = refusal
        self.exclusive = refusal != 0 or any(service.exclusive for service in services)


class Broker:
    """All sessions and messages of one broker.

    ``new_client_id`` gives an unguessable identifier for clients that bring none. ``report`` is told of every protocol
    error, for logs.
    """

    def __init__(
        self,
        limits: BrokerLimits | None = None,
        *,
        services: Sequence[Service] = (),
        new_client_id: Callable[[], str],
        wake: Callable[[], None] = lambda: None,
        report: Callable[[BrokerConnection, RemoteProtocolError], None] = lambda _connection, _error: None,
    ) -> None:
        self.limits = limits or BrokerLimits()
        self.stats = BrokerStats()
        self.topics = TopicNames()
        self.timers = Timers()
        self.sessions: dict[str, Session] = {}
        self.retained = Retained(self.limits.max_retained_messages, self.limits.max_retained_bytes)
        self.report = report
        self.wall_offset = 0
        self._new_client_id = new_client_id
        self._wake = wake
        self._services: list[Service] = []
        self._service_filters: FilterTree[Service] = FilterTree()
        self._filters: FilterTree[SessionSubscription] = FilterTree()
        self._routes: dict[str, _Route] = {}
        self._targets_kept = 0
        self._dirty: list[BrokerConnection] = []
        self._throttled: list[BrokerConnection] = []
        self.ended: list[BrokerConnection] = []
        """Connections that a service ended since the last flush."""
        self._connections = 0
        for service in services:
            self.add_service(service)

    # The shell's side

    def add_service(self, service: Service) -> None:
        """Hand the messages of the service's filters to it from now on."""
        for topic_filter in service.filters:
            validate_topic_filter(topic_filter)
            self._service_filters.set(topic_filter, str(len(self._services)), service)
        self._services.append(service)
        self._forget_all_routes()

    def open(self, name: str, now: int) -> BrokerConnection | None:
        """A network connection came in; None when there are too many: close it."""
        if self._connections >= self.limits.max_connections:
            self.stats.connections_refused += 1
            return None
        self._connections += 1
        self.stats.connections_opened += 1
        connection = BrokerConnection(self, name, now)
        self.timers.arm(connection, now + self.limits.connect_timeout_ms)
        return connection

    def flush(self, now: int) -> list[Output]:
        """What is to be written, one piece a connection. ``wake`` was called when there is more in the next turn."""
        if self.ended:
            ended, self.ended = self.ended, []
            for connection in ended:
                self.connection_ended(connection, now)
        throttled = self._throttled
        if throttled:
            self._throttled = []
            for connection in throttled:
                connection.end_throttle(now)
        dirty = self._dirty
        self._dirty = []
        outputs: list[Output] = []
        for connection in dirty:
            data = b"".join(connection.out)
            connection.out.clear()
            connection.out_bytes = 0
            connection.dirty = False
            if connection.throttled:
                self._throttled.append(connection)
            self.stats.bytes_sent += len(data)
            outputs.append((connection, data, connection.closing))
        if self._throttled:
            self._wake()
        return outputs

    def mark_dirty(self, connection: BrokerConnection) -> None:
        """Called by a connection that has output for the first time since it was flushed."""
        self._dirty.append(connection)
        if len(self._dirty) == 1:
            self._wake()

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
        stats.subscriptions = len(self._filters)
        stats.retained = self.retained.count
        stats.retained_bytes = self.retained.bytes
        stats.inflight = sum(len(session.inflight) for session in self.sessions.values())
        stats.queued = sum(len(session.queue) + len(session.queue_qos0) for session in self.sessions.values())
        connections = (session.connection for session in self.sessions.values())
        stats.unacknowledged = sum(c.unacknowledged for c in connections if c is not None)
        return stats

    def shut_down(self, now: int) -> None:
        """End every connection with DISCONNECT 0x8B."""
        for session in list(self.sessions.values()):
            if session.connection is not None:
                session.connection.disconnect(ReasonCode.SERVER_SHUTTING_DOWN, now)

    # The node's side

    def publish(self, publish: Publish, now: int) -> None:
        """Route a message of the node itself: to subscribers and retained, not to services.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        validate_topic_name(publish.topic)
        message = Message(publish, now)
        if publish.retain and not self.retained.store(publish.topic, message):
            raise LocalProtocolError("mqtt: no room for another retained message", do="raise max_retained_messages")
        self._fan_out(self._route(publish.topic), message, None, now)

    def respond(self, client_id: str, publish: Publish, now: int) -> bool:
        """Route a message of the node itself to one session's subscriptions; False where none matches.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        route = self._routes.get(publish.topic)
        if route is None:
            validate_topic_name(publish.topic)
            route = self._route(publish.topic)
        for target in route.targets:
            session = target.session
            if session.client_id == client_id:
                session.deliver(Message(publish, now), min(target.qos, publish.qos), 0, target.identifiers, now)
                return True
        return False

    def deliver(self, client_id: str, publish: Publish, now: int) -> bool:
        """Put a message straight into one session, subscribed or not; False where there is no such session.

        It carries the identifiers of the session's subscriptions that match.
        """
        session = self.sessions.get(client_id)
        if session is None:
            return False
        identifiers = b""
        for target in self._route(publish.topic).targets:
            if target.session is session:
                identifiers = target.identifiers
        qos = min(publish.qos, MAX_QOS)
        session.deliver(Message(publish, now), qos, 0, identifiers, now)
        return True

    def disconnect(self, client_id: str, reason_code: int, now: int, reason_string: str = "") -> None:
        """End a client's network connection, if it has one."""
        session = self.sessions.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(reason_code, now, reason_string)

    # The connections' side

    def connect(self, connection: BrokerConnection, packet: Connect, keep_alive_s: int, now: int) -> None:
        """Accept or refuse CONNECT [MQTT 5.0 section 3.1.4]."""
        properties = packet.properties
        answer = Properties()
        if properties.authentication_method is not None:  # [MQTT-4.12.0-1]
            connection.refuse(ReasonCode.BAD_AUTHENTICATION_METHOD, "no enhanced authentication here")
            return
        if packet.will is not None and (problem := self._will_problem(packet.will)):
            connection.refuse(*problem)
            return
        client_id = packet.client_id
        if not client_id:
            client_id = self._new_client_id()
            while client_id in self.sessions:
                client_id = self._new_client_id()
            answer.assigned_client_identifier = client_id  # [MQTT-3.1.3-7]
        session = self.sessions.get(client_id)
        if session is None and len(self.sessions) >= self.limits.max_sessions:
            connection.refuse(ReasonCode.QUOTA_EXCEEDED, "too many sessions")
            return
        if session is not None and session.connection is not None:  # [MQTT-3.1.4-3]
            session.connection.disconnect(ReasonCode.SESSION_TAKEN_OVER, now)
            session = self.sessions.get(client_id)
        present = session is not None and not packet.clean_start
        if session is not None and not present:
            self._discard(session, now)
            session = None
        if session is None:
            session = Session(self, client_id, self.limits, self.stats)
            self.sessions[client_id] = session
        asked = properties.session_expiry_interval or 0
        session.expiry_s = min(asked, self.limits.max_session_expiry_s)
        session.username = packet.username
        session.ends_at = session.will_at = 0
        session.will = packet.will  # a will that was still waiting is cancelled [MQTT-3.1.3-9]
        session.connection = connection
        connection.session = session
        if not connection.send(ConnAck(present, 0, self._capabilities(answer, packet, session, keep_alive_s))):
            # The client's Maximum Packet Size leaves no way to say what it must know, so nothing else may be said.
            session.will = None
            connection.close()
            self.connection_ended(connection, now)
            return
        session.resume(now)

    def _will_problem(self, will: Will) -> tuple[int, str] | None:
        """Reason code and text with which a CONNECT is refused for its will."""
        if will.qos > MAX_QOS:  # [MQTT-3.2.2-12]
            return ReasonCode.QOS_NOT_SUPPORTED, "Will QoS above Maximum QoS 1"
        if will.topic.count("/") >= self.limits.max_topic_levels:
            return ReasonCode.TOPIC_NAME_INVALID, "the will topic has too many levels"
        if will.properties.payload_format_indicator and not is_text(will.payload):
            return ReasonCode.PAYLOAD_FORMAT_INVALID, "the will payload is not UTF-8"
        return None

    def _capabilities(self, answer: Properties, packet: Connect, session: Session, keep_alive_s: int) -> Properties:
        """What CONNACK announces: only what differs from the protocol's own defaults."""
        limits = self.limits
        answer.maximum_qos = MAX_QOS  # [MQTT-3.2.2-9]
        answer.shared_subscription_available = 0
        if limits.receive_maximum < 65_535:
            answer.receive_maximum = limits.receive_maximum
        answer.maximum_packet_size = limits.max_packet_size
        if session.expiry_s != (packet.properties.session_expiry_interval or 0):
            answer.session_expiry_interval = session.expiry_s
        if keep_alive_s != packet.keep_alive:
            answer.server_keep_alive = keep_alive_s
        return answer

    def connection_ended(self, connection: BrokerConnection, now: int) -> None:
        """A connection is closing or gone: its session goes offline, its will gets ready, or all of it ends."""
        session = connection.session
        if session is None or session.connection is not connection:
            return
        session.connection = None
        for service in self._services:
            service.disconnected(session.client_id)
        will = session.will
        if will is not None:
            delay_s = min(will.properties.will_delay_interval or 0, session.expiry_s)
            if delay_s and session.expiry_s:
                session.will_at = now + delay_s * 1000
                self.timers.arm(session, session.will_at)
            else:
                self._publish_will(session, now)
        if not session.expiry_s:
            self._discard(session, now)
        elif session.expiry_s != NEVER:
            session.ends_at = now + session.expiry_s * 1000
            self.timers.arm(session, session.ends_at)

    def connection_lost(self, connection: BrokerConnection, now: int) -> None:
        """The network connection is gone for good; called once a connection."""
        self._connections -= 1
        self.connection_ended(connection, now)
        connection.closing = True
        self.timers.remove(connection)

    def session_due(self, session: Session, now: int) -> None:
        """Will delay or expiry of an offline session has come."""
        if session.connection is not None:
            return
        if session.will is not None and session.will_at and session.will_at <= now:
            self._publish_will(session, now)
        if session.ends_at and session.ends_at <= now:
            self._discard(session, now)
            return
        waiting = [at for at in (session.will_at, session.ends_at) if at]
        if waiting:  # the entry was of an earlier connection
            self.timers.arm(session, min(waiting))

    def route(self, publish: Publish, publisher: Session, now: int) -> tuple[list[Service], int]:
        """Route a client's message; the services that take it, and the reason code for its PUBACK."""
        route = self._routes.get(publish.topic)
        if route is None:
            route = self._route(publish.topic)
        if route.exclusive:
            return route.services, route.refusal
        targets = route.targets
        if not targets and not publish.retain:
            return route.services, 0 if route.services else ReasonCode.NO_MATCHING_SUBSCRIBERS
        message = Message(publish, now)
        if publish.retain and not self.retained.store(publish.topic, message):
            return [], ReasonCode.QUOTA_EXCEEDED
        self._fan_out(route, message, publisher, now)
        return route.services, 0

    def subscribe(self, session: Session, packet: Subscribe) -> list[int]:
        """Add subscriptions; a reason code each. The retained messages wait in ``session.replays`` for the SUBACK."""
        codes: list[int] = []
        identifier = identifier_block(packet.properties.subscription_identifiers)
        for wanted in packet.subscriptions:
            topic_filter = wanted.topic_filter
            if topic_filter.startswith(SHARE_PREFIX):
                codes.append(ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED)
                continue
            too_deep = topic_filter.count("/") >= self.limits.max_topic_levels
            if too_deep or filter_problem(topic_filter) is not None:
                codes.append(ReasonCode.TOPIC_FILTER_INVALID)
                continue
            new = topic_filter not in session.subscriptions
            if new and len(session.subscriptions) >= self.limits.max_subscriptions:
                codes.append(ReasonCode.QUOTA_EXCEEDED)
                continue
            qos = min(wanted.qos, MAX_QOS)  # [MQTT-3.2.2-10]
            subscription = SessionSubscription(session, wanted, qos, identifier)
            session.subscriptions[topic_filter] = subscription
            self._filters.set(topic_filter, session.client_id, subscription)
            self._forget_routes(topic_filter)
            codes.append(qos)
            if wanted.retain_handling == 0 or (wanted.retain_handling == 1 and new):  # [MQTT-3.3.1-9 to -11]
                session.replay(subscription)
        return codes

    def unsubscribe(self, session: Session, topic_filters: list[str]) -> list[int]:
        """End subscriptions; a reason code each."""
        codes: list[int] = []
        for topic_filter in topic_filters:
            if session.subscriptions.pop(topic_filter, None) is None:
                codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED)
            else:
                self._filters.remove(topic_filter, session.client_id)
                self._forget_routes(topic_filter)
                session.end_replay(topic_filter)  # [MQTT-3.10.4-2]
                codes.append(0)
        return codes

    # Inside

    def _fan_out(self, route: _Route, message: Message, publisher: Session | None, now: int) -> None:
        qos = message.qos
        retain = 1 if message.retain else 0
        for listed in route.targets:
            target: _Target | None = listed
            session = listed.session
            if session is publisher:
                target = listed.as_publisher
                if target is None:
                    continue
            assert target is not None
            session.deliver(
                message,
                min(target.qos, qos),  # [MQTT-3.8.4-8]
                retain if target.retain_as_published else 0,  # [MQTT-3.3.1-12], [MQTT-3.3.1-13]
                target.identifiers,
                now,
            )

    def _route(self, topic: str) -> _Route:
        route = self._routes.get(topic)
        if route is not None:
            return route
        if topic.count("/") >= self.limits.max_topic_levels:
            return _Route([], [], ReasonCode.TOPIC_NAME_INVALID)
        by_session: dict[str, list[SessionSubscription]] = {}
        for subscription in self._filters.match(topic):
            by_session.setdefault(subscription.session.client_id, []).append(subscription)
        services: list[Service] = []
        for service in self._service_filters.match(topic):
            if service not in services:
                services.append(service)
        route = _Route([_Target(subscriptions) for subscriptions in by_session.values()], services)
        if len(self._routes) >= ROUTES_KEPT or self._targets_kept >= TARGETS_KEPT:
            self._forget_all_routes()
        self._routes[topic] = route
        self._targets_kept += len(route.targets)
        return route

    def _forget_routes(self, topic_filter: str) -> None:
        """A subscription to the filter came, changed or went."""
        if has_wildcard(topic_filter):
            self._forget_all_routes()
        elif (route := self._routes.pop(topic_filter, None)) is not None:
            self._targets_kept -= len(route.targets)

    def _forget_all_routes(self) -> None:
        self._routes.clear()
        self._targets_kept = 0

    def _discard(self, session: Session, now: int) -> None:
        """End a session: its subscriptions, its messages; a will that was waiting goes out now [MQTT-4.1.0-2]."""
        if session.will is not None and session.connection is None:
            self._publish_will(session, now)
        for topic_filter in session.subscriptions:
            self._filters.remove(topic_filter, session.client_id)
            self._forget_routes(topic_filter)
        session.subscriptions.clear()
        session.clear()
        self.timers.remove(session)
        self.sessions.pop(session.client_id, None)

    def _publish_will(self, session: Session, now: int) -> None:
        will = session.will
        session.will = None
        session.will_at = 0
        if will is None:
            return
        publish = Publish(
            will.topic,
            will.payload,
            will.qos,
            retain=will.retain,
            properties=replace(will.properties, will_delay_interval=None),
        )
        services, _ = self.route(publish, session, now)
        for service in services:
            service.receive(Inbound(publish, session.client_id, now + self.wall_offset, username=session.username))
