"""The answer to a QoS 1 or 2 PUBLISH that cannot leave yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.service import NO_ANSWER, Answerable

if TYPE_CHECKING:
    from penstock.mqtt.engine.connections.acknowledgements import Acknowledgements

__all__ = ["PendingAck"]


@final
class PendingAck(Answerable):
    """A PUBACK or PUBREC that waits for ``waiting`` takers of the message, or for the answer before it.

    ``connection`` is where it leaves: for QoS 2 that may be a later one than the one that brought the message, when
    the client sends it again while its takers still work on it.
    """

    __slots__ = ("connection", "gate", "lined_up", "packet_id", "qos", "reason_code", "reason_string", "waiting")

    def __init__(self, connection: Acknowledgements, packet_id: int, qos: int, reason_code: int, waiting: int) -> None:
        self.connection = connection
        self.packet_id = packet_id
        self.qos = qos
        self.reason_code = reason_code
        self.reason_string = ""
        self.waiting = waiting
        self.lined_up = False
        """It is among the answers of the connection that wait; not while the services are handed the message."""
        self.gate = 0
        """The commit that it waits for, too: of what subscribers and the session were promised."""

    def settle(self, reason_code: int = 0, reason_string: str = "") -> None:
        """One taker is done; the highest reason code counts, with its words.

        ``NO_ANSWER``: it cannot take the message, and the client is to send it again on another connection.
        """
        self.waiting -= 1
        if reason_code == NO_ANSWER:
            self.connection.take_back(self, reason_string)
            return
        if reason_code > self.reason_code:
            if reason_code not in ALLOWED[PacketType.PUBACK]:
                reason_code = ReasonCode.UNSPECIFIED_ERROR
            self.reason_code = reason_code
            self.reason_string = reason_string
        if not self.waiting:
            self.connection.answer_settled(self)
