"""A message in the broker, encoded once for all receivers, and its delivery to one session.

The parts of a PUBLISH that are the same for every receiver are stored encoded: topic and property block with their
lengths, and payload. The fixed header and the packet identifier are added for each receiver.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, final

from librt.strings import BytesWriter
from mypy_extensions import mypyc_attr

from penstock.mqtt.codec.encoder import write_publish_head
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.primitives import encode_string, encode_varint, length_size
from penstock.mqtt.codec.property_blocks import (
    HAS_EXPIRY,
    HAS_SUBSCRIPTION_IDENTIFIER,
    HAS_TOPIC_ALIAS,
    decode_properties,
    encode_properties,
)
from penstock.mqtt.codec.reasons import PacketType
from penstock.mqtt.engine.model.inflight import InflightEntry

if TYPE_CHECKING:
    from mypy_extensions import i64

    from penstock.mqtt.codec.properties import Properties

__all__ = [
    "RELEASED",
    "Delivery",
    "DeliveryPool",
    "EncodedPublish",
    "Message",
    "Notification",
    "identifier_block",
    "message_of",
]

_CONTEXT: Final = 1 << PacketType.PUBLISH
_SPARE_DELIVERIES: Final = 4096
"""Maximum unused deliveries of a broker: half a megabyte."""
_LARGEST_ENCODED: Final = 1024
"""Maximum payload in bytes that :meth:`Message.encode` copies."""
_ENDS_HERE: Final = HAS_TOPIC_ALIAS | HAS_SUBSCRIPTION_IDENTIFIER
"""Properties of a connection, which are not forwarded."""


def identifier_block(identifiers: Iterable[int]) -> bytes:
    """Encode subscription identifiers as properties, once for all messages of the subscriptions."""
    return b"".join(b"\x0b" + encode_varint(identifier) for identifier in identifiers)


@mypyc_attr(acyclic=True)
class Message:
    """One accepted application message. ``expires_at``: instant in ms, 0 = never. ``qos`` as published.

    ``urgent``: it may exceed the first limit of a full queue, because it has high priority. ``stored``
    and ``receivers`` belong to the journal: 0 = stored with each delivery, -1 = to be stored once for all, otherwise
    the number of the stored message, and its number of deliveries. ``encoded``: the PUBLISH for most receivers, during
    the loop over them.
    """

    stored: int = 0
    receivers: int = 0
    urgent: bool = False
    encoded: EncodedPublish | None = None
    _properties: Properties | None = None

    def __init__(
        self,
        topic: str,
        topic_wire: bytes,
        payload: bytes,
        properties_wire: bytes,
        qos: i64,
        now: i64,
        *,
        retain: bool = False,
        expires_at: i64 = 0,
    ) -> None:
        self.topic = topic
        self.qos: i64 = qos
        self.retain = retain
        self.payload = payload
        self.topic_wire = topic_wire if len(topic_wire) > 0 else encode_string(topic, "the topic")
        self.accepted_at: i64 = now
        self.expires_at: i64 = expires_at
        self.properties_wire = properties_wire

    def take_properties(self, publish: Publish) -> None:
        """Set the properties from ``publish``, without properties of the connection."""
        wire = publish.properties_wire
        block = publish.block
        if len(wire) == 0:
            self._properties = publish.optional_properties
            wire = encode_properties(self._properties, _CONTEXT)
            block = publish.property_block()
        if block is not None:
            seen = block.seen
            if seen & HAS_EXPIRY:
                self.expires_at = self.accepted_at + block.message_expiry_interval * 1000
            if seen & _ENDS_HERE:
                self._properties = _without_aliases(publish.properties)
                wire = encode_properties(self._properties, _CONTEXT)
        self.properties_wire = wire

    def encode(self) -> None:
        """Encode the PUBLISH for most receivers before the loop over them.

        No effect for a message with an expiry, whose properties change with time, and for large payloads, which would
        be copied once more.
        """
        if not self.expires_at and len(self.payload) <= _LARGEST_ENCODED:
            self.encoded = EncodedPublish(self)

    @property
    def properties(self) -> Properties:
        """The properties, without properties of the connection; shared, so copy them before a change."""
        given = self._properties
        if given is None:
            wire = self.properties_wire
            given = self._properties = decode_properties(wire, length_size(wire), len(wire), _CONTEXT)
        return given

    @property
    def size(self) -> int:
        """Bytes that count towards queue limits."""
        return len(self.topic_wire) + len(self.properties_wire) + len(self.payload)

    def expired(self, now: int) -> bool:
        """Return True if the message has expired [MQTT-3.3.2-5]. Times are rounded down: not before the next ms."""
        return 0 < self.expires_at < now

    def properties_for(self, identifiers: bytes, now: int) -> bytes:
        """Encode the properties for a receiver: remaining expiry, and its :func:`identifier_block`."""
        wire = self.properties_wire
        waited_ms = now - self.accepted_at - 1  # at least, since both times are rounded down
        if self.expires_at and waited_ms >= 1000:
            properties = self.properties.copy()
            left = max(0, (properties.message_expiry_interval or 0) - waited_ms // 1000)
            properties.message_expiry_interval = left  # [MQTT-3.3.2-6]
            wire = encode_properties(properties, _CONTEXT)
        if identifiers:
            header = length_size(wire)
            wire = encode_varint(len(wire) - header + len(identifiers)) + wire[header:] + identifiers
        return wire


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class EncodedPublish:
    """An encoded MQTT 5.0 PUBLISH at the message's QoS, with the message's properties only and without packet
    identifier.

    ``first`` is its first byte; ``before`` and ``after`` are the bytes around the identifier (all bytes at QoS 0).
    """

    __slots__ = ("after", "before", "first")

    def __init__(self, message: Message) -> None:
        topic, after = message.topic_wire, message.properties_wire + message.payload
        qos = message.qos
        remaining: i64 = len(topic)
        remaining += len(after)
        if qos:
            remaining += 2
        out = BytesWriter()
        self.first: i64 = 0x30 | qos << 1
        write_publish_head(out, self.first, remaining)
        out.write(topic)
        self.before = out.getvalue()
        self.after = after


def message_of(publish: Publish, now: i64) -> Message:
    """Create a message from a PUBLISH that was accepted at ``now``.

    Raises:
        LocalProtocolError: the topic or the properties cannot be sent.
    """
    wire = publish.properties_wire
    message = Message(publish.topic, publish.topic_wire, publish.payload, wire, publish.qos, now, retain=publish.retain)
    if publish.block is not None or len(wire) == 0:
        message.take_properties(publish)
    return message


def _without_aliases(properties: Properties) -> Properties:
    """Copy properties without Topic Alias and Subscription Identifiers of the publisher."""
    properties = properties.copy()
    properties.topic_alias = None
    properties.subscription_identifiers = []
    return properties


@final
@mypyc_attr(acyclic=True)
class Notification(Message):
    """A notification: the state of a key at one instant, superseded by a newer notification of the same topic.

    A session with a full queue drops superseded notifications [MessageQueue]. ``deletes``: it reports that the state
    was deleted; only a later deletion supersedes that.
    """

    def __init__(self, publish: Publish, now: i64, *, deletes: bool) -> None:
        super().__init__(publish.topic, publish.topic_wire, publish.payload, b"", publish.qos, now)
        self.take_properties(publish)
        self.deletes = deletes


RELEASED: Final = message_of(Publish("released"), 0)
"""Replaces the message of a QoS 2 delivery after its PUBREL, when the payload is no longer needed [MQTT-4.3.3-6]."""


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Delivery(InflightEntry):
    """One message for one session, from the moment it is queued or sent until its last acknowledgement.

    ``retain`` is the RETAIN flag, 0 or 1; ``identifiers`` the subscription identifiers as an encoded block; ``share``
    the topic filter of the shared subscription that chose the session, empty for another subscription; ``number`` its
    number in the journal, 0 for a delivery that is not stored.
    """

    __slots__ = ("identifiers", "message", "number", "qos", "retain", "share")

    def __init__(self, message: Message, qos: i64, retain: i64, identifiers: bytes, share: str, number: int) -> None:
        super().__init__()
        self.message = message
        self.qos: i64 = qos
        self.retain: i64 = retain
        self.identifiers = identifiers
        self.share = share
        self.number = number

    def release(self) -> None:
        """Free the message after PUBREC: only PUBREL and PUBCOMP remain."""
        self.message = RELEASED
        self.identifiers = b""
        self.share = ""


class DeliveryPool:
    """Reuses acknowledged deliveries: creating an object costs several times as much.

    The free list of mypyc has one object per class, but thousands of messages are in flight.
    """

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        # A list instead of a chain of deliveries: freeing a chain of more than 50 objects corrupts memory.
        self._spare: list[Delivery] = []

    def create(self, message: Message, qos: i64, retain: i64, identifiers: bytes, share: str) -> Delivery:
        """Return a delivery that is not stored."""
        if not self._spare:
            return Delivery(message, qos, retain, identifiers, share, 0)
        delivery = self._spare.pop()
        delivery.message = message
        delivery.qos = qos
        delivery.retain = retain
        delivery.identifiers = identifiers
        delivery.share = share
        delivery.number = 0
        return delivery

    def recycle(self, delivery: Delivery) -> None:
        """Keep an otherwise unreferenced delivery for :meth:`create`."""
        if len(self._spare) < _SPARE_DELIVERIES:
            delivery.message = RELEASED
            self._spare.append(delivery)
