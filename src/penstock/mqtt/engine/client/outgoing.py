"""Operations of a client without an answer: messages at QoS 1 and 2, SUBSCRIBE, UNSUBSCRIBE.

Operations outlive network connections. After a CONNACK with Session Present 1, PUBREL and PUBLISH (with DUP) are sent
again in their order [MQTT-4.4.0-1]; otherwise messages are sent as new ones and subscriptions are created again. A QoS
2 message after its PUBREC belongs to the server: it is reported as done, because sending it again would duplicate it. A
message that must not be sent again in a new session, where the server cannot detect the duplicate, fails instead.

The server may have the session of an earlier client with the same client identifier that ended without releasing its
QoS 2 messages. A message with one of their packet identifiers would be a repetition for the server, which drops it
[MQTT-4.3.3-10]. So the first message with an identifier follows a PUBREL, which frees it.

Source: MQTT 5.0 sections 4.3, 4.4, 4.6, 4.9; 3.3.2.3.4 for topic aliases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, cast

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.client.events import Event, OperationDone, Unsubscribed
from penstock.mqtt.engine.client.outbox import Outbox
from penstock.mqtt.engine.model.inflight import Inflight, InflightEntry

__all__ = ["MAX_OPEN", "Outgoing"]

MAX_OPEN: Final = 65_000
"""Maximum of unanswered operations, so that packet identifiers are always free."""

_NO_PROPERTIES: Final = Properties()


class _Operation(InflightEntry):
    """An operation that the server answers.

    ``sent``: sent in the current session; ``seen``: sent, possibly in an older session. ``received``: the reason code
    of its PUBREC, None before. ``counted``: it counts towards the server's Receive Maximum. ``expires_at``: instant of
    its message expiry in ms; 0 = never. ``resend``: send it again in a new session.
    """

    __slots__ = ("counted", "expires_at", "packet", "received", "resend", "seen", "sent", "token")

    def __init__(
        self, packet: Publish | Subscribe | Unsubscribe, token: object, expires_at: int, *, resend: bool
    ) -> None:
        super().__init__()
        self.packet = packet
        self.token = token
        self.expires_at = expires_at
        self.resend = resend
        self.sent = False
        self.seen = False
        self.counted = False
        self.received: int | None = None


class Outgoing:
    """The operations of one client. ``topic_aliases``: maximum number of topic aliases, if the server allows them."""

    def __init__(self, outbox: Outbox, events: list[Event], *, topic_aliases: int = 0) -> None:
        self.writable = True
        self.subscriptions: dict[str, tuple[Subscription, _Operation]] = {}
        """Granted subscriptions with their SUBSCRIBE; created again when the server lost the session."""
        self.next_expiry = 0
        """Instant at which a message that waits for a connection is given up, 0 for never; fixed while connected."""
        self._outbox = outbox
        self._events = events
        self._online = False
        self._announced = _NO_PROPERTIES
        self._send_maximum = 65_535
        self._open_publishes = 0
        self._inflight = Inflight()
        self._inherited = False
        """Whether the session may have packet identifiers of QoS 2 messages of an earlier client."""
        self._freed: set[int] = set()
        """The packet identifiers that it has no longer."""
        self._waiting: OrderedDict[_Operation, None] = OrderedDict()
        """Messages to send, in their order: an ordered set, from which any of them can be removed."""
        self._by_token: dict[object, _Operation] = {}
        self._topic_aliases = topic_aliases
        self._aliases: dict[str, int] = {}
        self._alias_maximum = 0

    @property
    def open(self) -> int:
        """Number of unanswered operations."""
        return len(self._inflight) + len(self._waiting)

    # Network connections

    def resume(self, announced: Properties, now: int, *, present: bool, first: bool = False) -> None:
        """Send unanswered operations again after CONNACK: PUBREL and control packets first, then messages in order.

        ``first``: it is the first connection, so a session that is present is that of an earlier client.
        """
        self._online = True
        self._inherited = present and (first or self._inherited)
        self._announced = announced
        self._send_maximum = announced.receive_maximum or 65_535
        self._alias_maximum = min(self._topic_aliases, announced.topic_alias_maximum or 0)
        control = [op for op in self._operations() if not isinstance(op.packet, Publish)]
        received = [op for op in self._operations() if op.received is not None]
        if present:
            for operation in received:
                self._outbox.send(PubRel(operation.packet.packet_id), now)
        else:  # [MQTT-3.2.2-5]
            self._inflight.clear()
            for operation in received:
                self._answer(operation, (operation.received or 0,), None)
            for operation in [op for op in self._waiting if op.seen and not op.resend]:
                self._give_up(operation, _outcome_unknown(operation.packet))
            for operation in (*control, *self._waiting):
                operation.packet.packet_id = 0
                operation.sent = False
            for wanted, granted in list(self.subscriptions.values()):
                identifiers = granted.packet.properties.subscription_identifiers
                self._control(Subscribe(0, [wanted], Properties(subscription_identifiers=identifiers)), None, now)
        for operation in control:
            self._send_control(operation, now)
        self.pump(now)

    def stop(self) -> None:
        """Send nothing more on a connection that is about to end."""
        self._online = False

    def lost(self) -> None:
        """Handle the end of the network connection; unanswered operations wait for the next one."""
        self._online = False
        unanswered = [
            op for op in self._operations() if isinstance(op.packet, Publish) and op.sent and op.received is None
        ]
        for operation in reversed(unanswered):
            if operation not in self._waiting:
                self._waiting[operation] = None
                self._waiting.move_to_end(operation, last=False)
        for operation in self._operations():
            operation.counted = False
        self._open_publishes = 0
        self._aliases.clear()
        self._find_next_expiry()

    def abandon(self) -> list[tuple[object, bool]]:
        """Abandon all unanswered operations; return their tokens, and whether the server may have received them."""
        operations = {id(op): op for op in (*self._operations(), *self._waiting)}
        self._inflight.clear()
        self._waiting.clear()
        self._by_token.clear()
        self._open_publishes = 0
        return [(op.token, op.seen) for op in operations.values() if op.token is not None]

    def withdraw(self, token: object) -> None:
        """Cancel an operation, unless it was sent."""
        operation = self._by_token.pop(token, None)
        if operation is None:
            return
        operation.token = None
        if not operation.sent:
            self._remove(operation)

    # Requests

    def publish(self, publish: Publish, token: object, now: int, since: int, *, resend: bool) -> None:
        """Send a QoS 1 or 2 message as soon as connection and Receive Maximum allow."""
        given = publish.optional_properties
        expires_at = 0
        if given is not None and given.message_expiry_interval is not None:
            expires_at = since + given.message_expiry_interval * 1000
            if not self.next_expiry or expires_at < self.next_expiry:
                self.next_expiry = expires_at + 1
        operation = self._operation(publish, token, expires_at, resend=resend)
        if self._waiting or not self._can_send():
            self._waiting[operation] = None
            self.pump(now)
        else:
            self._send(operation, publish, now)

    def publish_qos0(self, publish: Publish, now: int) -> None:
        """Send a QoS 0 message.

        Raises:
            LocalProtocolError: it cannot be sent, or the server announced that it does not support such a message.
        """
        self._outbox.add(self._encode(publish), now)

    def subscribe(self, subscriptions: list[Subscription], properties: Properties, token: object, now: int) -> None:
        """Send SUBSCRIBE; repeated after a reconnect until it is answered.

        Raises:
            LocalProtocolError: the server announced that it does not support the subscription, or too many operations
            are open.
        """
        if self._online:
            self._check_subscriptions(subscriptions, properties)
        self._control(Subscribe(0, subscriptions, properties), token, now)

    def unsubscribe(self, topic_filters: list[str], properties: Properties, token: object, now: int) -> None:
        """Send UNSUBSCRIBE; repeated after a reconnect until it is answered."""
        for topic_filter in topic_filters:
            self.subscriptions.pop(topic_filter, None)
        self._control(Unsubscribe(0, topic_filters, properties), token, now)

    # Responses

    def acknowledged(self, packet: PubAck, now: int) -> None:
        """Handle a PUBACK; one with an unknown identifier is ignored."""
        operation = self._find(packet.packet_id)
        if operation is None or not isinstance(operation.packet, Publish):
            return
        if operation.packet.qos != 1:
            raise protocol_error("PUBACK answers a QoS 2 message")
        given = packet.optional_properties
        self._finish(operation, packet.reason_code, given.reason_string if given is not None else None, now)

    def received(self, packet: PubRec, now: int) -> None:
        """Handle a PUBREC, which accepts or refuses a message [MQTT-4.3.3-4]."""
        operation = self._find(packet.packet_id)
        if operation is None or not isinstance(operation.packet, Publish):
            if packet.reason_code < 0x80:  # otherwise the identifier is unknown
                self._outbox.send(PubRel(packet.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), now)
        elif operation.packet.qos != 2:
            raise protocol_error("PUBREC answers a QoS 1 message")
        elif packet.reason_code >= 0x80:
            self._finish(operation, packet.reason_code, packet.properties.reason_string, now)
        else:
            operation.received = packet.reason_code
            self._outbox.send(PubRel(packet.packet_id), now)

    def completed(self, packet: PubComp, now: int) -> None:
        """Handle a PUBCOMP. Its code 0x92, unknown identifier, still means that the server has the message."""
        operation = self._find(packet.packet_id)
        if operation is not None and operation.received is not None:
            self._finish(operation, operation.received, None, now)

    def answered(self, packet: SubAck | UnsubAck) -> None:
        """Handle a SUBACK or UNSUBACK."""
        operation = self._find(packet.packet_id)
        if operation is None:
            return
        asked = operation.packet
        if isinstance(asked, Subscribe) and isinstance(packet, SubAck):
            expected = len(asked.subscriptions)
        elif isinstance(asked, Unsubscribe) and isinstance(packet, UnsubAck):
            expected = len(asked.topic_filters)
        else:
            raise protocol_error(f"{type(packet).__name__} answers another packet")
        if len(packet.reason_codes) != expected:
            raise protocol_error(f"{len(packet.reason_codes)} reason codes for {expected} topic filters [MQTT-3.8.4-6]")
        self._inflight.remove(operation)
        if isinstance(asked, Subscribe):
            for wanted, code in zip(asked.subscriptions, packet.reason_codes, strict=True):
                if code < 0x80:
                    self.subscriptions[wanted.topic_filter] = (wanted, operation)
                elif operation.token is None and self.subscriptions.pop(wanted.topic_filter, None) is not None:
                    self._events.append(Unsubscribed(wanted.topic_filter, code))
        elif isinstance(asked, Unsubscribe):
            for topic_filter in asked.topic_filters:
                entry = self.subscriptions.get(topic_filter)
                if entry is not None and entry[1].order < operation.order:
                    del self.subscriptions[topic_filter]  # its SUBACK arrived after the UNSUBSCRIBE was sent
        self._answer(operation, packet.reason_codes, packet.properties.reason_string)

    # Send quota and expiry

    def pump(self, now: int) -> None:
        """Send queued messages while connection and Receive Maximum allow it."""
        waiting = self._waiting
        while waiting and self._can_send():
            operation, _ = waiting.popitem(last=False)
            publish = operation.packet
            assert isinstance(publish, Publish)
            self._send(operation, publish, now)

    def give_up_expired(self, now: int) -> None:
        """Fail messages that expired without a connection."""
        for operation in [op for op in self._waiting if 0 < op.expires_at < now and not _bound(op)]:
            assert isinstance(operation.packet, Publish)
            self._give_up(operation, _expired(operation.packet, operation))
        self._find_next_expiry()

    # Internal

    def _find(self, packet_id: int) -> _Operation | None:
        return cast("_Operation | None", self._inflight.get(packet_id))

    def _operations(self) -> list[_Operation]:
        return cast("list[_Operation]", self._inflight.values())

    def _can_send(self) -> bool:
        """Return whether connection and Receive Maximum allow another message of QoS 1 or 2."""
        return (
            self._online
            and self.writable
            and self._open_publishes < self._send_maximum
            and len(self._inflight) < MAX_OPEN
        )

    def _send(self, operation: _Operation, publish: Publish, now: int) -> None:
        """Send the message of an operation that is not in the queue, unless it expired or may not be sent."""
        if operation.expires_at and not self._count_down(operation, publish, now):
            return
        inflight = self._inflight
        if publish.packet_id == 0:
            publish.packet_id = inflight.assign(operation)
        elif self._find(publish.packet_id) is None:
            inflight.add(publish.packet_id, operation)
        publish.dup = operation.sent  # [MQTT-3.3.1-1]
        try:
            data = self._encode(publish)
        except LocalProtocolError as e:
            self._give_up(operation, e)
            return
        if self._inherited and publish.qos == 2 and publish.packet_id not in self._freed:
            self._freed.add(publish.packet_id)
            if not operation.sent:
                self._outbox.send(PubRel(publish.packet_id), now)
        operation.sent = operation.seen = operation.counted = True
        self._open_publishes += 1
        self._outbox.add(data, now)

    def _operation(
        self, packet: Publish | Subscribe | Unsubscribe, token: object, expires_at: int = 0, *, resend: bool = True
    ) -> _Operation:
        operation = _Operation(packet, token, expires_at, resend=resend)
        if token is not None:
            self._by_token[token] = operation
        return operation

    def _remove(self, operation: _Operation) -> None:
        """Remove an operation that is not sent (any more)."""
        self._waiting.pop(operation, None)
        if self._find(operation.packet.packet_id) is operation:
            self._inflight.remove(operation)

    def _finish(self, operation: _Operation, code: int, reason_string: str | None, now: int) -> None:
        """Complete a message."""
        self._inflight.remove(operation)
        if operation.counted:
            self._open_publishes -= 1
        self._answer(operation, (code,), reason_string)
        if self._waiting:
            self.pump(now)

    def _answer(
        self,
        operation: _Operation,
        reason_codes: Sequence[int],
        reason_string: str | None,
        error: PenstockError | None = None,
    ) -> None:
        token = operation.token
        if token is not None:
            self._by_token.pop(token, None)
            self._events.append(OperationDone(token, reason_codes, reason_string or "", error))

    def _give_up(self, operation: _Operation, error: PenstockError) -> None:
        """Fail a message that is not sent (any more)."""
        self._remove(operation)
        self._answer(operation, (), None, error)

    def _count_down(self, operation: _Operation, publish: Publish, now: int) -> bool:
        """Update the expiry of a message before it is sent; return False if it expired and failed."""
        if _bound(operation):
            return True
        left = -((now - 1 - operation.expires_at) // 1000)  # times are rounded down
        if left < 0 or (left == 0 and publish.properties.message_expiry_interval):
            self._give_up(operation, _expired(publish, operation))
            return False
        if left < (publish.properties.message_expiry_interval or 0):
            properties = publish.properties.copy()
            properties.message_expiry_interval = left
            publish.replace_properties(properties)
        return True

    def _find_next_expiry(self) -> None:
        expiring = (op.expires_at + 1 for op in self._waiting if op.expires_at and not _bound(op))
        self.next_expiry = min(expiring, default=0)

    def _encode(self, publish: Publish) -> bytes:
        """Encode the message, with a topic alias if possible.

        Raises:
            LocalProtocolError: the server would close the connection for it.
        """
        if not self._alias_maximum:
            data = encode(publish)
            self._check_announced(publish, len(data))
            return data
        alias = self._aliases.get(publish.topic)
        new = alias is None and len(self._aliases) < self._alias_maximum
        if alias is None and not new:
            data = encode(publish)
        else:
            number = len(self._aliases) + 1 if alias is None else alias
            properties = Properties() if publish.optional_properties is None else publish.optional_properties.copy()
            properties.topic_alias = number
            data = encode(
                Publish(
                    publish.topic if new else "",
                    publish.payload,
                    publish.qos,
                    retain=publish.retain,
                    dup=publish.dup,
                    packet_id=publish.packet_id,
                    properties=properties,
                )
            )
            largest = self._announced.maximum_packet_size
            if largest is not None and len(data) > largest:
                data, new = encode(publish), False  # an alias may be longer than the topic
        self._check_announced(publish, len(data))
        if new:
            self._aliases[publish.topic] = len(self._aliases) + 1
        return data

    def _check_announced(self, publish: Publish, size: int) -> None:
        """Reject a message that violates CONNACK [MQTT-3.2.2-11], [MQTT-3.2.2-14], [MQTT-3.2.2-15]."""
        announced = self._announced
        if announced.maximum_packet_size is not None and size > announced.maximum_packet_size:
            why = f"it has {size} bytes, the server's Maximum Packet Size is {announced.maximum_packet_size}"
        elif announced.maximum_qos is not None and publish.qos > announced.maximum_qos:
            why = f"its QoS is {publish.qos}, the server's Maximum QoS is {announced.maximum_qos}"
        elif publish.retain and announced.retain_available == 0:
            why = "the server does not support retained messages"
        else:
            return
        raise LocalProtocolError(f"mqtt: the message to {publish.topic!r} was not sent", why=why)

    def _check_subscriptions(self, subscriptions: list[Subscription], properties: Properties) -> None:
        """Reject a packet that requires a capability that the server does not have."""
        announced = self._announced
        for wanted in subscriptions:
            topic_filter = wanted.topic_filter
            if announced.wildcard_subscription_available == 0 and ("+" in topic_filter or "#" in topic_filter):
                why = "the server does not support wildcard subscriptions"
            elif announced.shared_subscription_available == 0 and topic_filter.startswith("$share/"):
                why = "the server does not support shared subscriptions"
            elif announced.subscription_identifier_available == 0 and properties.subscription_identifiers:
                why = "the server does not support subscription identifiers"
            else:
                continue
            raise LocalProtocolError(f"mqtt: the subscription to {topic_filter!r} was not sent", why=why)

    def _control(self, packet: Subscribe | Unsubscribe, token: object, now: int) -> None:
        if len(self._inflight) >= MAX_OPEN:
            raise LocalProtocolError(f"mqtt: {MAX_OPEN} operations wait for an answer", hint="wait for some of them")
        operation = self._operation(packet, token)
        packet.packet_id = self._inflight.free_id()
        self._inflight.add(packet.packet_id, operation)
        if self._online:
            self._send_control(operation, now)

    def _send_control(self, operation: _Operation, now: int) -> None:
        packet = operation.packet
        if packet.packet_id == 0:
            packet.packet_id = self._inflight.free_id()
            self._inflight.add(packet.packet_id, operation)
        operation.sent = operation.seen = True
        self._outbox.send(packet, now)


def _bound(operation: _Operation) -> bool:
    """Return True if the server may have the QoS 2 message: it is then completed even if it has expired.

    [MQTT-4.3.3-7]; if its identifier were reused, the server would drop another message.
    """
    return operation.sent and isinstance(operation.packet, Publish) and operation.packet.qos == 2


def _expired(publish: Publish, operation: _Operation) -> UnavailableError:
    return UnavailableError(
        f"mqtt: the message to {publish.topic!r} expired before it was acknowledged",
        applied=None if operation.seen else False,
        why="the message expired before the server could accept it",
    )


def _outcome_unknown(packet: Publish | Subscribe | Unsubscribe) -> UnavailableError:
    assert isinstance(packet, Publish)
    return UnavailableError(
        f"mqtt: whether the server received the message to {packet.topic!r} is unknown",
        applied=None,
        why="the connection was lost before the acknowledgement, and the server has no session of this client",
        hint="find out whether it had an effect before sending it again",
    )
