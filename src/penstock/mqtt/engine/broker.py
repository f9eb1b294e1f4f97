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
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscribe, Subscription
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.runs import PublishRun
from penstock.mqtt.codec.topics import filter_problem, validate_topic_filter, validate_topic_name
from penstock.mqtt.engine.access import LOCAL, UNKNOWN, Access, Granted, Origin, Rights, may_hurry
from penstock.mqtt.engine.admission import capabilities, expiry_asked, will_problem
from penstock.mqtt.engine.bulk import Bulk
from penstock.mqtt.engine.connection import BrokerConnection
from penstock.mqtt.engine.figures import FIGURES_PREFIX, Figures
from penstock.mqtt.engine.handshake import Handshake
from penstock.mqtt.engine.journal import PERSISTENCE_PROPERTY, Journal
from penstock.mqtt.engine.kept import Kept
from penstock.mqtt.engine.limits import BrokerLimits, BrokerStats, QueueFull
from penstock.mqtt.engine.message import EncodedMessage, Message, identifier_block
from penstock.mqtt.engine.retained import Retained
from penstock.mqtt.engine.routes import Route, Router
from penstock.mqtt.engine.session import NEVER, Session, SessionSubscription
from penstock.mqtt.engine.shared import SharedGroup
from penstock.mqtt.engine.sharing import deliver_shared, leave_group, share_out, take_over
from penstock.mqtt.engine.timers import Timers
from penstock.mqtt.engine.unpromised import Unpromised
from penstock.mqtt.engine.waiting import WaitingTotals
from penstock.mqtt.service import Encoded, Inbound, Service

__all__ = ["Broker", "Output"]

NODE: Final = "penstock"
"""Client identifier of what the node itself publishes, for the services that take it."""

Output = tuple[BrokerConnection, bytes, bool]
"""Write the bytes to the connection, then close it if the flag says so."""


class Broker:
    """All sessions and messages of one broker.

    ``journal`` collects what is to outlive the process; without one nothing does. ``new_client_id`` gives an
    unguessable identifier for clients that bring none. ``report`` is told of every protocol error, for logs.
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
        report: Callable[[BrokerConnection, RemoteProtocolError], None] = lambda _connection, _error: None,
    ) -> None:
        self.limits = limits or BrokerLimits()
        self.stats = BrokerStats()
        self.topics = TopicNames()
        self.timers = Timers()
        self.sessions: dict[str, Session] = {}
        self.journal = journal or Journal(enabled=False)
        self.retained = Retained(self.limits.max_retained_messages, self.limits.max_retained_bytes, journal)
        self.router = Router(self.limits)
        self.waiting_totals = WaitingTotals()
        self.figures = Figures(
            self.timers,
            self.limits.figures_interval_s * 1000,
            wanted=lambda: self.router.figures_wanted,
            measure=self.measure,
            publish=self._publish_figure,
        )
        self.report = report
        self.wall_offset = 0
        self._access = access
        self._new_client_id = new_client_id
        self._wake = wake
        self._services: list[Service] = []
        self._routes = self.router.routes
        self._refusing = self.limits.when_queue_full is QueueFull.REFUSE
        self._dirty: list[BrokerConnection] = []
        self._throttled: list[BrokerConnection] = []
        self.recall: Callable[[str, str], Rights | None] | None = None
        """Asked, where there is somebody to ask, for the rights of a session that a start brought back and nobody has
        resumed: by its owner and its client identifier. None: whoever that was may do nothing any more."""
        self.ended: list[BrokerConnection] = []
        """Connections that a service ended since the last flush."""
        self._unpromised: dict[BrokerConnection, None] = {}
        """Connections with output that waits for a commit."""
        self._committed = 0
        self._connections = 0
        for service in services:
            self.add_service(service)

    # The shell's side

    def keep_in(self, journal: Journal) -> None:
        """Record in ``journal`` what is to outlive the process; before the first connection."""
        self.journal = self.retained.journal = journal

    def add_service(self, service: Service) -> None:
        """Hand the messages of the service's filters to it from now on."""
        for topic_filter in service.filters:
            validate_topic_filter(topic_filter)
        self._services.append(service)
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
        committed = self.journal.committed
        if committed != self._committed:
            self._committed = committed
            self._keep_promises(outputs)
        for connection in dirty:
            data = b"".join(connection.out)
            connection.out.clear()
            connection.out_bytes = 0
            connection.dirty = False
            self.stats.bytes_sent += len(data)
            if connection.gate > committed or connection.unpromised is not None:
                self._hold_back(connection, data, now)
                continue
            if connection.throttled:
                self._throttled.append(connection)
            outputs.append((connection, data, connection.closing))
        if self._throttled:
            self._wake()
        return outputs

    def storage_failed(self, now: int) -> None:
        """No commit will be done any more: end the connections whose output waits for one."""
        for connection in list(self._unpromised):
            self._give_up(connection, now)

    def _hold_back(self, connection: BrokerConnection, data: bytes, now: int) -> None:
        """The output waits for the commit of what it promises, and what is larger than one turn's for its end."""
        unpromised = connection.unpromised
        if unpromised is None:
            unpromised = connection.unpromised = Unpromised()
            self._unpromised[connection] = None
        unpromised.add(connection.gate, data)
        if self.journal.failure:
            self._give_up(connection, now)
        elif unpromised.bytes > self.limits.max_output_bytes:
            connection.throttled = True
            connection.writable = False
        elif connection.throttled:
            self._throttled.append(connection)

    def _keep_promises(self, outputs: list[Output]) -> None:
        """A commit is done: what waited for it leaves."""
        for connection in list(self._unpromised):
            unpromised = connection.unpromised
            assert unpromised is not None
            data = unpromised.take(self._committed)
            done = not unpromised
            if done:
                connection.unpromised = None
                del self._unpromised[connection]
            if connection.throttled and unpromised.bytes <= self.limits.max_output_bytes:
                self._throttled.append(connection)
            if data or done:
                outputs.append((connection, data, connection.closing and done and not connection.dirty))

    def _give_up(self, connection: BrokerConnection, now: int) -> None:
        """What the output promises will never be durable: say nothing of it, so that the client keeps its messages."""
        self._unpromised.pop(connection, None)
        unpromised, connection.unpromised = connection.unpromised, None
        connection.out.clear()
        connection.gate = 0
        if connection.closing:
            connection.mark()
        elif unpromised is not None and unpromised.first_is_connack:
            connection.close()
            self.connection_ended(connection, now)
        else:
            connection.disconnect(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, now, "the broker's disk failed")

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
        stats.subscriptions = len(self.router)
        stats.retained = self.retained.count
        stats.retained_bytes = self.retained.bytes
        stats.inflight = sum(len(session.inflight) for session in self.sessions.values())
        stats.queued = self.waiting_totals.messages
        stats.queued_bytes = self.waiting_totals.bytes
        connections = (session.connection for session in self.sessions.values())
        stats.unacknowledged = sum(c.unacknowledged for c in connections if c is not None)
        return stats

    def publish_wills(self, now: int) -> None:
        """The broker ends: publish the wills of connected clients that are not to wait, while services still run.

        A will with a delay stays with its session, for the next start.
        """
        for session in list(self.sessions.values()):
            will = session.will
            if session.connection is None or will is None:
                continue
            if not (session.expiry_s and will.properties.will_delay_interval):
                self._publish_will(session, now)

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
        self._fan_out(route, message, None, now)
        for service in route.services:
            if not service.exclusive:  # those are asked by clients; an answer must not come back as a question
                service.receive(Inbound(publish, NODE, now + self.wall_offset))

    def respond(self, client_id: str, publish: Publish, now: int) -> bool:
        """Route a message of the node itself to one session's subscriptions; False where none matches.

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
                publish.topic_wire = route.topic_wire  # the next answer to the client need not encode it again
                message = Message(publish, now)
                route.topic_wire = message.topic_wire
                session.deliver(message, min(target.qos, publish.qos), 0, target.identifiers, now)
                return True
        return False

    def respond_encoded(self, client_id: str, encoded: Encoded, now: int) -> bool:
        """The same with a message that is written already; its topic has been checked."""
        topic = encoded[0]
        route = self._routes.get(topic) or self.router.route(topic)
        for target in route.targets:
            session = target.session
            if session.client_id == client_id:
                session.deliver(EncodedMessage(encoded, now), 1 if target.qos else 0, 0, target.identifiers, now)
                return True
        return False

    def deliver(self, client_id: str, publish: Publish, now: int) -> bool:
        """Put a message straight into one session, subscribed or not.

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
        session.deliver(Message(publish, now), publish.qos, 0, identifiers, now)
        return True

    def disconnect(self, client_id: str, reason_code: int, now: int, reason_string: str = "") -> None:
        """End a client's network connection, if it has one."""
        session = self.sessions.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(reason_code, now, reason_string)

    def policies_changed(self, now: int) -> None:
        """Who decides about access decides otherwise from now on: ask again, also for what waits.

        Subscriptions and waiting messages that are not allowed any more go; a client that may not connect any more is
        the Access's to :meth:`disconnect`.
        """
        self.router.forget_all()
        for session in list(self.sessions.values()):
            if session.rights is not None:
                session.rights.forget()
                self._check_again(session, now)

    def set_rights(self, session: Session, rights: Rights, now: int) -> None:
        """The client of the session has other rights now, be it as somebody else or as who it was."""
        session.rights = rights
        if session.subscriptions:
            self.router.forget_all()
        self._check_again(session, now)

    # The connections' side

    def new_client_id(self) -> str:
        """A client identifier that no session has [MQTT-3.2.2-16]."""
        client_id = self._new_client_id()
        while client_id in self.sessions:
            client_id = self._new_client_id()
        return client_id

    def connect(
        self, connection: BrokerConnection, handshake: Handshake, granted: Granted | None, keep_alive_s: int, now: int
    ) -> None:
        """Make a session of a CONNECT that was let pass, or refuse it after all [MQTT 5.0 section 3.1.4]."""
        packet = handshake.packet
        client_id = handshake.credentials.client_id
        rights = connection.rights_of(granted)
        will = packet.will
        problem = will_problem(will, rights, self.router.route(will.topic).refusal) if will is not None else None
        if problem is not None:
            self.stats.refused_unauthorized += problem[0] == ReasonCode.NOT_AUTHORIZED
            connection.refuse(*problem)
            return
        journal = self.journal
        promises = journal.promises
        if journal.failure and self._wants_promises(packet):
            connection.refuse(ReasonCode.SERVER_UNAVAILABLE, "the broker's disk failed")
            return
        owner = "" if granted is None else granted.principal.name
        session = self.sessions.get(client_id)
        if session is None and len(self.sessions) >= self.limits.max_sessions:
            connection.refuse(ReasonCode.QUOTA_EXCEEDED, "too many sessions")
            return
        if session is not None and session.owner != owner:
            self.stats.refused_unauthorized += 1
            connection.refuse(ReasonCode.NOT_AUTHORIZED, "the client identifier belongs to another principal")
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
            session.owner = owner
            self.sessions[client_id] = session
        session.expiry_s = min(expiry_asked(packet), self.limits.max_session_expiry_s)
        session.username = packet.username
        session.ends_at = session.will_at = 0
        session.will = packet.will  # a will that was still waiting is cancelled [MQTT-3.1.3-9]
        if rights is not None:
            self.set_rights(session, rights, now)
        session.restored = False
        session.connection = connection
        connection.session = session
        if journal.enabled:
            self._keep(session, packet)
            if journal.promises != promises:
                connection.gate = journal.number
        answer = capabilities(self.limits, handshake, session, keep_alive_s, granted)
        if not connection.send(ConnAck(present, 0, answer)):
            # The client's Maximum Packet Size leaves no way to say what it must know, so nothing else may be said.
            session.will = None
            connection.close()
            self.connection_ended(connection, now)
            return
        session.resume(now)
        for subscription in session.subscriptions.values():
            if subscription.group is not None:
                take_over(subscription.group, now)

    def _wants_promises(self, packet: Connect) -> bool:
        """Whether the client's session is kept and its acknowledgements wait for the disk."""
        if not min(expiry_asked(packet), self.limits.max_session_expiry_s):
            return False
        return self.journal.promise_all or PERSISTENCE_PROPERTY in packet.properties.user_properties

    def _keep(self, session: Session, packet: Connect) -> None:
        """Have the session outlive the process, or not any more, as this CONNECT says."""
        kept = session.kept
        if not session.expiry_s:
            if kept is not None:
                kept.forget(session)
                session.kept = session.waiting.kept = None
            return
        if kept is None:
            kept = Kept(self.journal, self.journal.new_number(), promised=False)
            session.kept = session.waiting.kept = kept
        kept.promised |= self._wants_promises(packet)
        kept.save(session)

    def connection_ended(self, connection: BrokerConnection, now: int) -> None:
        """A connection is closing or gone: its session goes offline, its will gets ready, or all of it ends."""
        session = connection.session
        if session is None or session.connection is not connection:
            return
        session.connection = None
        for service in self._services:
            service.disconnected(session.client_id)
        share_out(session, now)
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
            return
        if session.expiry_s != NEVER:
            session.ends_at = now + session.expiry_s * 1000
            self.timers.arm(session, session.ends_at)
        if session.kept is not None:
            session.kept.save(session)

    def connection_lost(self, connection: BrokerConnection, now: int) -> None:
        """The network connection is gone for good; called once a connection."""
        self._connections -= 1
        self._unpromised.pop(connection, None)
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
        if session.kept is not None:
            session.kept.save(session)

    def route(self, publish: Publish, publisher: Session, now: int) -> tuple[list[Service], int]:
        """Route a client's message; the services that take it, and the reason code for its PUBACK or PUBREC."""
        route = self._routes.get(publish.topic)
        if route is None:
            route = self.router.route(publish.topic)
        if route.exclusive:
            return route.services, route.refusal
        if route.nobody and not publish.retain:
            return route.services, 0 if route.services else ReasonCode.NO_MATCHING_SUBSCRIBERS
        message = Message(publish, now)
        given = publish.optional_properties
        if given is not None and given.user_properties:
            message.urgent = may_hurry(publish, publisher.rights)
        if self._refusing and publish.qos and not _has_room(route, message, publisher):
            self.stats.refused_queue_full += 1
            return [], ReasonCode.QUOTA_EXCEEDED
        if publish.retain and not self.retained.store(publish.topic, message):
            return [], ReasonCode.QUOTA_EXCEEDED
        self._fan_out(route, message, publisher, now)
        return route.services, 0

    def route_run(self, run: PublishRun, version: int, publisher: Session, now: int) -> bool:
        """Route a client's messages in a row to subscribers, each of whom gets all of them before the next does.

        False where somebody must look at them one by one, and nothing was done: services, a receiver that is the
        publisher itself, a queue that is not to overflow, or nobody to receive them.
        """
        model = run.model
        route = self._routes.get(model.topic)
        if route is None:
            route = self.router.route(model.topic)
        if route.services or route.exclusive or route.nobody or self._refusing:
            return False
        targets = route.targets
        for target in targets:
            if target.session is publisher:
                return False
        for shared in route.shared:
            if any(member.session is publisher for member in shared.members):
                return False
        given = model.optional_properties
        urgent = given is not None and may_hurry(model, publisher.rights)
        bulk = Bulk(run, version, now, many=route.many, urgent=urgent)
        qos = model.qos
        for target in targets:
            granted = target.qos
            target.session.deliver_bulk(bulk, min(qos, granted), target.identifiers, now)  # [MQTT-3.8.4-8]
        for shared in route.shared:
            for message in bulk.messages:
                member = shared.group.choose(message.publish, shared.members)
                if member is not None:
                    deliver_shared(member, shared.group, message, now)
        return True

    def is_for_one(self, topic: str) -> bool:
        """Whether messages of the topic are for one service and for nobody else."""
        route = self._routes.get(topic) or self.router.route(topic)
        return route.exclusive and len(route.services) == 1

    def services_for(self, publish: Publish) -> list[Service]:
        """The services that take a message whose subscribers have it already."""
        return self.router.route(publish.topic).services

    def subscribe(self, session: Session, packet: Subscribe, now: int) -> list[int]:
        """Add subscriptions; a reason code each. The retained messages wait in ``session.replays`` for the SUBACK."""
        identifier = identifier_block(packet.properties.subscription_identifiers)
        return [self._subscribe(session, wanted, identifier, now) for wanted in packet.subscriptions]

    def subscribed(self, session: Session, packet: Subscribe, now: int) -> None:
        """The SUBACK is on its way: send what new subscriptions bring at once."""
        for wanted in packet.subscriptions:
            subscription = session.subscriptions.get(wanted.topic_filter)
            if subscription is not None and subscription.group is not None:
                take_over(subscription.group, now)
        if session.replays:
            session.send_waiting(now)

    def _subscribe(self, session: Session, wanted: Subscription, identifier: bytes, now: int) -> int:
        topic_filter = wanted.topic_filter
        limits = self.limits
        if (
            topic_filter.count("/") >= limits.max_topic_levels
            or len(topic_filter.encode(errors="replace")) > limits.max_topic_bytes
            or filter_problem(topic_filter) is not None
        ):
            return ReasonCode.TOPIC_FILTER_INVALID
        if session.rights is not None and not session.rights.may_subscribe(topic_filter, wanted.qos):
            self.stats.refused_unauthorized += 1
            return limits.refused_subscription
        new = topic_filter not in session.subscriptions
        if new and (
            len(session.subscriptions) >= limits.max_subscriptions or len(self.router) >= limits.max_total_subscriptions
        ):
            return ReasonCode.QUOTA_EXCEEDED
        subscription = SessionSubscription(session, wanted, wanted.qos, identifier)
        session.subscriptions[topic_filter] = subscription
        if topic_filter.startswith(FIGURES_PREFIX):
            self.figures.renew(now)
        self.router.add(subscription)
        if session.kept is not None:
            session.kept.subscribed(subscription)
        wants_retained = wanted.retain_handling == 0 or (wanted.retain_handling == 1 and new)  # [MQTT-3.3.1-9 to -11]
        if wants_retained and subscription.group is None:  # a shared subscription gets none
            session.replay(subscription)
        return wanted.qos

    def unsubscribe(self, session: Session, topic_filters: list[str], now: int) -> list[int]:
        """End subscriptions; a reason code each."""
        codes: list[int] = []
        for topic_filter in topic_filters:
            subscription = session.subscriptions.get(topic_filter)
            if subscription is None:
                codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED)
            else:
                self._end_subscription(session, subscription, now)
                codes.append(0)
        return codes

    def take_over(self, group: SharedGroup, now: int) -> None:
        """A member of the group has room again for what waits for members that are away."""
        take_over(group, now)

    # Inside

    def _publish_figure(self, topic: str, text: str, now: int) -> None:
        message = Message(Publish(topic, text.encode(), retain=True), now)
        self.retained.store(topic, message)
        self._fan_out(self.router.route(topic), message, None, now)

    def _fan_out(self, route: Route, message: Message, publisher: Session | None, now: int) -> None:
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

    def _end_subscription(self, session: Session, subscription: SessionSubscription, now: int) -> None:
        del session.subscriptions[subscription.topic_filter]
        self.router.remove(subscription)
        if session.kept is not None:
            session.kept.unsubscribed(subscription.topic_filter)
        session.end_replay(subscription.topic_filter)  # [MQTT-3.10.4-2]
        group = subscription.group
        if group is not None:
            leave_group(session, group, now)

    def _check_again(self, session: Session, now: int) -> None:
        """Take away what the session's rights do not cover any more."""
        rights = session.rights
        if rights is None:
            return
        for subscription in list(session.subscriptions.values()):
            if not rights.may_subscribe(subscription.topic_filter, subscription.qos):
                self._end_subscription(session, subscription, now)
        waiting = session.waiting
        unwanted = [d for d in (*waiting.reliable, *waiting.qos0) if not rights.may_receive(d[0].publish.topic)]
        if unwanted:
            waiting.remove(unwanted)
            if session.kept is not None:
                for delivery in unwanted:
                    session.kept.done(delivery)
            self.stats.dropped_unauthorized += len(unwanted)

    def _discard(self, session: Session, now: int) -> None:
        """End a session: its subscriptions, its messages; a will that was waiting goes out now [MQTT-4.1.0-2]."""
        if session.will is not None and session.connection is None:
            self._publish_will(session, now)
        for subscription in session.subscriptions.values():
            self.router.remove(subscription)
        session.ending = True
        share_out(session, now)
        if session.kept is not None:
            session.kept.forget(session)
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
        rights = session.rights
        if session.restored and self.recall is not None:
            rights = self.recall(session.owner, session.client_id)
            if rights is None:
                self.stats.refused_unauthorized += 1
                return
        if rights is not None and not rights.may_publish(will.topic, will.qos, retain=will.retain):
            self.stats.refused_unauthorized += 1
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
            service.receive(
                Inbound(
                    publish,
                    session.client_id,
                    now + self.wall_offset,
                    username=session.username,
                    principal=(UNKNOWN if session.restored else None) if rights is None else rights.principal,
                )
            )


def _has_room(route: Route, message: Message, publisher: Session) -> bool:
    """Whether every receiver would get the message: where the publisher is to hear of the first who would not."""
    for target in route.targets:
        session = target.session
        chosen = target.as_publisher if session is publisher else target
        if chosen is not None and chosen.qos and not session.has_room(message):
            return False
    return all(any(member.session.has_room(message) for member in shared.members) for shared in route.shared)
