"""A subscription in force, of one session to one filter.

Source: MQTT 5.0 section 3.8.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.mqtt.codec.packets import Subscription

if TYPE_CHECKING:
    from penstock.mqtt.engine.routing.shared_groups import SharedGroup
    from penstock.mqtt.engine.sessions.session import Session

__all__ = ["SessionSubscription"]


class SessionSubscription:
    """A subscription in force: granted QoS, options, and its identifier as an encoded block (empty = none).

    ``retain_handling`` is kept for those who show it; it has done its work when the subscription was made. ``group`` is
    set for a shared subscription.
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

    def __init__(self, session: Session, wanted: Subscription, qos: int, identifier: bytes) -> None:
        self.session = session
        self.topic_filter = wanted.topic_filter
        self.qos = qos
        self.no_local = wanted.no_local
        self.retain_as_published = wanted.retain_as_published
        self.retain_handling = wanted.retain_handling
        self.identifier = identifier
        self.group: SharedGroup | None = None
