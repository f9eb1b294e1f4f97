"""Clients of MQTT that follow the protocol: sessions, subscriptions, messages of every QoS, wills.

A client never loses its own state. It connects again after every loss, resumes its session, sends again what was not
acknowledged, and subscribes again where its session has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
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
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from tests.simulation.history import History, Violation
from tests.simulation.loop import VirtualLoop
from tests.simulation.mqtt_history import Message, MqttHistory, Wanted, Window
from tests.simulation.node import Connection, SimulatedNode
from tests.simulation.tube_client import LogHistory

__all__ = ["CLIENTS", "TOPICS", "MqttClient", "MqttStep", "RetainedReader", "mqtt_step"]

TOPICS = [f"t/{number}" for number in range(6)]
EXPIRY_S = [100_000, 100_000, 100_000, 100_000, 20, 0]
"""Session Expiry Interval of each client. Only sessions that never end may be in the way of a shared subscription."""
CLIENTS = len(EXPIRY_S)
FIRST_SHARING = 3
WINDOW = 8
"""Messages of a client without acknowledgement."""
FLOOD = 600
"""Messages of QoS 0 without a receiver, in one write: more than all shares of a loop turn."""
CROWD = 40
"""Clients that connect and end their direction at the same time: more than the share of connections of a turn."""
PING_S = 30.0
KEEP_ALIVE_S = 60
NOTICED_S = 65.0
"""Time in which a node notices that a connection was cut; pauses are not counted."""

ALLOWED = {
    0x83: "the disk failed",
    0x88: "unavailable",
    0x89: "the log failed",
    0x8B: "the node stops",
    0x8E: "taken over",
    0x98: "an administrator",
}
"""Reason codes with which a broker may end a connection of these clients."""


class MqttStep(NamedTuple):
    """One operation of a client. ``away_s``: how long it stays away after the end of its connection."""

    client: int
    kind: str
    topic: str = ""
    qos: int = 0
    retain: bool = False
    clear: bool = False
    expiry_s: int = 0
    padding: int = 0
    away_s: float = 0.0
    clean: bool = False


def mqtt_step(random: Random) -> MqttStep:
    """A random operation of a random client."""
    client = random.randrange(CLIENTS)
    leaving = ("disconnect", "disconnect and end", "cut", "end", "silence", "take over")
    kinds = ("publish", "subscribe", "unsubscribe", "flood", "crowd", *leaving)
    kind = random.choices(kinds, (85, 5, 3, 0.7, 0.3, 0.75, 0.75, 1, 1, 1, 1.5))[0]
    if kind == "publish":
        retain = random.random() < 0.15
        return MqttStep(
            client,
            kind,
            random.choice(TOPICS),
            random.choices((0, 1, 2), (20, 40, 40))[0],
            retain,
            retain and random.random() < 0.2,
            0 if retain else random.choice((0, 0, 0, 5, 600)),
            random.choice((0, 0, 10, 700)),
        )
    shares = client >= FIRST_SHARING and EXPIRY_S[client] > 1000
    if kind == "subscribe":
        topic = random.choice([*TOPICS * 3, "t/+", "t/#"])
        if client < FIRST_SHARING and random.random() < 0.4:
            return MqttStep(client, kind, f"$share/g/{topic}", random.choice((1, 2)))
        return MqttStep(client, kind, topic, random.choice((0, 1, 2)))
    if kind in {"unsubscribe", "flood", "crowd"}:
        return MqttStep(client, kind)
    clean = (shares or EXPIRY_S[client] < 1000) and random.random() < 0.3
    return MqttStep(client, kind, away_s=random.choice((0.01, 0.5, 3.0, 15.0, 25.0, 90.0)), clean=clean)


class Simulation(Protocol):
    """What clients need of the simulation."""

    history: History
    mqtt: MqttHistory
    tube: LogHistory
    loop: VirtualLoop
    node: SimulatedNode
    paused_s: float

    def next_number(self) -> int: ...

    def check_done(self) -> None: ...

    def check_failed(self) -> None: ...


class _Attachment:
    """One connection of a client, from the client's view."""

    def __init__(self, client: MqttClient, connection: Callable[[_Attachment], Connection], now_ms: int) -> None:
        self.client = client
        self.decoder = Decoder(role=Role.CLIENT)
        self.sent_ms = now_ms
        self.is_ready = False
        self.disconnects = False
        """DISCONNECT was sent."""
        self.was_told = False
        """DISCONNECT was received."""
        self.unwanted_ms: int | None = None
        """When an administrator disconnected it: the broker may have ended it while its output waits for a commit."""
        self.will: Message | None = None
        self.delay_s = 0
        self.connection = connection(self)

    @property
    def ended_ms(self) -> int | None:
        """When the connection has ended at the earliest; None: it exists."""
        return self.unwanted_ms or self.connection.ended_ms

    def will_due_ms(self) -> int | None:
        """When the will may be published at the earliest; None while the connection exists."""
        ended_ms = self.ended_ms
        return None if ended_ms is None else ended_ms + min(self.delay_s, self.client.expiry_s) * 1000

    def send(self, packet: Packet) -> None:
        self.connection.send(encode(packet))

    def data_received(self, data: bytes) -> None:
        for packet in self.decoder.feed(data):
            if self.client.attachment is self:
                self.client.received(packet)
        if self.decoder.error is not None:
            raise Violation(f"{self.client.name} cannot read: {self.decoder.error}")

    def connection_lost(self) -> None:
        if self.client.attachment is self:
            self.client.connection_lost()


class _Outgoing:
    """A message without its last acknowledgement."""

    __slots__ = ("is_released", "message", "padding")

    def __init__(self, message: Message, padding: int) -> None:
        self.message = message
        self.padding = padding
        self.is_released = False


class MqttClient:
    """A client with a session. Its steps are carried out in order, as fast as its window allows."""

    def __init__(self, simulation: Simulation, name: str, expiry_s: int, random: Random) -> None:
        self.name = name
        self.expiry_s = expiry_s
        self.steps: deque[MqttStep] = deque()
        self.attachment: _Attachment | None = None
        self.windows: list[Window] = []
        self.unwanted_until_ms = 0.0
        """Until when a request of an administrator, which names the client, may end a new connection."""
        self._simulation = simulation
        self._random = random
        self._clean = False
        self._packet_id = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, None] = {}
        """QoS 2 messages without PUBREL."""
        self._wanted: dict[str, Wanted] = {}
        self._asked: tuple[int, Wanted, bool] | None = None
        """Packet identifier of a SUBSCRIBE (True) or UNSUBSCRIBE without its answer."""
        self._again: list[tuple[str, int]] = []
        """Subscriptions of a session that has ended."""
        self._has_session = False
        self._lost_ms: int | None = None
        """First loss of a connection since the last CONNACK, or DISCONNECT."""
        self._old_wills: list[tuple[Message, int, bool, float]] = []
        """Wills of ended connections whose delay may still run, with their delay, whether the node must notice, and the
        length of all pauses before."""

    @property
    def is_done(self) -> bool:
        """Whether it is connected, with nothing to do."""
        is_ready = self.attachment is not None and self.attachment.is_ready
        return is_ready and not (self.steps or self._outgoing or self._asked or self._again)

    @property
    def is_connected(self) -> bool:
        """Whether its connection is accepted and open, as far as both ends know."""
        attachment = self.attachment
        if attachment is None or not attachment.is_ready or attachment.disconnects:
            return False
        return attachment.ended_ms is None

    # Connections

    def connect(self) -> None:
        """Connect; a connection that is there is left to be taken over."""
        simulation = self._simulation
        now_ms = simulation.loop.true_ms()
        if self.attachment is not None:
            self._end_connection(now_ms)
        simulation.check_failed()
        if self._clean:
            for wanted in self._wanted.values():
                wanted.end_asked_ms = wanted.end_asked_ms or now_ms
        for will, delay_s, must_notice, paused_s in self._old_wills:
            assert will.sent_ms is not None
            if self._clean:
                will.sent_ms = min(will.sent_ms, now_ms)
                continue
            noticed_s = NOTICED_S + simulation.paused_s - paused_s
            if delay_s and must_notice and now_ms > will.sent_ms + noticed_s * 1000:
                will.acked_ms = now_ms
        attachment = self.attachment = _Attachment(self, simulation.node.accept, now_ms)
        if now_ms < self.unwanted_until_ms:
            attachment.unwanted_ms = now_ms
        packet = Connect(self.name, self._clean, KEEP_ALIVE_S)
        packet.properties.session_expiry_interval = self.expiry_s
        if self._random.random() < 0.5:
            packet.will = self._new_will(attachment)
        attachment.send(packet)
        simulation.history.note(f"{now_ms} {self.name} connects clean={self._clean}")
        simulation.loop.call_later(PING_S, self._ping, attachment)

    def _new_will(self, attachment: _Attachment) -> Will:
        random = self._random
        number = self._simulation.next_number()
        message = Message(number, self.name, random.choice(TOPICS), random.choice((0, 1, 2)), is_will=True)
        message.retain = random.random() < 0.2
        attachment.will = self._simulation.mqtt.publish(message, None)
        message.ended = attachment.will_due_ms
        attachment.delay_s = random.choice((0, 0, 2, 30))
        will = Will(message.topic, b"will", message.qos, message.retain)
        will.properties.correlation_data = b"%d" % number
        if attachment.delay_s:
            will.properties.will_delay_interval = attachment.delay_s
        tube = self._simulation.tube
        if message.topic in tube.captured_topics:
            # Known to the log's history as every message: a group that has read a will may confirm its offset. It may
            # be stored again, since power may be lost between the append and the commit that the will was published.
            tube.send(self.name, number, repeats=True)
            will.properties.user_properties = self._captured(number)
        return will

    def _captured(self, number: int) -> list[tuple[str, str]]:
        """User properties by which a captured message is recognized in the log."""
        return [("publisher", self.name), ("number", str(number))]

    def connection_lost(self) -> None:
        """The connection has ended; connect again soon."""
        self._end_connection(self._simulation.loop.true_ms())
        self._simulation.loop.soon(0.2, self._connect_unless_connected)

    def _connect_unless_connected(self) -> None:
        if self.attachment is None:
            self.connect()

    def power_lost(self) -> None:
        """The node has lost power."""
        if self.attachment is not None:
            self._end_connection(self._simulation.loop.true_ms(), power=True)

    def _end_connection(self, now_ms: int, *, power: bool = False) -> None:
        attachment, self.attachment = self.attachment, None
        assert attachment is not None
        lost_ms = attachment.connection.ended_ms or now_ms
        if attachment.is_ready:
            self.windows[-1].end_ms = lost_ms
        lost_ms = attachment.ended_ms or now_ms  # the broker may have ended it before
        self._lost_ms = min(self._lost_ms or lost_ms, lost_ms)
        will = attachment.will
        if will is None:
            return
        delay_s = min(attachment.delay_s, self.expiry_s)
        connection = attachment.connection
        was_heard = connection.closed_by_server and not (connection.is_silent or attachment.was_told)
        if attachment.disconnects and was_heard:
            will.sent_ms = now_ms
            will.why_not = "it was withdrawn"
            return
        will.sent_ms = lost_ms + delay_s * 1000
        will.why_not = ""
        is_stored = attachment.is_ready and self.expiry_s > 0
        if is_stored and not delay_s and not attachment.disconnects:
            will.acked_ms = will.sent_ms + self._simulation.mqtt.ample_ms // 2
        is_noticed = connection.is_cut and not connection.is_silent
        must_notice = is_noticed and is_stored and not (power or attachment.disconnects)
        self._old_wills.append((will, delay_s, must_notice, self._simulation.paused_s))

    # Packets

    def received(self, packet: Packet) -> None:
        """A packet has arrived."""
        attachment = self.attachment
        if attachment is None:
            return
        if isinstance(packet, Publish):
            self._publish_received(attachment, packet)
        elif isinstance(packet, PubAck | PubRec):
            self._acknowledged(attachment, packet)
        elif isinstance(packet, PubRel):
            self._incoming.pop(packet.packet_id, None)
            attachment.send(PubComp(packet.packet_id))
        elif isinstance(packet, PubComp):
            self._outgoing.pop(packet.packet_id, None)
        elif isinstance(packet, ConnAck):
            self._connected(attachment, packet)
        elif isinstance(packet, SubAck | UnsubAck):
            self._answered(packet)
        elif isinstance(packet, Disconnect):
            attachment.was_told = True
            if packet.reason_code not in ALLOWED:
                raise Violation(f"{self.name} was disconnected: {packet}")
        elif not isinstance(packet, PingResp):
            raise Violation(f"{self.name} received {packet}")
        self.go_on()

    def _connected(self, attachment: _Attachment, packet: ConnAck) -> None:
        simulation = self._simulation
        now_ms = simulation.loop.true_ms()
        simulation.history.note(f"{now_ms} {self.name} {packet}")
        if packet.reason_code:
            if packet.reason_code not in ALLOWED:
                raise Violation(f"{self.name} was refused: {packet}")
            return
        present = packet.session_present
        if self._clean and present:
            raise Violation(f"{self.name} asked for a new session and got an old one")
        if not present:
            self._session_ended(now_ms)
        else:
            for will, delay_s, *_ in self._old_wills:
                if delay_s and will.sent_ms is not None and attachment.sent_ms < will.sent_ms:
                    will.why_not = "its client had resumed the session before its delay passed"
        self._old_wills.clear()
        self._clean = False
        self._has_session = self.expiry_s > 0
        self._lost_ms = None
        attachment.is_ready = True
        self.windows.append(Window(now_ms))
        for packet_id, outgoing in self._outgoing.items():
            if outgoing.is_released:
                attachment.send(PubRel(packet_id))
            else:
                outgoing.message.was_repeated = True
                self._send(attachment, packet_id, outgoing, dup=True)
        if self._asked is not None:
            self._ask(attachment, *self._asked)

    def _session_ended(self, now_ms: int) -> None:
        lost_ms = now_ms if self._lost_ms is None else self._lost_ms
        if self._has_session and not self._clean and now_ms < lost_ms + self.expiry_s * 1000:
            raise Violation(
                f"the session of {self.name} ended at {now_ms}, {now_ms - lost_ms} ms after its connection; "
                f"it has {self.expiry_s} s"
            )
        self._outgoing.clear()
        self._incoming.clear()
        self._asked = None
        for wanted in self._wanted.values():
            wanted.end_asked_ms = wanted.end_asked_ms or lost_ms
            wanted.ended_ms = now_ms
        self._again += [(wanted.topic_filter, wanted.qos) for wanted in self._wanted.values()]
        self._wanted.clear()

    def _publish_received(self, attachment: _Attachment, packet: Publish) -> None:
        simulation = self._simulation
        now_ms = simulation.loop.true_ms()
        number = int(packet.properties.correlation_data or b"0")
        simulation.history.note(f"{now_ms} {self.name} received {number} {packet.qos} {packet.packet_id}")
        repeated = packet.qos == 2 and packet.packet_id in self._incoming
        if not repeated:
            simulation.mqtt.receive(
                self.name,
                number,
                packet.properties.subscription_identifiers,
                packet.qos,
                now_ms,
                retained=packet.retain,
                topic=packet.topic,
            )
        if packet.qos == 1:
            attachment.send(PubAck(packet.packet_id))
        elif packet.qos == 2:
            self._incoming[packet.packet_id] = None
            attachment.send(PubRec(packet.packet_id))

    def _acknowledged(self, attachment: _Attachment, packet: PubAck | PubRec) -> None:
        simulation = self._simulation
        outgoing = self._outgoing.get(packet.packet_id)
        now_ms = simulation.loop.true_ms()
        simulation.history.note(f"{now_ms} {self.name} {packet}")
        if outgoing is None or outgoing.message.qos != (1 if isinstance(packet, PubAck) else 2):
            raise Violation(f"{self.name} received {packet} for no message")
        if packet.reason_code == ReasonCode.QUOTA_EXCEEDED:
            # A rule refuses a message that subscribers have received.
            is_captured = outgoing.message.topic in simulation.tube.captured_topics
            simulation.mqtt.refuse(outgoing.message, is_final=not is_captured)
            del self._outgoing[packet.packet_id]
            return
        if packet.reason_code >= 0x80:
            raise Violation(f"{outgoing.message} was refused: {packet}")
        simulation.mqtt.acknowledge(outgoing.message, now_ms)
        if outgoing.message.topic in simulation.tube.captured_topics:
            simulation.tube.acknowledge(self.name, outgoing.message.number)
        if isinstance(packet, PubAck):
            del self._outgoing[packet.packet_id]
        else:
            outgoing.is_released = True
            attachment.send(PubRel(packet.packet_id))

    def _answered(self, packet: SubAck | UnsubAck) -> None:
        if self._asked is None or self._asked[0] != packet.packet_id:
            raise Violation(f"{self.name} received {packet} for no request")
        _, wanted, subscribes = self._asked
        self._asked = None
        now_ms = self._simulation.loop.true_ms()
        # An UNSUBSCRIBE that is sent again may find nothing.
        if subscribes and packet.reason_codes == [ReasonCode.QUOTA_EXCEEDED]:
            del self._wanted[wanted.topic_filter]
            limit = self._simulation.node.server.limits.max_subscriptions
            self._simulation.mqtt.refuse_subscription(wanted, len(self._wanted), limit)
            return
        expected = {wanted.qos} if subscribes else {ReasonCode.SUCCESS, ReasonCode.NO_SUBSCRIPTION_EXISTED}
        if subscribes != isinstance(packet, SubAck) or not expected.issuperset(packet.reason_codes):
            raise Violation(f"{wanted} was answered with {packet}")
        if subscribes:
            wanted.confirmed_ms = now_ms
        else:
            wanted.ended_ms = now_ms
            del self._wanted[wanted.topic_filter]

    # Steps

    def go_on(self) -> None:
        """Carry out steps while the window has room."""
        attachment = self.attachment
        while attachment is not None and attachment.is_ready and not attachment.disconnects:
            if self._asked is not None or len(self._outgoing) >= WINDOW or attachment.connection.has_ended:
                return
            if self._again:
                self._subscribe(attachment, *self._again.pop())
            elif self.steps:
                self._step(attachment, self.steps.popleft())
            else:
                self._simulation.check_done()
                return
            attachment = self.attachment

    def _step(self, attachment: _Attachment, step: MqttStep) -> None:
        if step.kind == "publish":
            self._publish(attachment, step)
        elif step.kind == "subscribe":
            if step.topic not in self._wanted:
                self._subscribe(attachment, step.topic, step.qos)
        elif step.kind == "flood":
            attachment.connection.send(encode(Publish("flood", b"")) * FLOOD)
        elif step.kind == "crowd":
            for _ in range(CROWD):
                _Passer(self._simulation)
        elif step.kind == "unsubscribe":
            if self._wanted:
                wanted = next(iter(self._wanted.values()))
                wanted.end_asked_ms = self._simulation.loop.true_ms()
                self._ask(attachment, self._next_id(), wanted, False)
        else:
            self._leave(attachment, step)

    def _leave(self, attachment: _Attachment, step: MqttStep) -> None:
        loop = self._simulation.loop
        self._simulation.history.note(f"{loop.true_ms()} {self.name} {step.kind}")
        self._clean = step.clean
        if step.kind == "take over":
            self.connect()
        elif step.kind == "silence":
            attachment.connection.fall_silent()
            loop.call_later(step.away_s, self._replace, attachment)
        elif step.kind.startswith("disconnect"):
            attachment.disconnects = True
            # The session expires from here on, also while output that waits for a full disk keeps the connection.
            self._lost_ms = loop.true_ms()
            attachment.send(Disconnect())
            if step.kind.endswith("end"):
                attachment.connection.end()
        elif step.kind == "end":
            # The last packet is incomplete: the broker must not handle it.
            attachment.connection.send(encode(Publish(TOPICS[0], b"incomplete"))[:-1])
            attachment.connection.end()
        else:
            attachment.connection.cut()
            self._end_connection(loop.true_ms())
            loop.call_later(step.away_s, self._connect_unless_connected)

    def _replace(self, attachment: _Attachment) -> None:
        """Notice that a connection is silent."""
        if self.attachment is attachment:
            self.connect()

    def _publish(self, attachment: _Attachment, step: MqttStep) -> None:
        number = self._simulation.next_number()
        message = Message(number, self.name, step.topic, step.qos, step.retain, step.clear, step.expiry_s)
        self._simulation.mqtt.publish(message, self._simulation.loop.true_ms())
        outgoing = _Outgoing(message, step.padding)
        packet_id = 0
        if step.qos:
            packet_id = self._next_id()
            self._outgoing[packet_id] = outgoing
        self._send(attachment, packet_id, outgoing)

    def _send(self, attachment: _Attachment, packet_id: int, outgoing: _Outgoing, *, dup: bool = False) -> None:
        message = outgoing.message
        payload = b"" if message.clear else b"message" + b"." * outgoing.padding
        properties = Properties(correlation_data=b"%d" % message.number)
        tube = self._simulation.tube
        if message.topic in tube.captured_topics:
            tube.transmit(self.name, message.number)
            properties.user_properties = self._captured(message.number)
        if message.expiry_s:
            properties.message_expiry_interval = message.expiry_s
        packet = Publish(message.topic, payload, message.qos, retain=message.retain, dup=dup, packet_id=packet_id)
        packet.replace_properties(properties)
        attachment.send(packet)

    def _subscribe(self, attachment: _Attachment, topic_filter: str, qos: int) -> None:
        now_ms = self._simulation.loop.true_ms()
        wanted = Wanted(self._simulation.next_number(), self.name, topic_filter, qos, now_ms, windows=self.windows)
        self._wanted[topic_filter] = self._simulation.mqtt.subscribe(wanted)
        self._ask(attachment, self._next_id(), wanted, True)

    def _ask(self, attachment: _Attachment, packet_id: int, wanted: Wanted, subscribes: bool) -> None:
        self._asked = packet_id, wanted, subscribes
        if not subscribes:
            attachment.send(Unsubscribe(packet_id, [wanted.topic_filter]))
            return
        packet = Subscribe(packet_id, [Subscription(wanted.topic_filter, wanted.qos)])
        packet.properties.subscription_identifiers = [wanted.identifier]
        attachment.send(packet)

    def _ping(self, attachment: _Attachment) -> None:
        if self.attachment is attachment and not attachment.disconnects:
            attachment.send(PingReq())
            self._simulation.loop.call_later(PING_S, self._ping, attachment)

    def _next_id(self) -> int:
        while True:
            self._packet_id = self._packet_id % 65_535 + 1
            if self._packet_id not in self._outgoing:
                return self._packet_id


class _Passer:
    """A client that connects and ends its direction at once. The server may answer, and must close the connection."""

    def __init__(self, simulation: Simulation) -> None:
        connection = simulation.node.accept(self)
        connection.send(encode(Connect(f"passer-{simulation.next_number()}")))
        connection.end()

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self) -> None: ...


class RetainedReader:
    """Reads all retained messages once in each life of the node."""

    WAIT_S = 100.0

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._found: list[str] = []
        self._decoder = Decoder(role=Role.CLIENT)
        self._wanted: Wanted | None = None

    def connect(self) -> None:
        """Subscribe, and check after a time what has come."""
        simulation = self._simulation
        self._decoder = Decoder(role=Role.CLIENT)
        self._found.clear()
        now_ms = simulation.loop.true_ms()
        self._wanted = simulation.mqtt.subscribe(Wanted(simulation.next_number(), "reader", "t/#", 1, now_ms))
        subscribe = Subscribe(1, [Subscription("t/#", 1)])
        subscribe.properties.subscription_identifiers = [self._wanted.identifier]
        connection = simulation.node.accept(self)
        connection.send(encode(Connect("reader")) + encode(subscribe))
        simulation.loop.call_later(self.WAIT_S, self._check, connection, self._wanted)

    def data_received(self, data: bytes) -> None:
        simulation = self._simulation
        for packet in self._decoder.feed(data):
            if isinstance(packet, Publish) and packet.retain:
                number = int(packet.properties.correlation_data or b"0")
                identifiers = packet.properties.subscription_identifiers
                now_ms = simulation.loop.true_ms()
                simulation.mqtt.receive(
                    "reader", number, identifiers, packet.qos, now_ms, retained=True, topic=packet.topic
                )
                self._found.append(packet.topic)

    def connection_lost(self) -> None:
        self._wanted = None

    def _check(self, connection: Connection, wanted: Wanted) -> None:
        if self._wanted is wanted:
            missing = [topic for topic in TOPICS if topic not in self._found]
            self._simulation.mqtt.check_missing_retained(missing, wanted.sent_ms)
            connection.cut()
