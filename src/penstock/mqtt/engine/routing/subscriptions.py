"""Active subscriptions, their subscribers, and the groups of shared subscriptions.

Each message of a shared subscription is sent to one of its members. A consistent hash of the user property
``$partition``, or of the topic if the filter has wildcards, chooses the member: related messages go to the same member,
and few are reassigned when members join or leave. Other messages are distributed round-robin. Connected members have
precedence over disconnected ones, and members with a free send quota over slow ones.

Source: MQTT 5.0 sections 3.8.3 and 4.8.2; the hash follows Azure IoT Operations' broker.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final
from zlib import crc32

from penstock.mqtt.codec.packets import Subscription
from penstock.mqtt.codec.topics import SHARE_PREFIX, has_wildcard
from penstock.mqtt.engine.model.timers import DeadlineOwner

if TYPE_CHECKING:
    from mypy_extensions import i64

    from penstock.mqtt.engine.model.access import Rights
    from penstock.mqtt.engine.model.message import Message

__all__ = ["PARTITION", "SessionSubscription", "SharedGroup", "Subscriber", "by_hash", "split_shared"]

PARTITION: Final = "$partition"
"""User property whose value assigns messages to a member."""

_MASK: Final = 0xFFFFFFFFFFFFFFFF


def split_shared(topic_filter: str) -> tuple[str, str] | None:
    """Return group name and filter of a valid ``$share/name/filter``; None for another filter."""
    if not topic_filter.startswith(SHARE_PREFIX):
        return None
    name, _, rest = topic_filter[len(SHARE_PREFIX) :].partition("/")
    return name, rest


def _mix_bits(value: int) -> int:
    """Mix the bits of a hash with the finalizer of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class Subscriber(DeadlineOwner):
    """The interface of routing to the owner of subscriptions; sessions implement it."""

    __slots__ = ("client_id", "ending", "rights")

    def __init__(self, client_id: str) -> None:
        super().__init__()
        self.client_id = client_id
        self.ending = False
        """Whether the session has ended and its subscriptions are being removed: no route contains it."""
        self.rights: Rights | None = None
        """Rights of the client; None without access control."""

    def may_receive(self, topic: str) -> bool:
        """Return whether the client may receive messages of the topic."""
        return not self.ending and (self.rights is None or self.rights.may_receive(topic))

    @abstractmethod
    def deliver(self, message: Message, qos: i64, retain: i64, identifiers: bytes, now: i64, share: str = "") -> None:
        """Send the message to the client, or queue it. ``identifiers``: its subscription identifiers, encoded."""

    @abstractmethod
    def count_events(self, kind: str, count: int, detail: str = "") -> None:
        """Count events of this client, for logs and warnings [ClientEvents]."""

    @abstractmethod
    def has_room(self, message: Message) -> bool:
        """Return whether a QoS 1 or 2 message would be sent or queued."""

    @abstractmethod
    def overflow_reason(self, message: Message) -> str:
        """Return why there is no room for a message, for its publisher."""

    @abstractmethod
    def keeps_up(self) -> bool:
        """Return whether a message would be sent immediately."""

    @abstractmethod
    def queued(self) -> int:
        """Return the number of queued messages."""

    @abstractmethod
    def is_connected(self) -> bool:
        """Return whether the client has a network connection."""

    @abstractmethod
    def is_persistent(self) -> bool:
        """Return whether its deliveries are stored and survive a restart."""


class SessionSubscription:
    """One subscription: granted QoS, options, and its identifier as an encoded block (empty: none).

    ``retain_handling`` is stored for display only; it takes effect when the subscription is created. ``group`` is set
    for a shared subscription.
    """

    __slots__ = (
        "group",
        "identifier",
        "no_local",
        "qos",
        "retain_as_published",
        "retain_handling",
        "session",
        "topic_filter",
    )

    def __init__(self, session: Subscriber, wanted: Subscription, qos: int, identifier: bytes) -> None:
        self.session = session
        self.topic_filter = wanted.topic_filter
        self.qos = qos
        self.no_local = wanted.no_local
        self.retain_as_published = wanted.retain_as_published
        self.retain_handling = wanted.retain_handling
        self.identifier = identifier
        self.group: SharedGroup | None = None


class SharedGroup:
    """The members of one ``$share/name/filter``, by client id. ``topic_filter`` is the whole text."""

    __slots__ = ("_turn", "by_topic", "members", "topic_filter")

    def __init__(self, topic_filter: str) -> None:
        self.topic_filter = topic_filter
        self.members: dict[str, SessionSubscription] = {}
        self.by_topic = has_wildcard(topic_filter)
        self._turn = 0

    def choose(
        self, message: Message, members: list[SessionSubscription], without: Subscriber | None = None
    ) -> SessionSubscription | None:
        """Return the member that receives the message; None without members.

        ``members``: the members of this group that may receive the topic.
        """
        present = [m for m in members if m.session.is_connected() and m.session is not without]
        if not present:
            present = [m for m in members if m.session is not without and not m.session.gone]
            if not present:
                return None
        if len(present) == 1:
            return present[0]
        key = message.properties.user_property(PARTITION) if len(message.properties_wire) > 1 else None
        if key is None and self.by_topic:
            key = message.topic
        if key is not None:
            return by_hash(key, present)
        self._turn += 1
        count = len(present)
        fewest = present[self._turn % count]
        for step in range(count):
            member = present[(self._turn + step) % count]
            if member.session.keeps_up():
                return member
            if member.session.queued() < fewest.session.queued():
                fewest = member
        return fewest


def by_hash(key: str, members: list[SessionSubscription]) -> SessionSubscription:
    """Choose by rendezvous hashing: the member with the highest weight for the key.

    Members that join or leave do not change the weights of others.
    """
    wanted = crc32(key.encode(errors="replace"))
    return max(members, key=lambda m: _mix_bits(crc32(m.session.client_id.encode(errors="replace")) << 32 ^ wanted))
