"""The client without IO: what is asked for goes in, bytes and events come out; it outlives its network connections.

After each call the shell handles :meth:`ClientEngine.take_events` and sends what :meth:`ClientEngine.take` returns.
Operations carry a token of the caller, which comes back in :class:`Answered`. What has no answer when a connection ends
is kept: after the next CONNACK it is sent again, with DUP where the server still has the session, as new where it has
not [MQTT-4.4.0-1]; then subscriptions are made anew too.

Source: MQTT 5.0 chapters 3 and 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from penstock.errors import LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.decoder import LARGEST_PACKET, Decoder, Role, TopicNames
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.inflight import Inflight

__all__ = ["Answered", "ClientEngine", "ClientState", "Closed", "Connected", "Event", "Refused", "Unsubscribed"]

MAX_OPEN: Final = 65_000
"""Operations that may wait for an answer at once, so that packet identifiers are always free."""
PING_GRACE_MS: Final = 10_000
"""How long a PINGRESP may take before the connection counts as lost."""


class ClientState(Enum):
    """Where the network connection stands."""

    OFFLINE = "offline"
    CONNECTING = "connecting"
    CONNECTED = "connected"


@dataclass(slots=True)
class Connected:
    """The server accepted CONNECT."""

    packet: ConnAck


@dataclass(slots=True)
class Refused:
    """The server refused CONNECT; close the network connection."""

    packet: ConnAck


@dataclass(slots=True)
class Answered:
    """An operation is done: reason codes (one of a publish, one a filter else) and the server's words.

    ``error`` is set where it was given up here: the protocol or the server's announcements forbid it, or its message
    expiry is used up.
    """

    token: object
    reason_codes: Sequence[int]
    reason_string: str
    error: PenstockError | None = None


@dataclass(slots=True)
class Closed:
    """Close the network connection: the server said DISCONNECT, or one of the two broke the protocol or fell silent."""

    reason_code: int
    reason_string: str
    by_server: bool


@dataclass(slots=True)
class Unsubscribed:
    """A subscription that was in force is no more: the server lost the session and refused to make it again."""

    topic_filter: str
    reason_code: int


Event = Connected | Refused | Answered | Closed | Unsubscribed | Publish
"""What :meth:`ClientEngine.receive` and :meth:`ClientEngine.tick` report; a Publish is a message that came in."""


class _Operation:
    """Something the server has to answer. ``sent``: in its session, as far as we know; ``seen``: maybe in an older one.

    ``expires_at``: when the message is worth nothing any more, in ms; 0 = never.
    """

    __slots__ = ("expires_at", "packet", "seen", "sent", "token")

    def __init__(self, packet: Publish | Subscribe | Unsubscribe, token: object, expires_at: int = 0) -> None:
        self.packet = packet
        self.token = token
        self.expires_at = expires_at
        self.sent = False
        self.seen = False


class ClientEngine:
    """One client. ``connect`` is its first CONNECT; later ones carry Clean Start 0 and the identifier assigned."""

    def __init__(self, connect: Connect, *, max_packet_size: int = LARGEST_PACKET) -> None:
        self.connect = connect
        self.state = ClientState.OFFLINE
        self.writable = True
        self.server = ConnAck()
        """The last CONNACK that accepted us."""
        self.subscriptions: dict[str, tuple[Subscription, list[int]]] = {}
        """What the server granted, with the subscription identifiers: made anew when it lost the session."""
        self._max_packet_size = max_packet_size
        self._topics = TopicNames(1024)
        self._decoder = Decoder(max_packet_size, role=Role.CLIENT, topics=self._topics)
        self._out: list[bytes] = []
        self._inflight: Inflight[_Operation] = Inflight()
        self._waiting: deque[_Operation] = deque()
        self._open_publishes = 0
        self._send_maximum = 65_535
        self._events: list[Event] = []
        self._keep_alive_ms = 0
        self._last_sent = 0
        self._last_received = 0
        self._ping_sent = 0
        self._next_expiry = 0
        """When a message that waits for a connection expires, 0 for never; not kept while there is one."""
        self._connected_before = False

    # Network connections

    def begin(self, now: int) -> None:
        """A network connection is there: send CONNECT."""
        assert self.state is ClientState.OFFLINE
        if self._connected_before:
            self.connect = replace(self.connect, clean_start=False)
        self._decoder = Decoder(self._max_packet_size, role=Role.CLIENT, topics=self._topics)
        self._out.clear()
        self.writable = True
        self.state = ClientState.CONNECTING
        self._ping_sent = 0
        self._send(self.connect, now)

    def receive(self, data: bytes, now: int) -> list[Event]:
        """Handle what the bytes bring; messages among the events are already acknowledged in the output."""
        if self.state is ClientState.OFFLINE:
            return []
        self._last_received = now
        try:
            for packet in self._decoder.feed(data):
                if not self._handle(packet, now):
                    return self.take_events()
            if self._decoder.error is not None:
                raise self._decoder.error
        except RemoteProtocolError as e:
            if self.state is ClientState.CONNECTED:
                self._send(Disconnect(e.reason_code), now)
            self._close(e.reason_code, e.what, by_server=False)
        return self.take_events()

    def lost(self) -> None:
        """The network connection is gone; what has no answer waits for the next one."""
        self.state = ClientState.OFFLINE
        self._out.clear()
        unanswered = [op for op in self._inflight.values() if isinstance(op.packet, Publish) and op.sent]
        already = set(map(id, self._waiting))
        self._waiting.extendleft(op for op in reversed(unanswered) if id(op) not in already)
        self._open_publishes = 0
        self._find_next_expiry()

    def disconnect(self, now: int, reason_code: int = 0, session_expiry_s: int | None = None) -> None:
        """Say goodbye; the shell closes once the output is sent."""
        if self.state is ClientState.CONNECTED:
            self._send(Disconnect(reason_code, Properties(session_expiry_interval=session_expiry_s)), now)
        self.state = ClientState.OFFLINE

    def abandon(self) -> list[tuple[object, bool]]:
        """Give up everything that waits for an answer: its tokens, and whether the server may have seen it."""
        operations = {id(op): op for op in (*self._inflight.values(), *self._waiting)}
        self._inflight.clear()
        self._waiting.clear()
        self._open_publishes = 0
        return [(op.token, op.seen) for op in operations.values() if op.token is not None]

    def withdraw(self, token: object) -> None:
        """Nobody waits for the answer any more: forget the operation, unless it has been sent."""
        for operation in self._waiting:
            if operation.token is token:
                operation.token = None
                if not operation.sent:
                    self._waiting.remove(operation)
                return
        for packet_id, operation in self._inflight.items():
            if operation.token is token:
                operation.token = None
                if not operation.sent:
                    del self._inflight[packet_id]
                return

    @property
    def unsent(self) -> int:
        """Pieces of output that wait for :meth:`take`."""
        return len(self._out)

    def take(self) -> bytes:
        """The bytes to send now."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    # Operations

    def publish(self, publish: Publish, token: object, now: int, *, since: int | None = None) -> None:
        """Send a QoS 1 message as soon as connection and Receive Maximum allow; the answer comes with ``token``.

        Its message expiry runs from ``since`` (default: now): it leaves with what is left, or is given up.
        """
        given = publish.optional_properties
        expires_at = 0
        if given is not None and given.message_expiry_interval is not None:
            expires_at = (now if since is None else since) + given.message_expiry_interval * 1000
            if not self._next_expiry or expires_at < self._next_expiry:
                self._next_expiry = expires_at
        self._waiting.append(_Operation(publish, token, expires_at))
        self._pump(now)

    def publish_qos0(self, publish: Publish, now: int) -> None:
        """Send a QoS 0 message; the caller made sure that the client is connected.

        Raises:
            LocalProtocolError: it cannot be sent, or the server announced that it takes no such message.
        """
        data = encode(publish)
        self._check_announced(publish, len(data))
        self._out.append(data)
        self._last_sent = now

    def subscribe(self, subscriptions: list[Subscription], properties: Properties, token: object, now: int) -> None:
        """Ask for subscriptions; sent again after a reconnect until it is answered."""
        self._control(Subscribe(0, subscriptions, properties), token, now)

    def unsubscribe(self, topic_filters: list[str], properties: Properties, token: object, now: int) -> None:
        """End subscriptions; sent again after a reconnect until it is answered."""
        for topic_filter in topic_filters:
            self.subscriptions.pop(topic_filter, None)
        self._control(Unsubscribe(0, topic_filters, properties), token, now)

    def resume_writing(self, now: int) -> None:
        """The transport takes bytes again."""
        self.writable = True
        self._pump(now)

    # Time

    def next_deadline(self) -> int | None:
        """When :meth:`tick` has something to do, or None."""
        if self.state is not ClientState.CONNECTED:
            return self._next_expiry or None
        if not self._keep_alive_ms:
            return None
        # Also when only the server is silent: who sends QoS 0 alone would never find out that it is gone.
        silent_since = min(self._last_sent, self._last_received)
        return self._ping_sent + PING_GRACE_MS if self._ping_sent else silent_since + self._keep_alive_ms

    def tick(self, now: int) -> list[Event]:
        """Ping a silent connection, give up one that does not answer; without one give up messages that expired."""
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline:
            if self.state is not ClientState.CONNECTED:
                self._give_up_expired(now)
            elif self._ping_sent:
                self._close(ReasonCode.KEEP_ALIVE_TIMEOUT, "no PINGRESP", by_server=False)
            else:  # [MQTT-3.1.2-20]
                self._send(PingReq(), now)
                self._ping_sent = now
        return self.take_events()

    # Inside

    def _handle(self, packet: Packet, now: int) -> bool:
        """Handle one packet; False when the connection is over with it."""
        if self.state is ClientState.CONNECTING:
            if not isinstance(packet, ConnAck):
                raise protocol_error(f"{type(packet).__name__} before CONNACK [MQTT-3.2.0-1]")
            self._connack(packet, now)
        elif isinstance(packet, Publish):
            self._received(packet, now)
        elif isinstance(packet, PubAck):
            operation = self._inflight.get(packet.packet_id)
            if operation is not None and isinstance(operation.packet, Publish):
                del self._inflight[packet.packet_id]
                self._open_publishes -= 1
                given = packet.optional_properties
                self._answer(operation, (packet.reason_code,), given.reason_string if given is not None else None)
                if self._waiting:
                    self._pump(now)
        elif isinstance(packet, SubAck | UnsubAck):
            self._control_answer(packet)
        elif isinstance(packet, PingResp):
            self._ping_sent = 0
        elif isinstance(packet, Disconnect):
            self._close(packet.reason_code, packet.properties.reason_string or "", by_server=True)
        elif isinstance(packet, ConnAck):
            raise protocol_error("a second CONNACK [MQTT-3.2.0-2]")
        else:
            raise protocol_error(f"{type(packet).__name__} for nothing we sent")
        return self.state is not ClientState.OFFLINE

    def _connack(self, packet: ConnAck, now: int) -> None:
        if packet.reason_code >= 0x80:
            self.state = ClientState.OFFLINE
            self._events.append(Refused(packet))
            return
        if packet.session_present and self.connect.clean_start:
            raise protocol_error("Session Present after Clean Start [MQTT-3.2.2-2]")
        self.state = ClientState.CONNECTED
        self.server = packet
        properties = packet.properties
        if properties.assigned_client_identifier is not None:
            self.connect = replace(self.connect, client_id=properties.assigned_client_identifier)
        keep_alive = properties.server_keep_alive
        self._keep_alive_ms = (self.connect.keep_alive if keep_alive is None else keep_alive) * 1000
        self._send_maximum = properties.receive_maximum or 65_535
        self._events.append(Connected(packet))
        self._resume(now, present=packet.session_present)
        self._connected_before = True

    def _resume(self, now: int, *, present: bool) -> None:
        """Send again what has no answer: control packets and subscriptions first, then messages in order."""
        control = [op for op in self._inflight.values() if not isinstance(op.packet, Publish)]
        if not present:  # [MQTT-3.2.2-5]
            self._inflight.clear()
            for operation in (*control, *self._waiting):
                operation.packet.packet_id = 0
                operation.sent = False
            for wanted, identifiers in list(self.subscriptions.values()):
                properties = Properties(subscription_identifiers=identifiers)
                self._control(Subscribe(0, [wanted], properties), None, now)
        for operation in control:
            self._send_control(operation, now)
        self._pump(now)

    def _received(self, publish: Publish, now: int) -> None:
        if publish.qos == 2:
            raise RemoteProtocolError("mqtt: QoS 2 to subscriptions of at most QoS 1", reason_code=0x9B)
        given = publish.optional_properties
        if given is not None and given.topic_alias is not None:
            raise RemoteProtocolError("mqtt: Topic Alias where none is allowed", reason_code=0x94)
        if publish.qos:
            self._out.append((0x40020000 | publish.packet_id).to_bytes(4, "big"))
            self._last_sent = now
        self._events.append(publish)

    def _pump(self, now: int) -> None:
        """Send messages that wait, as far as connection and Receive Maximum allow."""
        if self.state is not ClientState.CONNECTED:
            return
        waiting = self._waiting
        inflight = self._inflight
        while waiting and self.writable and self._open_publishes < self._send_maximum and len(inflight) < MAX_OPEN:
            operation = waiting.popleft()
            publish = operation.packet
            assert isinstance(publish, Publish)
            if operation.expires_at and not self._count_down(operation, publish, now):
                continue
            if publish.packet_id == 0:
                publish.packet_id = inflight.free_id()
            publish.dup = operation.sent  # [MQTT-3.3.1-1]
            try:
                data = encode(publish)
                self._check_announced(publish, len(data))
            except LocalProtocolError as e:
                self._give_up(operation, e)
                continue
            inflight[publish.packet_id] = operation
            operation.sent = operation.seen = True
            self._open_publishes += 1
            self._out.append(data)
            self._last_sent = now

    def _count_down(self, operation: _Operation, publish: Publish, now: int) -> bool:
        """Let the message leave with what is left of its expiry; False when nothing is, and it was given up."""
        left = -((now - operation.expires_at) // 1000)
        if left < 0 or (left == 0 and publish.properties.message_expiry_interval):
            self._give_up(operation, _expired(publish, operation))
            return False
        if left < (publish.properties.message_expiry_interval or 0):
            publish.optional_properties = replace(publish.properties, message_expiry_interval=left)
        return True

    def _give_up_expired(self, now: int) -> None:
        waiting = self._waiting
        self._waiting = deque(op for op in waiting if not op.expires_at or op.expires_at > now)
        for operation in waiting:
            if operation.expires_at and operation.expires_at <= now:
                assert isinstance(operation.packet, Publish)
                self._give_up(operation, _expired(operation.packet, operation))
        self._find_next_expiry()

    def _find_next_expiry(self) -> None:
        self._next_expiry = min((op.expires_at for op in self._waiting if op.expires_at), default=0)

    def _give_up(self, operation: _Operation, error: PenstockError) -> None:
        """Answer a message that is not sent (any more)."""
        self._inflight.pop(operation.packet.packet_id, None)
        if operation.token is not None:
            self._events.append(Answered(operation.token, (), "", error))

    def _check_announced(self, publish: Publish, size: int) -> None:
        """Refuse what the server would close the connection for [MQTT-3.2.2-11], [MQTT-3.2.2-14], [MQTT-3.2.2-15]."""
        announced = self.server.properties
        if announced.maximum_packet_size is not None and size > announced.maximum_packet_size:
            why = f"it has {size} bytes, the server's Maximum Packet Size is {announced.maximum_packet_size}"
        elif announced.maximum_qos is not None and publish.qos > announced.maximum_qos:
            why = f"its QoS is {publish.qos}, the server's Maximum QoS is {announced.maximum_qos}"
        elif publish.retain and announced.retain_available == 0:
            why = "it is to be retained, and the server has no retained messages"
        else:
            return
        raise LocalProtocolError(f"mqtt: the message to {publish.topic!r} was not sent", why=why)

    def _control(self, packet: Subscribe | Unsubscribe, token: object, now: int) -> None:
        if len(self._inflight) >= MAX_OPEN:
            raise LocalProtocolError(f"mqtt: {MAX_OPEN} operations wait for an answer", do="wait for some of them")
        operation = _Operation(packet, token)
        packet.packet_id = self._inflight.free_id()
        self._inflight[packet.packet_id] = operation
        if self.state is ClientState.CONNECTED:
            self._send_control(operation, now)

    def _send_control(self, operation: _Operation, now: int) -> None:
        packet = operation.packet
        if packet.packet_id == 0:
            packet.packet_id = self._inflight.free_id()
        self._inflight[packet.packet_id] = operation
        operation.sent = operation.seen = True
        self._send(packet, now)

    def _control_answer(self, packet: SubAck | UnsubAck) -> None:
        operation = self._inflight.get(packet.packet_id)
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
        del self._inflight[packet.packet_id]
        if isinstance(asked, Subscribe):
            for wanted, code in zip(asked.subscriptions, packet.reason_codes, strict=True):
                if code < 0x80:
                    self.subscriptions[wanted.topic_filter] = (wanted, asked.properties.subscription_identifiers)
                elif operation.token is None and self.subscriptions.pop(wanted.topic_filter, None) is not None:
                    self._events.append(Unsubscribed(wanted.topic_filter, code))
        self._answer(operation, packet.reason_codes, packet.properties.reason_string)

    def _answer(self, operation: _Operation, reason_codes: Sequence[int], reason_string: str | None) -> None:
        if operation.token is not None:
            self._events.append(Answered(operation.token, reason_codes, reason_string or ""))

    def _send(self, packet: Packet, now: int) -> None:
        self._out.append(encode(packet))
        self._last_sent = now

    def _close(self, reason_code: int, reason_string: str, *, by_server: bool) -> None:
        self.state = ClientState.OFFLINE
        self._events.append(Closed(int(reason_code), reason_string, by_server))

    def take_events(self) -> list[Event]:
        """What happened outside of :meth:`receive` and :meth:`tick`: messages refused before they were sent."""
        events = self._events
        self._events = []
        return events


def _expired(publish: Publish, operation: _Operation) -> UnavailableError:
    return UnavailableError(
        f"mqtt: the message to {publish.topic!r} expired before it was acknowledged",
        applied=None if operation.seen else False,
        why="its message expiry was used up while the server was away or took no more",
    )
