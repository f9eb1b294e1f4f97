"""Incremental decoder: bytes as they arrive in, packets out, of MQTT 5 and MQTT 3.1.1.

Fixed header [MQTT 5.0 section 2.1]:  type (4 bits) | flags (4 bits) | Remaining Length (1 to 4 bytes, shortest form)

Invariant: any bytes give packets or one RemoteProtocolError, the same in one piece or split. Work is linear in the
bytes received, however they are split: pieces of an unfinished packet are joined once, when the packet is complete.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.bodies import BODIES
from penstock.mqtt.codec.packets import Connect, Disconnect, Packet, PubAck, PubComp, Publish, PubRec, PubRel
from penstock.mqtt.codec.primitives import MAX_VARINT, Reader, malformed, protocol_error, quoted
from penstock.mqtt.codec.property_blocks import HAS_SUBSCRIPTION_IDENTIFIER, decode_publish_properties
from penstock.mqtt.codec.reasons import CLIENT_DISCONNECT, PacketType, reason_name
from penstock.mqtt.codec.topics import has_wildcard
from penstock.mqtt.codec.version311 import BODIES_311

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["LARGEST_PACKET", "Decoder", "Role", "TopicNames"]

LARGEST_PACKET: Final = MAX_VARINT + 5
"""The largest packet that the protocol can express, in bytes with its header."""

_NO_PROPERTIES: Final = b"\x00"
_ACKNOWLEDGEMENTS: Final[dict[int, type[PubRec | PubRel | PubComp]]] = {5: PubRec, 6: PubRel, 7: PubComp}
"""Those that come in their short form nearly always, beside PUBACK."""


class Role(Enum):
    """Which side decodes; it decides which packets may come in."""

    SERVER = "server"
    CLIENT = "client"
    EITHER = "either"


_REFUSED: dict[Role, frozenset[int]] = {
    Role.SERVER: frozenset((PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP)),
    Role.CLIENT: frozenset((PacketType.CONNECT, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE, PacketType.PINGREQ)),
    Role.EITHER: frozenset(),
}


class TopicNames:
    """Checked topic names by their bytes on the wire, so that a topic is decoded once and its hash is kept.

    Bounded: emptied when ``limit`` names or ``limit_bytes`` bytes are in it, which costs one decoding each; long names
    are not kept. The default bytes are enough for 4,096 names of 256 bytes; text takes up to four times as much.
    """

    __slots__ = ("_bytes", "_limit", "_limit_bytes", "names")

    def __init__(self, limit: int = 4096, limit_bytes: int = 1024 * 1024) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.names: dict[bytes, str] = {}

    def add(self, wire: bytes) -> str:
        """The topic name in ``wire`` (with its two length bytes), checked and kept; "" is let through for an alias.

        Raises:
            RemoteProtocolError: 0x81 for bad UTF-8, 0x90 for wildcards [MQTT-3.3.2-2].
        """
        topic = Reader(wire, 0, len(wire)).string()
        if has_wildcard(topic):
            raise RemoteProtocolError(f"mqtt: topic name {quoted(topic)} holds a wildcard", reason_code=0x90)
        if len(wire) <= 1024:
            if len(self.names) >= self._limit or self._bytes + len(wire) > self._limit_bytes:
                self.names.clear()
                self._bytes = 0
            self.names[wire] = topic
            self._bytes += len(wire)
        return topic


class Decoder:
    """Decodes one direction of one connection.

    ``max_packet_size`` is our own limit in bytes, header included: a larger packet is refused with 0x95 as soon as its
    length is known. ``max_connect_size`` bounds what comes before a CONNECT was decoded, CONNECT included. ``topics``
    may be shared between decoders of one thread. ``version`` is the protocol level of what comes in, 5 or 4 (MQTT
    3.1.1); a CONNECT that comes in changes it to its own.
    """

    __slots__ = (
        "_largest",
        "_last_topic",
        "_last_wire",
        "_needed",
        "_pieces",
        "_refused",
        "_role",
        "_topics",
        "buffered",
        "error",
        "max_packet_size",
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
        self._largest = min(max_packet_size, max_connect_size)
        self.error: RemoteProtocolError | None = None
        """Set once the bytes are beyond repair; packets before it were returned."""
        self.protocol_level = 0
        """The level byte of the CONNECT that came in; with the name it decides the form of a refusal. 0 before a whole
        CONNECT came in, be it well formed or not."""
        self.protocol_name = b""
        """The first bytes of the protocol name of that CONNECT."""
        self.version = version
        self._role = role
        self._refused = _REFUSED[role]
        self._topics = topics or TopicNames()
        self._last_wire = b""
        self._last_topic = ""
        """Topic of the last PUBLISH: it is that of the next one nearly always."""
        self._pieces: list[bytes] = []
        self.buffered = 0
        """Bytes of a packet that is not complete."""
        self._needed = 1

    def feed(self, data: bytes) -> list[Packet]:
        """Decode what is complete with ``data``; the rest is kept for the next call.

        When packets come before an error in the same bytes, they are returned, ``error`` is set, and the next call
        raises; so look at ``error`` once the packets are handled.

        Raises:
            RemoteProtocolError: with the reason code to answer with; and again on every later call.
        """
        if self.error is not None:
            raise self.error.copy()
        if self.buffered:
            self._pieces.append(data)
            self.buffered += len(data)
            if self.buffered < self._needed:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.buffered = 0
        packets: list[Packet] = []
        try:
            used = self._decode(data, packets)
        except RemoteProtocolError as e:
            self.error = e.copy()
            if not packets:
                raise
            return packets
        if used < len(data):
            rest = data[used:] if used else data
            self._pieces.append(rest)
            self.buffered = len(rest)
        return packets

    def discard(self) -> None:
        """Forget the bytes of an unfinished packet: the connection is gone."""
        self._pieces.clear()
        self.buffered = 0

    def _decode(self, data: bytes, packets: list[Packet]) -> i64:
        """Append the packets that are complete; return how many bytes they took. Sets ``_needed`` for the rest."""
        position: i64 = 0
        size: i64 = len(data)
        refused = self._refused
        largest: i64 = self._largest
        while position < size:
            first: i64 = data[position]
            kind: i64 = _KINDS[first]
            if kind == 0:
                raise malformed(f"first byte 0x{first:02X}: reserved type or flags [MQTT-2.1.3-1]")
            if kind != 3 and kind != 4 and kind in refused:  # noqa: PLR1714 - both sides send these two
                raise protocol_error(f"{PacketType(kind).name} was sent to the wrong side")
            if position + 1 >= size:
                self._needed = 2
                return position
            length: i64 = data[position + 1]
            start: i64 = position + 2
            if length > 127:
                if position + 2 < size and 0 < data[position + 2] < 128:
                    length = length & 127 | data[position + 2] << 7
                    start = position + 3
                else:
                    header = _long_length(data, position + 1, size)
                    if header is None:
                        self._needed = size - position + 1
                        return position
                    length, start = header
            end = start + length
            if end - position > largest:
                raise RemoteProtocolError(
                    f"mqtt: a packet of {end - position} bytes is larger than the {largest} allowed", reason_code=0x95
                )
            if end > size:
                self._needed = end - position
                return position
            if kind == 3:
                if self.version == 5:
                    packets.append(self._publish(data, first, start, end))
                else:
                    packets.append(self._publish_311(data, first, start, end))
            elif kind == 4 and length == 2 and (data[start] or data[start + 1]):
                packets.append(PubAck(data[start] << 8 | data[start + 1]))
            elif kind in _ACKNOWLEDGEMENTS and length == 2 and (data[start] or data[start + 1]):
                packets.append(_ACKNOWLEDGEMENTS[kind](data[start] << 8 | data[start + 1]))
            else:
                packets.append(self._other(data, kind, start, end))
                if kind == 1:
                    largest = self._largest
            position = end
        self._needed = 1
        return position

    def _publish(self, data: bytes, first: i64, start: i64, end: i64) -> Publish:
        """PUBLISH: topic, identifier (QoS 1, 2), properties, payload to the end [MQTT 5.0 section 3.3]."""
        position = start + 2
        if position > end:
            raise malformed("the packet ends within a field")
        position += data[start] << 8 | data[start + 1]
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
            packet_id = data[position] << 8 | data[position + 1]
            if packet_id == 0:
                raise protocol_error("packet identifier 0 [MQTT-2.2.1-3]")
        if data[properties_start] == 0:
            publish = Publish(topic, data[properties_start + 1 : end], qos)
            publish.properties_wire = _NO_PROPERTIES
        else:
            length: i64 = data[properties_start]
            block: i64 = 1
            if length > 127:
                if properties_start + 1 < end and 0 < data[properties_start + 1] < 128:
                    length = length & 127 | data[properties_start + 1] << 7
                    block = 2
                else:
                    reader = Reader(data, properties_start, end)
                    length = reader.varint()
                    block = reader.position - properties_start
            properties_end = properties_start + block + length
            if properties_end > end:
                raise malformed("the property length goes beyond the packet")
            wire = data[properties_start:properties_end]
            properties = decode_publish_properties(wire, block, block + length)
            if properties.seen & HAS_SUBSCRIPTION_IDENTIFIER and self._role is Role.SERVER:
                raise protocol_error("Subscription Identifier in a PUBLISH of a client [MQTT-3.3.4-6]")
            publish = Publish(topic, data[properties_end:end], qos)
            publish.block = properties
            publish.properties_wire = wire
        if not topic and (publish.block is None or not publish.block.topic_alias):
            raise protocol_error("PUBLISH with neither a topic nor a Topic Alias")
        publish.packet_id = packet_id
        publish.topic_wire = topic_wire
        if first & 9:
            publish.retain = first & 1 == 1
            publish.dup = first & 8 == 8
        return publish

    def _publish_311(self, data: bytes, first: i64, start: i64, end: i64) -> Publish:
        """PUBLISH of MQTT 3.1.1: topic, identifier (QoS 1, 2), payload to the end."""
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

    def _other(self, data: bytes, kind: int, start: int, end: int) -> Packet:
        """Every packet off the hot path, and what may come from one side only."""
        if kind == PacketType.CONNECT:
            at = start + 2 + (data[start] << 8 | data[start + 1]) if end - start > 2 else end
            # Never a slice that ends before it begins: compiled code fails on one.
            self.protocol_name = data[start + 2 : max(start + 2, min(at, start + 10, end))]
            self.protocol_level = data[at] if at < end else 0
        elif self.version != 5:
            return BODIES_311[kind](data, start, end)
        packet = BODIES[kind](data, start, end)
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
    """A Remaining Length of two to four bytes at ``position`` and where it ends; None when it is not all there."""
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


def _kinds() -> list[int]:
    """First byte -> packet type, 0 where type or flags are reserved [MQTT-2.1.3-1]."""
    kinds = [0] * 256
    for packet_type in PacketType:
        flags = 2 if packet_type in (PacketType.PUBREL, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE) else 0
        kinds[packet_type << 4 | flags] = int(packet_type)
    for flags in range(16):
        qos = flags >> 1 & 3
        if qos != 3 and not (qos == 0 and flags & 8):  # [MQTT-3.3.1-4], [MQTT-3.3.1-2]
            kinds[PacketType.PUBLISH << 4 | flags] = int(PacketType.PUBLISH)
    return kinds


_KINDS: Final[list[int]] = _kinds()
