"""A message for one session, from the moment it is queued or sent until its last acknowledgement."""

from __future__ import annotations

from typing import Final, final

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.engine.routing.subscriptions import SharedGroup

__all__ = ["RELEASED", "Delivery"]

RELEASED: Final = Message(Publish("released"), 0)
"""Replaces the message of a QoS 2 delivery after its PUBREL, which needs no payload any more [MQTT-4.3.3-6]."""


@final
class Delivery:
    """One message for one session.

    ``retain`` is the RETAIN flag, 0 or 1; ``identifiers`` the subscription identifiers as an encoded block; ``group``
    the shared subscription that chose the session, None for a subscription of its own; ``number`` its number in the
    journal, 0 for a delivery that is not stored.
    """

    __slots__ = ("group", "identifiers", "message", "number", "qos", "retain")

    def __init__(
        self, message: Message, qos: int, retain: int, identifiers: bytes, group: SharedGroup | None, number: int
    ) -> None:
        self.message = message
        self.qos = qos
        self.retain = retain
        self.identifiers = identifiers
        self.group = group
        self.number = number
