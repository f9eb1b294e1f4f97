"""The answers to a client's QoS 1 and 2 messages: in the order of the messages, once their takers are done.

Source: MQTT 5.0 sections 3.3.4, 4.3, 4.6.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.packet_writer import PacketWriter
from penstock.mqtt.engine.connections.pending_ack import PendingAck
from penstock.mqtt.engine.sessions.session_journal import TAKEN

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker
    from penstock.mqtt.engine.sessions.session import Session

__all__ = ["Acknowledgements"]

_NO_ANSWERS: Final[deque[PendingAck]] = deque(maxlen=0)
_NO_IDENTIFIERS: Final[set[int]] = set()
"""Both are shared by the connections that never had any, since their own would take a kilobyte; never added to."""


class Acknowledgements(PacketWriter):
    """What a connection owes its client for the messages that it brought."""

    __slots__ = ("_crowded", "holds", "open_qos2", "pending", "receive_maximum", "session")

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.session: Session | None = None
        self._crowded = False
        """Held until some of its messages are answered."""
        self.pending = _NO_ANSWERS
        """Answers to messages that cannot leave yet, in the order of the messages."""
        self.open_qos2 = _NO_IDENTIFIERS
        """QoS 2 messages that this connection brought and that have no PUBREL yet."""
        self.receive_maximum = broker.limits.receive_maximum
        self.holds = 0
        """While it is not 0 the shell reads nothing: a service cannot take more, or the client waits for a decision."""

    def hold(self) -> None:
        """Have the shell read nothing more until :meth:`release` was called as often."""
        raise NotImplementedError

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        raise NotImplementedError

    def end(self, reason_code: int, reason_string: str) -> None:
        """End the connection with DISCONNECT."""
        raise NotImplementedError

    @property
    def unacknowledged(self) -> int:
        """QoS 1 and 2 messages that came in and have no PUBACK or PUBREC yet."""
        return len(self.pending)

    def line_up(self, answer: PendingAck) -> None:
        """The answer leaves after those that wait already."""
        if self.pending is _NO_ANSWERS:
            self.pending = deque()
        answer.lined_up = True
        self.pending.append(answer)

    def opened(self, packet_id: int) -> None:
        """A QoS 2 message that has no PUBREL yet came on this connection."""
        if self.open_qos2 is _NO_IDENTIFIERS:
            self.open_qos2 = set()
        self.open_qos2.add(packet_id)

    def answer_settled(self, answer: PendingAck) -> None:
        """The takers of a message are done: send the answers that are ready, in the order of the messages."""
        if answer.qos == 2:
            self._keep_identifier(answer)
        if self.closing:
            return
        pending = self.pending
        if not answer.lined_up:
            if not pending:
                self._send_answer(answer)
                return
            self.line_up(answer)
        while pending and not pending[0].waiting:
            self._send_answer(pending.popleft())
        if self._crowded and len(pending) < self.receive_maximum:
            self._crowded = False
            self.release()

    def _send_answer(self, answer: PendingAck) -> None:
        self.gate = max(self.gate, answer.gate)
        if answer.qos == 2:
            self.pubrec(answer.packet_id, answer.reason_code, answer.reason_string)
        else:
            self.puback(answer.packet_id, answer.reason_code, answer.reason_string)

    def take_back(self, answer: PendingAck, reason_string: str) -> None:
        """A taker wants the message on another connection: this one ends without an answer to it.

        A QoS 2 message is looked at again when it comes again, by the services alone.
        """
        session = self.session
        if answer.qos == 2 and session is not None and session.incoming.get(answer.packet_id) is answer:
            del session.incoming[answer.packet_id]
            self.open_qos2.discard(answer.packet_id)
            session.was_routed(answer.packet_id)
        self.end(ReasonCode.SERVER_BUSY, reason_string)

    def _keep_identifier(self, answer: PendingAck) -> None:
        """From its PUBREC on a QoS 2 identifier stands until PUBREL; after a refusal it is free [MQTT-4.3.3-9].

        MQTT 3.1.1 knows no refusal: its clients go on to PUBREL.
        """
        session = self.session
        if session is None or session.incoming.get(answer.packet_id) is not answer:
            return
        kept = session.kept
        session.routed.discard(answer.packet_id)
        if answer.reason_code >= 0x80 and self.version == 5:
            del session.incoming[answer.packet_id]
            self.open_qos2.discard(answer.packet_id)
            if kept is not None:
                kept.incoming_done(answer.packet_id)
        else:
            session.incoming[answer.packet_id] = None
            if kept is not None:
                kept.incoming(answer.packet_id, TAKEN)
        if kept is not None and kept.promised:
            answer.gate = kept.journal.number

    def check_open(self) -> None:
        """Raise when another QoS 1 or 2 message would be one too many [MQTT-3.3.4-7].

        A client of MQTT 3.1.1 was told no maximum: nothing is read from it until there is room.
        """
        if self.version != 5:
            if len(self.pending) >= self.receive_maximum and not self._crowded:
                self._crowded = True
                self.hold()
            return
        if len(self.pending) + len(self.open_qos2) < self.receive_maximum:
            return  # at most, since a QoS 2 message may stand in both
        waiting_qos1 = sum(answer.qos == 1 for answer in self.pending)
        if waiting_qos1 + len(self.open_qos2) >= self.receive_maximum:
            raise RemoteProtocolError("mqtt: more messages without an answer than Receive Maximum", reason_code=0x93)
