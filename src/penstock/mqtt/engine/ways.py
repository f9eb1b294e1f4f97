"""Ways of messages that come again and again: what was found out about one holds for those like it.

Most clients publish to a few topics, one message at a time, and acknowledge what they get one by one. Whether a client
may publish there, who gets it and what it looks like as it leaves was found out for the messages before. A :class:`Way`
keeps that, so that of the next one the bytes of its header are compared and nothing else is looked at. What is not like
them is decoded, and goes where every message goes: :mod:`penstock.mqtt.engine.receiving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.shapes import LONGEST, Learner, Shape
from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.routes import Route
from penstock.mqtt.engine.session import LARGE, Session

if TYPE_CHECKING:
    from penstock.mqtt.engine.connection import BrokerConnection

__all__ = ["NO_WAYS", "Way", "learn"]

MOST: Final = 64
"""Topics of one connection whose ways are kept."""
MOST_RECEIVERS: Final = 16
"""Of a message that has a way: with more of them, finding them is little of the work, and what is kept here much."""


class Way:
    """Where a client's messages of one topic go, as long as ``route`` and ``rights`` stand.

    ``first``: the first byte of their packets; ``properties``: what stands between packet identifier and payload, or
    the ``shape`` that it has, once ``learner`` has seen what varies. ``model`` is like them in all else but payload.
    ``plain``: there is one receiver, and it gets what came, but for the packet identifier.
    """

    __slots__ = ("first", "learner", "model", "plain", "properties", "rights", "route", "shape")

    def __init__(
        self, publish: Publish, connection: BrokerConnection, session: Session, route: Route, model: Message
    ) -> None:
        version, qos = connection.version, publish.qos
        self.first = 0x30 | qos << 1
        self.properties = model.properties_wire if version == 5 else b""
        self.route = route
        self.rights = session.rights
        self.model = model
        self.learner: Learner | None = None
        self.shape: Shape | None = None
        self.plain = (
            version == 5
            and len(route.targets) == 1
            and not route.shared
            and all(t.qos >= qos and not t.identifiers and t.session is not session for t in route.targets)
        )

    def holds(self, connection: BrokerConnection, session: Session) -> bool:
        """Whether the client's messages of the topic go this way still."""
        return (
            connection.broker.router.routes.get(self.model.publish.topic) is self.route
            and session.rights is self.rights
        )

    def take(
        self,
        connection: BrokerConnection,
        session: Session,
        data: bytes,
        begin: int,
        at: int,
        end: int,
        now: int,
        *,
        alone: bool,
    ) -> bool:
        """Send the message in ``data[begin:end]`` on its way; its topic ends at ``at``. False where it is not like the
        others, or the way is not theirs any more; then nothing was done.

        ``alone``: no other message came with it. What several cause is collected, since they share writes.
        """
        model = self.model
        qos = model.qos
        shape, properties = self.shape, self.properties
        properties_at = at + 2 if qos else at
        if shape is None:
            payload_at = properties_at + len(properties)
            like = payload_at <= end and data.startswith(properties, properties_at)
        else:
            start = at - len(model.topic_wire)
            payload_at = start + shape.size
            like = shape.fits(data, start, end)
        if not like or connection.pending or connection.open_qos2 or not self.holds(connection, session):
            return False
        packet_id = data[at] << 8 | data[at + 1] if qos else 0
        if qos and not packet_id:
            return False
        message = model.like(data[payload_at:end], now, b"" if shape is None else data[properties_at:payload_at])
        broker = connection.broker
        promises = broker.journal.promises
        answered = qos == 0
        if self.plain:
            receiver = self.route.targets[0].session
            if alone and not answered and (receiver.kept is None or not receiver.kept.promised):
                answered = connection.puback_now(packet_id)
            if not alone or not _passed_on(receiver, message, data[begin:at], data[properties_at:end]):
                receiver.deliver(message, qos, 0, b"", now)
        else:
            broker.fan_out(self.route, message, session, now)
        broker.stats.publishes_received += 1
        if not answered and not connection.closing:
            if broker.journal.promises != promises:
                connection.gate = broker.journal.number
            connection.puback(packet_id, 0)
        return True


def _passed_on(session: Session, message: Message, head: bytes, rest: bytes) -> bool:
    """:meth:`Session.deliver` for a plain way: as it came and at once, where nothing is in the way. False where it is;
    then nothing was done. ``head`` is what came before the packet identifier, ``rest`` what came after it."""
    connection = session.connection
    if connection is None or connection.dirty or connection.gate or not connection.writable:
        return False
    sink = connection.sink
    size = len(head) + len(rest) + 2
    if sink is None or not connection.plain or size > connection.maximum_out:
        return False
    stats = connection.stats
    if message.qos:
        inflight = session.inflight
        if size >= LARGE or session.kept is not None or session.waiting.reliable or not session.window_open(connection):
            return False
        packet_id = inflight.free_id()
        inflight[packet_id] = (message, 1, 0, b"", None, 0)
        sink.send(b"".join((head, packet_id.to_bytes(2, "big"), rest)))
        stats.bytes_sent += size
    else:
        sink.send(head + rest)
        stats.bytes_sent += size - 2
    stats.publishes_sent += 1
    return True


NO_WAYS: Final[dict[bytes, Way | None]] = {}
"""Of the connections that never published; never added to."""


def learn(connection: BrokerConnection, session: Session, publish: Publish, now: int) -> None:
    """A message of QoS 0 or 1 without DUP and RETAIN went to its receivers: those like it may follow it.

    After the first of a topic that is only noted, so that what comes once costs little.
    """
    ways = connection.ways
    topic = publish.topic_wire
    if topic not in ways:
        if ways is NO_WAYS:
            ways = connection.ways = {}
        elif len(ways) >= MOST:
            ways.clear()
        ways[topic] = None
        return
    properties = publish.optional_properties
    if properties is not None and (properties.topic_alias is not None or properties.payload_format_indicator):
        return
    known = ways[topic]
    shape: Shape | None = None
    learner: Learner | None = None
    if known is not None and known.first == 0x30 | publish.qos << 1 and known.holds(connection, session):
        if connection.version != 5 or publish.properties_wire == known.properties:
            return
        if properties is not None:
            learner = known.learner = known.learner or Learner()
            shape = learner.compare(publish, properties)
            if shape is None:
                return
    broker = connection.broker
    route = broker.router.routes.get(publish.topic)
    if (
        route is None
        or not route.forwards
        or route.receivers > MOST_RECEIVERS
        or broker.refusing
        or broker.out_of_space
    ):
        return
    if len(topic) + len(publish.properties_wire) <= LONGEST:
        way = ways[topic] = Way(publish, connection, session, route, broker.message(publish, session, now))
        way.shape, way.learner = shape, learner
