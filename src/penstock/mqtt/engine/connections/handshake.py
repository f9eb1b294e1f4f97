"""Handshake from CONNECT to CONNACK, and re-authentication: the Access authenticates the client, then the session is
created or resumed.

The decision may take time. Packets that arrive earlier are held, within the size limit for unauthenticated clients;
with an Authentication Method only AUTH and DISCONNECT are allowed before CONNACK [MQTT-3.1.2-30].

Source: MQTT 5.0 sections 3.1.4, 3.15, 4.12.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Auth, ConnAck, Connect, Disconnect, Packet, Will
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.engine.connections.connection_state import ConnectionState
from penstock.mqtt.engine.connections.publish import is_text
from penstock.mqtt.engine.model.access import (
    Access,
    Challenge,
    Credentials,
    Decision,
    Granted,
    Principal,
    Refused,
    Rights,
)
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.session_manager import SessionManager, expiry_asked
from penstock.mqtt.engine.sessions.shared_delivery import take_over

__all__ = ["Handshake", "Reauthentication", "check_method", "open_session"]


class _Exchange(ABC):
    """One authentication: passes credentials to the Access, its challenges to the client and its decision to
    ``decided``."""

    __slots__ = ("_access", "_asked", "_challenge", "connection", "credentials")

    def __init__(self, connection: ConnectionState, access: Access | None, credentials: Credentials) -> None:
        self._access = access
        self._asked = 0
        """Number of requests to the Access; answers to earlier requests are ignored."""
        self._challenge: Challenge | None = None
        self.connection = connection
        self.credentials = credentials

    def begin(self, now: int) -> None:
        """Request a decision from the Access."""
        if self._access is None:
            if self.credentials.method is not None:  # [MQTT-4.12.0-1]
                text = "no enhanced authentication here"
                self.decided(Refused(ReasonCode.BAD_AUTHENTICATION_METHOD, text), now)
            else:
                self.decided(None, now)
            return
        self._asked += 1
        asked = self._asked
        self._access.authenticate(self.credentials, lambda decision, at: self._answered(asked, decision, at), now)

    def proceed(self, packet: Auth, now: int) -> None:
        """Handle the client's answer to a challenge.

        Raises:
            RemoteProtocolError: no challenge was sent, or the AUTH has another method.
        """
        challenge = self._challenge
        if challenge is None or packet.reason_code != ReasonCode.CONTINUE_AUTHENTICATION:
            raise protocol_error("AUTH that answers no challenge [MQTT-4.12.0-3]")
        check_method(packet, self.credentials.method)
        self._challenge = None
        self._asked += 1
        asked = self._asked
        challenge.proceed(
            packet.properties.authentication_data, lambda decision, at: self._answered(asked, decision, at), now
        )

    def _answered(self, asked: int, decision: Decision, now: int) -> None:
        if asked != self._asked or self.connection.closing:
            return
        self._asked += 1
        self.credentials.withdraw = None
        if isinstance(decision, Challenge):
            if self.credentials.method is None:
                self.decided(Refused(ReasonCode.NOT_AUTHORIZED, "an Authentication Method is needed"), now)
                return
            self._challenge = decision
            self.connection.send(_auth(ReasonCode.CONTINUE_AUTHENTICATION, self.credentials.method, decision.data))
            return
        self.decided(decision, now)

    def withdraw(self) -> None:
        """Discard a later decision, because the connection ended."""
        self._asked += 1
        withdraw, self.credentials.withdraw = self.credentials.withdraw, None
        if withdraw is not None:
            withdraw()

    @abstractmethod
    def decided(self, decision: Granted | Refused | None, now: int) -> None:
        """Handle the final decision; None: no access control is configured."""


class Handshake(_Exchange):
    """The authentication of a CONNECT.

    ``held``: packets received meanwhile, which are handled after the CONNACK. ``accepted`` is called with the decision
    that accepts it, None without access control.
    """

    __slots__ = ("_accepted", "assigned", "held", "packet")

    def __init__(
        self,
        connection: ConnectionState,
        access: Access | None,
        credentials: Credentials,
        packet: Connect,
        accepted: Callable[[Handshake, Granted | None, int], None],
        *,
        assigned: bool,
    ) -> None:
        super().__init__(connection, access, credentials)
        self._accepted = accepted
        self.packet = packet
        self.assigned = assigned
        self.held: list[Packet] = []

    def receive(self, packet: Packet, now: int) -> None:
        """Handle a packet before the CONNACK.

        Raises:
            RemoteProtocolError: the packet is not allowed before CONNACK.
        """
        if isinstance(packet, Connect):
            raise protocol_error("a second CONNECT [MQTT-3.1.0-2]")
        if isinstance(packet, Disconnect):
            self.connection.close()
        elif self.credentials.method is None:
            if isinstance(packet, Auth):
                raise protocol_error("AUTH without an Authentication Method in CONNECT [MQTT-4.12.0-7]")
            self.held.append(packet)
        elif isinstance(packet, Auth):
            self.proceed(packet, now)
        else:
            raise protocol_error(f"{type(packet).__name__} before CONNACK, with an Authentication Method")

    def decided(self, decision: Granted | Refused | None, now: int) -> None:
        """Accept or refuse the CONNECT."""
        if isinstance(decision, Refused):
            code = decision.reason_code
            if code < 0x80 or code not in ALLOWED[PacketType.CONNACK]:
                code = ReasonCode.NOT_AUTHORIZED
            self.connection.refuse(code, decision.reason_string, decision.server_reference)
        else:
            self._accepted(self, decision, now)


class Reauthentication(_Exchange):
    """Re-authentication (AUTH 0x19) on an accepted connection, which continues meanwhile [MQTT 5.0 section 4.12.1].

    ``accepted`` is called with the principal of the new decision.
    """

    __slots__ = ("_accepted",)

    def __init__(
        self,
        connection: ConnectionState,
        access: Access | None,
        credentials: Credentials,
        accepted: Callable[[Principal, int], None],
    ) -> None:
        super().__init__(connection, access, credentials)
        self._accepted = accepted

    def decided(self, decision: Granted | Refused | None, now: int) -> None:
        """Continue with the new principal, or end the connection [MQTT-4.12.1-2]."""
        connection = self.connection
        previous = self.credentials.previous
        if isinstance(decision, Granted) and previous is not None and decision.principal.name != previous.name:
            decision = Refused(ReasonCode.NOT_AUTHORIZED, "a re-authentication cannot change the principal")
        if isinstance(decision, Granted):
            self._accepted(decision.principal, now)
            if not connection.closing and self.credentials.method is not None:
                connection.send(_auth(0, self.credentials.method, decision.data))
            return
        refused = decision or Refused(ReasonCode.NOT_AUTHORIZED)
        code = refused.reason_code
        if code < 0x80 or code not in ALLOWED[PacketType.DISCONNECT]:
            code = ReasonCode.NOT_AUTHORIZED
        connection.disconnect(code, now, refused.reason_string)


def _auth(reason_code: int, method: str, data: bytes | None) -> Auth:
    """Create an AUTH of the broker, which always contains the method [MQTT-4.12.0-5]."""
    return Auth(int(reason_code), Properties(authentication_method=method, authentication_data=data))


def check_method(packet: Auth, method: str | None) -> None:
    """Raise unless the AUTH has the connection's Authentication Method [MQTT-4.12.1-1]."""
    if packet.properties.authentication_method != method:
        raise RemoteProtocolError(
            "mqtt: protocol error: AUTH by another Authentication Method than CONNECT", reason_code=0x82
        )


def open_session(
    sessions: SessionManager,
    connection: ConnectionState,
    handshake: Handshake,
    granted: Granted | None,
    rights: Rights | None,
    keep_alive_s: int,
    now: int,
) -> None:
    """Create or resume the session of an accepted CONNECT and send CONNACK, or refuse it [MQTT 5.0 section 3.1.4]."""
    broker = connection.broker
    limits = broker.limits
    packet = handshake.packet
    client_id = handshake.credentials.client_id
    owner = "" if granted is None else granted.principal.name
    will = packet.will
    refusal = None
    if will is not None:
        refusal = _will_problem(will, rights, broker.router.route(will.topic).refusal)
    if refusal is None:
        refusal = sessions.refusal(packet, client_id, owner)
    if refusal is not None:
        broker.stats.refused_unauthorized += refusal[0] == ReasonCode.NOT_AUTHORIZED
        broker.report(connection, *refusal)
        connection.refuse(*refusal)
        return
    journal = broker.journal
    awaited_changes = journal.awaited_changes
    session, present = sessions.resume_or_create(client_id, owner, now, clean_start=packet.clean_start)
    session.expiry_s = min(expiry_asked(packet), limits.max_session_expiry_s)
    session.username = packet.username
    session.ends_at = session.will_at = 0
    session.will = will  # cancels a delayed will [MQTT-3.1.3-9]
    if rights is not None:
        sessions.set_rights(session, rights, now)
    session.restored = False
    session.connection = connection
    connection.session = session
    connection.resumed = present
    if journal.enabled:
        sessions.update_persistence(session, packet)
        if journal.awaited_changes != awaited_changes:
            connection.gate = journal.number
    usual = b""
    if connection.version == 5 and _is_usual(limits, handshake, session, keep_alive_s):
        usual = _usual_connack(limits, present=present)
    if usual and len(usual) <= connection.maximum_out:
        connection.send_encoded(usual)
    elif not connection.send(ConnAck(present, 0, _capabilities(limits, handshake, session, keep_alive_s, granted))):
        # With a smaller Maximum Packet Size, required properties would not fit.
        session.will = None
        connection.close()
        sessions.connection_ended(connection, now)
        return
    session.resume(now)
    take_over([each.group for each in session.subscriptions.values() if each.group is not None], now)


def _will_problem(will: Will, rights: Rights | None, topic_refusal: int) -> tuple[int, str] | None:
    """Return the reason code and text for refusing a CONNECT because of its will; ``topic_refusal`` is the router's."""
    if rights is not None and not rights.may_publish(will.topic, will.qos, retain=will.retain):
        return ReasonCode.NOT_AUTHORIZED, "the will may not be published"
    if topic_refusal == ReasonCode.NOT_AUTHORIZED:
        return topic_refusal, "the will topic is reserved for the broker"
    if topic_refusal:
        return topic_refusal, "the will topic cannot be used here"
    if will.properties.payload_format_indicator and not is_text(will.payload):
        return ReasonCode.PAYLOAD_FORMAT_INVALID, "the will payload is not UTF-8"
    return None


_USUAL_CONNACKS: Final[dict[tuple[bool, int, int, int], bytes]] = {}
"""Encoded CONNACKs whose only properties are limits, by Session Present and these limits: encoding one costs as much as
the rest of CONNECT."""


def _is_usual(limits: BrokerLimits, handshake: Handshake, session: Session, keep_alive_s: int) -> bool:
    """Return whether CONNACK has only the properties of :func:`_limit_properties`."""
    packet = handshake.packet
    asked = packet.properties
    return not (
        handshake.assigned
        or session.expiry_s != (asked.session_expiry_interval or 0)
        or keep_alive_s != packet.keep_alive
        or (asked.request_response_information and limits.response_information)
        or asked.authentication_method is not None
    )


def _usual_connack(limits: BrokerLimits, *, present: bool) -> bytes:
    key = (present, limits.max_packet_size, limits.receive_maximum, limits.max_topic_aliases)
    data = _USUAL_CONNACKS.get(key)
    if data is None:
        data = _USUAL_CONNACKS[key] = encode(ConnAck(present, 0, _limit_properties(limits)))
    return data


def _limit_properties(limits: BrokerLimits) -> Properties:
    answer = Properties(maximum_packet_size=limits.max_packet_size)
    if limits.receive_maximum < 65_535:
        answer.receive_maximum = limits.receive_maximum
    if limits.max_topic_aliases:
        answer.topic_alias_maximum = limits.max_topic_aliases
    return answer


def _capabilities(
    limits: BrokerLimits, handshake: Handshake, session: Session, keep_alive_s: int, granted: Granted | None
) -> Properties:
    """Return the properties of CONNACK that differ from the protocol's defaults."""
    asked = handshake.packet.properties
    answer = _limit_properties(limits)
    if handshake.assigned:
        answer.assigned_client_identifier = session.client_id  # [MQTT-3.1.3-7]
    if session.expiry_s != (asked.session_expiry_interval or 0):
        answer.session_expiry_interval = session.expiry_s
    if keep_alive_s != handshake.packet.keep_alive:
        answer.server_keep_alive = keep_alive_s
    if asked.request_response_information and limits.response_information:  # [MQTT-3.1.2-28]
        answer.response_information = limits.response_information.replace("{clientId}", session.client_id)
    if asked.authentication_method is not None:  # [MQTT-4.12.0-5], [MQTT-4.12.0-6]
        answer.authentication_method = asked.authentication_method
        answer.authentication_data = None if granted is None else granted.data
    return answer
