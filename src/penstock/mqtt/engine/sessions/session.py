"""Session of one client: the state that survives network connections.

It has the subscriptions, the messages in flight in both directions, the queued messages and the will. A message for the
session is sent immediately if the connection allows it; otherwise it is queued, within the limits.

Source: MQTT 5.0 sections 4.1, 4.3, 4.4, 4.5, 4.6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

from penstock.mqtt.codec.packets import Will
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.model.client_events import QUEUE_FULL, ClientEvents
from penstock.mqtt.engine.model.inflight import Inflight
from penstock.mqtt.engine.model.journal import SessionRow
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.model.message import RELEASED, Delivery, DeliveryPool, Message, Notification
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.model.timers import DeadlineOwner
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, SharedGroup, Subscriber
from penstock.mqtt.engine.sessions.message_queue import MessageQueue, QueueTotals
from penstock.mqtt.engine.sessions.retained import Retained, RetainedSearch
from penstock.mqtt.engine.sessions.session_journal import SessionJournal
from penstock.mqtt.service import Inbound

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["LARGE", "NEVER", "NOTIFICATIONS_LOST", "RetainedDelivery", "Session", "SessionConnection", "SessionOwner"]

NEVER: Final = 0xFFFFFFFF
"""Session Expiry Interval of a session that does not expire."""

LARGE: Final = 4096
"""Minimum payload in bytes that counts towards ``max_inflight_bytes``."""

SEARCH_STEP: Final = 8
"""Topic levels that a search for retained messages visits per unit of work."""

NOTIFICATIONS_LOST: Final = "the client is too slow: a state store notification does not fit into its queue"
"""Reason String for observers that are disconnected."""

_NOTHING: Final[deque[Delivery]] = deque(maxlen=0)
"""Shared empty queue of sessions without messages to send again: a deque takes 760 bytes."""
_NO_IDENTIFIERS: Final[set[int]] = set()
"""The same for packet identifiers; never modified."""
_NO_GROUPS: Final[dict[SharedGroup, None]] = {}
"""The same for shared subscriptions; never modified."""


class SessionOwner(ABC):
    """The interface of the broker for its sessions."""

    def __init__(self, retained: Retained, max_turn_work: int, report_merged: Callable[[str, int], None]) -> None:
        self.retained = retained
        self.max_turn_work: i64 = max_turn_work
        self.report_merged = report_merged
        self.queue_totals = QueueTotals()
        self.client_events = ClientEvents()
        self.delivery_pool = DeliveryPool()
        self.work: i64 = 0
        """Work since the start, in the units of ``max_turn_work``."""

    @abstractmethod
    def session_due(self, session: Session, now: int) -> None:
        """Handle the will delay or the expiry of an offline session."""

    @abstractmethod
    def shared_group(self, topic_filter: str) -> SharedGroup | None:
        """Return the members of a shared subscription; None without members."""

    @abstractmethod
    def take_over(self, groups: Iterable[SharedGroup], now: int) -> None:
        """Deliver messages that are queued for disconnected members of ``groups`` to members with room for them."""


class SessionConnection(DeadlineOwner):
    """The interface of a client's network connection for its session."""

    __slots__ = ("closing", "gate", "send_maximum", "session", "unacknowledged", "version", "writable")

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        """Session of the client; None until CONNECT is accepted."""
        self.version: i64 = 5
        """Protocol level of CONNECT: 5, or 4 for MQTT 3.1.1."""
        self.send_maximum: i64 = 65_535
        """QoS 1 and 2 messages that may be in flight to the client."""
        self.writable = True
        """Whether messages can be sent; False while the transport or the output of this turn is full."""
        self.gate = 0
        """Number of the commit that later output waits for; 0: none."""
        self.closing = False
        """Whether the connection closes after its queued output."""
        self.unacknowledged = 0
        """QoS 1 and 2 messages of the client without PUBACK or PUBREC."""

    @abstractmethod
    def send_publish(self, message: Message, packet_id: i64, first: i64, identifiers: bytes, now: i64) -> bool:
        """Queue a PUBLISH: ``first`` is its first byte (type, DUP, QoS, RETAIN); ``packet_id`` 0 at QoS 0.

        Returns False for a packet above the client's Maximum Packet Size, which then counts as delivered.
        """

    @abstractmethod
    def throttle(self) -> None:
        """Send no more messages in this turn."""

    @abstractmethod
    def pubrel(self, packet_id: int, code: int = 0) -> None:
        """Queue a PUBREL."""

    @abstractmethod
    def disconnect(self, reason_code: int, now: int, reason_string: str = "") -> None:
        """End the connection with DISCONNECT."""


class Session(Subscriber):
    """State of one client id. ``connection`` is None while it is offline; ``ends_at``: instant in ms, 0 = none."""

    __slots__ = (
        "_broker",
        "_limits",
        "_max_inflight_bytes",
        "_stats",
        "connection",
        "deferred_groups",
        "ends_at",
        "expiry_s",
        "incoming",
        "inflight",
        "journal",
        "owner",
        "resend",
        "restored",
        "retained_delivery",
        "routed",
        "subscriptions",
        "username",
        "waiting",
        "will",
        "will_at",
    )

    def __init__(self, broker: SessionOwner, client_id: str, limits: BrokerLimits, stats: BrokerStats) -> None:
        super().__init__(client_id)
        self._broker = broker
        self._limits = limits
        self._max_inflight_bytes: i64 = limits.max_inflight_bytes
        self._stats = stats

        # Session state, which survives connections and restarts [MQTT 5.0 section 4.1].
        self.owner = ""
        """Name of the principal that created the session and may resume it; empty without access control."""
        self.username: str | None = None
        self.journal: SessionJournal | None = None
        """Records a persistent session; None for others."""
        self.expiry_s = 0
        self.ends_at = 0
        self.will: Will | None = None
        self.will_at = 0
        self.subscriptions: dict[str, SessionSubscription] = {}
        self.inflight = Inflight()
        """Unacknowledged QoS 1 and 2 messages; their message is :data:`RELEASED` after PUBREC."""
        self.incoming: dict[int, Inbound | None] = {}
        """Received QoS 2 messages without PUBREL, by packet identifier; the value is the pending acknowledgement, if
        any."""
        self.routed = _NO_IDENTIFIERS
        """Packet identifiers of QoS 2 messages that subscribers received but services did not process, because of a
        restart or the end of the connection. Their repetitions go to services only."""
        self.waiting = MessageQueue(limits, stats, broker.queue_totals)

        self.restored = False
        """Whether it was recovered at a start and not resumed since: its rights are unknown."""

        # State of the connection.
        self.connection: SessionConnection | None = None
        self.resend = _NOTHING
        """Messages in flight to send again on this connection, before new messages."""
        self.deferred_groups = _NO_GROUPS
        """Shared subscriptions with messages for disconnected members that this session had no room for: an ordered
        set."""
        self.retained_delivery: RetainedDelivery | None = None
        """Sends the retained messages of new subscriptions."""

    def due(self, now: int) -> None:
        """Handle the will delay or the session expiry."""
        self._broker.session_due(self, now)

    def clear(self) -> None:
        """Remove all messages; the broker removes subscriptions."""
        self.inflight.clear()
        self.inflight = Inflight()
        self.incoming.clear()
        self.routed = _NO_IDENTIFIERS
        self.resend = _NOTHING
        self.retained_delivery = None
        self.deferred_groups = _NO_GROUPS
        self.waiting.clear()

    def deliveries(self) -> list[Delivery]:
        """Return the messages in flight, the oldest first."""
        return cast("list[Delivery]", self.inflight.values())

    def defer(self, group: SharedGroup) -> None:
        """Take over messages of ``group`` when this session has room again."""
        if self.deferred_groups is _NO_GROUPS:
            self.deferred_groups = {}
        self.deferred_groups[group] = None

    def take_deferred(self) -> Iterable[SharedGroup]:
        """Return and forget the deferred groups."""
        groups, self.deferred_groups = self.deferred_groups, _NO_GROUPS
        return groups

    def mark_routed(self, packet_id: int) -> None:
        """Register a QoS 2 message whose repetition goes to services only."""
        if self.routed is _NO_IDENTIFIERS:
            self.routed = set()
        self.routed.add(packet_id)

    # Persistence

    def is_persistent(self) -> bool:
        """Return whether the session is stored and survives a restart."""
        return self.journal is not None

    def is_awaited(self) -> bool:
        """Return whether acknowledgements of the session wait for the commit of the changes they confirm."""
        return self.journal is not None and self.journal.awaited

    def hold_output(self, connection: SessionConnection) -> None:
        """Hold later output of ``connection`` until the commit of the changes recorded so far."""
        journal = self.journal
        if journal is not None and journal.awaited:
            connection.gate = journal.journal.commit_soon()

    def hold_answer(self, connection: SessionConnection) -> None:
        """:meth:`hold_output` for the answer to a request, after which the client may send the next one."""
        journal = self.journal
        if journal is not None and journal.awaited:
            self.hold_output(connection)
            journal.journal.answer_after(connection.gate)

    def save_state(self) -> None:
        """Record the session's own state: its owner, expiry and will."""
        journal = self.journal
        if journal is None:
            return
        connection = self.connection
        journal.save(
            SessionRow(
                journal.number,
                self.client_id,
                self.owner,
                self.username,
                5 if connection is None else connection.version,
                self.expiry_s,
                self.ends_at,
                self.will,
                self.will_at,
                journal.awaited,
            )
        )

    def delete_state(self) -> None:
        """Remove the session from the journal: it has ended, or will end with its connection."""
        journal = self.journal
        if journal is None:
            return
        deliveries = [*self.deliveries(), *self.waiting.reliable]
        journal.delete(list(self.subscriptions), deliveries, [*self.incoming, *self.routed])

    # Messages to the client

    def deliver(self, message: Message, qos: i64, retain: i64, identifiers: bytes, now: i64, share: str = "") -> None:
        """Send the message, or queue it until the connection is writable and the send quota allows it."""
        connection = self.connection
        if qos == 0:
            if connection is None:
                self._stats.dropped_offline += 1
            elif connection.writable:
                connection.send_publish(message, 0, 0x30 | retain, identifiers, now)
            else:
                self._wait(Delivery(message, 0, retain, identifiers, share, 0), now)
            return
        journal = self.journal
        inflight = self.inflight  # also full while messages are sent again after a reconnect
        if (
            connection is None
            or not connection.writable
            or self.waiting.backlog
            or inflight.count >= connection.send_maximum
            or inflight.bytes >= self._max_inflight_bytes
        ):
            if self.ending:
                return  # the session ended during the loop over the receivers
            number = 0 if journal is None else journal.queue(message, qos, retain, identifiers, share, 0)
            self._wait(Delivery(message, qos, retain, identifiers, share, number), now)
            return
        delivery = self._broker.delivery_pool.create(message, qos, retain, identifiers, share)
        packet_id = inflight.assign(delivery)
        if not connection.send_publish(message, packet_id, 0x30 | qos << 1 | retain, identifiers, now):
            inflight.remove(delivery)
            return
        if journal is not None:
            delivery.number = journal.queue(message, qos, retain, identifiers, share, packet_id)
            if qos == 2:
                self.hold_output(connection)
        size: i64 = len(message.payload)
        if size >= LARGE:
            inflight.bytes += size

    def _wait(self, delivery: Delivery, now: int) -> None:
        waiting = self.waiting
        self._broker.work += 1
        stats = self._stats
        dropped = stats.dropped_queue_full
        added = waiting.add(delivery)
        if stats.dropped_queue_full != dropped:
            self.count_events(QUEUE_FULL, stats.dropped_queue_full - dropped)
        if waiting.merged:
            merged, waiting.merged = waiting.merged, 0
            self._broker.report_merged(self.client_id, merged)
        if added:
            return
        if self.journal is not None:
            self.journal.done(delivery)
        if type(delivery.message) is Notification:
            connection = self.connection
            if connection is not None:  # observations end with the connection
                stats.observers_disconnected += 1
                connection.disconnect(ReasonCode.QUOTA_EXCEEDED, now, NOTIFICATIONS_LOST)
        elif self._limits.queue_overflow is QueueOverflowPolicy.DISCONNECT:
            connection = self.connection
            if connection is not None:
                connection.disconnect(ReasonCode.QUOTA_EXCEEDED, now, "too many messages wait for this client")

    def count_events(self, kind: str, count: int, detail: str = "") -> None:
        """Count events of this client, for logs and warnings [ClientEvents]."""
        self._broker.client_events.count(kind, self.client_id, self.owner or self.username or "", count, detail)

    def has_room(self, message: Message) -> bool:
        """Return whether a QoS 1 or 2 message would be sent or queued."""
        return self.keeps_up() or self.waiting.has_room(message)

    def overflow_reason(self, message: Message) -> str:
        """Return why there is no room for a message, for its publisher."""
        return self.waiting.overflow_reason(message)

    def queued(self) -> int:
        """Return the number of queued messages."""
        return len(self.waiting)

    def is_connected(self) -> bool:
        """Return whether the client has a network connection."""
        return self.connection is not None

    def keeps_up(self) -> bool:
        """Return whether a message would be sent immediately."""
        connection = self.connection
        return (
            connection is not None and connection.writable and not self.waiting.backlog and self.window_open(connection)
        )

    def shared_group(self, topic_filter: str) -> SharedGroup | None:
        """Return the members of a shared subscription; None without members."""
        return self._broker.shared_group(topic_filter)

    def window_open(self, connection: SessionConnection) -> bool:
        """Return whether the send quota allows another message in flight."""
        inflight = self.inflight
        return inflight.count < connection.send_maximum and inflight.bytes < self._max_inflight_bytes

    def _release_bytes(self, delivery: Delivery) -> None:
        """Subtract a large message that is no longer in flight."""
        size = len(delivery.message.payload)
        if size >= LARGE:
            self.inflight.bytes -= size

    def acknowledge(self, packet_id: i64, now: i64) -> bool:
        """Handle a PUBACK, with any reason code [MQTT-4.4.0-2]; return False for an unknown identifier.

        Raises:
            RemoteProtocolError: the message was sent at QoS 2.
        """
        inflight = self.inflight
        delivery = cast("Delivery | None", inflight.pop(packet_id))
        if delivery is None:
            return False
        if delivery.qos != 1:
            inflight.put_back(delivery)  # the session outlives this connection
            raise protocol_error("PUBACK for a message sent at QoS 2")
        if inflight.bytes:
            self._release_bytes(delivery)
        if self.resend is not _NOTHING:
            if self.journal is not None:
                self.journal.done(delivery)
            if delivery in self.resend:  # a late acknowledgement, for a message of an earlier connection
                self.resend.remove(delivery)
            self.send_waiting(now)
            return True
        if self.journal is not None:
            self.journal.done(delivery)
        else:
            self._broker.delivery_pool.recycle(delivery)
        if self.waiting.backlog or self.retained_delivery is not None:
            self.send_waiting(now)
        return True

    def pubrec(self, packet_id: int, reason_code: int, now: int) -> int:
        """Handle a PUBREC; return the reason code for PUBREL, or -1 if a refusal ends the exchange.

        Raises:
            RemoteProtocolError: the message was sent at QoS 1.
        """
        delivery = cast("Delivery | None", self.inflight.get(packet_id))
        if delivery is None:
            return ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if reason_code < 0x80 else -1  # [MQTT-4.3.3-4]
        if delivery.qos != 2:
            raise protocol_error("PUBREC for a message sent at QoS 1")
        if self.inflight.bytes:
            self._release_bytes(delivery)  # the payload is no longer needed
        if self.resend is not _NOTHING and delivery in self.resend:
            self.resend.remove(delivery)
        journal = self.journal
        if reason_code < 0x80:
            if delivery.message is not RELEASED:
                if journal is not None:
                    journal.released(delivery, packet_id)
                delivery.release()
            if journal is not None and self.connection is not None:
                # If a crash lost the PUBREC, the client could receive the message twice.
                self.hold_output(self.connection)
            return 0
        if journal is not None:
            journal.done(delivery)
        self.inflight.remove(delivery)
        self.send_waiting(now)
        return -1

    def pubcomp(self, packet_id: int, now: int) -> bool:
        """Handle a PUBCOMP; return False for an unknown identifier.

        Raises:
            RemoteProtocolError: no PUBREL was sent for it.
        """
        delivery = cast("Delivery | None", self.inflight.get(packet_id))
        if delivery is None:
            return False
        if delivery.message is not RELEASED:
            raise protocol_error("PUBCOMP before PUBREL")
        if self.journal is not None:
            self.journal.done(delivery)
        self.inflight.remove(delivery)
        if self.waiting.backlog or self.resend is not _NOTHING or self.retained_delivery is not None:
            self.send_waiting(now)
        return True

    def withdraw(self, deliveries: list[Delivery]) -> None:
        """Remove deliveries of shared subscriptions that other members take over."""
        gone = {(delivery.message, delivery.share) for delivery in deliveries}
        for sent in self.deliveries():
            if (sent.message, sent.share) in gone:
                if self.inflight.bytes:
                    self._release_bytes(sent)
                self.inflight.remove(sent)
        self.waiting.remove(deliveries)
        if self.journal is not None:
            for delivery in deliveries:
                self.journal.done(delivery)

    def send_retained(self, subscription: SessionSubscription) -> None:
        """Send the retained messages of a subscription, with :meth:`send_waiting`."""
        if self.retained_delivery is None:
            self.retained_delivery = RetainedDelivery(self, self._broker)
        self.retained_delivery.add(subscription)

    def resume(self, now: int) -> None:
        """Send unacknowledged messages again, in order and with DUP, then queued ones.

        PUBRELs are sent first: they need no send quota [MQTT-4.9.0-3], [MQTT-4.4.0-1], [MQTT-4.6.0-1].
        """
        connection = self.connection
        self.resend = deque() if self.inflight.count else _NOTHING
        for delivery in self.deliveries():
            if delivery.message is not RELEASED:
                self.resend.append(delivery)
            elif connection is not None:
                connection.pubrel(delivery.packet_id)
        self.send_waiting(now)

    def send_waiting(self, now: int) -> None:
        """Send queued messages while the connection is writable and the send quota allows it.

        At most the work of one turn; then the connection is throttled.
        """
        connection = self.connection
        if connection is None:
            return
        broker = self._broker
        end = broker.work + broker.max_turn_work
        inflight, resend = self.inflight, self.resend
        while resend and connection.writable and inflight.count - len(resend) < connection.send_maximum:
            if broker.work >= end:
                connection.throttle()
                return
            broker.work += 1
            delivery = resend.popleft()
            first = 0x38 | delivery.qos << 1 | delivery.retain
            if not connection.send_publish(delivery.message, delivery.packet_id, first, delivery.identifiers, now):
                if inflight.bytes:
                    self._release_bytes(delivery)
                inflight.remove(delivery)
                if self.journal is not None:
                    self.journal.done(delivery)
        if not resend:
            self.resend = _NOTHING
        waiting = self.waiting
        while waiting.backlog and connection.writable and self.window_open(connection):
            if broker.work >= end:
                connection.throttle()
                return
            self.send_queued(waiting.pop(), connection, now)
        if self.retained_delivery is not None and self.retained_delivery.send(connection, now):
            self.retained_delivery = None
        while waiting.qos0 and connection.writable:
            if broker.work >= end:
                connection.throttle()
                return
            broker.work += 1
            delivery = waiting.pop_qos0()
            message = delivery.message
            if message.expired(now):
                self._stats.dropped_expired += 1
            else:
                connection.send_publish(message, 0, 0x30 | delivery.retain, delivery.identifiers, now)
        if self.deferred_groups and not waiting.backlog:
            self._broker.take_over(self.take_deferred(), now)

    def send_queued(self, delivery: Delivery, connection: SessionConnection, now: int) -> None:
        """Send a queued QoS 1 or 2 message, which then is in flight."""
        self._broker.work += 1
        message, qos = delivery.message, delivery.qos
        journal = self.journal
        if message.expired(now):  # [MQTT-3.3.2-5]
            self._stats.dropped_expired += 1
            if journal is not None:
                journal.done(delivery)
            return
        inflight = self.inflight
        packet_id = inflight.free_id()
        if not connection.send_publish(
            message, packet_id, 0x30 | qos << 1 | delivery.retain, delivery.identifiers, now
        ):
            if journal is not None:
                journal.done(delivery)
            return
        if journal is not None:
            if delivery.number:
                journal.sent(delivery, packet_id)
            else:  # retained, or from before the session was persistent
                delivery.number = journal.queue(
                    message, qos, delivery.retain, delivery.identifiers, delivery.share, packet_id
                )
            if qos == 2:
                self.hold_output(connection)
        inflight.add(packet_id, delivery)
        if len(message.payload) >= LARGE:
            inflight.bytes += len(message.payload)


class RetainedDelivery:
    """Sends the retained messages of new subscriptions, as fast as the client receives them.

    They bypass the queue, which would drop those beyond its limits [MQTT 5.0 sections 3.3.1.3, 3.8.4].
    """

    __slots__ = ("_broker", "_found", "_searches", "_session")

    def __init__(self, session: Session, broker: SessionOwner) -> None:
        self._session = session
        self._broker = broker
        self._searches: dict[str, tuple[SessionSubscription, RetainedSearch]] = {}
        """Subscriptions by topic filter, each with the search for the messages that were retained when it began: later
        ones it received when they were published."""
        self._found: deque[Message] = deque()
        """Messages found by the first search that are not sent yet."""

    def add(self, subscription: SessionSubscription) -> None:
        """Add a subscription. If its messages are being sent, sending starts again."""
        topic_filter = subscription.topic_filter
        self.cancel(topic_filter)
        self._searches[topic_filter] = (subscription, self._broker.retained.search(topic_filter))

    def cancel(self, topic_filter: str) -> None:
        """Remove a subscription."""
        if topic_filter in self._searches:
            if next(iter(self._searches)) == topic_filter:
                self._found.clear()
            del self._searches[topic_filter]

    def send(self, connection: SessionConnection, now: int) -> bool:
        """Send messages while connection and send quota allow it; return True when all were sent."""
        session, broker, found = self._session, self._broker, self._found
        retained = broker.retained
        end = broker.work + broker.max_turn_work
        while self._searches:
            topic_filter, (subscription, search) = next(iter(self._searches.items()))
            while found or not search.done:
                if broker.work >= end:
                    connection.throttle()
                    return False
                broker.work += 1
                if not found:
                    found.extend(search.find(SEARCH_STEP, now))
                    continue
                message = found[0]
                qos = min(subscription.qos, message.qos)
                if not connection.writable or (qos and not session.window_open(connection)):
                    return False
                found.popleft()
                # A message that was replaced meanwhile was delivered to the subscription when it was published.
                topic = message.topic
                if message.expired(now) or not retained.delivers(topic, message) or not session.may_receive(topic):
                    continue
                if qos:
                    session.send_queued(Delivery(message, qos, 1, subscription.identifier, "", 0), connection, now)
                else:
                    connection.send_publish(message, 0, 0x31, subscription.identifier, now)
            del self._searches[topic_filter]
        return True
