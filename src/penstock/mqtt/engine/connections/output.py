"""Output of network connections: packets encoded for each client, held until their commit, written once per turn.

:class:`PacketWriter` encodes the packets of one connection. :class:`BrokerOutput` collects the output of all of them:
one piece per connection and event loop turn. A PUBACK that confirms durable data waits for the commit of that data.

Reason Strings [MQTT 5.0 section 3.4.2.2.2] are sent to clients that did not disable Request Problem Information, and
omitted if the packet would exceed the client's Maximum Packet Size.

Source: MQTT 5.0 sections 3.1.2.11, 3.3.2.3.4, 4.3; MQTT 3.1.1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, write_i32_be
from mypy_extensions import mypyc_attr

from penstock.mqtt.codec.decoder import LARGEST_PACKET
from penstock.mqtt.codec.encoder import encode_within, head_size, write_publish_head
from penstock.mqtt.codec.packets import Packet, PubAck, PubComp, PubRec, PubRel
from penstock.mqtt.codec.primitives import write_two_bytes
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.engine.connections.aliases import SentAliases, with_alias
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import LARGE, SessionConnection
from penstock.runtime.turns import TURN_SHARES

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "IDENTIFIER_REASONS",
    "PUBLISH_REASONS",
    "SUBSCRIPTION_REASONS",
    "BrokerOutput",
    "OutputTransport",
    "PacketWriter",
    "PendingWrite",
    "UncommittedOutput",
    "diagnosis",
]

PUBLISH_REASONS: Final[dict[int, str]] = {
    ReasonCode.NOT_AUTHORIZED: "this client is not allowed to publish to this topic",
    ReasonCode.TOPIC_NAME_INVALID: "the topic is too long, has too many levels, or belongs to the broker",
    ReasonCode.PAYLOAD_FORMAT_INVALID: "the payload is not UTF-8, although its Payload Format Indicator is 1",
}
"""Reason Strings of PUBACK and PUBREC by reason code; that of an exceeded quota says which one, and what to do."""

SUBSCRIPTION_REASONS: Final[dict[int, str]] = {
    ReasonCode.UNSPECIFIED_ERROR: "the policies do not permit this subscription",
    ReasonCode.NOT_AUTHORIZED: "the policies do not permit this subscription",
    ReasonCode.TOPIC_FILTER_INVALID: "the topic filter is too long or has too many levels",
    ReasonCode.QUOTA_EXCEEDED: "too many subscriptions",
}
"""Reason Strings of SUBACK, for the first refused filter."""

IDENTIFIER_REASONS: Final[dict[int, str]] = {
    ReasonCode.PACKET_IDENTIFIER_NOT_FOUND: "no message with this packet identifier is open",
}
"""Reason Strings of PUBREL and PUBCOMP."""

LONGEST_REASON: Final = 500
"""Maximum characters of a Reason String; longer texts are truncated, because services may quote client data."""


_NO_SUBSCRIBERS: Final = 0x10


def diagnosis(text: str) -> Properties:
    """Return ``text`` as a Reason String: valid, and truncated."""
    if not text:
        return Properties()
    sendable = text[:LONGEST_REASON].encode(errors="replace").replace(b"\0", b"?").decode()
    return Properties(reason_string=sendable)


_MAX_KEPT_BUFFER: Final = 4096
"""Maximum output in bytes after which a connection keeps its buffer for the next output."""

_CLOSING_MS: Final = 5000
"""Maximum time for which the end of a connection waits for commits: a full disk can delay them for hours."""


@mypyc_attr(allow_interpreted_subclasses=True)
class OutputTransport(ABC):
    """The transport of a connection. A closing one discards the data."""

    __slots__ = ()

    @abstractmethod
    def send_now(self, data: bytes) -> None:
        """Write immediately, so that the client can continue while the broker works for others.

        Only while input of the connection is handled.
        """

    @abstractmethod
    def send_output(self, data: bytes) -> None:
        """Write the output of a flush; ``data`` is empty if only the state of the connection has changed."""


class UncommittedOutput:
    """Output of one connection that waits for commits: pieces with the number of their commit, in ascending order."""

    __slots__ = ("_pieces", "bytes", "discard_at", "first_is_connack")

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytes]] = deque()
        self.bytes = 0
        self.discard_at = 0
        """Time at which a connection that is closing discards this output; 0: it is not closing."""
        self.first_is_connack = False
        """True if the first piece is the CONNACK, so the client is not connected yet."""

    def add(self, gate: int, data: bytes) -> None:
        """Keep ``data`` until commit ``gate`` is done."""
        if not self._pieces:
            self.first_is_connack = data[:1] == b"\x20"
        self._pieces.append((gate, data))
        self.bytes += len(data)

    def take_committed(self, committed: int) -> bytes:
        """Remove and return the output that may be sent after commit ``committed``."""
        pieces = self._pieces
        ready: list[bytes] = []
        while pieces and pieces[0][0] <= committed:
            ready.append(pieces.popleft()[1])
        data = b"".join(ready)
        self.bytes -= len(data)
        if data:
            self.first_is_connack = False
        return data

    def __len__(self) -> int:
        return len(self._pieces)


class PacketWriter(SessionConnection):
    """The output of one connection. ``out`` collects encoded packets until the broker's flush."""

    __slots__ = (
        "_full_since",
        "_max_output",
        "_problem_information",
        "aliases_out",
        "broker",
        "dirty",
        "holds",
        "later",
        "left",
        "maximum_out",
        "out",
        "outbound",
        "sink",
        "stats",
        "throttled",
        "uncommitted",
        "waits_for_turn",
    )

    def __init__(self, broker: BrokerCore, outbound: BrokerOutput) -> None:
        super().__init__()
        self.broker = broker
        self.outbound = outbound
        self.stats = broker.stats
        self._max_output: i64 = broker.limits.max_output_bytes
        self.maximum_out: i64 = LARGEST_PACKET
        self._problem_information = True
        self.aliases_out: SentAliases | None = None
        """Topic aliases of the broker; None if the client does not allow any."""
        self.sink: OutputTransport | None = None
        """Transport for output that need not wait for the flush; None: all output waits."""
        self.throttled = False
        """Whether the output limit of this turn is reached; a later turn continues."""
        self.waits_for_turn = False
        """True if the connection is one of the throttled connections of :class:`BrokerOutput`."""
        self.out = BytesWriter()
        self.uncommitted: UncommittedOutput | None = None
        """Output that waits for its commit."""
        self.dirty = False
        """Whether there is output to flush."""
        self.later = False
        """True if there is output of messages with many receivers, which is written in shares per turn."""
        self.left = False
        """Whether the client sent DISCONNECT, after which it sends nothing."""
        self.holds = 0
        """Number of reasons to pause reading, for example a busy service; the shell does not read unless it is 0."""
        self._full_since: int | None = None
        """Instant at which the transport became full; None if it accepts bytes."""

    def mark(self) -> None:
        """Register the connection for the next flush."""
        if not self.dirty:
            if self.broker.fans_out:
                if not self.later:
                    self.later = True
                    self.outbound.mark_later(self)
                return
            self.dirty = True
            if self.outbound.reading is not self:
                self.outbound.mark(self)

    def close(self) -> None:
        """Close after the queued output."""
        self.closing = True
        self.mark()

    def pause(self, now: int) -> None:
        """Send no more messages: the transport is full."""
        self.writable = False
        self._full_since = now
        self.broker.timers.arm(self, now + self.broker.limits.write_stall_ms)

    def unpause(self, now: int) -> None:
        """Continue to send messages: the transport accepts bytes again."""
        self._full_since = None
        self._resume_output(now)

    def end_throttle(self, now: int) -> None:
        """Continue to send messages in a new turn."""
        self.throttled = self.waits_for_turn = False
        self._resume_output(now)

    def _resume_output(self, now: int) -> None:
        self.writable = self._full_since is None and not self.throttled
        if self.writable and self.session is not None and not self.closing:
            self.session.send_waiting(now)

    def throttle(self) -> None:
        """Send no more messages in this turn; a later one continues."""
        self.throttled = True
        self.writable = False
        if not self.dirty:
            self.mark()

    def take_output(self) -> bytes:
        """Remove and return the queued output."""
        out = self.out
        data = out.getvalue()
        if len(data) > _MAX_KEPT_BUFFER:
            self.out = BytesWriter()
        else:
            out.truncate(0)
        self.dirty = self.later = False
        self.stats.bytes_sent += len(data)
        return data

    def send(self, packet: Packet) -> bool:
        """Encode and queue a packet other than PUBLISH, without its Reason String if it would be too large.

        Returns False for a packet that is larger than the client's Maximum Packet Size even then; it is not sent.
        """
        if self.version == 5:
            data = encode_within(packet, self.maximum_out)
            if data is None:
                self.stats.dropped_too_large += 1
                return False
        else:
            data = encode_311(packet)
        self.send_encoded(data)
        return True

    def send_encoded(self, data: bytes) -> None:
        """Queue a packet other than PUBLISH that the client accepts."""
        self.out.write(data)
        self.stats.answers_sent += 1
        if not self.dirty:
            self.mark()

    def send_publish(self, message: Message, packet_id: i64, first: i64, identifiers: bytes, now: i64) -> bool:
        """Queue a PUBLISH: ``first`` is its first byte (type, DUP, QoS, RETAIN); ``packet_id`` 0 at QoS 0.

        Returns False for a packet above the client's Maximum Packet Size, which then counts as delivered
        [MQTT-3.1.2-24], [MQTT-3.1.2-25].
        """
        out = self.out
        encoded = message.encoded
        if (
            encoded is not None
            and encoded.first == first
            and self.version == 5
            and self.aliases_out is None
            and len(identifiers) == 0
        ):
            size: i64 = len(encoded.before)
            size += len(encoded.after)
            if packet_id:
                size += 2
            if size > self.maximum_out:
                self.stats.dropped_too_large += 1
                return False
            out.write(encoded.before)
            if packet_id:
                write_two_bytes(out, packet_id)
            out.write(encoded.after)
        elif not self._encode_publish(message, packet_id, first, identifiers, now):
            self.stats.dropped_too_large += 1
            return False
        if len(out) > self._max_output:
            self.throttle()
        self.stats.publishes_sent += 1
        if not self.dirty:
            self.mark()
        return True

    def _encode_publish(self, message: Message, packet_id: i64, first: i64, identifiers: bytes, now: i64) -> bool:
        """Encode a PUBLISH for this connection; return False if it exceeds the client's Maximum Packet Size."""
        topic = message.topic_wire
        payload = message.payload
        aliases = self.aliases_out
        alias = 0
        if self.version != 5:
            properties = b""
        elif message.expires_at or len(identifiers) > 0:
            properties = message.properties_for(identifiers, now)
        else:
            properties = message.properties_wire
        size: i64 = len(payload)
        fixed = size
        if packet_id:
            fixed += 2
        remaining = fixed
        remaining += len(topic)
        remaining += len(properties)
        if aliases is not None:
            alias, known = aliases.find(topic)
            if alias:
                aliased = with_alias(properties, alias)
                shown = b"\x00\x00" if known else topic
                larger = fixed
                larger += len(shown)
                larger += len(aliased)
                if larger > remaining and larger + head_size(larger) > self.maximum_out:
                    alias = 0  # it may be longer than the topic
                else:
                    topic = shown
                    properties = aliased
                    remaining = larger
        if remaining + head_size(remaining) > self.maximum_out:
            return False
        out = self.out
        write_publish_head(out, first, remaining)
        out.write(topic)
        if packet_id:
            write_two_bytes(out, packet_id)
        out.write(properties)
        out.write(payload)
        if alias and aliases is not None:
            aliases.set(message.topic_wire, alias)
        if size >= LARGE:
            self.broker.work += size >> 12
        return True

    def puback(self, packet_id: i64, code: i64, reason_string: str = "") -> None:
        """Queue a PUBACK, the answer to a QoS 1 message."""
        if code == 0 or self.version != 5:
            self._send_short(0x40020000 | packet_id)
        elif code == _NO_SUBSCRIBERS and not reason_string and self.maximum_out >= 5:
            # Answer to a message without subscribers.
            head: int = 0x40030000 | packet_id
            write_i32_be(self.out, head)
            self.out.append(_NO_SUBSCRIBERS)
            self.stats.answers_sent += 1
            if not self.dirty:
                self.mark()
        else:
            text = reason_string or PUBLISH_REASONS.get(code, "")
            self.send(PubAck(packet_id, code, self.problem_text(text)))

    def pubrec(self, packet_id: int, code: int, reason_string: str = "") -> None:
        """Queue a PUBREC, the answer to a QoS 2 message."""
        if code == 0 or self.version != 5:
            self._send_short(0x50020000 | packet_id)
        else:
            self.send(PubRec(packet_id, code, self.problem_text(reason_string or PUBLISH_REASONS.get(code, ""))))

    def pubrel(self, packet_id: int, code: int = 0) -> None:
        """Queue a PUBREL for a QoS 2 message of the broker."""
        if code == 0 or self.version != 5:
            self._send_short(0x62020000 | packet_id)
        else:
            self.send(PubRel(packet_id, code, self.problem_text(IDENTIFIER_REASONS.get(code, ""))))

    def pubcomp(self, packet_id: int, code: int = 0) -> None:
        """Queue a PUBCOMP, which completes a QoS 2 message of the client."""
        if code == 0 or self.version != 5:
            self._send_short(0x70020000 | packet_id)
        else:
            self.send(PubComp(packet_id, code, self.problem_text(IDENTIFIER_REASONS.get(code, ""))))

    def problem_text(self, text: str) -> Properties:
        """Return a Reason String, unless the client requested no Problem Information [MQTT-3.1.2-29]."""
        return diagnosis(text) if self._problem_information else Properties()

    def _send_short(self, packet: int) -> None:
        """Queue a packet of four bytes: a packet identifier without reason code."""
        write_i32_be(self.out, packet)
        self.stats.answers_sent += 1
        if not self.dirty:
            self.mark()


PendingWrite = tuple[PacketWriter, bytes, bool]
"""Connection, bytes to write, and whether to close the connection afterwards."""


class BrokerOutput:
    """Output of all connections. ``wake`` is called for the first output since the last flush."""

    def __init__(self, broker: BrokerCore, wake: Callable[[], None]) -> None:
        self._broker = broker
        self._stats = broker.stats
        self._limits = broker.limits
        self._wake = wake
        self._dirty: list[PacketWriter] = []
        self._later: deque[PacketWriter] = deque()
        """Connections with output of messages with many receivers, see :attr:`PacketWriter.later`."""
        self._throttled: deque[PacketWriter] = deque()
        self.ended: list[PacketWriter] = []
        """Connections that a service ended since the last flush."""
        self._uncommitted: dict[PacketWriter, None] = {}
        """Connections with output that waits for a commit."""
        self._committed = 0
        self.reading: PacketWriter | None = None
        """Connection whose input is being handled: :meth:`end_read` sends its output."""
        self._at_read_end: Callable[[], None] | None = None
        self.collects = False
        """Whether a flush in this turn is scheduled, so that :attr:`wake` is not called."""

    @property
    def has_output(self) -> bool:
        """Whether connections have output to flush."""
        return bool(self._dirty) or bool(self._later)

    def begin_read(self, connection: PacketWriter) -> None:
        """Begin to handle input of ``connection``, until :meth:`end_read`."""
        self.reading = connection
        connection.dirty = True  # end_read() sends its output

    def at_read_end(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` when all packets of this read are handled, before its output is sent.

        False, and it is not called, if no input is being handled or another callback waits for the end of this read.
        """
        if self.reading is None or self._at_read_end is not None:
            return False
        self._at_read_end = callback
        return True

    def _read_ended(self) -> None:
        callback = self._at_read_end
        if callback is not None:
            try:
                callback()
            finally:
                self._at_read_end = None

    def abandon_read(self) -> None:
        """End a read without output, after an internal error."""
        self.reading = None
        self._read_ended()

    def end_read(self, *, unread: bool = False) -> None:
        """Send the output of the connection whose input was handled, unless it waits for a commit.

        This is one write for all packets of a read, without the cost of :meth:`flush`. ``unread``: the rest of the read
        is handled in the next turn, so the flush writes the output, after the messages to other clients. If a part of a
        publisher's window were acknowledged earlier, the next window would arrive in parts, each of which causes a
        write to every receiver. A finished read is acknowledged immediately: with one message in flight this increases
        the rate by half, and doubles the delay of delivery.
        """
        if self._at_read_end is not None:
            self._read_ended()
        connection, self.reading = self.reading, None
        if connection is None or not connection.dirty:
            return
        sink = connection.sink
        if not len(connection.out) and not connection.closing and not connection.throttled:
            connection.dirty = False
        elif (
            sink is None
            or connection.closing
            or connection.throttled
            or unread
            or connection.gate  # even while earlier output waits for its commit
        ):
            self.mark(connection)
        else:
            sink.send_now(connection.take_output())

    def end_connection(self) -> bool:
        """Whether the connection whose input was handled can be closed at once, without :meth:`flush`.

        This is the case if its client sent DISCONNECT and all output was written. :meth:`end_read` need not be called
        then.
        """
        if self._at_read_end is not None:
            self._read_ended()
        connection = self.reading
        if connection is None or not connection.left or len(connection.out) or connection.uncommitted is not None:
            return False
        connection.dirty = False
        self.reading = None
        return True

    def flush(self, now: int) -> list[PendingWrite]:
        """Write the output, one piece per connection [Broker.flush]."""
        if self.ended:
            ended, self.ended = self.ended, []
            for connection in ended:
                self._broker.connection_ended(connection, now)
        throttled = self._throttled
        if throttled:
            broker = self._broker
            end = broker.work + TURN_SHARES * broker.max_turn_work
            for _ in range(len(throttled)):
                if broker.work >= end:
                    break
                throttled.popleft().end_throttle(now)
        dirty = self._dirty
        self._dirty = []
        later = self._later
        if later:
            for _ in range(min(len(later), self._broker.writes_per_turn)):
                connection = later.popleft()
                if connection.later and not connection.dirty:
                    dirty.append(connection)
        outputs: list[PendingWrite] = []
        committed = self._broker.journal.committed
        if committed != self._committed:
            self._committed = committed
            self._release_committed(outputs)
        for connection in dirty:
            data = connection.take_output()
            if connection.gate > committed or connection.uncommitted is not None:
                self._hold(connection, data, now)
                continue
            connection.gate = 0
            if connection.throttled:
                self._continue_later(connection)
            _write(connection, data, connection.closing, outputs)
        if self._throttled or later:
            self._wake()
        return outputs

    def _continue_later(self, connection: PacketWriter) -> None:
        """Continue to send messages to a throttled connection in a later turn."""
        if not connection.waits_for_turn:
            connection.waits_for_turn = True
            self._throttled.append(connection)

    def storage_failed(self, now: int) -> None:
        """End the connections whose output waits for a commit, because no commit will complete."""
        for connection in list(self._uncommitted):
            self._abandon(connection, now)

    def _hold(self, connection: PacketWriter, data: bytes, now: int) -> None:
        """Hold output until its commit; above the output limit of one turn, the connection is throttled until then."""
        uncommitted = connection.uncommitted
        if uncommitted is None:
            uncommitted = connection.uncommitted = UncommittedOutput()
            self._uncommitted[connection] = None
        uncommitted.add(connection.gate, data)
        if self._broker.journal.failure:
            self._abandon(connection, now)
        elif connection.closing:
            if not uncommitted.discard_at:
                uncommitted.discard_at = now + _CLOSING_MS
                self._broker.timers.arm(connection, uncommitted.discard_at)
        elif uncommitted.bytes > self._limits.max_output_bytes:
            connection.throttled = True
            connection.writable = False
        elif connection.throttled:
            self._continue_later(connection)

    def _release_committed(self, outputs: list[PendingWrite]) -> None:
        """Write the output that waited for the last commit [:meth:`flush`]."""
        for connection in list(self._uncommitted):
            uncommitted = connection.uncommitted
            assert uncommitted is not None
            data = uncommitted.take_committed(self._committed)
            done = not uncommitted
            if done:
                connection.uncommitted = None
                del self._uncommitted[connection]
                if connection.gate <= self._committed:
                    connection.gate = 0
            if connection.throttled and uncommitted.bytes <= self._limits.max_output_bytes:
                self._continue_later(connection)
            if data or done:
                _write(connection, data, connection.closing and done and not connection.dirty, outputs)

    def check_closing(self, connection: PacketWriter, now: int) -> None:
        """Close a connection that has waited for its commits long enough, or arm its timer again.

        The client does not get the output that waits, so it repeats its messages.
        """
        uncommitted = connection.uncommitted
        if uncommitted is None or not uncommitted.discard_at:
            return
        if now < uncommitted.discard_at:
            self._broker.timers.arm(connection, uncommitted.discard_at)
        else:
            self._abandon(connection, now)

    def _abandon(self, connection: PacketWriter, now: int) -> None:
        """Discard output that confirms data that was not made durable, so that the client repeats its messages."""
        self._uncommitted.pop(connection, None)
        uncommitted, connection.uncommitted = connection.uncommitted, None
        connection.out.truncate(0)
        connection.gate = 0
        if connection.closing:
            connection.mark()
        elif uncommitted is not None and uncommitted.first_is_connack:
            connection.close()
            self._broker.connection_ended(connection, now)
        else:
            connection.disconnect(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, now, "the broker's disk failed")

    def mark(self, connection: PacketWriter) -> None:
        """Register a connection with output for the next flush; not :attr:`reading`."""
        self._dirty.append(connection)
        if len(self._dirty) == 1 and not self.collects:
            self._wake()

    def mark_later(self, connection: PacketWriter) -> None:
        """Register a connection that receives a message with many receivers."""
        self._later.append(connection)
        if len(self._later) == 1 and not self.collects:
            self._wake()

    def forget(self, connection: PacketWriter) -> None:
        """Drop a closed connection."""
        self._uncommitted.pop(connection, None)


def _write(connection: PacketWriter, data: bytes, close: bool, outputs: list[PendingWrite]) -> None:  # noqa: FBT001
    """Write output with the transport of the connection; without one, or before its end, append it to ``outputs``."""
    sink = connection.sink
    if sink is None or close:
        outputs.append((connection, data, close))
    else:
        sink.send_output(data)
