"""What leaves on one network connection of the broker: packets, encoded for its client, in one piece a flush.

Source: MQTT 5.0 sections 3.1.2.11, 3.3.2.3.4; MQTT 3.1.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from penstock.mqtt.codec.decoder import LARGEST_PACKET
from penstock.mqtt.codec.encoder import PUBLISH_HEADS, encode, encode_within, publish_head
from penstock.mqtt.codec.packets import Packet, PubAck, PubComp, PubRec, PubRel
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.engine.connections.aliases import AliasesOut, with_alias
from penstock.mqtt.engine.connections.reason_strings import IDENTIFIER_REASONS, PUBLISH_REASONS
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.engine.model.timers import Timed

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker
    from penstock.mqtt.engine.connections.uncommitted_output import UncommittedOutput

__all__ = ["PacketWriter", "Sink", "diagnosis"]

LONGEST_REASON: Final = 500
"""Characters of a Reason String; the rest is cut, since texts of services may quote what clients sent."""


_NO_SUBSCRIBERS: Final = 0x10


def diagnosis(text: str) -> Properties:
    """A Reason String that can be sent, whatever the text."""
    if not text:
        return Properties()
    sendable = text[:LONGEST_REASON].encode(errors="replace").replace(b"\0", b"?").decode()
    return Properties(reason_string=sendable)


_NO_SUBSCRIBERS_PACKET: Final = encode(PubAck(1, _NO_SUBSCRIBERS, diagnosis(PUBLISH_REASONS.get(_NO_SUBSCRIBERS, ""))))
_NO_SUBSCRIBERS_SHORT: Final = encode(PubAck(1, _NO_SUBSCRIBERS))
"""PUBACK of a message without a receiver, with and without its Reason String; the packet identifier is filled in."""


class Sink(Protocol):
    """The transport of a connection. One that closes takes nothing."""

    def send_now(self, data: bytes) -> None:
        """Write at once, so that the client goes on while the broker works for others."""
        ...


class PacketWriter(Timed):
    """The output side of a connection. ``out`` collects until the broker's flush; ``closing``: it ends after that."""

    __slots__ = (
        "_max_output",
        "_problem_information",
        "aliases_out",
        "broker",
        "closing",
        "dirty",
        "gate",
        "maximum_out",
        "out",
        "out_bytes",
        "plain",
        "sink",
        "stats",
        "throttled",
        "unpromised",
        "version",
        "writable",
    )

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self.broker = broker
        self.stats = broker.stats
        self._max_output = broker.limits.max_output_bytes
        self.maximum_out = LARGEST_PACKET
        self.plain = True
        """Messages without expiry and identifiers leave in the form in which they are kept: no 3.1.1, no aliases."""
        self._problem_information = True
        self.aliases_out: AliasesOut | None = None
        """Those that the client allows, if it allows any."""
        self.version = 5
        """The protocol level of its CONNECT: 5, or 4 for MQTT 3.1.1."""
        self.sink: Sink | None = None
        """Takes what need not be collected; None: everything is."""
        self.writable = True
        """False while the transport is full or this turn's output is: messages wait in the session."""
        self.throttled = False
        """This turn's output is full; the next turn goes on."""
        self.out: list[bytes | bytearray] = []
        self.out_bytes = 0
        """Of the messages in ``out``; answers are bounded by the input."""
        self.gate = 0
        """The commit before whose end nothing leaves any more: it promises what is recorded there. 0: it is done."""
        self.unpromised: UncommittedOutput | None = None
        """Output that waits for its commit."""
        self.dirty = False
        self.closing = False

    def mark(self) -> None:
        """There is something to flush."""
        raise NotImplementedError

    def send(self, packet: Packet) -> bool:
        """Encode and queue a packet that is no PUBLISH; diagnostics go when the client allows no more bytes.

        False when even then it is larger than the client takes, and nothing is sent.
        """
        if self.version == 5:
            data = encode_within(packet, self.maximum_out)
            if data is None:
                self.stats.dropped_too_large += 1
                return False
        else:
            data = encode_311(packet)
        self.out.append(data)
        self.stats.answers_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def send_publish(self, message: Message, packet_id: int, first: int, identifiers: bytes, now: int) -> bool:
        """Queue a PUBLISH: ``first`` is its first byte (type, DUP, QoS, RETAIN); ``packet_id`` 0 at QoS 0.

        False when it is larger than the client takes: then it counts as delivered [MQTT-3.1.2-24], [MQTT-3.1.2-25].
        """
        if not self.plain:
            return self._send_other_form(message, packet_id, first, identifiers, now)
        if message.expires_at or identifiers:
            properties = message.properties_for(identifiers, now)
        else:
            properties = message.properties_wire
        topic = message.topic_wire
        payload = message.payload
        remaining = len(topic) + len(properties) + len(payload)
        stats = self.stats
        heads = PUBLISH_HEADS.get(first)  # written out: it runs once a receiver, and a call costs as much as the rest
        if packet_id:
            remaining += 2
            head = heads[remaining] if heads is not None and remaining < 2048 else publish_head(first, remaining)
            if remaining + len(head) > self.maximum_out:
                stats.dropped_too_large += 1
                return False
            out = self.out
            out.append(head)
            out.append(topic)
            out.append(packet_id.to_bytes(2, "big"))
            out.append(properties)
            out.append(payload)
        else:
            head = heads[remaining] if heads is not None and remaining < 2048 else publish_head(first, remaining)
            if remaining + len(head) > self.maximum_out:
                stats.dropped_too_large += 1
                return False
            out = self.out
            out.append(head)
            out.append(topic)
            out.append(properties)
            out.append(payload)
        self.out_bytes += remaining
        if self.out_bytes > self._max_output:
            self.throttled = True
            self.writable = False
        stats.publishes_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def _send_other_form(self, message: Message, packet_id: int, first: int, identifiers: bytes, now: int) -> bool:
        """The same for MQTT 3.1.1, which has no properties, and for a client that allows Topic Aliases."""
        aliases = self.aliases_out
        topic = message.topic_wire
        number, known = aliases.find(topic) if aliases is not None else (0, False)
        if self.version != 5:
            properties = b""
        else:
            properties = message.properties_for(identifiers, now)
            if number:
                properties = with_alias(properties, number)
        identifier = packet_id.to_bytes(2, "big") if packet_id else b""
        sent_topic = b"\x00\x00" if known else topic
        remaining = len(sent_topic) + len(identifier) + len(properties) + len(message.payload)
        head = publish_head(first, remaining)
        if remaining + len(head) > self.maximum_out:
            self.stats.dropped_too_large += 1
            return False
        self.out += (head, sent_topic, identifier, properties, message.payload)
        if number and aliases is not None:
            aliases.set(topic, number)
        self.out_bytes += remaining
        if self.out_bytes > self._max_output:
            self.throttled = True
            self.writable = False
        self.stats.publishes_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def puback(self, packet_id: int, code: int, reason_string: str = "") -> None:
        """Answer a QoS 1 message."""
        if code == 0 or self.version != 5:
            self.out.append((0x40020000 | packet_id).to_bytes(4, "big"))
            self.stats.answers_sent += 1
            if not self.dirty:
                self.mark()
        elif code == _NO_SUBSCRIBERS and not reason_string and self.maximum_out > len(_NO_SUBSCRIBERS_PACKET):
            # The answer to every message that nobody wants.
            packet = _NO_SUBSCRIBERS_PACKET if self._problem_information else _NO_SUBSCRIBERS_SHORT
            self.out.append(packet[:2] + packet_id.to_bytes(2, "big") + packet[4:])
            self.stats.answers_sent += 1
            if not self.dirty:
                self.mark()
        else:
            self.send(PubAck(packet_id, code, self.explained(reason_string or PUBLISH_REASONS.get(code, ""))))

    def pubrec(self, packet_id: int, code: int, reason_string: str = "") -> None:
        """Answer a QoS 2 message."""
        if code == 0 or self.version != 5:
            self._send_short(0x50020000 | packet_id)
        else:
            self.send(PubRec(packet_id, code, self.explained(reason_string or PUBLISH_REASONS.get(code, ""))))

    def pubrel(self, packet_id: int, code: int = 0) -> None:
        """Release a QoS 2 message of ours."""
        if code == 0 or self.version != 5:
            self._send_short(0x62020000 | packet_id)
        else:
            self.send(PubRel(packet_id, code, self.explained(IDENTIFIER_REASONS.get(code, ""))))

    def pubcomp(self, packet_id: int, code: int = 0) -> None:
        """Complete a QoS 2 message of the client."""
        if code == 0 or self.version != 5:
            self._send_short(0x70020000 | packet_id)
        else:
            self.send(PubComp(packet_id, code, self.explained(IDENTIFIER_REASONS.get(code, ""))))

    def explained(self, text: str) -> Properties:
        """A Reason String, for a client that wants to hear one [MQTT-3.1.2-29]."""
        return diagnosis(text) if self._problem_information else Properties()

    def _send_short(self, packet: int) -> None:
        self.out.append(packet.to_bytes(4, "big"))
        self.stats.answers_sent += 1
        if not self.dirty:
            self.mark()
