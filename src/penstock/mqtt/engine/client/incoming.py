"""Messages that a client receives: topic aliases, Receive Maximum, acknowledgements in order, QoS 2 exactly once.

The owner acknowledges a message with :meth:`Incoming.acknowledge`, unless the client acknowledges automatically.
Acknowledgements are sent in the order of the messages, regardless of the order of the calls [MQTT-4.6.0-2],
[MQTT-4.6.0-3]. Receive Maximum is the backpressure: a server stops sending while that many messages are not
acknowledged.

Source: MQTT 5.0 sections 3.3.2.3.4, 4.3, 4.6, 4.9.
"""

from __future__ import annotations

from collections import deque

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import PubAck, PubComp, Publish, PubRec, PubRel
from penstock.mqtt.codec.primitives import encode_size, protocol_error
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.client.events import Event
from penstock.mqtt.engine.client.outbox import Outbox

__all__ = ["Incoming"]


class _ReceivedMessage:
    """A message of this connection without acknowledgement. ``code``: None until the owner acknowledges it."""

    __slots__ = ("code", "publish")

    def __init__(self, publish: Publish, code: int | None = None) -> None:
        self.publish = publish
        self.code = code


class Incoming:
    """The receiver of a client. ``automatic``: messages are acknowledged when they arrive."""

    def __init__(
        self,
        outbox: Outbox,
        events: list[Event],
        *,
        receive_maximum: int,
        topic_alias_maximum: int,
        automatic: bool,
    ) -> None:
        self._outbox = outbox
        self._events = events
        self._receive_maximum = receive_maximum
        self._topic_alias_maximum = topic_alias_maximum
        self._automatic = automatic
        self._aliases: dict[int, str] = {}
        self._order: deque[_ReceivedMessage] = deque()
        self._open: dict[int, _ReceivedMessage] = {}
        """The messages in ``_order`` by packet identifier."""
        self._exactly_once: dict[int, Publish | None] = {}
        """QoS 2 messages of the session up to their PUBREL; None after the owner acknowledged them."""
        self._awaiting_release: set[int] = set()
        """Identifiers of QoS 2 messages of this connection after PUBREC, which count towards Receive Maximum."""
        self._resent = 0
        """Messages repeated on this connection. Mosquitto 2.0 exceeds Receive Maximum by that many."""

    def begin(self) -> None:
        """Start a network connection: reset aliases, order and quota; QoS 2 identifiers belong to the session."""
        self._aliases.clear()
        self._order.clear()
        self._open.clear()
        self._awaiting_release.clear()
        self._resent = 0

    def session_lost(self) -> None:
        """Drop all identifiers, because the server has a new session."""
        self._exactly_once.clear()

    def publish(self, publish: Publish, now: int) -> None:
        """Handle a PUBLISH.

        Raises:
            RemoteProtocolError: an invalid Topic Alias, more messages than Receive Maximum, a packet identifier in use.
        """
        given = publish.optional_properties
        if given is not None and given.topic_alias is not None:
            self._resolve(publish, given.topic_alias)
        qos = publish.qos
        if qos == 0:
            self._events.append(publish)
        elif qos == 1 and self._automatic and not self._order:
            self._outbox.add(b"\x40\x02" + encode_size(publish.packet_id), now)
            self._events.append(publish)
        else:
            self._receive(publish, now)

    def release(self, packet: PubRel, now: int) -> None:
        """Handle a PUBREL, which completes a QoS 2 message [MQTT-4.3.3-11]."""
        packet_id = packet.packet_id
        if self._exactly_once.get(packet_id) is not None:
            raise protocol_error(f"PUBREL {packet_id} before its PUBREC")
        known = packet_id in self._exactly_once
        self._exactly_once.pop(packet_id, None)
        if packet_id in self._awaiting_release:
            self._awaiting_release.remove(packet_id)
        else:
            self._resent += 1
        self._outbox.send(PubComp(packet_id, 0 if known else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), now)

    def acknowledge(self, publish: Publish, code: int, now: int) -> None:
        """Acknowledge a message; no effect at QoS 0, or for a QoS 1 message of an earlier connection.

        ``code`` 0x80 and above refuses it.
        """
        packet_id = publish.packet_id
        receipt = self._open.get(packet_id)
        if receipt is not None and receipt.publish is publish:
            receipt.code = code
            self._acknowledge_settled(now)
        elif publish.qos == 2 and self._exactly_once.get(packet_id) is publish:
            # Acknowledged between two connections: if the server sends the message again, it is answered with PUBREC
            # and not delivered again.
            if code < 0x80:
                self._exactly_once[packet_id] = None
            else:
                del self._exactly_once[packet_id]

    def _resolve(self, publish: Publish, alias: int) -> None:
        if not 1 <= alias <= self._topic_alias_maximum:  # [MQTT-3.3.2-9]
            raise RemoteProtocolError(
                f"mqtt: Topic Alias {alias}, where 1 to {self._topic_alias_maximum} are allowed", reason_code=0x94
            )
        if publish.topic:
            self._aliases[alias] = publish.topic
            return
        topic = self._aliases.get(alias)
        if topic is None:
            raise protocol_error(f"Topic Alias {alias} was never set")
        publish.topic = topic

    def _receive(self, publish: Publish, now: int) -> None:
        packet_id = publish.packet_id
        if packet_id in self._open or packet_id in self._awaiting_release:
            raise protocol_error(f"PUBLISH with the packet identifier {packet_id}, which is in use [MQTT-2.2.1-4]")
        if publish.dup:
            self._resent += 1
        open_ = len(self._open) + len(self._awaiting_release)
        if open_ >= self._receive_maximum + self._resent:  # [MQTT-3.3.4-9]
            raise RemoteProtocolError(
                f"mqtt: more than the Receive Maximum of {self._receive_maximum} messages without acknowledgement",
                reason_code=ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
            )
        receipt = _ReceivedMessage(publish)
        if publish.qos == 2 and packet_id in self._exactly_once:  # sent again after a reconnect [MQTT-4.3.3-10]
            before = self._exactly_once[packet_id]
            receipt = _ReceivedMessage(publish, 0) if before is None else _ReceivedMessage(before)
        else:
            if publish.qos == 2:
                self._exactly_once[packet_id] = publish
            self._events.append(publish)
            if self._automatic:
                receipt.code = 0
        self._order.append(receipt)
        self._open[packet_id] = receipt
        self._acknowledge_settled(now)

    def _acknowledge_settled(self, now: int) -> None:
        """Send acknowledgements in order, up to the first message without one."""
        order = self._order
        while order and (code := order[0].code) is not None:
            publish = order.popleft().publish
            packet_id = publish.packet_id
            del self._open[packet_id]
            if publish.qos == 1:
                self._outbox.send(PubAck(packet_id, code), now)
                continue
            if code < 0x80:
                self._exactly_once[packet_id] = None
                self._awaiting_release.add(packet_id)
            else:
                self._exactly_once.pop(packet_id, None)
            self._outbox.send(PubRec(packet_id, code), now)
