"""State of one network connection: pending acknowledgements, backpressure, rate limit, keep alive, and its end.

Acknowledgements of a client's QoS 1 and 2 messages are sent in the order of the messages, after the services that
received them have settled them.

Source: MQTT 5.0 sections 3.1.2.10, 3.3.4, 4.3, 4.6, 4.9.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, final

from mypy_extensions import mypyc_attr

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import ConnAck, Disconnect, Publish
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, ReasonCode
from penstock.mqtt.engine.connections.aliases import ReceivedAliases
from penstock.mqtt.engine.connections.output import BrokerOutput, PacketWriter, diagnosis
from penstock.mqtt.engine.model.access import Credentials, has_high_priority
from penstock.mqtt.engine.model.client_events import RATE_LIMITED
from penstock.mqtt.engine.model.limits import RateLimitPolicy
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.session_journal import PROCESSED
from penstock.mqtt.service import NO_ANSWER, Inbound

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["ConnectionState", "PendingAck", "TokenBucket"]

_NO_ANSWERS: Final[deque[PendingAck]] = deque(maxlen=0)
_NO_IDENTIFIERS: Final[set[int]] = set()
"""Empty collections that are shared by connections without entries, to save a kilobyte per connection; never
modified."""


class TokenBucket:
    """Rate limit of one client: ``per_second`` tokens per second, up to ``burst``; each message costs one."""

    __slots__ = ("_burst", "_credit", "_per_second", "_since")

    def __init__(self, per_second: int, burst: int, now: int) -> None:
        self._per_second = per_second
        self._burst = burst * 1000
        self._credit = self._burst
        """Credit in thousandths of a token: milliseconds times rate are added without a division."""
        self._since = now

    def acquire(self, now: int) -> bool:
        """Remove a token; False without one. The credit then becomes negative, down to one more burst."""
        credit = self._credit
        if now != self._since:
            credit = min(self._burst, credit + (now - self._since) * self._per_second)
            self._since = now
        enough = credit >= 1000
        self._credit = max(credit - 1000, -self._burst)
        return enough

    def give_back(self) -> None:
        """Return the token of a refused message."""
        self._credit += 1000

    def ready_at(self, now: int) -> int:
        """Return the instant at which a token is available."""
        missing = 1000 - self._credit - (now - self._since) * self._per_second
        return now if missing <= 0 else now - (-missing // self._per_second)


@final
@mypyc_attr(free_list_len=1)
class PendingAck(Inbound):
    """A message whose PUBACK or PUBREC waits for ``waiting`` services, or for an earlier acknowledgement.

    The first service receives this object, each other service a separate one that calls :meth:`record`.
    ``acknowledger`` is the connection that sends the acknowledgement. At QoS 2 it may be a later connection than that
    of the message, if the client repeats the message while services still process it.
    """

    reason_string: str = ""
    enqueued: bool = False
    """True if the acknowledgement is in the connection's queue; False while services still receive the message."""
    gate: int = 0
    """Number of the commit that the acknowledgement also waits for; 0: none."""
    _settled: bool = False

    def __init__(
        self, connection: ConnectionState, session: Session, publish: Publish, wall_ms: int, code: i64, waiting: i64
    ) -> None:
        rights = session.rights
        super().__init__(
            publish,
            session.client_id,
            wall_ms,
            username=session.username,
            principal=None if rights is None else rights.principal,
            protocol_version=connection.version,
            connection=connection,
            read=connection.broker.reads,
        )
        self.acknowledger = connection
        self.reason_code: i64 = code
        self.waiting: i64 = waiting

    def settle(self, reason_code: int = 0, reason_string: str = "") -> None:
        """Record the result of the first service [Inbound.settle]."""
        if not self._settled:
            self._settled = True
            self.record(reason_code, reason_string)

    def record(self, reason_code: int, reason_string: str) -> None:
        """Record the result of one service; the highest reason code counts, with its reason string.

        ``NO_ANSWER``: the service cannot process the message, and the client must repeat it on another connection.
        """
        self.waiting -= 1
        if reason_code == NO_ANSWER:
            self.acknowledger.end_unacknowledged(self, reason_string)
            return
        if reason_code > self.reason_code:
            if reason_code not in ALLOWED[PacketType.PUBACK]:
                reason_code = ReasonCode.UNSPECIFIED_ERROR
            self.reason_code = reason_code
            self.reason_string = reason_string
        if self.waiting == 0:
            self.acknowledger.answer_settled(self)


class ConnectionState(PacketWriter):
    """The state of a connection that packet handlers use; :class:`BrokerConnection` adds the input."""

    __slots__ = (
        "_aliases_in",
        "_receive_full",
        "_resume_at",
        "_was_held",
        "alias_maximum",
        "bridge",
        "checked",
        "connected_at",
        "credentials",
        "keep_alive_ms",
        "last_received",
        "name",
        "open_qos2",
        "pending",
        "rate",
        "receive_maximum",
        "received_qos2",
        "resumed",
    )

    def __init__(self, broker: BrokerCore, outbound: BrokerOutput, name: str, now: int, *, checked: bool) -> None:
        super().__init__(broker, outbound)
        self.name = name
        """The peer's address, for logs."""
        self.credentials: Credentials | None = None
        """Credentials of the accepted CONNECT, without the password."""
        self.bridge = False
        """Whether the client is the bridge of another broker, which must not receive its own messages."""
        self.checked = checked
        """Whether each message is checked against the rate limit or the client's rights."""
        self.resumed = False
        """Whether CONNECT resumed a session."""
        self._aliases_in: ReceivedAliases | None = None
        self.alias_maximum = broker.limits.max_topic_aliases
        """Topic Alias Maximum of the CONNACK; a reload may change the limit."""
        self.pending = _NO_ANSWERS
        """Acknowledgements that cannot be sent yet, in the order of the messages."""
        self.open_qos2 = _NO_IDENTIFIERS
        """Packet identifiers of QoS 2 messages received on this connection without PUBREL."""
        self.received_qos2 = False
        """Whether the client sent a QoS 2 message on this connection."""
        self.receive_maximum = broker.limits.receive_maximum
        self._receive_full = False
        """Whether reading is paused until some messages are acknowledged."""
        self._was_held = False
        """Whether reading was paused since the last check of keep alive."""
        self._resume_at = 0
        """Instant at which reading from a client above its rate limit resumes; 0: the client is within the limit."""
        self.rate: TokenBucket | None = None
        self.last_received = now
        self.connected_at = now
        self.keep_alive_ms = 0

    # Acknowledgements

    def enqueue(self, answer: PendingAck) -> None:
        """Queue an acknowledgement behind earlier ones."""
        if self.pending is _NO_ANSWERS:
            self.pending = deque()
        answer.enqueued = True
        self.pending.append(answer)
        self.unacknowledged += 1

    def register_qos2(self, packet_id: int) -> None:
        """Register a QoS 2 message of this connection, until its PUBREL."""
        if self.open_qos2 is _NO_IDENTIFIERS:
            self.open_qos2 = set()
        self.open_qos2.add(packet_id)
        self.received_qos2 = True

    def answer_settled(self, answer: PendingAck) -> None:
        """Send the acknowledgements that are ready, in the order of the messages; called when one becomes ready."""
        if answer.publish.qos == 2:
            self._hold_identifier(answer)
        if self.closing:
            return
        if not answer.enqueued:
            if not self.unacknowledged:
                self._send_answer(answer)
                return
            self.enqueue(answer)
        pending = self.pending
        while pending and not pending[0].waiting:
            self.unacknowledged -= 1
            self._send_answer(pending.popleft())
        if self._receive_full and self.unacknowledged < self.receive_maximum:
            self._receive_full = False
            self.release()

    def _send_answer(self, answer: PendingAck) -> None:
        if answer.gate:
            self.gate = max(self.gate, answer.gate)
            self.broker.journal.answer_after(answer.gate)
        publish = answer.publish
        if publish.qos == 2:
            self.pubrec(publish.packet_id, answer.reason_code, answer.reason_string)
        else:
            self.puback(publish.packet_id, answer.reason_code, answer.reason_string)

    def end_unacknowledged(self, answer: PendingAck, reason_string: str) -> None:
        """End the connection without acknowledging the message, so that the client repeats it on another one.

        Only services receive the repetition of a QoS 2 message.
        """
        session, packet_id = self.session, answer.publish.packet_id
        if answer.publish.qos == 2 and session is not None and session.incoming.get(packet_id) is answer:
            del session.incoming[packet_id]
            self.open_qos2.discard(packet_id)
            session.mark_routed(packet_id)
        self.disconnect_client(ReasonCode.SERVER_BUSY, reason_string)

    def _hold_identifier(self, answer: PendingAck) -> None:
        """Hold the identifier of a QoS 2 message until PUBREL; a refusal frees it [MQTT-4.3.3-9].

        MQTT 3.1.1 cannot refuse a message: its clients always continue with PUBREL.
        """
        session, packet_id = self.session, answer.publish.packet_id
        if session is None or session.incoming.get(packet_id) is not answer:
            return
        journal = session.journal
        session.routed.discard(packet_id)
        if answer.reason_code >= 0x80 and self.version == 5:
            del session.incoming[packet_id]
            self.open_qos2.discard(packet_id)
            if journal is not None:
                journal.incoming_done(packet_id)
        else:
            session.incoming[packet_id] = None
            if journal is not None:
                journal.incoming(packet_id, PROCESSED)
        if journal is not None and journal.awaited:
            answer.gate = journal.journal.number

    def check_receive_maximum(self) -> None:
        """Check that another QoS 1 or 2 message stays within Receive Maximum [MQTT-3.3.4-7].

        MQTT 3.1.1 does not have Receive Maximum: reading is paused until messages are acknowledged.

        Raises:
            RemoteProtocolError: it would exceed Receive Maximum.
        """
        if self.version != 5:
            if self.unacknowledged >= self.receive_maximum and not self._receive_full:
                self._receive_full = True
                self.hold()
            return
        if self.unacknowledged + len(self.open_qos2) < self.receive_maximum:
            return  # an upper bound: a QoS 2 message may be counted in both
        waiting_qos1 = sum(answer.publish.qos == 1 for answer in self.pending)
        if waiting_qos1 + len(self.open_qos2) >= self.receive_maximum:
            raise RemoteProtocolError("mqtt: more messages without an answer than Receive Maximum", reason_code=0x93)

    # Backpressure, rate limit and keep alive

    def due(self, now: int) -> None:
        """Check deadlines: CONNECT, keep alive, the rate limit, a full transport, the end. Arm the next one."""
        if self.closing:
            self.outbound.check_closing(self, now)
            return
        limits, grace = self.broker.limits, self.broker.grace_until
        if self.session is None:
            deadline = max(self.connected_at + limits.connect_timeout_ms, grace)
            if now >= deadline:
                self.close()
                return
            self.broker.timers.arm(self, deadline)
            return
        if self._resume_at:
            self._resume_at = self.rate.ready_at(now) if self.rate is not None else now
            if now >= self._resume_at:
                self._resume_at = 0
                self.release()
            else:
                self.broker.timers.arm(self, self._resume_at)
        if self._was_held:  # the client may have sent packets that were not read
            self._was_held = self.holds > 0
            self.last_received = now
        if self.keep_alive_ms:
            deadline = max(self.last_received + self.keep_alive_ms, grace)
            if now >= deadline:  # [MQTT-3.1.2-22]
                self.disconnect(ReasonCode.KEEP_ALIVE_TIMEOUT, now)
                return
            self.broker.timers.arm(self, deadline)
        if self._full_since is not None:
            deadline = max(self._full_since + limits.write_stall_ms, grace)
            if now >= deadline:
                self.stats.write_stalls += 1
                self.disconnect(ReasonCode.QUOTA_EXCEEDED, now, "the client does not read")
                return
            self.broker.timers.arm(self, deadline)

    def hold(self) -> None:
        """Stop reading until :meth:`release` was called as often."""
        self.holds += 1
        self._was_held = True

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self.holds -= 1
        if not self.holds:
            self.mark()

    def limit_rate(self, publish: Publish, now: int) -> int:
        """Apply the rate limit action; return the reason code for the message, 0 to accept it."""
        rate, session = self.rate, self.session
        assert rate is not None
        assert session is not None
        if has_high_priority(publish, session.rights):
            rate.give_back()
            return 0
        self.stats.rate_exceeded += 1
        session.count_events(RATE_LIMITED, 1)
        policy = self.broker.limits.rate_limit_action
        if policy is RateLimitPolicy.DISCONNECT:
            self.disconnect(ReasonCode.MESSAGE_RATE_TOO_HIGH, now)
        elif policy is RateLimitPolicy.REFUSE:
            rate.give_back()
            return ReasonCode.QUOTA_EXCEEDED
        elif not self._resume_at:
            self._resume_at = rate.ready_at(now)
            self.hold()
            self.broker.timers.arm(self, self._resume_at)
        return 0

    # Aliases and the end

    def resolve_alias(self, publish: Publish, alias: int) -> None:
        """Register or resolve a Topic Alias of the client."""
        aliases = self._aliases_in
        if aliases is None:
            aliases = self._aliases_in = ReceivedAliases(self.alias_maximum)
        aliases.resolve(publish, alias)

    def disconnect(self, reason_code: int, now: int, reason_string: str = "") -> None:
        """End the connection: with DISCONNECT if CONNECT was accepted, otherwise just close it [MQTT-3.14.0-1].

        An MQTT 3.1.1 server cannot send DISCONNECT.
        """
        if self.closing:
            return
        self._send_disconnect(reason_code, reason_string)
        self.broker.connection_ended(self, now)

    def disconnect_client(self, reason_code: int, reason_string: str) -> None:
        """End the connection as :meth:`disconnect`, without the current time: its session goes offline at the next
        flush."""
        if self.closing:
            return
        self._send_disconnect(reason_code, reason_string)
        self.writable = False  # no more output: messages wait in the session
        self.outbound.ended.append(self)

    def _send_disconnect(self, reason_code: int, reason_string: str) -> None:
        self.broker.report(self, int(reason_code), reason_string)
        if self.session is not None and self.version == 5:
            self.send(Disconnect(int(reason_code), diagnosis(reason_string)))
        self.close()

    def refuse(self, reason_code: int, why: str = "", server_reference: str = "") -> None:
        """Answer CONNECT with a refusal and close [MQTT-3.2.2-7]."""
        if self.closing:
            return
        self.stats.connections_refused += 1
        properties = diagnosis(why)
        if server_reference:
            properties.server_reference = server_reference
        self.send(ConnAck(reason_code=int(reason_code), properties=properties))
        self.close()

    def __repr__(self) -> str:
        client = "a client without CONNECT" if self.session is None else f"client {self.session.client_id!r}"
        return f"{client} at {self.name}"
