"""Shared subscriptions: each message of a group goes to one of its members.

Which one: with a user property ``$partition``, or where the filter has wildcards by the topic, the member that a
consistent hash gives, so that what belongs together stays together and little moves when members come and go; else the
members take turns. Connected members come before those that are away, and those that keep up before those that do not.

Source: MQTT 5.0 section 4.8.2; the hash follows Azure IoT Operations' broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.topics import SHARE_PREFIX, has_wildcard

if TYPE_CHECKING:
    from penstock.mqtt.engine.routing.subscription import SessionSubscription
    from penstock.mqtt.engine.sessions.session import Session

__all__ = ["PARTITION", "SharedGroup", "by_hash", "split_shared"]

PARTITION: Final = "$partition"
"""User property whose value keeps messages together."""

_MASK: Final = 0xFFFFFFFFFFFFFFFF


def split_shared(topic_filter: str) -> tuple[str, str] | None:
    """Group name and filter of a well-formed ``$share/name/filter``; None for another filter."""
    if not topic_filter.startswith(SHARE_PREFIX):
        return None
    name, _, rest = topic_filter[len(SHARE_PREFIX) :].partition("/")
    return name, rest


def _mixed(value: int) -> int:
    """The finalizer of splitmix64: spreads the few bits in which two hashes differ over all."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class SharedGroup:
    """The members of one ``$share/name/filter``, by client id. ``topic_filter`` is the whole text."""

    __slots__ = ("_turn", "by_topic", "members", "topic_filter")

    def __init__(self, topic_filter: str) -> None:
        self.topic_filter = topic_filter
        self.members: dict[str, SessionSubscription] = {}
        self.by_topic = has_wildcard(topic_filter)
        self._turn = 0

    def choose(
        self, publish: Publish, members: list[SessionSubscription], without: Session | None = None
    ) -> SessionSubscription | None:
        """The one of ``members`` (of this group, those who may have the topic) that gets the message; None: nobody."""
        present = [m for m in members if m.session.connection is not None and m.session is not without]
        if not present:
            present = [m for m in members if m.session is not without and not m.session.gone]
            if not present:
                return None
        if len(present) == 1:
            return present[0]
        properties = publish.optional_properties
        key = None if properties is None else properties.user_property(PARTITION)
        if key is None and self.by_topic:
            key = publish.topic
        if key is not None:
            return by_hash(key, present)
        self._turn += 1
        count = len(present)
        fewest = present[self._turn % count]
        for step in range(count):
            member = present[(self._turn + step) % count]
            if member.session.keeps_up():
                return member
            if len(member.session.waiting) < len(fewest.session.waiting):
                fewest = member
        return fewest


def by_hash(key: str, members: list[SessionSubscription]) -> SessionSubscription:
    """Rendezvous hashing: the member with the highest mark for the key; another one's coming or going moves no mark."""
    wanted = crc32(key.encode(errors="replace"))
    return max(members, key=lambda m: _mixed(crc32(m.session.client_id.encode(errors="replace")) << 32 ^ wanted))
