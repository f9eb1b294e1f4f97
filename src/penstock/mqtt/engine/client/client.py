"""The client engine, which does no IO: takes operations and received bytes, returns bytes and events. It outlives
network connections.

After each call the shell handles :meth:`ClientEngine.take_events` and sends the result of
:meth:`ClientEngine.take_output`. Operations have a token of the caller, which :class:`OperationDone` returns.
Operations without an answer when a connection ends are sent again after the next CONNACK
(:mod:`penstock.mqtt.engine.client.outgoing`); received messages are acknowledged as
:mod:`penstock.mqtt.engine.client.incoming` describes.

Source: MQTT 5.0 chapters 3 and 4.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final, Protocol

from penstock.errors import LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.decoder import LARGEST_PACKET, Decoder, Role, TopicNames
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscription,
    UnsubAck,
)
from penstock.mqtt.codec.primitives import protocol_error
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.client.events import Closed, Connected, ConnectRefused, Event, OperationDone
from penstock.mqtt.engine.client.incoming import Incoming
from penstock.mqtt.engine.client.outbox import Outbox
from penstock.mqtt.engine.client.outgoing import Outgoing

__all__ = ["ClientEngine", "ClientState", "EnhancedAuthentication"]

PING_GRACE_MS: Final = 10_000
"""Time for a PINGRESP, in ms; without one the connection is closed."""


class ClientState(Enum):
    """State of the network connection."""

    OFFLINE = "offline"
    CONNECTING = "connecting"
    CONNECTED = "connected"


class EnhancedAuthentication(Protocol):
    """One method of enhanced authentication [MQTT 5.0 section 4.12]; each exchange begins with :meth:`start`."""

    @property
    def method(self) -> str:
        """Name of the method, as both sides know it."""
        ...

    def start(self) -> bytes | None:
        """Return the Authentication Data of CONNECT, or of the AUTH that starts a re-authentication."""
        ...

    def answer(self, data: bytes | None) -> bytes | None:
        """Return the response to the server's AUTH; raise PenstockError to reject the server."""
        ...

    def finish(self, data: bytes | None) -> None:
        """Check the server's final data; raise PenstockError if its proof is missing or wrong."""
        ...


class ClientEngine:
    """One client. ``connect`` is its first CONNECT; later ones have Clean Start 0 and the assigned client identifier.

    ``automatic``: messages are acknowledged when they are received; otherwise by :meth:`acknowledge`.
    ``topic_aliases``: maximum number of topic aliases, if the server accepts them.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        automatic: bool = True,
        topic_aliases: int = 0,
        authentication: EnhancedAuthentication | None = None,
    ) -> None:
        self.connect = connect
        self.state = ClientState.OFFLINE
        self.server = ConnAck()
        """The last successful CONNACK."""
        self.reading = True
        """Whether the shell reads from the network; while it does not, keep alive is not checked."""
        self._max_packet_size = connect.properties.maximum_packet_size or LARGEST_PACKET
        self._topics = TopicNames(1024)
        self._decoder = Decoder(self._max_packet_size, role=Role.CLIENT, topics=self._topics)
        self._outbox = Outbox()
        self._events: list[Event] = []
        self._outgoing = Outgoing(self._outbox, self._events, topic_aliases=topic_aliases)
        self._incoming = Incoming(
            self._outbox,
            self._events,
            receive_maximum=connect.properties.receive_maximum or 65_535,
            topic_alias_maximum=connect.properties.topic_alias_maximum or 0,
            automatic=automatic,
        )
        self._authentication = authentication
        self._reauthentication: object = None
        self._keep_alive_ms = 0
        self._last_received = 0
        self._ping_sent = 0
        self._connected_before = False

    # Network connections

    def begin(self, now: int) -> None:
        """Send CONNECT on a new network connection."""
        assert self.state is ClientState.OFFLINE
        if self._connected_before:
            self.connect = replace(self.connect, clean_start=False)
        if self._authentication is not None:
            properties = self.connect.properties.copy()
            properties.authentication_method = self._authentication.method
            properties.authentication_data = self._authentication.start()
            self.connect = replace(self.connect, properties=properties)
        self._decoder = Decoder(self._max_packet_size, role=Role.CLIENT, topics=self._topics)
        self._outbox.pieces.clear()
        self._incoming.begin()
        self._outgoing.writable = True
        self.state = ClientState.CONNECTING
        self._ping_sent = 0
        self._outbox.send(self.connect, now)

    def receive(self, data: bytes, now: int) -> list[Event]:
        """Handle received bytes."""
        if self.state is ClientState.OFFLINE:
            return []
        self._last_received = now
        try:
            for packet in self._decoder.feed(data):
                self._handle(packet, now)
                if self._is_closed():
                    return self.take_events()
            if self._decoder.error is not None:
                self._fail(self._decoder.error, now)
        except RemoteProtocolError as e:
            self._fail(e, now)
        return self.take_events()

    def lost(self) -> None:
        """Handle the end of the network connection; unanswered operations wait for the next one.

        A re-authentication belongs to its connection, so it fails: see :meth:`take_events`.
        """
        self.state = ClientState.OFFLINE
        self._outbox.pieces.clear()
        self._outgoing.lost()
        self._fail_reauthentication(UnavailableError("mqtt: the connection was lost during the re-authentication"))

    def disconnect(self, now: int, reason_code: int = 0, session_expiry_s: int | None = None) -> None:
        """Send DISCONNECT; the shell closes the connection after the output is sent."""
        if self.state is ClientState.CONNECTED:
            self._outbox.send(Disconnect(reason_code, Properties(session_expiry_interval=session_expiry_s)), now)
        self._end()

    def abandon(self) -> list[tuple[object, bool]]:
        """Abandon all unanswered operations; return their tokens, and whether the server may have received them."""
        given_up = self._outgoing.abandon()
        if self._reauthentication is not None:
            given_up.append((self._reauthentication, True))
            self._reauthentication = None
        return given_up

    def withdraw(self, token: object) -> None:
        """Cancel an operation, unless it was sent."""
        self._outgoing.withdraw(token)

    @property
    def subscriptions(self) -> list[str]:
        """Topic filters of the granted subscriptions."""
        return list(self._outgoing.subscriptions)

    @property
    def unsent(self) -> int:
        """Pieces of output that wait for :meth:`take_output`."""
        return len(self._outbox.pieces)

    @property
    def open_operations(self) -> int:
        """Number of unanswered operations."""
        return self._outgoing.open

    @property
    def writable(self) -> bool:
        """Whether the transport accepts bytes; messages at QoS 1 and 2 wait while it does not."""
        return self._outgoing.writable

    @writable.setter
    def writable(self, writable: bool) -> None:
        self._outgoing.writable = writable

    def resume_writing(self, now: int) -> None:
        """Continue to send: the transport accepts bytes again."""
        self._outgoing.writable = True
        self._outgoing.pump(now)

    def take_output(self) -> bytes:
        """Return and remove the bytes to send."""
        return self._outbox.take_output()

    def take_events(self) -> list[Event]:
        """Return and remove events from outside of :meth:`receive` and :meth:`tick`: operations that failed."""
        events = self._events[:]
        self._events.clear()
        return events

    # Operations

    def publish(
        self, publish: Publish, token: object, now: int, *, since: int | None = None, resend: bool = True
    ) -> None:
        """Send a QoS 1 or 2 message as soon as connection and Receive Maximum allow; its :class:`OperationDone` has the
        ``token``.

        Its message expiry runs from ``since`` (default: now): it is sent with the remaining interval, or given up.
        Without ``resend`` a message that was sent, but not acknowledged, fails when the server has lost the session.
        """
        self._outgoing.publish(publish, token, now, now if since is None else since, resend=resend)

    def publish_qos0(self, publish: Publish, now: int) -> None:
        """Send a QoS 0 message; the caller made sure that the client is connected.

        Raises:
            LocalProtocolError: it cannot be sent, or the server announced that it does not support such a message.
        """
        self._outgoing.publish_qos0(publish, now)

    def subscribe(self, subscriptions: list[Subscription], properties: Properties, token: object, now: int) -> None:
        """Send SUBSCRIBE; repeated after a reconnect until it is answered."""
        self._outgoing.subscribe(subscriptions, properties, token, now)

    def unsubscribe(self, topic_filters: list[str], properties: Properties, token: object, now: int) -> None:
        """Send UNSUBSCRIBE; repeated after a reconnect until it is answered."""
        self._outgoing.unsubscribe(topic_filters, properties, token, now)

    def acknowledge(self, publish: Publish, now: int, reason_code: int = 0) -> None:
        """Acknowledge a received message after its owner has handled it."""
        self._incoming.acknowledge(publish, reason_code, now)

    def authenticate_again(self, token: object, now: int) -> None:
        """Authenticate again on the current connection [MQTT 5.0 section 4.12.1].

        Raises:
            LocalProtocolError: the client has no method, is not connected, or a re-authentication is in progress.
        """
        if self._authentication is None or self.state is not ClientState.CONNECTED:
            raise LocalProtocolError(
                "mqtt: nothing to authenticate again",
                why="the client is not connected, or has no method of enhanced authentication",
            )
        if self._reauthentication is not None:
            raise LocalProtocolError("mqtt: an authentication is in progress")
        self._send_auth(ReasonCode.REAUTHENTICATE, self._authentication.start(), now)
        self._reauthentication = token

    # Time

    def next_deadline(self) -> int | None:
        """Return the instant at which :meth:`tick` is due; None without a deadline."""
        if self.state is not ClientState.CONNECTED:
            return self._outgoing.next_expiry or None
        if not self._keep_alive_ms:
            return None
        # Also while the client sends: a client that only sends QoS 0 would not detect a lost connection.
        silent_since = min(self._outbox.last_sent, self._last_received)
        return self._ping_sent + PING_GRACE_MS if self._ping_sent else silent_since + self._keep_alive_ms

    def tick(self, now: int) -> list[Event]:
        """Send PINGREQ when due, and close without PINGRESP; without a connection, fail expired messages."""
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline:
            if self.state is not ClientState.CONNECTED:
                self._outgoing.give_up_expired(now)
            elif self._ping_sent and self.reading:
                self._close(ReasonCode.KEEP_ALIVE_TIMEOUT, "no PINGRESP")
            else:  # [MQTT-3.1.2-20]
                self._outbox.send(PingReq(), now)
                self._ping_sent = now
        return self.take_events()

    # Internal

    def _fail(self, error: RemoteProtocolError, now: int) -> None:
        """Close after a protocol error of the server, with DISCONNECT where that is allowed."""
        if self.state is ClientState.CONNECTED:
            self._outbox.send(Disconnect(error.reason_code), now)
        self._close(error.reason_code, error.what)

    def _end(self) -> None:
        """Close: nothing may be sent on this connection any more; :meth:`lost` follows."""
        self.state = ClientState.OFFLINE
        self._outgoing.stop()

    def _is_closed(self) -> bool:
        return self.state is ClientState.OFFLINE

    def _handle(self, packet: Packet, now: int) -> None:
        """Handle one packet; afterwards the state is OFFLINE if the packet ended the connection."""
        if isinstance(packet, Publish) and self.state is ClientState.CONNECTED:
            self._incoming.publish(packet, now)
        elif self.state is ClientState.CONNECTING:
            if isinstance(packet, ConnAck):
                self._connack(packet, now)
            elif isinstance(packet, Auth):
                self._auth(packet, now)
            else:
                raise protocol_error(f"{type(packet).__name__} before CONNACK [MQTT-3.2.0-1]")
        elif isinstance(packet, PubAck):
            self._outgoing.acknowledged(packet, now)
        elif isinstance(packet, PubRec):
            self._outgoing.received(packet, now)
        elif isinstance(packet, PubComp):
            self._outgoing.completed(packet, now)
        elif isinstance(packet, PubRel):
            self._incoming.release(packet, now)
        elif isinstance(packet, SubAck | UnsubAck):
            self._outgoing.answered(packet)
        elif isinstance(packet, PingResp):
            self._ping_sent = 0
        elif isinstance(packet, Disconnect):
            self._end()
            properties = packet.properties
            self._events.append(
                Closed(
                    packet.reason_code,
                    properties.reason_string or "",
                    by_server=True,
                    server_reference=properties.server_reference,
                )
            )
        elif isinstance(packet, Auth):
            self._auth(packet, now)
        else:
            raise protocol_error("a second CONNACK [MQTT-3.2.0-2]")

    def _connack(self, packet: ConnAck, now: int) -> None:
        if packet.reason_code >= 0x80:
            self._end()
            self._events.append(ConnectRefused(packet))
            return
        if packet.session_present and self.connect.clean_start:
            raise protocol_error("Session Present after Clean Start [MQTT-3.2.2-2]")
        properties = packet.properties
        if self._authentication is not None and not self._verify_server(properties.authentication_data, now):
            return
        self.state = ClientState.CONNECTED
        self.server = packet
        if properties.assigned_client_identifier is not None:
            self.connect = replace(self.connect, client_id=properties.assigned_client_identifier)
        keep_alive = properties.server_keep_alive
        self._keep_alive_ms = (self.connect.keep_alive if keep_alive is None else keep_alive) * 1000
        if not packet.session_present:
            self._incoming.session_lost()
        self._events.append(Connected(packet))
        self._outgoing.resume(properties, now, present=packet.session_present, first=not self._connected_before)
        self._connected_before = True

    def _auth(self, packet: Auth, now: int) -> None:
        """Handle an AUTH, of the first authentication or of a later one."""
        authentication = self._authentication
        properties = packet.properties
        if authentication is None:
            raise protocol_error("AUTH without an Authentication Method in CONNECT [MQTT-4.12.0-6]")
        if properties.authentication_method != authentication.method:
            raise protocol_error("AUTH of another Authentication Method [MQTT-4.12.0-5]")
        again = self._reauthentication
        if self.state is ClientState.CONNECTED and again is None:
            raise protocol_error("AUTH without an authentication in progress")
        if packet.reason_code == ReasonCode.CONTINUE_AUTHENTICATION:
            try:
                answer = authentication.answer(properties.authentication_data)
            except PenstockError as e:
                self._reject_server(e, now)
                return
            self._send_auth(ReasonCode.CONTINUE_AUTHENTICATION, answer, now)  # [MQTT-4.12.0-3]
        elif packet.reason_code == 0 and again is not None:
            if self._verify_server(properties.authentication_data, now):
                self._reauthentication = None
                self._events.append(OperationDone(again, (0,), properties.reason_string or ""))
        else:
            raise protocol_error("AUTH with a reason code that is out of place")

    def _send_auth(self, reason_code: int, data: bytes | None, now: int) -> None:
        assert self._authentication is not None
        properties = Properties(authentication_method=self._authentication.method, authentication_data=data)
        self._outbox.send(Auth(int(reason_code), properties), now)

    def _verify_server(self, data: bytes | None, now: int) -> bool:
        """Check the server's proof; return False after closing the connection without one."""
        assert self._authentication is not None
        try:
            self._authentication.finish(data)
        except PenstockError as e:
            self._reject_server(e, now)
            return False
        return True

    def _reject_server(self, error: PenstockError, now: int) -> None:
        if self.state is ClientState.CONNECTED:
            self._outbox.send(Disconnect(ReasonCode.UNSPECIFIED_ERROR), now)  # 0x87 is for servers
        self._end()
        self._fail_reauthentication(error)
        self._events.append(Closed(ReasonCode.NOT_AUTHORIZED, error.what, by_server=False, error=error))

    def _fail_reauthentication(self, error: PenstockError) -> None:
        again, self._reauthentication = self._reauthentication, None
        if again is not None:
            self._events.append(OperationDone(again, (), "", error))

    def _close(self, reason_code: int, reason_string: str) -> None:
        self._end()
        self._events.append(Closed(int(reason_code), reason_string, by_server=False))
