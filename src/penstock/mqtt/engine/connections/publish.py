"""Handlers of PUBLISH and PUBREL: check, route, pass to services, acknowledge.

QoS 2 is exactly once: the session holds the identifier from the PUBLISH to its PUBREL, across connections; a repetition
is acknowledged but not routed [MQTT-4.3.3-10].

Source: MQTT 5.0 sections 3.3.4, 4.3, 4.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.packets import Publish, PubRel
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.connection_state import ConnectionState, PendingAck
from penstock.mqtt.engine.model.client_events import PUBLISH_DENIED
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.session_journal import PROCESSED, ROUTED
from penstock.mqtt.service import Inbound, Service

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["handle_publish", "handle_pubrel", "is_text"]

_NO_SERVICES: Final[list[Service]] = []
"""Shared empty list; never modified."""

_TOO_MANY_USER_PROPERTIES: Final = "the message has too many user properties: send fewer, or raise max_user_properties"
_TOO_FAST: Final = "the client exceeds its publish rate: publish more slowly, or raise max_publish_rate"


def is_text(payload: bytes) -> bool:
    """Return whether a payload with Payload Format Indicator 1 is UTF-8 [MQTT 5.0 section 3.3.2.3.2]."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def handle_publish(connection: ConnectionState, session: Session, publish: Publish, now: i64, wall_ms: i64) -> None:
    """Handle a PUBLISH.

    Raises:
        RemoteProtocolError: an unknown topic alias, or more messages than Receive Maximum.
    """
    broker = connection.broker
    broker.stats.publishes_received += 1
    block = publish.block
    code: i64 = 0
    reason = ""
    if block is not None:
        if block.topic_alias:
            connection.resolve_alias(publish, block.topic_alias)
        if block.payload_format_indicator and not is_text(publish.payload):
            code = ReasonCode.PAYLOAD_FORMAT_INVALID
        if block.user_count and block.user_count > broker.limits.max_user_properties:
            code = ReasonCode.QUOTA_EXCEEDED
            reason = _TOO_MANY_USER_PROPERTIES
    qos = publish.qos
    if qos:
        packet_id = publish.packet_id
        if (connection.unacknowledged or connection.received_qos2) and packet_id not in connection.open_qos2:
            connection.check_receive_maximum()
        if qos == 2:
            if packet_id in session.incoming:
                _repeated(connection, session, publish, wall_ms)
                return
            connection.register_qos2(packet_id)
    if connection.checked and not code:
        code = _check(connection, session, publish, now)
        if connection.closing:
            return
        if code == ReasonCode.QUOTA_EXCEEDED:
            reason = _TOO_FAST
    journal = broker.journal
    awaited_changes = journal.awaited_changes
    taken = _NO_SERVICES
    if not code:
        if qos == 2 and _only_services(session, publish):
            taken = broker.services_for(publish)
        else:
            taken, code, reason = broker.route(publish, session, now)
            if broker.out_of_space and reason == broker.out_of_space and qos and connection.version != 5:
                connection.disconnect(code, now, reason)
                return
    if qos == 0:
        for service in taken:
            service.receive(_inbound(connection, session, publish, wall_ms))
        if code >= 0x80 and not taken:
            broker.stats.dropped_refused += 1
        return
    gate = journal.number if journal.awaited_changes != awaited_changes else 0
    if taken or connection.unacknowledged:
        _answer_later(connection, session, publish, taken, code, gate, wall_ms, reason)
        return
    if qos == 2:
        _hold_identifier(connection, session, packet_id, code)
        if journal.awaited_changes != awaited_changes:
            gate = journal.number
    if connection.closing:
        return  # disconnected because its own queue was full: no packet may follow DISCONNECT [MQTT-3.14.4-1]
    if gate:
        connection.gate = gate
        journal.answer_after(gate)
    if qos == 1:
        connection.puback(packet_id, code, reason)
    else:
        connection.pubrec(packet_id, code, reason)


def _answer_later(
    connection: ConnectionState,
    session: Session,
    publish: Publish,
    taken: list[Service],
    code: i64,
    gate: int,
    wall_ms: i64,
    reason: str,
) -> None:
    """Acknowledge the message after all services have settled it and earlier messages are acknowledged."""
    answer = PendingAck(connection, session, publish, wall_ms, code, len(taken))
    answer.gate = gate
    if reason:
        answer.reason_string = reason
    if publish.qos == 2:
        session.incoming[publish.packet_id] = answer
        if session.journal is not None and taken:
            session.journal.incoming(publish.packet_id, ROUTED)
    if not taken:
        connection.answer_settled(answer)
        return
    taken[0].receive(answer)
    if len(taken) > 1:
        _pass_to_services(connection, session, publish, taken, wall_ms, answer)
    if answer.waiting and not answer.enqueued:
        connection.enqueue(answer)


def _pass_to_services(
    connection: ConnectionState,
    session: Session,
    publish: Publish,
    taken: list[Service],
    wall_ms: int,
    answer: PendingAck,
) -> None:
    """Pass the message to the services after the first."""
    for service in taken[1:]:
        service.receive(_inbound(connection, session, publish, wall_ms, answer.record))


def _hold_identifier(connection: ConnectionState, session: Session, packet_id: int, code: int) -> None:
    """Hold the identifier of an accepted QoS 2 message until PUBREL; free the identifier of a refused message."""
    if code < 0x80 or connection.version != 5:
        session.incoming[packet_id] = None
        if session.journal is not None:
            session.journal.incoming(packet_id, PROCESSED)
    else:
        connection.open_qos2.discard(packet_id)


def _check(connection: ConnectionState, session: Session, publish: Publish, now: int) -> int:
    """Check rate limit and rights; return the reason code that refuses the message, 0 to accept it."""
    rate = connection.rate
    if rate is not None and not rate.acquire(now):
        code = connection.limit_rate(publish, now)
        if code:
            return code
    rights = session.rights
    if rights is not None and not rights.may_publish(publish.topic, publish.qos, retain=publish.retain):
        connection.broker.stats.refused_unauthorized += 1
        session.count_events(PUBLISH_DENIED, 1, publish.topic)
        return ReasonCode.NOT_AUTHORIZED
    return 0


def _inbound(
    connection: ConnectionState,
    session: Session,
    publish: Publish,
    wall_ms: int,
    settle: Callable[[int, str], None] | None = None,
) -> Inbound:
    return Inbound(
        publish,
        session.client_id,
        wall_ms,
        username=session.username,
        protocol_version=connection.version,
        connection=connection,
        settle=settle,
        principal=None if session.rights is None else session.rights.principal,
        read=connection.broker.reads,
    )


def _only_services(session: Session, publish: Publish) -> bool:
    """Return whether only services receive the message; without DUP it is a new message that reuses the identifier."""
    if publish.packet_id not in session.routed:
        return False
    session.routed.discard(publish.packet_id)
    return publish.dup


def _repeated(connection: ConnectionState, session: Session, publish: Publish, wall_ms: int) -> None:
    """Acknowledge a repeated QoS 2 message without routing it."""
    packet_id = publish.packet_id
    connection.register_qos2(packet_id)
    answer = session.incoming[packet_id]
    if answer is None:
        session.hold_answer(connection)
        answer = PendingAck(connection, session, publish, wall_ms, 0, 0)
        connection.enqueue(answer)
        connection.answer_settled(answer)
    elif (
        isinstance(answer, PendingAck) and answer.acknowledger is not connection
    ):  # services still process it: this connection will send the acknowledgement
        answer.acknowledger = connection
        connection.enqueue(answer)


def handle_pubrel(connection: ConnectionState, session: Session, packet: PubRel) -> None:
    """Handle a PUBREL: free the identifier and send PUBCOMP [MQTT-4.3.3-11].

    Raises:
        RemoteProtocolError: its PUBREC was not sent yet.
    """
    packet_id = packet.packet_id
    code = 0
    if packet_id not in session.incoming:
        code = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
    elif session.incoming[packet_id] is not None:
        raise protocol_error("PUBREL before PUBREC")
    else:
        del session.incoming[packet_id]
        if session.journal is not None:
            # A client that has PUBCOMP uses the identifier again; after a crash that message must not be taken for a
            # repetition.
            session.journal.incoming_done(packet_id)
            session.hold_answer(connection)
    connection.open_qos2.discard(packet_id)
    connection.pubcomp(packet_id, code)
