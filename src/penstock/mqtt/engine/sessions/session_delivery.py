"""A message for one session, from the moment it is queued or sent until its last acknowledgement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from mypy_extensions import mypyc_attr

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.model.inflight import InflightEntry
from penstock.mqtt.engine.model.message import Message

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["RELEASED", "Delivery"]

RELEASED: Final = Message(Publish("released"), 0)
"""Replaces the message of a QoS 2 delivery after its PUBREL, which needs no payload any more [MQTT-4.3.3-6]."""


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Delivery(InflightEntry):
    """One message for one session.

    ``retain`` is the RETAIN flag, 0 or 1; ``identifiers`` the subscription identifiers as an encoded block; ``share``
    the topic filter of the shared subscription that chose the session, empty for a subscription of its own; ``number``
    its number in the journal, 0 for a delivery that is not stored.
    """

    __slots__ = ("identifiers", "message", "number", "qos", "retain", "share")

    def __init__(self, message: Message, qos: i64, retain: i64, identifiers: bytes, share: str, number: int) -> None:
        super().__init__()
        self.message = message
        self.qos: i64 = qos
        self.retain: i64 = retain
        self.identifiers = identifiers
        self.share = share
        self.number = number

    def release(self) -> None:
        """Free the message after PUBREC: only PUBREL and PUBCOMP are left."""
        self.message = RELEASED
        self.identifiers = b""
        self.share = ""
