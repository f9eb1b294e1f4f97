"""Incremental decoder of MQTT 5 and MQTT 3.1.1: converts received bytes to packets.

Fixed header [MQTT 5.0 section 2.1]:  type (4 bits) | flags (4 bits) | Remaining Length (1 to 4 bytes, shortest form)

A server reads packet by packet: :meth:`Decoder.add`, then :meth:`Decoder.next_type` until it returns 0, and after each
:meth:`Decoder.publish`, :attr:`Decoder.packet_id` of a short acknowledgement, or :meth:`Decoder.packet`. A client calls
:meth:`Decoder.feed`, which returns all packets of a read.

Invariant: any sequence of bytes results in packets or one RemoteProtocolError, regardless of how it is split. Work is
linear in the bytes received, however they are split: pieces of an unfinished packet are joined once, when the packet is
complete.

Source: MQTT 5.0 chapter 3; reason codes for malformed packets: sections 2.4, 4.13 and the text of each packet.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from librt.strings import read_i16_be

from penstock.errors import RemoteProtocolError
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
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.primitives import MAX_VARINT, Reader, check_filter_count, malformed, protocol_error, quoted
from penstock.mqtt.codec.properties import WILL, Properties
from penstock.mqtt.codec.property_blocks import (
    HAS_SUBSCRIPTION_IDENTIFIER,
    LastResponseTopic,
    decode_publish_properties,
    read_properties,
)
from penstock.mqtt.codec.reasons import ALLOWED, CLIENT_DISCONNECT, PacketType, reason_name
from penstock.mqtt.codec.topics import SHARE_PREFIX, filter_problem, has_wildcard, name_problem
from penstock.mqtt.codec.version311 import BODIES_311, BRIDGE_LEVEL

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["LARGEST_PACKET", "Decoder", "Role", "TopicNames", "decode_acknowledgement"]

LARGEST_PACKET: Final = MAX_VARINT + 5
"""The largest packet that the protocol can express, in bytes with its header."""

_NO_PROPERTIES: Final = b"\x00"

_CONNECT: Final = 1
_PUBLISH: Final = 3
_PUBACK: Final = 4
_PUBCOMP: Final = 7


class Role(Enum):
    """The side that decodes; it determines which packets are accepted."""

    SERVER = "server"
    CLIENT = "client"
    EITHER = "either"


_REFUSED: Final[dict[Role, tuple[PacketType, ...]]] = {
    Role.SERVER: (PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP),
    Role.CLIENT: (PacketType.CONNECT, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE, PacketType.PINGREQ),
    Role.EITHER: (),
}
"""Packet types that only the role itself sends."""


class TopicNames:
    """Cache of validated topic names by their encoded bytes, so that each topic is decoded and hashed once.

    Bounded: emptied at ``limit`` names or ``limit_bytes`` bytes, after which each name is decoded once more; long names
    are not cached. The default is sufficient for 4,096 names of 256 bytes; decoded text uses up to four times as much
    memory.
    """

    __slots__ = ("_bytes", "_limit", "_limit_bytes", "names")

    def __init__(self, limit: int = 4096, limit_bytes: int = 1024 * 1024) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.names: dict[bytes, str] = {}

    def add(self, wire: bytes) -> str:
        """Return the topic name encoded in ``wire`` (with its length), validated and cached; "" is accepted with a
        topic alias.

        Raises:
            RemoteProtocolError: 0x81 for bad UTF-8, 0x90 for wildcards [MQTT-3.3.2-2].
        """
        topic = Reader(wire, 0, len(wire)).string()
        if has_wildcard(topic):
            raise RemoteProtocolError(f"mqtt: topic name {quoted(topic)} contains a wildcard", reason_code=0x90)
        if len(wire) <= 1024:
            if len(self.names) >= self._limit or self._bytes + len(wire) > self._limit_bytes:
                self.names.clear()
                self._bytes = 0
            self.names[wire] = topic
            self._bytes += len(wire)
        return topic


class Decoder:
    """Decodes one direction of one connection.

    ``max_packet_size`` is the limit in bytes, header included: a larger packet is refused with 0x95 as soon as its
    length is known. ``max_connect_size`` limits the bytes up to the end of CONNECT. ``topics`` may be shared between
    decoders of one thread. ``version`` is the protocol level of received packets, 5 or 4 (MQTT 3.1.1); a received
    CONNECT sets it.
    """

    __slots__ = (
        "_data",
        "_end",
        "_first",
        "_largest",
        "_last_response_topic",
        "_last_topic",
        "_last_wire",
        "_needed",
        "_pieces",
        "_role",
        "_start",
        "_topics",
        "_types",
        "buffered",
        "error",
        "max_packet_size",
        "packet_id",
        "protocol_level",
        "protocol_name",
        "version",
    )

    def __init__(
        self,
        max_packet_size: int = LARGEST_PACKET,
        *,
        role: Role = Role.EITHER,
        topics: TopicNames | None = None,
        max_connect_size: int = LARGEST_PACKET,
        version: int = 5,
    ) -> None:
        self.max_packet_size = max_packet_size
        self._largest: i64 = min(max_packet_size, max_connect_size)
        self.error: RemoteProtocolError | None = None
        """Error of an earlier :meth:`feed`, after which nothing can be decoded."""
        self.protocol_level = 0
        """Protocol level byte of the received CONNECT; level and name determine the format of a refusal. 0 before a
        complete CONNECT was received, valid or not."""
        self.protocol_name = b""
        """The first bytes of the protocol name of that CONNECT."""
        self.version = version
        self._role = role
        self._types = _ACCEPTED[role]
        self._topics = topics or TopicNames()
        self._last_wire = b""
        self._last_topic = ""
        """Topic of the last PUBLISH: most clients publish to the same topic repeatedly."""
        self._last_response_topic = LastResponseTopic()
        self._pieces: list[bytes] = []
        self.buffered: i64 = 0
        """Bytes of an incomplete packet."""
        self._needed: i64 = 1
        self._data = b""
        self._first: i64 = 0
        self._start: i64 = 0
        self._end: i64 = 0
        """The current packet: its first byte; its body is ``_data[_start:_end]``."""
        self.packet_id: i64 = 0
        """Packet identifier of the current packet if it is an acknowledgement in its short form (identifier only); 0
        for an acknowledgement in its long form. Undefined for other packets."""

    def feed(self, data: bytes) -> list[Packet]:
        """Decode the packets that ``data`` completes; an incomplete packet is kept for the next call.

        Packets before an error in the same bytes are returned, ``error`` is set, and the next call raises; check
        ``error`` after handling the packets.

        Raises:
            RemoteProtocolError: with the reason code for the peer; raised again by every later call.
        """
        if self.error is not None:
            raise self.error.copy()
        packets: list[Packet] = []
        try:
            self.add(data)
            while self.next_type():
                packets.append(self.packet())
        except RemoteProtocolError as e:
            self.error = e.copy()
            self.discard()
            if not packets:
                raise
        return packets

    def has_more(self) -> bool:
        """Return whether bytes follow the current packet; if not, discard the packet."""
        if self._end < len(self._data):
            return True
        self._data = b""  # so that an idle connection has no buffer
        self._end = 0
        return False

    def add(self, data: bytes) -> None:
        """Add received bytes. Copies the bytes after the current packet, unless :meth:`next_type` returned 0 or
        :meth:`has_more` returned False."""
        if self.buffered:
            self._pieces.append(data)
            self.buffered += len(data)
            if self.buffered < self._needed:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.buffered = 0
        elif self._end < len(self._data):
            data = self._data[self._end :] + data
            self._end = 0
        self._data = data

    def next_type(self) -> i64:
        """Advance to the next packet and return its type; 0 without a complete packet.

        Raises:
            RemoteProtocolError: with the reason code to answer with; nothing can be decoded after it.
        """
        data = self._data
        position = self._end
        size: i64 = len(data)
        start = position + 2
        if start > size:
            if position >= size:
                self._data = b""
                self._end = 0
                return 0
            if self._types[data[position]] == 0:
                raise _unexpected_packet(data[position])
            return self._keep(position, 2)
        first: i64 = data[position]
        length: i64 = data[position + 1]
        packet_type: i64 = self._types[first]
        if packet_type == 0:
            raise _unexpected_packet(first)
        if length > 127:
            more: i64 = 0
            if start < size:
                more = data[start]
            if 0 < more < 128:
                length = length & 127 | more << 7
                start += 1
            else:
                header = _long_length(data, position + 1, size)
                if header is None:
                    return self._keep(position, size - position + 1)
                length, start = header
        end = start + length
        if end - position > self._largest:
            raise RemoteProtocolError(
                f"mqtt: a packet of {end - position} bytes is larger than the {self._largest} allowed", reason_code=0x95
            )
        if end > size:
            return self._keep(position, end - position)
        packet_id: i64 = 0
        if length == 2:
            packet_id = data[start] << 8 | data[start + 1]
        self.packet_id = packet_id
        self._first = first
        self._start = start
        self._end = end
        return packet_type

    def is_empty(self) -> bool:
        """Return whether the current packet has only its fixed header."""
        return self._start == self._end

    def packet(self) -> Packet:
        """Decode the current packet.

        Raises:
            RemoteProtocolError: with the reason code to answer with; nothing can be decoded after it.
        """
        packet_type = self._types[self._first]
        if packet_type == _PUBLISH:
            return self.publish()
        if _PUBACK <= packet_type <= _PUBCOMP and self.packet_id:
            return _ACKNOWLEDGEMENTS[packet_type](self.packet_id)
        return self._decode_body(self._data, packet_type, self._start, self._end)

    def publish(self) -> Publish:
        """Decode the current packet, a PUBLISH: topic, identifier (QoS 1, 2), properties, payload [section 3.3].

        Raises:
            RemoteProtocolError: as :meth:`packet`.
        """
        data, first, start, end = self._data, self._first, self._start, self._end
        if self.version != 5:
            return self._publish_311(data, first, start, end)
        position = start + 2
        if position > end:
            raise malformed("the packet ends within a field")
        signed: int = read_i16_be(data, start)
        size: i64 = signed
        size &= 0xFFFF
        position += size
        qos = first >> 1 & 3
        properties_start = position + 2 if qos else position
        if properties_start >= end:
            raise malformed("PUBLISH ends before its properties")
        topic_wire = data[start:position]
        if topic_wire == self._last_wire:
            topic_wire = self._last_wire
            topic = self._last_topic
        else:
            known = self._topics.names.get(topic_wire)
            topic = self._topics.add(topic_wire) if known is None else known
            self._last_wire, self._last_topic = topic_wire, topic
        packet_id: i64 = 0
        if qos:
            signed = read_i16_be(data, position)
            packet_id = signed
            packet_id &= 0xFFFF
            if packet_id == 0:
                raise protocol_error("packet identifier 0 [MQTT-2.2.1-3]")
        length: i64 = data[properties_start]
        if length == 0:
            publish = Publish(
                topic,
                data[properties_start + 1 : end],
                qos,
                packet_id=packet_id,
                topic_wire=topic_wire,
                properties_wire=_NO_PROPERTIES,
            )
        else:
            block: i64 = 1
            if length > 127:
                more: i64 = 0
                if properties_start + 1 < end:
                    more = data[properties_start + 1]
                if 0 < more < 128:
                    length = length & 127 | more << 7
                    block = 2
                else:
                    reader = Reader(data, properties_start, end)
                    length = reader.varint()
                    block = reader.position - properties_start
            properties_end = properties_start + block + length
            if properties_end > end:
                raise malformed("the property length goes beyond the packet")
            wire = data[properties_start:properties_end]
            properties = decode_publish_properties(wire, block, self._last_response_topic)
            if properties.seen & HAS_SUBSCRIPTION_IDENTIFIER and self._role is Role.SERVER:
                raise protocol_error("Subscription Identifier in a PUBLISH of a client [MQTT-3.3.4-6]")
            publish = Publish(
                topic, data[properties_end:end], qos, packet_id=packet_id, topic_wire=topic_wire, properties_wire=wire
            )
            publish.block = properties
        if not topic and (publish.block is None or not publish.block.topic_alias):
            raise protocol_error("PUBLISH with neither a topic nor a Topic Alias")
        if first & 9:
            publish.retain = first & 1 == 1
            publish.dup = first & 8 == 8
        return publish

    def discard(self) -> None:
        """Discard bytes that were not decoded, after the end of the connection."""
        self._data = b""
        self._end = 0
        self._pieces.clear()
        self.buffered = 0

    def _keep(self, position: i64, needed: i64) -> i64:
        """Store the beginning of a packet of at least ``needed`` bytes; return 0."""
        rest = self._data[position:] if position else self._data
        self._data = b""
        self._end = 0
        self._pieces.append(rest)
        self.buffered = len(rest)
        self._needed = needed
        return 0

    def _publish_311(self, data: bytes, first: i64, start: i64, end: i64) -> Publish:
        """Decode PUBLISH of MQTT 3.1.1: topic, identifier (QoS 1, 2), payload."""
        position = start + 2
        if position > end:
            raise malformed("the packet ends within a field")
        position += data[start] << 8 | data[start + 1]
        qos = first >> 1 & 3
        body = position + 2 if qos else position
        if body > end:
            raise malformed("the packet ends within a field")
        wire = data[start:position]
        topic = self._topics.names.get(wire)
        if topic is None:
            topic = self._topics.add(wire)
        if not topic:
            raise protocol_error("PUBLISH without a topic")
        publish = Publish(topic, data[body:end], qos, retain=first & 1 == 1, dup=first & 8 == 8)
        if qos:
            publish.packet_id = data[position] << 8 | data[position + 1]
            if publish.packet_id == 0:
                raise protocol_error("packet identifier 0")
        publish.topic_wire = wire
        publish.properties_wire = _NO_PROPERTIES
        return publish

    def _decode_body(self, data: bytes, packet_type: int, start: int, end: int) -> Packet:
        """Decode a packet other than PUBLISH and the short acknowledgements."""
        if packet_type == _CONNECT:
            at = start + 2 + (data[start] << 8 | data[start + 1]) if end - start > 2 else end
            # Compiled code fails on a slice whose end is before its start.
            self.protocol_name = data[start + 2 : max(start + 2, min(at, start + 10, end))]
            self.protocol_level = data[at] if at < end else 0
        elif self.version != 5:
            return BODIES_311[packet_type](data, start, end)
        packet = _BODIES[packet_type](data, start, end)
        if isinstance(packet, Connect):
            self._largest = self.max_packet_size
            self.version = packet.protocol_version
        if isinstance(packet, Disconnect) and self._role is not Role.EITHER:
            self._check_disconnect(packet)
        return packet

    def _check_disconnect(self, packet: Disconnect) -> None:
        from_client = self._role is Role.SERVER
        code, properties = packet.reason_code, packet.properties
        if (from_client and code not in CLIENT_DISCONNECT) or (not from_client and code == 0x04):
            raise protocol_error(f"this side does not send DISCONNECT {reason_name(code)}")
        if from_client and properties.server_reference is not None:
            raise protocol_error("a client does not send Server Reference")
        if not from_client and properties.session_expiry_interval is not None:
            raise protocol_error("a server does not send Session Expiry Interval on DISCONNECT [MQTT-3.14.2-2]")


def _long_length(data: bytes, position: int, size: int) -> tuple[int, int] | None:
    """Decode a Remaining Length of two to four bytes at ``position``; return it and its end, None if it is
    incomplete."""
    value = shift = 0
    while position < size:
        byte = data[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            if byte == 0:
                raise malformed("the Remaining Length is not in its shortest form [MQTT-1.5.5-1]")
            return value, position
        shift += 7
        if shift > 21:
            raise malformed("the Remaining Length has more than four bytes")
    return None


def _types() -> bytes:
    """Table of first byte -> packet type; 0 if the type or the flags are reserved [MQTT-2.1.3-1]."""
    types = bytearray(256)
    for packet_type in PacketType:
        flags = 2 if packet_type in (PacketType.PUBREL, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE) else 0
        types[packet_type << 4 | flags] = int(packet_type)
    for flags in range(16):
        qos = flags >> 1 & 3
        if qos != 3 and not (qos == 0 and flags & 8):  # [MQTT-3.3.1-4], [MQTT-3.3.1-2]
            types[PacketType.PUBLISH << 4 | flags] = int(PacketType.PUBLISH)
    return bytes(types)


_TYPES: Final = _types()
_ACCEPTED: Final[dict[Role, bytes]] = {
    role: bytes(0 if packet_type in refused else packet_type for packet_type in _TYPES)
    for role, refused in _REFUSED.items()
}
"""The packet type table of each role: 0 also for packets that only the role itself sends."""


def _unexpected_packet(first: int) -> RemoteProtocolError:
    packet_type = _TYPES[first]
    if packet_type == 0:
        return malformed(f"first byte 0x{first:02X}: reserved type or flags [MQTT-2.1.3-1]")
    return protocol_error(f"{PacketType(packet_type).name} was sent to the wrong side")


# Packet bodies: each function gets the whole buffer and the bounds of the body.

_Ack = TypeVar("_Ack", bound=PubAck | PubRec | PubRel | PubComp)


def _connect(data: bytes, position: int, end: int) -> Connect:
    """Decode CONNECT of MQTT 5 (level 5) or MQTT 3.1.1 (level 4, without properties; with the bridge bit 0x84)."""
    reader = Reader(data, position, end)
    name = reader.binary()
    level = reader.byte()
    bridge = level == BRIDGE_LEVEL
    if bridge:
        level = 4
    if name != b"MQTT" or level not in (4, 5):  # [MQTT-3.1.2-1], [MQTT-3.1.2-2]
        raise RemoteProtocolError(
            f"mqtt: protocol {name[:16]!r} level {level} is not supported",
            reason_code=0x84,
            hint="use MQTT 5.0 or 3.1.1",
        )
    flags = reader.byte()
    will_qos = flags >> 3 & 3
    if flags & 1:
        raise malformed("the reserved connect flag is set [MQTT-3.1.2-3]")
    if will_qos == 3:
        raise malformed("Will QoS is 3 [MQTT-3.1.2-12]")
    if not flags & 4 and flags & 0x38:
        raise malformed("Will QoS or Will Retain without a will [MQTT-3.1.2-11, MQTT-3.1.2-13]")
    if level == 4 and flags & 0x40 and not flags & 0x80:
        raise malformed("a password without a user name")
    keep_alive = reader.two_bytes()
    properties = read_properties(reader, 1 << PacketType.CONNECT) if level == 5 else Properties()
    client_id = reader.string()
    will = None
    if flags & 4:
        will_properties = read_properties(reader, WILL) if level == 5 else Properties()
        topic = reader.string()
        problem = name_problem(topic)
        if problem is not None:
            raise RemoteProtocolError(f"mqtt: will topic {quoted(topic)} cannot be used", reason_code=0x90, why=problem)
        will = Will(topic, reader.binary(), will_qos, bool(flags & 0x20), will_properties)
    username = reader.string() if flags & 0x80 else None
    password = reader.binary() if flags & 0x40 else None
    _finish(reader)
    return Connect(client_id, bool(flags & 2), keep_alive, username, password, will, properties, level, bridge=bridge)


def _connack(data: bytes, position: int, end: int) -> ConnAck:
    reader = Reader(data, position, end)
    flags = reader.byte()
    if flags & 0xFE:
        raise malformed("reserved acknowledge flags are set [MQTT-3.2.2-1]")
    code = _reason(reader.byte(), PacketType.CONNACK)
    if flags and code:
        raise protocol_error("Session Present with a refusal [MQTT-3.2.2-6]")
    properties = read_properties(reader, 1 << PacketType.CONNACK)
    _finish(reader)
    return ConnAck(bool(flags), code, properties)


def decode_acknowledgement(cls: type[_Ack], packet_type: int, data: bytes, position: int, end: int) -> _Ack:
    """Decode PUBACK, PUBREC, PUBREL or PUBCOMP, also in their short forms [MQTT 5.0 section 3.4.2.1]."""
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    code = _reason(reader.byte(), packet_type) if reader.position < end else 0
    if reader.position == end:
        return cls(packet_id, code)
    properties = read_properties(reader, 1 << packet_type)
    _finish(reader)
    return cls(packet_id, code, properties)


def _puback(data: bytes, position: int, end: int) -> PubAck:
    return decode_acknowledgement(PubAck, PacketType.PUBACK, data, position, end)


def _pubrec(data: bytes, position: int, end: int) -> PubRec:
    return decode_acknowledgement(PubRec, PacketType.PUBREC, data, position, end)


def _pubrel(data: bytes, position: int, end: int) -> PubRel:
    return decode_acknowledgement(PubRel, PacketType.PUBREL, data, position, end)


def _pubcomp(data: bytes, position: int, end: int) -> PubComp:
    return decode_acknowledgement(PubComp, PacketType.PUBCOMP, data, position, end)


def _subscribe(data: bytes, position: int, end: int) -> Subscribe:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    properties = read_properties(reader, 1 << PacketType.SUBSCRIBE)
    subscriptions: list[Subscription] = []
    while reader.position < end:
        topic_filter = _filter(reader)
        options = reader.byte()
        if options & 0xC0:
            raise malformed("reserved subscription options are set [MQTT-3.8.3-5]")
        qos, retain_handling = options & 3, options >> 4 & 3
        if qos == 3 or retain_handling == 3:
            raise protocol_error("subscription options ask for QoS 3 or Retain Handling 3")
        no_local = bool(options & 4)
        if no_local and topic_filter.startswith(SHARE_PREFIX):
            raise protocol_error("No Local on a shared subscription [MQTT-3.8.3-4]")
        subscriptions.append(Subscription(topic_filter, qos, no_local, bool(options & 8), retain_handling))
        check_filter_count(len(subscriptions))
    if not subscriptions:
        raise protocol_error("SUBSCRIBE without a topic filter [MQTT-3.8.3-2]")
    return Subscribe(packet_id, subscriptions, properties)


def _unsubscribe(data: bytes, position: int, end: int) -> Unsubscribe:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    properties = read_properties(reader, 1 << PacketType.UNSUBSCRIBE)
    filters: list[str] = []
    while reader.position < end:
        filters.append(_filter(reader))
        check_filter_count(len(filters))
    if not filters:
        raise protocol_error("UNSUBSCRIBE without a topic filter [MQTT-3.10.3-2]")
    return Unsubscribe(packet_id, filters, properties)


def _reason_list(packet_type: int, data: bytes, position: int, end: int) -> tuple[int, list[int], Properties]:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    properties = read_properties(reader, 1 << packet_type)
    codes = [_reason(code, packet_type) for code in data[reader.position : end]]
    if not codes:
        raise protocol_error("an acknowledgement without reason codes")
    return packet_id, codes, properties


def _suback(data: bytes, position: int, end: int) -> SubAck:
    return SubAck(*_reason_list(PacketType.SUBACK, data, position, end))


def _unsuback(data: bytes, position: int, end: int) -> UnsubAck:
    return UnsubAck(*_reason_list(PacketType.UNSUBACK, data, position, end))


def _pingreq(data: bytes, position: int, end: int) -> PingReq:
    _finish(Reader(data, position, end))
    return PingReq()


def _pingresp(data: bytes, position: int, end: int) -> PingResp:
    _finish(Reader(data, position, end))
    return PingResp()


def _disconnect(data: bytes, position: int, end: int) -> Disconnect:
    reader = Reader(data, position, end)
    code = _reason(reader.byte(), PacketType.DISCONNECT) if position < end else 0
    if reader.position == end:
        return Disconnect(code)
    properties = read_properties(reader, 1 << PacketType.DISCONNECT)
    _finish(reader)
    return Disconnect(code, properties)


def _auth(data: bytes, position: int, end: int) -> Auth:
    if position == end:
        return Auth()
    reader = Reader(data, position, end)
    code = _reason(reader.byte(), PacketType.AUTH)
    properties = read_properties(reader, 1 << PacketType.AUTH)
    _finish(reader)
    return Auth(code, properties)


def _packet_id(reader: Reader) -> int:
    packet_id = reader.two_bytes()
    if packet_id == 0:
        raise protocol_error("packet identifier 0 [MQTT-2.2.1-3]")
    return packet_id


def _filter(reader: Reader) -> str:
    """Decode a topic filter. An invalid one is a malformed packet: 0x8F is for a filter that is "correctly formed"
    [section 2.4]."""
    topic_filter = reader.string()
    problem = filter_problem(topic_filter)
    if problem is not None:
        raise malformed(f"topic filter {quoted(topic_filter)}: {problem}")
    return topic_filter


def _reason(code: int, packet_type: int) -> int:
    """Return the reason code ``code``; raise if the packet type does not allow it."""
    if code not in ALLOWED[packet_type]:
        raise protocol_error(f"{PacketType(packet_type).name} cannot carry reason code {reason_name(code)}")
    return code


def _finish(reader: Reader) -> None:
    if reader.position != reader.end:
        raise malformed(f"{reader.end - reader.position} bytes follow the last field")


_BODIES: Final[dict[int, Callable[[bytes, int, int], Packet]]] = {
    PacketType.CONNECT: _connect,
    PacketType.CONNACK: _connack,
    PacketType.PUBACK: _puback,
    PacketType.PUBREC: _pubrec,
    PacketType.PUBREL: _pubrel,
    PacketType.PUBCOMP: _pubcomp,
    PacketType.SUBSCRIBE: _subscribe,
    PacketType.SUBACK: _suback,
    PacketType.UNSUBSCRIBE: _unsubscribe,
    PacketType.UNSUBACK: _unsuback,
    PacketType.PINGREQ: _pingreq,
    PacketType.PINGRESP: _pingresp,
    PacketType.DISCONNECT: _disconnect,
    PacketType.AUTH: _auth,
}
"""Packet type -> decoder of its body; PUBLISH is decoded by :class:`Decoder`."""

_ACKNOWLEDGEMENTS: Final[dict[int, type[PubAck | PubRec | PubRel | PubComp]]] = {
    4: PubAck,
    5: PubRec,
    6: PubRel,
    7: PubComp,
}
