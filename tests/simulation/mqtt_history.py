"""Messages and subscriptions of all MQTT clients, and the delivery rules that they must obey.

Each message has a number, which it carries as correlation data, and each SUBSCRIBE an identifier, which comes back with
every message that it caused. So each delivery names its publisher and its subscription, and the rules need no model of
the broker:

* A message arrives for a subscription that matches it, was requested before the message was acknowledged, and had not
  ended when the message was sent; with at most the lower QoS of the two.
* Acknowledged is a subset of delivered: a QoS 1 or 2 message reaches every subscription of QoS 1 or 2 that was
  confirmed before it was sent and never ended; of a shared subscription, one member.
* A QoS 2 message to a QoS 2 subscription is delivered once, over restarts as well; QoS 0 at most once.
* The first deliveries of one publisher's messages have, per topic and QoS, the order in which they were sent.
* A retained message that is read is not older than one that was acknowledged before; nothing is read only if nothing
  was stored or the last message deleted it.
* A will is published after its connection has ended and its delay has passed, unless the client has withdrawn it or has
  resumed its session before, and it is published if its session was stored.
* A message or subscription that a quota refused is not delivered, if the client sent it once. Then a will may be lost,
  and a message that a shared subscription passes to another member, whose queue may be full.
* A session ends when its expiry has passed, not before; a message with an expiry is delivered to a client that was
  connected for long enough in its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.history import Violation

__all__ = ["AMPLE_MS", "Message", "MqttHistory", "Wanted", "Window", "matches"]

AMPLE_MS = 200_000
"""Time in which a node delivers whatever it has to a connected client, also from a slow disk."""
CONNECTED = "its client is connected"


@dataclass(slots=True, eq=False)
class Message:
    """A message, or a will, which is sent when its connection has ended. ``clear``: it deletes the retained message."""

    number: int
    publisher: str
    topic: str
    qos: int
    retain: bool = False
    clear: bool = False
    expiry_s: int = 0
    was_repeated: bool = False
    """Whether it was sent again, since its acknowledgement was lost."""
    is_will: bool = False
    sent_ms: int | None = None
    acked_ms: int | None = None
    """When it was acknowledged; of a will: when it should have been published."""
    why_not: str = ""
    """Why it must not be published: it is a will, or a quota refused it."""
    ended: Callable[[], int | None] = lambda: None
    """Of a will: when its connection ended, also if its client has not noticed yet."""
    losses: int = 0
    """Losses of power since a will was stored, or before a QoS 2 message was acknowledged."""

    def __str__(self) -> str:
        kind = "will" if self.is_will else "message"
        options = f"{' retained' if self.retain else ''}{f' expiry {self.expiry_s} s' if self.expiry_s else ''}"
        return f"{kind} {self.number} of {self.publisher} to {self.topic}, QoS {self.qos}{options}"


@dataclass(slots=True)
class Window:
    """A time in which a client was connected."""

    begin_ms: int
    end_ms: int | None = None


@dataclass(slots=True, eq=False)
class Wanted:
    """A subscription. ``end_asked_ms``: since when it may have ended; ``ended_ms``: since when it surely has."""

    identifier: int
    client: str
    topic_filter: str
    qos: int
    sent_ms: int
    confirmed_ms: int | None = None
    end_asked_ms: int | None = None
    ended_ms: int | None = None
    windows: list[Window] = field(default_factory=list)
    """Those of its client."""

    @property
    def share(self) -> str:
        """Its group, "" if it is not shared."""
        return self.topic_filter if self.topic_filter.startswith("$share/") else ""

    def __str__(self) -> str:
        return f"subscription {self.identifier} of {self.client} to {self.topic_filter}, QoS {self.qos}"


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter of the simulation, shared or not, matches a topic; both have at most one wildcard, the last."""
    if topic_filter.startswith("$share/"):
        topic_filter = topic_filter.split("/", 2)[2]
    if topic_filter.endswith("#"):
        return topic.startswith(topic_filter[:-1])
    if topic_filter.endswith("/+"):
        return topic.rpartition("/")[0] == topic_filter[:-2]
    return topic_filter == topic


class MqttHistory:
    """What the MQTT clients of one simulation have sent and received.

    ``ample_ms``: how long a client must have been connected for messages to have arrived.
    """

    def __init__(self, ample_ms: int = AMPLE_MS) -> None:
        self.ample_ms = ample_ms
        self.messages: dict[int, Message] = {}
        self.subscriptions: dict[int, Wanted] = {}
        self.has_quotas = False
        """Whether the broker has limits that its clients exceed."""
        self.refused = 0
        """Messages and subscriptions that these limits refused."""
        self.acknowledged = 0
        self.delivered = 0
        self._retained: dict[str, list[Message]] = {}
        self._received: dict[tuple[int, int], list[int]] = {}
        """Numbers of message and subscription to the QoS of each delivery."""
        self._of_group: dict[tuple[int, str], list[int]] = {}
        self._seen: set[tuple[int, str]] = set()
        self._last: dict[tuple[str, str, int, str, int], int] = {}
        self._wills: list[Message] = []

    # Publishers

    def publish(self, message: Message, now_ms: int | None) -> Message:
        """A message is about to be sent, or a will: with None."""
        message.sent_ms = now_ms
        self.messages[message.number] = message
        if message.retain:
            self._retained.setdefault(message.topic, []).append(message)
        if message.is_will:
            self._wills.append(message)
            message.why_not = CONNECTED
        return message

    def acknowledge(self, message: Message, now_ms: int) -> None:
        """PUBACK or PUBREC arrived."""
        self.acknowledged += 1
        if message.acked_ms is None:
            message.acked_ms = now_ms

    def refuse(self, message: Message, *, is_final: bool) -> None:
        """PUBACK or PUBREC with Quota exceeded arrived: nobody receives the message, unless it was sent before."""
        if not self.has_quotas:
            raise Violation(f"{message} was refused, and the broker has large limits")
        self.refused += 1
        if is_final and not message.was_repeated:
            message.why_not = "it was refused"

    def refuse_subscription(self, wanted: Wanted, others: int, limit: int) -> None:
        """SUBACK with Quota exceeded arrived; the session has ``others`` subscriptions."""
        if others < limit:
            raise Violation(f"{wanted} was refused, and its session has {others} others")
        self.refused += 1
        wanted.end_asked_ms = wanted.ended_ms = wanted.sent_ms

    def power_lost(self, now_ms: int) -> None:
        """The node lost power."""
        for message in self.messages.values():
            if not message.is_will and message.qos == 2 and message.acked_ms is None:
                # Deliveries with QoS 0 do not wait for the commit, and the publisher sends the message again.
                message.losses += 1
        for will in self._wills:
            will.losses += 1
            if (
                will.why_not == "it was withdrawn"
                and will.sent_ms is not None
                and now_ms < will.sent_ms + self.ample_ms
            ):
                will.why_not = ""  # nobody waits for this to be stored

    # Subscribers

    def subscribe(self, wanted: Wanted) -> Wanted:
        """A SUBSCRIBE is about to be sent."""
        self.subscriptions[wanted.identifier] = wanted
        return wanted

    def receive(
        self, client: str, number: int, identifiers: list[int], qos: int, now_ms: int, *, retained: bool, topic: str
    ) -> None:
        """A client has received a message; not as a repetition that QoS 2 recognises."""
        message = self.messages.get(number)
        if message is None or message.topic != topic:
            raise Violation(f"{client} received a message that nobody sent: {number} on {topic}")
        if message.why_not == CONNECTED and (ended_ms := message.ended()) is not None:
            message.sent_ms, message.why_not = ended_ms, ""
        if message.why_not:
            raise Violation(f"{message} was published: {message.why_not}")
        if message.sent_ms is None or message.sent_ms > now_ms:
            raise Violation(f"{message} was received at {now_ms}, before {message.sent_ms}")
        if not identifiers:
            raise Violation(f"{client} received {message} without a subscription")
        self.delivered += 1
        allowed = 0
        for identifier in identifiers:
            wanted = self.subscriptions.get(identifier)
            if wanted is None or wanted.client != client or not matches(wanted.topic_filter, topic):
                raise Violation(f"{client} received {message} for subscription {identifier}")
            allowed = max(allowed, wanted.qos)
            if retained:
                self._check_retained(message, wanted.sent_ms, now_ms, str(wanted))
                continue
            late = message.acked_ms is not None and wanted.sent_ms > message.acked_ms
            # A member that comes late takes over what waits for others.
            late = late and not (message.is_will or wanted.share)
            if late or (wanted.ended_ms is not None and wanted.ended_ms < message.sent_ms):
                raise Violation(f"{wanted} was not there when {message} was sent")
            self._count(message, wanted, qos)
        if qos > min(allowed, message.qos):
            raise Violation(f"{client} received {message} with QoS {qos}; the subscription has {allowed}")
        if not retained and not message.is_will:
            self._check_order(message, client, identifiers, qos, now_ms)

    def _count(self, message: Message, wanted: Wanted, qos: int) -> None:
        levels = self._received.setdefault((message.number, wanted.identifier), [])
        if wanted.share:
            levels = self._of_group.setdefault((message.number, wanted.share), [])
        levels.append(qos)
        # A QoS 1 message may be published twice.
        if levels.count(2) > 1 or (message.qos != 1 and levels.count(0) > 1 + message.losses):
            raise Violation(f"{message} was delivered again with QoS {qos} for {wanted}")

    def _check_order(self, message: Message, client: str, identifiers: list[int], qos: int, now_ms: int) -> None:
        if self.subscriptions[identifiers[0]].share:
            return
        key = (message.publisher, message.topic, message.qos, client, qos)
        last = self._last.get(key, 0)
        is_first = (message.number, client) not in self._seen
        self._seen.add((message.number, client))
        if message.number > last:
            self._last[key] = message.number
        elif self.has_quotas and message.was_repeated:
            pass  # the first publication may have been refused
        elif is_first and _has_one_publication(message, [self.subscriptions[i] for i in identifiers], qos, now_ms):
            raise Violation(f"{client} received {message} after message {last}")

    def _check_retained(self, found: Message, begin_ms: int, now_ms: int, reader: str) -> None:
        if not found.retain or found.clear:
            raise Violation(f"{found} was retained for {reader}")
        newer = self._newer(found, begin_ms)
        if newer is not None:
            raise Violation(f"{reader} found {found} retained at {now_ms}, {newer} was acknowledged before")

    def _newer(self, message: Message, begin_ms: int) -> Message | None:
        """A retained message that surely replaced ``message`` before ``begin_ms``."""
        if message.acked_ms is None or message.is_will:
            return None
        for other in self._retained[message.topic]:
            if other.is_will or other.acked_ms is None or other.sent_ms is None:
                continue
            if message.acked_ms < other.sent_ms and other.acked_ms < begin_ms:
                return other
        return None

    def check_missing_retained(self, topics: list[str], begin_ms: int) -> None:
        """A read of ``topics`` that began at ``begin_ms`` found no retained messages."""
        for topic in topics:
            stored = self._retained.get(topic, [])
            known = [m for m in stored if not m.clear and m.acked_ms is not None and m.acked_ms < begin_ms]
            known = [m for m in known if not m.is_will]
            if known and not any(m.clear and self._newer(m, begin_ms) is None for m in stored):
                raise Violation(f"no message is retained on {topic}; {known[-1]} was acknowledged before")

    # The end

    def check_delivered(self, now_ms: int) -> None:
        """Every message that must arrive has arrived; all clients have been connected for ample time."""
        groups: dict[str, list[Wanted]] = {}
        plain: list[Wanted] = []
        for wanted in self.subscriptions.values():
            if wanted.share:
                groups.setdefault(wanted.share, []).append(wanted)
            elif wanted.qos and wanted.confirmed_ms is not None and wanted.end_asked_ms is None:
                plain.append(wanted)
        for message in self.messages.values():
            sent_ms, acked_ms = message.sent_ms, message.acked_ms
            if not message.qos or sent_ms is None or acked_ms is None:
                continue
            if self.has_quotas and message.is_will:
                continue  # nobody is told that it was refused
            for wanted in plain:
                if (
                    wanted.confirmed_ms is not None
                    and wanted.confirmed_ms < sent_ms
                    and matches(wanted.topic_filter, message.topic)
                    and (message.number, wanted.identifier) not in self._received
                    and self._in_time(message, [wanted], acked_ms, now_ms)
                ):
                    raise Violation(f"{message}, sent at {sent_ms}, never arrived for {wanted}")
            for group, members in groups.items():
                if self.has_quotas or not matches(group, message.topic) or (message.number, group) in self._of_group:
                    continue
                involved = [m for m in members if m.ended_ms is None or m.ended_ms > sent_ms]
                if (
                    any(m.confirmed_ms is not None and m.confirmed_ms < sent_ms for m in involved)
                    and all(m.end_asked_ms is None and m.qos for m in involved)
                    and self._in_time(message, involved, acked_ms, now_ms)
                ):
                    raise Violation(f"{message}, sent at {sent_ms}, never arrived for a member of {group}")

    def _in_time(self, message: Message, members: list[Wanted], acked_ms: int, now_ms: int) -> bool:
        """Whether each of ``members`` was connected for ample time before the message expired."""
        last_ms = now_ms
        if message.expiry_s and message.sent_ms is not None:
            last_ms = min(now_ms, message.sent_ms + message.expiry_s * 1000)
        return all(
            any(
                min(last_ms, now_ms if window.end_ms is None else window.end_ms) - max(acked_ms, window.begin_ms)
                >= self.ample_ms
                for window in member.windows
            )
            for member in members
        )


def _has_one_publication(message: Message, members: list[Wanted], qos: int, now_ms: int) -> bool:
    """Whether the first delivery, with ``qos``, is of the first publication.

    A message that is sent again reaches subscriptions that came meanwhile, those where it had expired, and, with QoS 0,
    those of clients that were not connected.
    """
    sent_ms = message.sent_ms
    if sent_ms is None or (message.expiry_s and now_ms >= sent_ms + message.expiry_s * 1000):
        return False
    windows = members[0].windows
    if not qos and not (windows and windows[-1].begin_ms < sent_ms):
        return False
    return all(member.confirmed_ms is not None and member.confirmed_ms < sent_ms for member in members)
