"""Which topics a bridge carries, in which direction, and what they are called on either side; how loops end.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.topics import matches

__all__ = ["HOPS", "BridgeTopic", "Direction", "bridge_client_id", "hops_of", "outgoing_properties", "renamed"]

HOPS: Final = "penstock-bridge-hops"
"""User property of a bridged message: how many bridges it has crossed."""


def bridge_client_id(name: str) -> str:
    """The client identifier of the bridge of that name on its own node."""
    return f"$bridge/{name}"


class Direction(StrEnum):
    """Where messages of a topic go."""

    OUT = "out"
    IN = "in"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class BridgeTopic:
    """Topics that match ``local_prefix + filter`` here, ``remote_prefix + filter`` there; only the prefix differs."""

    filter: str
    direction: Direction = Direction.OUT
    qos: int = 1
    local_prefix: str = ""
    remote_prefix: str = ""

    @property
    def out(self) -> bool:
        """Whether messages go out."""
        return self.direction is not Direction.IN

    @property
    def into(self) -> bool:
        """Whether messages come in."""
        return self.direction is not Direction.OUT

    @property
    def local_filter(self) -> str:
        """The filter on this side."""
        return self.local_prefix + self.filter

    @property
    def remote_filter(self) -> str:
        """The filter on the other side."""
        return self.remote_prefix + self.filter


def renamed(topic: str, topics: Sequence[BridgeTopic], *, outward: bool) -> str | None:
    """What ``topic`` is called on the other side, by the first of ``topics`` that it matches; None where none does."""
    for each in topics:
        if not (each.out if outward else each.into):
            continue
        here, there = (each.local_prefix, each.remote_prefix) if outward else (each.remote_prefix, each.local_prefix)
        if topic.startswith(here) and matches(here + each.filter, topic):
            return there + topic[len(here) :]
    return None


def hops_of(message: Publish) -> int:
    """How many bridges a message has crossed; 0 also where somebody wrote nonsense into the property."""
    given = message.optional_properties
    text = given.user_property(HOPS) if given is not None else None
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 4 else 0


def outgoing_properties(message: Publish) -> Properties:
    """The properties with which a message goes on: its own, without what belongs to the connection, one hop more."""
    given = message.optional_properties or Properties()
    user = [pair for pair in given.user_properties if pair[0] != HOPS]
    properties = given.copy()
    properties.topic_alias = None
    properties.subscription_identifiers = []
    properties.user_properties = [*user, (HOPS, str(hops_of(message) + 1))]
    return properties
