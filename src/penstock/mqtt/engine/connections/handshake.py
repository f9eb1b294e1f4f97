"""From CONNECT to CONNACK, and re-authentication: what is between a connection and who decides about access.

The decision may take its time. Until it is there, packets of an impatient client are kept, within the size that a
stranger may make us buffer; where an Authentication Method was given only AUTH and DISCONNECT may come [MQTT-3.1.2-30].

Source: MQTT 5.0 sections 3.1.4, 3.15, 4.12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import Auth, Connect, Disconnect, Packet
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.engine.model.access import Access, Challenge, Credentials, Decision, Granted, Refused

if TYPE_CHECKING:
    from penstock.mqtt.engine.connections.connection import BrokerConnection

__all__ = ["Handshake", "Reauthentication", "check_method"]


class _Exchange:
    """One authentication: credentials to the Access, its challenges to the client, its decision to ``decided``."""

    __slots__ = ("_access", "_asked", "_challenge", "connection", "credentials")

    def __init__(self, connection: BrokerConnection, access: Access | None, credentials: Credentials) -> None:
        self._access = access
        self._asked = 0
        """Number of questions put to the Access; an answer to an earlier one comes too late."""
        self._challenge: Challenge | None = None
        self.connection = connection
        self.credentials = credentials

    def begin(self, now: int) -> None:
        """Ask."""
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
        """The client answers a challenge.

        Raises:
            RemoteProtocolError: it was not asked, or answers by another method.
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
        if isinstance(decision, Challenge):
            if self.credentials.method is None:
                self.decided(Refused(ReasonCode.NOT_AUTHORIZED, "an Authentication Method is needed"), now)
                return
            self._challenge = decision
            self.connection.send(_auth(ReasonCode.CONTINUE_AUTHENTICATION, self.credentials.method, decision.data))
            return
        self.decided(decision, now)

    def decided(self, decision: Granted | Refused | None, now: int) -> None:
        """The end of it; None: nobody decides here, all are welcome."""
        raise NotImplementedError


class Handshake(_Exchange):
    """CONNECT is being judged. ``held``: packets that came meanwhile; they are handled after the CONNACK."""

    __slots__ = ("assigned", "held", "packet")

    def __init__(
        self,
        connection: BrokerConnection,
        access: Access | None,
        credentials: Credentials,
        packet: Connect,
        *,
        assigned: bool,
    ) -> None:
        super().__init__(connection, access, credentials)
        self.packet = packet
        self.assigned = assigned
        self.held: list[Packet] = []

    def receive(self, packet: Packet, now: int) -> None:
        """A packet before the CONNACK.

        Raises:
            RemoteProtocolError: it may not come now.
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
            self.connection.refuse(code, decision.reason_string)
        else:
            self.connection.admitted(self, decision, now)


class Reauthentication(_Exchange):
    """AUTH 0x19 on an accepted connection; everything else goes on meanwhile [MQTT 5.0 section 4.12.1]."""

    __slots__ = ()

    def decided(self, decision: Granted | Refused | None, now: int) -> None:
        """Go on with the new principal, or end the connection [MQTT-4.12.1-2]."""
        connection = self.connection
        previous = self.credentials.previous
        if isinstance(decision, Granted) and previous is not None and decision.principal.name != previous.name:
            decision = Refused(ReasonCode.NOT_AUTHORIZED, "a re-authentication cannot change who it is")
        if isinstance(decision, Granted):
            connection.reauthenticated(decision.principal, now)
            if not connection.closing and self.credentials.method is not None:
                connection.send(_auth(0, self.credentials.method, decision.data))
            return
        refused = decision or Refused(ReasonCode.NOT_AUTHORIZED)
        code = refused.reason_code
        if code < 0x80 or code not in ALLOWED[PacketType.DISCONNECT]:
            code = ReasonCode.NOT_AUTHORIZED
        connection.disconnect(code, now, refused.reason_string)


def _auth(reason_code: int, method: str, data: bytes | None) -> Auth:
    """An AUTH of ours: it always names the method [MQTT-4.12.0-5]."""
    return Auth(int(reason_code), Properties(authentication_method=method, authentication_data=data))


def check_method(packet: Auth, method: str | None) -> None:
    """Raise unless the AUTH names the connection's Authentication Method [MQTT-4.12.1-1]."""
    if packet.properties.authentication_method != method:
        raise RemoteProtocolError(
            "mqtt: protocol error: AUTH by another Authentication Method than CONNECT", reason_code=0x82
        )
