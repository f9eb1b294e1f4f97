"""Messages of a client: checked, routed, handed to services, answered.

QoS 2 is exactly once: the identifier is kept in the session from the PUBLISH to its PUBREL, across connections, and a
repeat is answered but not handed on [MQTT-4.3.3-10].

Source: MQTT 5.0 sections 3.3.4, 4.3, 4.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.mqtt.codec.packets import Publish, PubRel
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.pending_ack import PendingAck
from penstock.mqtt.engine.sessions.session_journal import ROUTED, TAKEN
from penstock.mqtt.service import Inbound, Service

if TYPE_CHECKING:
    from penstock.mqtt.engine.connections.connection import BrokerConnection
    from penstock.mqtt.engine.sessions.session import Session

__all__ = ["handle_publish", "handle_pubrel", "is_text"]


def is_text(payload: bytes) -> bool:
    """Whether a payload with Payload Format Indicator 1 is what it says: UTF-8 [MQTT 5.0 section 3.3.2.3.2]."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def handle_publish(connection: BrokerConnection, session: Session, publish: Publish, now: int, wall_ms: int) -> None:
    """A message of the client came in.

    Raises:
        RemoteProtocolError: an alias that does not hold, or more messages open than allowed.
    """
    broker = connection.broker
    broker.stats.publishes_received += 1
    block = publish.block
    code = 0
    if block is not None:
        if block.topic_alias:
            connection.resolve_alias(publish, block.topic_alias)
        if block.payload_format_indicator and not is_text(publish.payload):
            code = ReasonCode.PAYLOAD_FORMAT_INVALID
    qos = publish.qos
    if qos:
        packet_id = publish.packet_id
        if (connection.pending or connection.open_qos2) and packet_id not in connection.open_qos2:
            connection.check_open()
        if qos == 2:
            if packet_id in session.incoming:
                _repeated(connection, session, packet_id)
                return
            connection.opened(packet_id)
    if connection.checked and not code:
        code = _check(connection, session, publish, now)
        if connection.closing:
            return
    journal = broker.journal
    promises = journal.promises
    taken: list[Service] = []
    if not code:
        if qos == 2 and _was_routed(session, publish):
            taken = broker.services_for(publish)
        else:
            taken, code = broker.route(publish, session, now)
            if broker.out_of_space and code == ReasonCode.QUOTA_EXCEEDED and qos and connection.version != 5:
                connection.disconnect(code, now, broker.out_of_space)
                return
    if qos == 0:
        for service in taken:
            service.receive(_inbound(connection, session, publish, wall_ms))
        if code >= 0x80 and not taken:
            broker.stats.dropped_refused += 1
        return
    gate = journal.number if journal.promises != promises else 0
    if taken or connection.pending:
        _answer_later(connection, session, publish, taken, code, gate, wall_ms)
        return
    if qos == 2:
        _keep_identifier(connection, session, packet_id, code)
        if journal.promises != promises:
            gate = journal.number
    if connection.closing:
        return  # the client's own queue was full: nothing may follow DISCONNECT [MQTT-3.14.4-1]
    if gate:
        connection.gate = gate
    if qos == 1:
        connection.puback(packet_id, code)
    else:
        connection.pubrec(packet_id, code)


def _answer_later(
    connection: BrokerConnection,
    session: Session,
    publish: Publish,
    taken: list[Service],
    code: int,
    gate: int,
    wall_ms: int,
) -> None:
    """The answer waits for the services that take the message, or for the answers before it."""
    packet_id = publish.packet_id
    answer = PendingAck(connection, packet_id, publish.qos, code, len(taken))
    answer.gate = gate
    if publish.qos == 2:
        session.incoming[packet_id] = answer
        if session.kept is not None and taken:
            session.kept.incoming(packet_id, ROUTED)
    if not taken:
        connection.answer_settled(answer)
        return
    for service in taken:
        service.receive(_inbound(connection, session, publish, wall_ms, answer))
    if answer.waiting and not answer.lined_up:
        connection.line_up(answer)


def _keep_identifier(connection: BrokerConnection, session: Session, packet_id: int, code: int) -> None:
    """A QoS 2 message is taken, or refused: the identifier of one that was taken stands until PUBREL."""
    if code < 0x80 or connection.version != 5:
        session.incoming[packet_id] = None
        if session.kept is not None:
            session.kept.incoming(packet_id, TAKEN)
    else:
        connection.open_qos2.discard(packet_id)


def _check(connection: BrokerConnection, session: Session, publish: Publish, now: int) -> int:
    """The reason code with which the client's rate or rights refuse the message; 0 to take it."""
    rate = connection.rate
    if rate is not None and not rate.take(now):
        code = connection.too_fast(publish, now)
        if code:
            return code
    rights = session.rights
    if rights is not None and not rights.may_publish(publish.topic, publish.qos, retain=publish.retain):
        connection.broker.stats.refused_unauthorized += 1
        return ReasonCode.NOT_AUTHORIZED
    return 0


def _inbound(
    connection: BrokerConnection, session: Session, publish: Publish, wall_ms: int, answer: PendingAck | None = None
) -> Inbound:
    return Inbound(
        publish,
        session.client_id,
        wall_ms,
        username=session.username,
        protocol_version=connection.version,
        connection=connection,
        answer=answer,
        principal=None if session.rights is None else session.rights.principal,
    )


def _was_routed(session: Session, publish: Publish) -> bool:
    """Whether subscribers have the message already; without DUP it is another one with its identifier."""
    if publish.packet_id not in session.routed:
        return False
    session.routed.discard(publish.packet_id)
    return publish.dup


def _repeated(connection: BrokerConnection, session: Session, packet_id: int) -> None:
    """A QoS 2 message that we have already: answer, and hand on nothing."""
    connection.opened(packet_id)
    answer = session.incoming[packet_id]
    if answer is None:
        if session.kept is not None:
            session.kept.hold_back(connection)
        answer = PendingAck(connection, packet_id, 2, 0, 0)
        connection.line_up(answer)
        connection.answer_settled(answer)
    elif answer.connection is not connection:  # its takers still work on it: the answer leaves here
        answer.connection = connection
        connection.line_up(answer)


def handle_pubrel(connection: BrokerConnection, session: Session, packet: PubRel) -> None:
    """A PUBREL came in: the identifier is free, and PUBCOMP says so [MQTT-4.3.3-11].

    Raises:
        RemoteProtocolError: the PUBREC is still to come.
    """
    packet_id = packet.packet_id
    code = 0
    if packet_id not in session.incoming:
        code = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
    elif session.incoming[packet_id] is not None:
        raise protocol_error("PUBREL before PUBREC")
    else:
        del session.incoming[packet_id]
        if session.kept is not None:
            # A client that has PUBCOMP uses the identifier again; a crash must not make that message a repeat.
            session.kept.incoming_done(packet_id)
            session.kept.hold_back(connection)
    connection.open_qos2.discard(packet_id)
    connection.pubcomp(packet_id, code)
