"""Input of one network connection: decodes bytes and dispatches packets to their handlers.

Protocol errors are answered with CONNACK before the client is accepted, with DISCONNECT afterwards [MQTT 5.0 section
4.13].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import LARGEST_PACKET, Decoder, Role
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.engine.connections.aliases import SentAliases
from penstock.mqtt.engine.connections.connection_state import ConnectionState, TokenBucket
from penstock.mqtt.engine.connections.handshake import Handshake, Reauthentication, check_method, open_session
from penstock.mqtt.engine.connections.output import SUBSCRIPTION_REASONS, BrokerOutput, diagnosis
from penstock.mqtt.engine.connections.publish import handle_publish, handle_pubrel
from penstock.mqtt.engine.model.access import LOCAL, Access, Credentials, Granted, Origin, Principal, Rights
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.session_manager import SessionManager
from penstock.mqtt.engine.sessions.subscribing import NO_END, as_bridge, subscribe, subscribed, unsubscribe

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["BrokerConnection"]

PINGRESP: Final = b"\xd0\x00"
"""The answer to PINGREQ [MQTT-3.12.4-1]."""
CONNECT_WORK: Final = 64
"""Units of work for CONNECT, and for each packet of enhanced authentication before CONNACK."""

_PUBLISH: Final = 3
_PUBACK: Final = 4
_PINGREQ: Final = 12
_DISCONNECT: Final = 14


class _SubscriptionRequest:
    """SUBSCRIBE or UNSUBSCRIBE in progress, with the reason codes of the topic filters handled so far."""

    __slots__ = ("codes", "packet")

    def __init__(self, packet: Subscribe | Unsubscribe) -> None:
        self.packet = packet
        self.codes: list[int] = []


class BrokerConnection(ConnectionState):
    """One network connection: the shell calls :meth:`receive`, and sends the output of :meth:`Broker.flush`."""

    __slots__ = (
        "_access",
        "_change",
        "_credit",
        "_deciding",
        "_handshake",
        "_origin",
        "_reauthentication",
        "_sessions",
        "decoder",
        "unread",
    )

    def __init__(
        self,
        broker: BrokerCore,
        sessions: SessionManager,
        outbound: BrokerOutput,
        name: str,
        now: int,
        *,
        origin: Origin = LOCAL,
        access: Access | None = None,
    ) -> None:
        super().__init__(broker, outbound, name, now, checked=access is not None)
        limits = broker.limits
        self.decoder = Decoder(
            limits.max_packet_size, role=Role.SERVER, topics=broker.topics, max_connect_size=limits.max_connect_size
        )
        self._sessions = sessions
        self._origin = origin
        self._access = access
        self._handshake: Handshake | None = None
        self._reauthentication: Reauthentication | None = None
        self._deciding = False
        """Reading is held until the Access decides about CONNECT."""
        self._change: _SubscriptionRequest | None = None
        """SUBSCRIBE or UNSUBSCRIBE that is continued in the next share."""
        self._credit: i64 = 0
        """Work of the last packet beyond the share of its turn, as a negative number, which later turns make up for."""
        self.unread = False
        """True if the share of this turn was used up before all received bytes were handled: the shell calls
        :meth:`proceed` in the next turn."""

    # Input

    def receive(self, data: bytes, now: i64, wall_ms: i64) -> None:
        """Handle received bytes, within this turn's share of work; see :attr:`unread`.

        ``now``: monotonic ms; ``wall_ms``: wall clock, for the services. Work beyond the share is subtracted from later
        turns, so that a client with expensive packets gets the same share as others (deficit round robin).
        """
        self.unread = False
        if self.closing:
            return
        stats = self.stats
        decoder = self.decoder
        if len(data) > 0:
            stats.bytes_received += len(data)
            decoder.add(data)
        self.last_received = now
        broker = self.broker
        broker.wall_offset = wall_ms - now
        broker.reading_since = now
        broker.reads += 1
        session = self.session
        end = broker.work + broker.max_turn_work + self._credit
        try:
            change = self._change
            if (
                change is not None
                and session is not None
                and (broker.work >= end or not self._change_subscriptions(session, change, end, now))
            ):
                self._credit = end - broker.work
                self.unread = True
                return
            while not self.closing:
                if broker.work >= end and decoder.has_more():
                    self._credit = end - broker.work
                    self.unread = True
                    return
                packet_type = decoder.next_type()
                if packet_type == 0:
                    self._credit = 0
                    return
                broker.work += 1
                stats.packets_received += 1
                if session is None:
                    broker.work += CONNECT_WORK
                    self._before_connack(decoder.packet(), now)
                    session = self.session
                elif packet_type == _PUBLISH:
                    handle_publish(self, session, decoder.publish(), now, wall_ms)
                elif packet_type == _PUBACK and decoder.packet_id:
                    session.acknowledge(decoder.packet_id, now)
                elif packet_type == _PINGREQ and decoder.is_empty():
                    self.send_encoded(PINGRESP)
                elif packet_type == _DISCONNECT and decoder.is_empty():
                    self._handle_disconnect(session, now)
                else:
                    self._handle_packet(session, decoder.packet(), end, now)
                    if self._change is not None:
                        self._credit = end - broker.work
                        self.unread = True
                        return
                if not decoder.has_more():
                    self._credit = 0
                    return
        except RemoteProtocolError as e:
            self._fail(e, now)
        decoder.discard()  # bytes after DISCONNECT

    def keep(self, data: bytes, now: i64) -> None:
        """Keep received bytes for :meth:`proceed` in a later turn."""
        if not self.closing:
            self.stats.bytes_received += len(data)
            self.decoder.add(data)
            self.last_received = now
            self.unread = True

    def proceed(self, now: i64, wall_ms: i64) -> bool:
        """Handle the remaining bytes within the share of another turn; return :attr:`unread`."""
        self.receive(b"", now, wall_ms)
        return self.unread

    def lost(self, now: int) -> None:
        """Handle the end of the network connection; call it once."""
        broker = self.broker
        broker.connections -= 1
        self.outbound.forget(self)
        self._sessions.connection_ended(self, now)
        self.closing = True
        self.decoder.discard()  # the timer entry may reference the connection for a while
        self._change = None
        self.out.truncate(0)
        broker.timers.remove(self)
        for exchange in (self._handshake, self._reauthentication):
            if exchange is not None:
                exchange.withdraw()
        self._handshake = self._reauthentication = None  # frees the CONNECT and later packets as well

    # Packets

    def _before_connack(self, packet: Packet, now: int) -> None:
        if self._handshake is not None:
            self._handshake.receive(packet, now)
            return
        if not isinstance(packet, Connect):  # [MQTT-3.1.0-1]
            self.stats.protocol_errors += 1
            self.close()
            return
        self.version = packet.protocol_version
        self.bridge = packet.bridge
        properties = packet.properties
        self.maximum_out = properties.maximum_packet_size or LARGEST_PACKET
        self._problem_information = properties.request_problem_information != 0
        if not packet.client_id and self.version != 5 and not packet.clean_start:
            self.refuse(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)  # MQTT 3.1.1 cannot report an assigned identifier
            return
        if len(packet.client_id.encode()) > self.broker.limits.max_client_id_bytes:
            self.refuse(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "the client identifier is too long")  # [MQTT-3.1.3-8]
            return
        client_id = packet.client_id or self.broker.new_client_id()
        credentials = Credentials(
            client_id=client_id,
            username=packet.username,
            password=packet.password,
            method=properties.authentication_method,
            data=properties.authentication_data,
            origin=self._origin,
            protocol_version=self.version,
            user_properties=properties.user_properties,
        )
        handshake = Handshake(self, self._access, credentials, packet, self._accepted, assigned=not packet.client_id)
        self._handshake = handshake
        handshake.begin(now)
        if self.session is None and not self.closing and credentials.method is None:
            self._deciding = True
            self.hold()

    def _accepted(self, handshake: Handshake, granted: Granted | None, now: int) -> None:
        """Open the session of an accepted CONNECT, then handle the packets received meanwhile."""
        packet = handshake.packet
        self._handshake = None
        if self._deciding:
            self._deciding = False
            self.release()
        handshake.credentials.password = None
        self.credentials = handshake.credentials
        limits = self.broker.limits
        properties = packet.properties
        self.send_maximum = min(properties.receive_maximum or 65_535, limits.max_inflight)
        keep_alive = packet.keep_alive
        if self.version == 5:
            self.receive_maximum = limits.receive_maximum  # those of the CONNACK
            self.alias_maximum = limits.max_topic_aliases
            if properties.topic_alias_maximum:
                self.aliases_out = SentAliases(min(properties.topic_alias_maximum, limits.server_topic_alias_maximum))
            longest = limits.max_keep_alive_s
            if longest and (keep_alive > longest or (keep_alive == 0 and limits.require_keep_alive)):
                keep_alive = longest
        self.keep_alive_ms = keep_alive * 1500
        origin = self._origin
        rate, burst = limits.max_publish_rate, limits.max_publish_burst
        if origin.publish_rate:
            rate, burst = origin.publish_rate, origin.publish_burst
        if rate:
            self.checked = True
            self.rate = TokenBucket(rate, burst or rate, now)
        rights = None if granted is None or self._access is None else Rights(self._access, granted.principal)
        open_session(self._sessions, self, handshake, granted, rights, keep_alive, now)
        if self.session is None:
            return
        if self.keep_alive_ms:
            self.broker.timers.arm(self, now + self.keep_alive_ms)
        self._handle_held(handshake.held, now)

    def _handle_held(self, held: list[Packet], now: int) -> None:
        wall_ms = now + self.broker.wall_offset
        self.broker.reads += 1  # received during authentication: the time of arrival is now
        try:
            for packet in held:
                session = self.session
                if self.closing or session is None:
                    return
                if isinstance(packet, Publish):
                    handle_publish(self, session, packet, now, wall_ms)
                else:
                    self._handle_packet(session, packet, NO_END, now)
        except RemoteProtocolError as e:
            self._fail(e, now)

    def _handle_packet(self, session: Session, packet: Packet, end: i64, now: int) -> None:
        """Handle packets other than PUBLISH on an accepted connection. Topic filters are handled until the work is
        ``end``."""
        if isinstance(packet, PubRec):
            code = session.pubrec(packet.packet_id, packet.reason_code, now)
            if code >= 0:
                self.pubrel(packet.packet_id, code)  # [MQTT-4.3.3-4]
        elif isinstance(packet, PubRel):
            handle_pubrel(self, session, packet)
        elif isinstance(packet, PubComp):
            session.pubcomp(packet.packet_id, now)
        elif isinstance(packet, PubAck):
            session.acknowledge(packet.packet_id, now)
        elif isinstance(packet, PingReq):
            self.send_encoded(PINGRESP)
        elif isinstance(packet, (Subscribe, Unsubscribe)):
            if isinstance(packet, Subscribe) and self.bridge:
                as_bridge(packet)
            self._change_subscriptions(session, _SubscriptionRequest(packet), end, now)
        elif isinstance(packet, Disconnect):
            self._disconnect(packet, now)
        elif isinstance(packet, Connect):
            raise protocol_error("a second CONNECT [MQTT-3.1.0-2]")
        elif isinstance(packet, Auth):
            self._authenticate_again(packet, now)

    def _change_subscriptions(self, session: Session, change: _SubscriptionRequest, end: i64, now: int) -> bool:
        """Handle topic filters of SUBSCRIBE or UNSUBSCRIBE until the work is ``end``; return whether all are handled.

        The answer is sent after the last filter. :meth:`proceed` handles the remaining ones before other packets: a
        packet with 10,000 filters takes many turns.
        """
        broker, packet, codes = self.broker, change.packet, change.codes
        if isinstance(packet, Subscribe):
            done = subscribe(broker, session, packet, codes, end, now)
        else:
            done = unsubscribe(broker, session, packet.topic_filters, codes, end, now)
        if not done:
            self._change = change
            return False
        self._change = None
        session.hold_answer(self)
        if isinstance(packet, Subscribe):
            refused = next((code for code in codes if code >= 0x80), 0)
            self.send(SubAck(packet.packet_id, codes, self.problem_text(SUBSCRIPTION_REASONS.get(refused, ""))))
            subscribed(session, packet, now)
        else:
            self.send(UnsubAck(packet.packet_id, codes))
        return True

    def _authenticate_again(self, packet: Auth, now: int) -> None:
        credentials, session = self.credentials, self.session
        assert credentials is not None
        assert session is not None
        if credentials.method is None or session.rights is None:
            raise protocol_error("AUTH without an Authentication Method in CONNECT [MQTT-4.12.0-7]")
        running = self._reauthentication
        if packet.reason_code == ReasonCode.REAUTHENTICATE:
            if running is not None:
                raise protocol_error("a re-authentication within another")
            check_method(packet, credentials.method)
            again = credentials.renew(packet.properties.authentication_data, session.rights.principal)
            self._reauthentication = Reauthentication(self, self._access, again, self._reauthenticated)
            self._reauthentication.begin(now)
        elif running is None:
            raise protocol_error("AUTH that answers no challenge [MQTT-4.12.0-3]")
        else:
            running.proceed(packet, now)

    def _reauthenticated(self, principal: Principal, now: int) -> None:
        self._reauthentication = None
        if self.session is not None and self._access is not None:
            self._sessions.set_rights(self.session, Rights(self._access, principal), now)

    def _disconnect(self, packet: Disconnect, now: int) -> None:
        session = self.session
        assert session is not None
        expiry = packet.properties.session_expiry_interval
        if expiry is not None:
            if expiry and not session.expiry_s:
                raise protocol_error("Session Expiry Interval on DISCONNECT after 0 on CONNECT")
            session.expiry_s = min(expiry, self.broker.limits.max_session_expiry_s)
        if packet.reason_code == 0:
            self._handle_disconnect(session, now)
        else:
            self.left = True
            self.close()
            self._sessions.connection_ended(self, now)

    def _handle_disconnect(self, session: Session, now: int) -> None:
        """Handle an orderly DISCONNECT."""
        session.will = None  # [MQTT-3.1.2-10], [MQTT-3.14.4-3]
        self.left = True
        self.close()
        self._sessions.connection_ended(self, now)

    def _fail(self, error: RemoteProtocolError, now: int) -> None:
        """Close after a protocol error of the client, with CONNACK or DISCONNECT where allowed [MQTT-4.13.1-1]."""
        self.stats.protocol_errors += 1
        code = error.reason_code
        if self.session is not None:  # DISCONNECT does not have every reason code that a second CONNECT may cause
            if code not in ALLOWED[PacketType.DISCONNECT]:
                code = ReasonCode.PROTOCOL_ERROR
            self.disconnect(code, now, error.what)
            return
        self.broker.report(self, code, error.what)
        decoder = self.decoder
        level = decoder.protocol_level
        if level == 5 and self.version == 5:
            self.send(
                ConnAck(
                    reason_code=code if code in ALLOWED[PacketType.CONNACK] else ReasonCode.PROTOCOL_ERROR,
                    properties=diagnosis(error.what),
                )
            )
        elif (
            code == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
            and level != 4  # an unknown protocol name: no CONNACK [MQTT-3.1.4-1 of MQTT 3.1.1]
            and decoder.protocol_name in (b"MQTT", b"MQIsdp")
        ):
            # CONNACK of MQTT 3.1.1 with return code 1 [MQTT-3.1.2-2 of MQTT 3.1.1]: older clients and bridges of other
            # brokers then retry with another level; they do not understand CONNACK of MQTT 5.
            self.out.write(b"\x20\x02\x00\x01")
        self.close()
