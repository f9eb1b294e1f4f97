"""One network connection of the broker: bytes in, packets handled, bytes out.

What is to be sent collects in ``out`` and leaves as one piece when the shell flushes the connection; ``closing`` says
that the connection ends after it. Errors of the peer are answered with CONNACK before it is accepted, with DISCONNECT
afterwards [MQTT 5.0 section 4.13].
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import LARGEST_PACKET, Decoder, Role
from penstock.mqtt.codec.encoder import encode_within, publish_head
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.session import Session
from penstock.mqtt.engine.timers import Timed
from penstock.mqtt.service import Inbound

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker

__all__ = ["BrokerConnection", "is_text"]

LONGEST_REASON: Final = 500
"""Characters of a Reason String; the rest is cut, since texts of services may quote what clients sent."""


def is_text(payload: bytes) -> bool:
    """Whether a payload with Payload Format Indicator 1 is what it says: UTF-8 [MQTT 5.0 section 3.3.2.3.2]."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def _diagnosis(text: str) -> Properties:
    """A Reason String that can be sent, whatever the text."""
    if not text:
        return Properties()
    sendable = text[:LONGEST_REASON].encode(errors="replace").replace(b"\0", b"?").decode()
    return Properties(reason_string=sendable)


class _PendingAck:
    """A PUBACK that waits for the services that took the message, or for an earlier PUBACK."""

    __slots__ = ("connection", "packet_id", "reason_code", "reason_string", "waiting")

    def __init__(self, connection: BrokerConnection, packet_id: int, reason_code: int, waiting: int) -> None:
        self.connection = connection
        self.packet_id = packet_id
        self.reason_code = reason_code
        self.reason_string = ""
        self.waiting = waiting

    def settle(self, reason_code: int, reason_string: str) -> None:
        self.waiting -= 1
        if reason_code >= 0x80 and reason_code > self.reason_code:
            if reason_code not in ALLOWED[PacketType.PUBACK]:
                reason_code = ReasonCode.UNSPECIFIED_ERROR
            self.reason_code = reason_code
            self.reason_string = reason_string
        if not self.waiting:
            self.connection.acknowledge_settled()


class BrokerConnection(Timed):
    """Made by :meth:`Broker.open`; the shell feeds :meth:`receive` and takes the output from :meth:`Broker.flush`."""

    __slots__ = (
        "_acks",
        "_broker",
        "_decoder",
        "_full_since",
        "_last_received",
        "_max_output",
        "_maximum_out",
        "_problem_information",
        "_stats",
        "_was_held",
        "closing",
        "connected_at",
        "dirty",
        "holds",
        "keep_alive_ms",
        "name",
        "out",
        "out_bytes",
        "send_maximum",
        "session",
        "throttled",
        "writable",
    )

    def __init__(self, broker: Broker, name: str, now: int) -> None:
        super().__init__()
        self._broker = broker
        self._stats = broker.stats
        limits = broker.limits
        self._decoder = Decoder(
            limits.max_packet_size, role=Role.SERVER, topics=broker.topics, max_connect_size=limits.max_connect_size
        )
        self._acks: deque[_PendingAck] = deque()
        self._last_received = now
        self._full_since: int | None = None
        """When the transport became full; None while it is not."""
        self._max_output = limits.max_output_bytes
        self._maximum_out = LARGEST_PACKET
        self._problem_information = True
        self.name = name
        """Who it is, for logs: the peer's address."""
        self.connected_at = now
        self.keep_alive_ms = 0
        self.session: Session | None = None
        self.send_maximum = 65_535
        self.writable = True
        """False while the transport is full or this turn's output is: messages wait in the session."""
        self.throttled = False
        """This turn's output is full; the next turn goes on."""
        self.out: list[bytes] = []
        self.out_bytes = 0
        """Of the messages in ``out``; answers are bounded by the input."""
        self.dirty = False
        self._was_held = False
        """Whether it was held since the last look at its keep alive."""
        self.holds = 0
        """While it is not 0 the shell reads nothing: a service cannot take more."""
        self.closing = False

    # Input

    def receive(self, data: bytes, now: int, wall_ms: int) -> None:
        """Handle what the bytes bring. ``now``: monotonic ms; ``wall_ms``: wall clock, for the services."""
        closed = self.closing
        if closed:
            return
        self._last_received = now
        broker = self._broker
        broker.wall_offset = wall_ms - now
        stats = broker.stats
        stats.bytes_received += len(data)
        try:
            packets = self._decoder.feed(data)
            stats.packets_received += len(packets)
            for packet in packets:
                kind = type(packet)
                if self.session is None:
                    self._before_connect(packet, now)
                elif kind is Publish:
                    self._publish(packet, now, wall_ms)  # type: ignore[arg-type]
                elif kind is PubAck:
                    self.session.acknowledge(packet.packet_id, now)  # type: ignore[union-attr]
                else:
                    self._other(packet, now)
                if self.closing:
                    return
            if self._decoder.error is not None:
                raise self._decoder.error
        except RemoteProtocolError as e:
            self._fail(e, now)

    @property
    def unacknowledged(self) -> int:
        """QoS 1 messages that came in and have no PUBACK yet."""
        return len(self._acks)

    def pause(self, now: int) -> None:
        """The transport is full."""
        self.writable = False
        self._full_since = now
        self._broker.timers.arm(self, now + self._broker.limits.write_stall_ms)

    def unpause(self, now: int) -> None:
        """The transport takes bytes again."""
        self._full_since = None
        self._go_on(now)

    def end_throttle(self, now: int) -> None:
        """A new turn: there is room for output again."""
        self.throttled = False
        self._go_on(now)

    def _go_on(self, now: int) -> None:
        self.writable = self._full_since is None and not self.throttled
        if self.writable and self.session is not None and not self.closing:
            self.session.send_waiting(now)

    def lost(self, now: int) -> None:
        """The network connection is gone; call it once."""
        self._broker.connection_lost(self, now)

    def due(self, now: int) -> None:
        """CONNECT, the next packet or room to write is overdue, or was: then arm for the real deadline."""
        if self.closing:
            return
        limits = self._broker.limits
        if self.session is None:
            deadline = self.connected_at + limits.connect_timeout_ms
            if now >= deadline:
                self.close()
                return
            self._broker.timers.arm(self, deadline)
            return
        if self._was_held:  # its silence was ours
            self._was_held = self.holds > 0
            self._last_received = now
        if self.keep_alive_ms:
            deadline = self._last_received + self.keep_alive_ms
            if now >= deadline:  # [MQTT-3.1.2-22]
                self.disconnect(ReasonCode.KEEP_ALIVE_TIMEOUT, now)
                return
            self._broker.timers.arm(self, deadline)
        if self._full_since is not None:
            deadline = self._full_since + limits.write_stall_ms
            if now >= deadline:
                self._stats.write_stalls += 1
                self.disconnect(ReasonCode.QUOTA_EXCEEDED, now, "the client does not read")
                return
            self._broker.timers.arm(self, deadline)

    # Output

    def mark(self) -> None:
        """There is something to flush."""
        if not self.dirty:
            self.dirty = True
            self._broker.mark_dirty(self)

    def send(self, packet: Packet) -> bool:
        """Encode and queue a packet that is no PUBLISH; diagnostics go when the client allows no more bytes.

        False when even then it is larger than the client takes, and nothing is sent.
        """
        data = encode_within(packet, self._maximum_out)
        if data is None:
            self._broker.stats.dropped_too_large += 1
            return False
        self.out.append(data)
        self._broker.stats.answers_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def send_publish(self, message: Message, packet_id: int, flags: int, identifiers: bytes, now: int) -> bool:
        """Queue a PUBLISH: QoS 1 with a ``packet_id``, QoS 0 with 0; ``flags`` are RETAIN (1) and DUP (8).

        False when it is larger than the client takes: then it counts as delivered [MQTT-3.1.2-24], [MQTT-3.1.2-25].
        """
        if message.expires_at or identifiers:
            properties = message.properties_for(identifiers, now)
        else:
            properties = message.properties_wire
        topic = message.topic_wire
        payload = message.payload
        remaining = len(topic) + len(properties) + len(payload)
        stats = self._stats
        if packet_id:
            remaining += 2
            head = publish_head(0x32 | flags, remaining)
            if remaining + len(head) > self._maximum_out:
                stats.dropped_too_large += 1
                return False
            self.out += (head, topic, packet_id.to_bytes(2, "big"), properties, payload)
        else:
            head = publish_head(0x30 | flags, remaining)
            if remaining + len(head) > self._maximum_out:
                stats.dropped_too_large += 1
                return False
            self.out += (head, topic, properties, payload)
        self.out_bytes += remaining
        if self.out_bytes > self._max_output:
            self.throttled = True
            self.writable = False
        stats.publishes_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def disconnect(self, reason_code: int, now: int, reason_string: str = "") -> None:
        """End the connection: DISCONNECT with the code once it is accepted, just a close before [MQTT-3.14.0-1]."""
        if self.closing:
            return
        self._say_goodbye(reason_code, reason_string)
        self._broker.connection_ended(self, now)

    def end(self, reason_code: int, reason_string: str) -> None:
        """As :meth:`disconnect`, for who does not know the time: the session goes offline with the next flush."""
        if self.closing:
            return
        self._say_goodbye(reason_code, reason_string)
        self.writable = False  # nothing may follow: messages wait in the session
        self._broker.ended.append(self)

    def hold(self) -> None:
        """Have the shell read nothing more until :meth:`release` was called as often."""
        self.holds += 1
        self._was_held = True

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self.holds -= 1
        if not self.holds:
            self.mark()

    def _say_goodbye(self, reason_code: int, reason_string: str) -> None:
        if self.session is not None:
            self.send(Disconnect(int(reason_code), _diagnosis(reason_string)))
        self.close()

    def close(self) -> None:
        """Close after what is queued."""
        self.closing = True
        self.mark()

    # Packets

    def _before_connect(self, packet: Packet, now: int) -> None:
        if not isinstance(packet, Connect):  # [MQTT-3.1.0-1]
            self._broker.stats.protocol_errors += 1
            self.close()
            return
        properties = packet.properties
        self._maximum_out = properties.maximum_packet_size or LARGEST_PACKET
        self._problem_information = properties.request_problem_information != 0
        limits = self._broker.limits
        self.send_maximum = min(properties.receive_maximum or 65_535, limits.max_inflight)
        keep_alive = packet.keep_alive
        if limits.max_keep_alive_s and not 0 < keep_alive <= limits.max_keep_alive_s:
            keep_alive = limits.max_keep_alive_s
        self.keep_alive_ms = keep_alive * 1500
        self._broker.connect(self, packet, keep_alive, now)
        if self.session is not None and self.keep_alive_ms:
            self._broker.timers.arm(self, now + self.keep_alive_ms)

    def refuse(self, reason_code: int, why: str = "") -> None:
        """Answer CONNECT with a refusal and close [MQTT-3.2.2-7]."""
        self._broker.stats.connections_refused += 1
        self.send(ConnAck(reason_code=int(reason_code), properties=_diagnosis(why)))
        self.close()

    def _publish(self, publish: Publish, now: int, wall_ms: int) -> None:
        """A message of the client: route it, hand it to services, acknowledge it."""
        broker = self._broker
        session = self.session
        assert session is not None
        broker.stats.publishes_received += 1
        properties = publish.optional_properties
        refusal = 0
        if properties is not None:
            if properties.topic_alias is not None:  # [MQTT-3.2.2-18]
                raise RemoteProtocolError("mqtt: Topic Alias where none is allowed", reason_code=0x94)
            if properties.payload_format_indicator and not is_text(publish.payload):
                refusal = ReasonCode.PAYLOAD_FORMAT_INVALID
        qos = publish.qos
        if qos == 0:
            taken, code = broker.route(publish, session, now) if not refusal else ((), refusal)
            if code >= 0x80:
                broker.stats.dropped_refused += 1
            for service in taken:
                service.receive(
                    Inbound(publish, session.client_id, wall_ms, username=session.username, connection=self)
                )
            return
        if qos == 2:
            raise RemoteProtocolError("mqtt: QoS 2 above the Maximum QoS 1 announced", reason_code=0x9B)
        acks = self._acks
        if len(acks) >= broker.limits.receive_maximum:
            raise RemoteProtocolError("mqtt: more messages without PUBACK than Receive Maximum", reason_code=0x93)
        taken, code = broker.route(publish, session, now) if not refusal else ((), refusal)
        if not taken:
            if acks:
                acks.append(_PendingAck(self, publish.packet_id, code, 0))
            else:
                self._puback(publish.packet_id, code)
            return
        pending = _PendingAck(self, publish.packet_id, code, len(taken))
        acks.append(pending)
        for service in taken:
            service.receive(
                Inbound(
                    publish,
                    session.client_id,
                    wall_ms,
                    username=session.username,
                    connection=self,
                    settle=pending.settle,
                )
            )

    def acknowledge_settled(self) -> None:
        """Send the PUBACKs that are ready, in the order in which the messages came [MQTT-4.6.0-2]."""
        if self.closing:
            return
        acks = self._acks
        while acks and not acks[0].waiting:
            ack = acks.popleft()
            self._puback(ack.packet_id, ack.reason_code, ack.reason_string)

    def _puback(self, packet_id: int, code: int, reason_string: str = "") -> None:
        if code == 0:
            self.out.append((0x40020000 | packet_id).to_bytes(4, "big"))
            self._stats.answers_sent += 1
            if not self.dirty:
                self.mark()
        elif reason_string and self._problem_information:  # [MQTT-3.1.2-29]
            self.send(PubAck(packet_id, code, _diagnosis(reason_string)))
        else:
            self.send(PubAck(packet_id, code))

    def _other(self, packet: Packet, now: int) -> None:
        """Everything but PUBLISH and PUBACK, on an accepted connection."""
        session = self.session
        assert session is not None
        broker = self._broker
        if isinstance(packet, PingReq):
            self.out.append(b"\xd0\x00")  # [MQTT-3.12.4-1]
            broker.stats.answers_sent += 1
            self.mark()
        elif isinstance(packet, Subscribe):
            self.send(SubAck(packet.packet_id, broker.subscribe(session, packet)))
            if session.replays:
                session.send_waiting(now)
        elif isinstance(packet, Unsubscribe):
            self.send(UnsubAck(packet.packet_id, broker.unsubscribe(session, packet.topic_filters)))
        elif isinstance(packet, Disconnect):
            self._disconnect(packet, now)
        elif isinstance(packet, PubRec):  # we send no QoS 2, so the identifier cannot be known
            self.send(PubRel(packet.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
        elif isinstance(packet, PubRel):
            self.send(PubComp(packet.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
        elif isinstance(packet, Connect):
            raise protocol_error("a second CONNECT [MQTT-3.1.0-2]")
        elif isinstance(packet, Auth):
            raise protocol_error("AUTH without an Authentication Method in CONNECT [MQTT-4.12.0-7]")

    def _disconnect(self, packet: Disconnect, now: int) -> None:
        session = self.session
        assert session is not None
        expiry = packet.properties.session_expiry_interval
        if expiry is not None:
            if expiry and not session.expiry_s:
                raise protocol_error("Session Expiry Interval on DISCONNECT after 0 on CONNECT")
            session.expiry_s = min(expiry, self._broker.limits.max_session_expiry_s)
        if packet.reason_code == 0:
            session.will = None  # [MQTT-3.1.2-10]
        self.close()
        self._broker.connection_ended(self, now)

    def _fail(self, error: RemoteProtocolError, now: int) -> None:
        """The peer broke the protocol: say so where it is allowed, and close [MQTT-4.13.1-1]."""
        self._broker.stats.protocol_errors += 1
        self._broker.report(self, error)
        if self.session is not None:
            self.disconnect(error.reason_code, now, error.what)
            return
        if error.reason_code == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION and self._decoder.protocol_level < 5:
            self.out.append(b"\x20\x02\x00\x01")  # the CONNACK of MQTT 3.1.1: unacceptable protocol version
        elif self._decoder.connect_seen:
            self.send(ConnAck(reason_code=error.reason_code, properties=_diagnosis(error.what)))
        self.close()

    def __repr__(self) -> str:
        client = self.session.client_id if self.session is not None else "not connected"
        return f"<BrokerConnection {self.name} {client!r}>"
