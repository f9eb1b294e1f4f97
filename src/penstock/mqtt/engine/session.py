"""Session of one client: what outlives its network connections.

Subscriptions, messages in flight, messages that wait, the will. A message for the session leaves at once where the
connection takes it; otherwise it waits here, within the limits.

Source: MQTT 5.0 sections 4.1, 4.4, 4.5, 4.6.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.packets import Subscription, Will
from penstock.mqtt.engine.inflight import Inflight
from penstock.mqtt.engine.limits import BrokerLimits, BrokerStats, QueueFull
from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.timers import Timed

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker
    from penstock.mqtt.engine.connection import BrokerConnection

__all__ = ["NEVER", "Delivery", "Session", "SessionSubscription"]

NEVER: Final = 0xFFFFFFFF
"""Session Expiry Interval of a session that does not expire."""

Delivery = tuple[Message, int, int, bytes]
"""What goes to one session: message, QoS, RETAIN flag (0 or 1), subscription identifiers as an encoded block."""


class SessionSubscription:
    """A subscription in force: granted QoS, options, and its identifier as an encoded block (empty = none)."""

    __slots__ = ("identifier", "no_local", "qos", "retain_as_published", "session", "topic_filter")

    def __init__(self, session: Session, wanted: Subscription, qos: int, identifier: bytes) -> None:
        self.session = session
        self.topic_filter = wanted.topic_filter
        self.qos = qos
        self.no_local = wanted.no_local
        self.retain_as_published = wanted.retain_as_published
        self.identifier = identifier


class Session(Timed):
    """State of one client id. ``connection`` is None while it is offline; ``ends_at``: instant in ms, 0 = none."""

    __slots__ = (
        "_broker",
        "_limits",
        "_replaying",
        "_stats",
        "client_id",
        "connection",
        "ends_at",
        "expiry_s",
        "inflight",
        "queue",
        "queue_qos0",
        "queued_bytes",
        "replays",
        "resend",
        "subscriptions",
        "username",
        "will",
        "will_at",
    )

    def __init__(self, broker: Broker, client_id: str, limits: BrokerLimits, stats: BrokerStats) -> None:
        super().__init__()
        self._broker = broker
        self._limits = limits
        self._stats = stats
        self.client_id = client_id
        self.username: str | None = None
        self.connection: BrokerConnection | None = None
        self.expiry_s = 0
        self.ends_at = 0
        self.will: Will | None = None
        self.will_at = 0
        self.subscriptions: dict[str, SessionSubscription] = {}
        self.inflight: Inflight[Delivery] = Inflight()
        self.resend: deque[int] = deque()
        """Those in flight that this connection did not carry yet; nothing new leaves before them."""
        self.replays: dict[str, SessionSubscription] = {}
        """Subscriptions whose retained messages are still to be sent, the first of them from ``_replaying``."""
        self._replaying: deque[Message] | None = None
        self.queue: deque[Delivery] = deque()
        self.queue_qos0: deque[Delivery] = deque()
        self.queued_bytes = 0

    def due(self, now: int) -> None:
        """Will delay or session expiry has come."""
        self._broker.session_due(self, now)

    def clear(self) -> None:
        """Forget messages; subscriptions are the broker's to take down."""
        self.inflight = Inflight()
        self.resend.clear()
        self.replays.clear()
        self._replaying = None
        self.queue.clear()
        self.queue_qos0.clear()
        self.queued_bytes = 0

    def deliver(self, message: Message, qos: int, retain: int, identifiers: bytes, now: int) -> None:
        """Send the message, or let it wait for the connection or for an acknowledgement that makes room."""
        connection = self.connection
        if qos == 0:
            if connection is None:
                self._stats.dropped_offline += 1
            elif connection.writable:
                connection.send_publish(message, 0, retain, identifiers, now)
            else:
                self._wait((message, 0, retain, identifiers))
            return
        inflight = self.inflight  # holds what is to be sent again, too: then it is full, or the connection is
        if connection is None or not connection.writable or self.queue or len(inflight) >= connection.send_maximum:
            self._wait((message, 1, retain, identifiers))
            return
        packet_id = inflight.free_id()
        if connection.send_publish(message, packet_id, retain, identifiers, now):
            inflight[packet_id] = (message, 1, retain, identifiers)

    def acknowledge(self, packet_id: int, now: int) -> bool:
        """A PUBACK came in; False when nothing with that identifier is in flight."""
        if self.inflight.pop(packet_id, None) is None:
            return False
        if self.resend and packet_id in self.resend:  # late, for what an earlier connection carried
            self.resend.remove(packet_id)
        if self.queue or self.resend or self.replays:
            self.send_waiting(now)
        return True

    def replay(self, subscription: SessionSubscription) -> None:
        """Send the retained messages of a subscription, with :meth:`send_waiting`, as fast as the client takes them.

        They do not wait in the queue, which would drop what exceeds it.
        """
        self.end_replay(subscription.topic_filter)
        self.replays[subscription.topic_filter] = subscription

    def end_replay(self, topic_filter: str) -> None:
        """The subscription is replaced or gone."""
        if topic_filter in self.replays:
            if next(iter(self.replays)) == topic_filter:
                self._replaying = None
            del self.replays[topic_filter]

    def resume(self, now: int) -> None:
        """The client is back: send again what has no PUBACK, in order and with DUP, then what waited.

        [MQTT-4.4.0-1], [MQTT-4.6.0-1]
        """
        self.resend = deque(self.inflight)
        self.send_waiting(now)

    def send_waiting(self, now: int) -> None:
        """Send what waits, as far as the connection takes it."""
        connection = self.connection
        if connection is None:
            return
        inflight, resend = self.inflight, self.resend
        while resend and connection.writable and len(inflight) - len(resend) < connection.send_maximum:
            packet_id = resend.popleft()
            message, _, retain, identifiers = inflight[packet_id]
            if not connection.send_publish(message, packet_id, retain | 8, identifiers, now):
                del inflight[packet_id]
        queue = self.queue
        while queue and connection.writable and len(inflight) < connection.send_maximum:
            delivery = queue.popleft()
            self.queued_bytes -= delivery[0].size
            self._start(delivery, connection, now)
        if self.replays:
            self._send_retained(connection, now)
        queue = self.queue_qos0
        while queue and connection.writable:
            message, _, retain, identifiers = queue.popleft()
            self.queued_bytes -= message.size
            if _expired(message, now):
                self._stats.dropped_expired += 1
            else:
                connection.send_publish(message, 0, retain, identifiers, now)

    def _start(self, delivery: Delivery, connection: BrokerConnection, now: int) -> None:
        """First send of a QoS 1 message that waited: it is in flight from here on."""
        message, _, retain, identifiers = delivery
        if _expired(message, now):  # [MQTT-3.3.2-5]
            self._stats.dropped_expired += 1
            return
        inflight = self.inflight
        packet_id = inflight.free_id()
        if connection.send_publish(message, packet_id, retain, identifiers, now):
            inflight[packet_id] = delivery

    def _send_retained(self, connection: BrokerConnection, now: int) -> None:
        """Go on with the replays, as far as the connection takes them."""
        retained = self._broker.retained
        while self.replays:
            topic_filter, subscription = next(iter(self.replays.items()))
            if self._replaying is None:
                self._replaying = deque(retained.match(topic_filter, now))
            found = self._replaying
            while found:
                message = found[0]
                qos = min(subscription.qos, message.qos)
                if not connection.writable or (qos and len(self.inflight) >= connection.send_maximum):
                    return
                found.popleft()
                # One that was replaced while the replay paused reached the subscription as it came.
                if _expired(message, now) or retained.get(message.publish.topic) is not message:
                    continue
                if qos:
                    self._start((message, qos, 1, subscription.identifier), connection, now)
                else:
                    connection.send_publish(message, 0, 1, subscription.identifier, now)
            self._replaying = None
            del self.replays[topic_filter]

    def _wait(self, delivery: Delivery) -> None:
        """Queue the message, or drop what the policy names when there is no room.

        QoS 0 goes before QoS 1 whatever the policy: nobody was promised it.
        """
        limits = self._limits
        size = delivery[0].size
        if size > limits.max_queued_bytes:
            self._stats.dropped_queue_full += 1
            return
        while (
            len(self.queue) + len(self.queue_qos0) >= limits.max_queued_messages
            or self.queued_bytes + size > limits.max_queued_bytes
        ):
            self._stats.dropped_queue_full += 1
            oldest = self.queue_qos0 or self.queue
            if limits.when_queue_full is QueueFull.DROP_NEWEST and not (delivery[1] and self.queue_qos0):
                return
            if not oldest:
                return
            self.queued_bytes -= oldest.popleft()[0].size
        (self.queue if delivery[1] else self.queue_qos0).append(delivery)
        self.queued_bytes += size


def _expired(message: Message, now: int) -> bool:
    return message.expires_at != 0 and message.expires_at <= now and message.accepted_at != now
