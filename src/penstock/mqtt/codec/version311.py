"""MQTT 3.1.1 packets: without properties and, except for CONNACK and SUBACK, without reason codes.

The classes are those of MQTT 5; fields that 3.1.1 lacks are omitted when encoding, and empty when decoding.

Source: MQTT 3.1.1 (OASIS Standard) chapter 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.packets import (
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
)
from penstock.mqtt.codec.primitives import (
    Reader,
    check_filter_count,
    encode_binary,
    encode_frame,
    encode_size,
    encode_string,
    malformed,
    protocol_error,
    quoted,
)
from penstock.mqtt.codec.reasons import PacketType, ReasonCode
from penstock.mqtt.codec.topics import plain_filter_problem

__all__ = ["BODIES_311", "BRIDGE_LEVEL", "encode_311", "return_code"]

BRIDGE_LEVEL: Final = 0x84
"""Protocol level of bridges (Mosquitto and others): 3.1.1 with the highest bit set.

This is a convention, not part of the standard. A broker without support answers with return code 1, and the bridge
retries with level 4.
"""

_RETURN_CODES: dict[int, int] = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: 2,
    ReasonCode.SERVER_UNAVAILABLE: 3,
    ReasonCode.SERVER_BUSY: 3,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: 4,
    ReasonCode.BAD_AUTHENTICATION_METHOD: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
}
_REASON_CODES: Final = (0x00, 0x84, 0x85, 0x88, 0x86, 0x87)
"""Return code of CONNACK -> reason code of MQTT 5."""


def return_code(reason_code: int) -> int:
    """Return the CONNACK return code of 3.1.1 for a reason code; 3 (server unavailable) by default."""
    return _RETURN_CODES.get(reason_code, 3)


def encode_311(packet: Packet) -> bytes:
    """Encode ``packet`` as MQTT 3.1.1.

    Raises:
        LocalProtocolError: a field is out of range, or 3.1.1 does not have the packet (AUTH).
    """
    encoder = _ENCODERS.get(type(packet))
    if encoder is None:
        raise LocalProtocolError(f"mqtt: MQTT 3.1.1 has no {type(packet).__name__.upper()}")
    return encoder(packet)


def _encode_connect(packet: Connect) -> bytes:
    will = packet.will
    if packet.password is not None and packet.username is None:
        raise LocalProtocolError("mqtt: MQTT 3.1.1 allows a password with a user name only")
    flags = (
        (0x02 if packet.clean_start else 0)
        | (0x80 if packet.username is not None else 0)
        | (0x40 if packet.password is not None else 0)
    )
    parts = [encode_string(packet.client_id, "the client identifier")]
    if will is not None:
        flags |= 0x04 | will.qos << 3 | (0x20 if will.retain else 0)
        parts += (encode_string(will.topic, "the will topic"), encode_binary(will.payload, "the will payload"))
    if packet.username is not None:
        parts.append(encode_string(packet.username, "the user name"))
    if packet.password is not None:
        parts.append(encode_binary(packet.password, "the password"))
    head = b"\x00\x04MQTT" + bytes((BRIDGE_LEVEL if packet.bridge else 4, flags))
    return encode_frame(0x10, head, packet.keep_alive.to_bytes(2, "big"), *parts)


def _encode_publish(packet: Publish) -> bytes:
    first = 0x30 | packet.qos << 1 | (1 if packet.retain else 0) | (8 if packet.dup else 0)
    identifier = encode_size(packet.packet_id) if packet.qos else b""
    return encode_frame(first, encode_string(packet.topic, "the topic"), identifier, packet.payload)


def _encode_subscribe(packet: Subscribe) -> bytes:
    parts: list[bytes] = []
    for wanted in packet.subscriptions:
        parts += (encode_string(wanted.topic_filter, "a topic filter"), bytes((wanted.qos,)))
    return encode_frame(0x82, packet.packet_id.to_bytes(2, "big"), *parts)


def _encode_suback(packet: SubAck) -> bytes:
    codes = bytes(min(128, code) for code in packet.reason_codes)
    return encode_frame(0x90, packet.packet_id.to_bytes(2, "big"), codes)


def _encode_unsubscribe(packet: Unsubscribe) -> bytes:
    filters = [encode_string(topic_filter, "a topic filter") for topic_filter in packet.topic_filters]
    return encode_frame(0xA2, packet.packet_id.to_bytes(2, "big"), *filters)


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Connect: _encode_connect,
    ConnAck: lambda p: bytes((0x20, 2, 1 if p.session_present else 0, return_code(p.reason_code))),
    Publish: _encode_publish,
    PubAck: lambda p: b"\x40\x02" + p.packet_id.to_bytes(2, "big"),
    PubRec: lambda p: b"\x50\x02" + p.packet_id.to_bytes(2, "big"),
    PubRel: lambda p: b"\x62\x02" + p.packet_id.to_bytes(2, "big"),
    PubComp: lambda p: b"\x70\x02" + p.packet_id.to_bytes(2, "big"),
    Subscribe: _encode_subscribe,
    SubAck: _encode_suback,
    Unsubscribe: _encode_unsubscribe,
    UnsubAck: lambda p: b"\xb0\x02" + p.packet_id.to_bytes(2, "big"),
    PingReq: lambda _: b"\xc0\x00",
    PingResp: lambda _: b"\xd0\x00",
    Disconnect: lambda _: b"\xe0\x00",
}


def _connack(data: bytes, position: int, end: int) -> ConnAck:
    if end - position != 2:
        raise malformed("CONNACK has two bytes")
    flags, code = data[position], data[position + 1]
    if flags & 0xFE or code >= len(_REASON_CODES):
        raise malformed("reserved acknowledge flags or return code")
    return ConnAck(bool(flags), _REASON_CODES[code])


def _packet_id(reader: Reader) -> int:
    packet_id = reader.two_bytes()
    if packet_id == 0:
        raise protocol_error("packet identifier 0")
    return packet_id


def _filter(reader: Reader) -> str:
    """Decode a valid topic filter [MQTT-4.7.1-2], [MQTT-4.7.1-3], [MQTT-4.7.3-1] of MQTT 3.1.1."""
    topic_filter = reader.string()
    problem = plain_filter_problem(topic_filter)
    if problem is not None:
        raise malformed(f"topic filter {quoted(topic_filter)}: {problem}")
    return topic_filter


def _only_packet_id(data: bytes, position: int, end: int) -> int:
    packet_id = _packet_id(Reader(data, position, end))
    if end - position != 2:
        raise malformed("bytes follow the packet identifier")
    return packet_id


def _subscribe(data: bytes, position: int, end: int) -> Subscribe:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    subscriptions: list[Subscription] = []
    while reader.position < end:
        topic_filter = _filter(reader)
        qos = reader.byte()
        if qos > 2:
            raise malformed("a requested QoS is 0, 1 or 2")
        subscriptions.append(Subscription(topic_filter, qos))
        check_filter_count(len(subscriptions))
    if not subscriptions:
        raise protocol_error("SUBSCRIBE without a topic filter")
    return Subscribe(packet_id, subscriptions)


def _suback(data: bytes, position: int, end: int) -> SubAck:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    codes = list(data[reader.position : end])
    if not codes or any(code > 2 and code != 0x80 for code in codes):
        raise malformed("SUBACK has 0, 1, 2 or 0x80 for each filter")
    return SubAck(packet_id, codes)


def _unsubscribe(data: bytes, position: int, end: int) -> Unsubscribe:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    filters: list[str] = []
    while reader.position < end:
        filters.append(_filter(reader))
        check_filter_count(len(filters))
    if not filters:
        raise protocol_error("UNSUBSCRIBE without a topic filter")
    return Unsubscribe(packet_id, filters)


def _empty(packet: Callable[[], Packet]) -> Callable[[bytes, int, int], Packet]:
    def decode(_data: bytes, position: int, end: int) -> Packet:
        if position != end:
            raise malformed("bytes in a packet that has none")
        return packet()

    return decode


def _auth(_data: bytes, _position: int, _end: int) -> Packet:
    raise malformed("packet type 15 is reserved in MQTT 3.1.1")


BODIES_311: dict[int, Callable[[bytes, int, int], Packet]] = {
    PacketType.CONNACK: _connack,
    PacketType.PUBACK: lambda *at: PubAck(_only_packet_id(*at)),
    PacketType.PUBREC: lambda *at: PubRec(_only_packet_id(*at)),
    PacketType.PUBREL: lambda *at: PubRel(_only_packet_id(*at)),
    PacketType.PUBCOMP: lambda *at: PubComp(_only_packet_id(*at)),
    PacketType.SUBSCRIBE: _subscribe,
    PacketType.SUBACK: _suback,
    PacketType.UNSUBSCRIBE: _unsubscribe,
    PacketType.UNSUBACK: lambda *at: UnsubAck(_only_packet_id(*at), []),
    PacketType.PINGREQ: _empty(PingReq),
    PacketType.PINGRESP: _empty(PingResp),
    PacketType.DISCONNECT: _empty(Disconnect),
    PacketType.AUTH: _auth,
}
"""Packet type -> decoder of its body in 3.1.1; CONNECT and PUBLISH are in ``decoder``."""
