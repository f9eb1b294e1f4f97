"""Encode packets, each in its shortest form.

``encode`` encodes any packet. The broker forwards PUBLISH without it, with ``write_publish_head`` and encoded parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from librt.strings import BytesWriter, write_i16_be

from penstock.errors import LocalProtocolError
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
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.primitives import (
    encode_binary,
    encode_frame,
    encode_string,
    encode_varint,
)
from penstock.mqtt.codec.properties import WILL
from penstock.mqtt.codec.property_blocks import encode_properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, reason_name

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["encode", "encode_within", "head_size", "write_publish_head"]

_PUBLISH_CONTEXT: Final = 1 << PacketType.PUBLISH


def head_size(remaining: i64) -> i64:
    """Return the size in bytes of a fixed header with this Remaining Length."""
    if remaining < 128:
        return 2
    if remaining < 16_384:
        return 3
    return 4 if remaining < 2_097_152 else 5


def write_publish_head(out: BytesWriter, first: i64, remaining: i64) -> None:
    """Append the fixed header of a PUBLISH: ``first`` byte and Remaining Length."""
    if remaining < 128:
        head: int = first << 8 | remaining  # below 2**15, because the type of PUBLISH is 3
        write_i16_be(out, head)
    else:
        byte: int = first
        out.append(byte)
        out.write(encode_varint(remaining))


def encode(packet: Packet) -> bytes:
    """Encode ``packet``.

    Raises:
        LocalProtocolError: a field exceeds the protocol's range, or the packet cannot have a property or the reason
        code.
    """
    return _ENCODERS[type(packet)](packet)


def encode_within(packet: Packet, maximum: int) -> bytes | None:
    """Encode ``packet`` in at most ``maximum`` bytes, if necessary without User Properties and Reason String.

    Return None if it is larger even then. For responses, whose diagnostics must be omitted if they exceed the limit
    [MQTT-3.2.2-19], [MQTT-3.2.2-20] (and the same clauses of other packets).
    """
    data = encode(packet)
    if len(data) <= maximum:
        return data
    if not isinstance(packet, Publish | PingReq | PingResp | Connect):
        for attribute, empty in (("user_properties", []), ("reason_string", None)):
            setattr(packet.properties, attribute, empty)
            data = encode(packet)
            if len(data) <= maximum:
                return data
    return None


def _connect(packet: Connect) -> bytes:
    will = packet.will
    flags = (
        (0x02 if packet.clean_start else 0)
        | (0x80 if packet.username is not None else 0)
        | (0x40 if packet.password is not None else 0)
    )
    parts = [encode_string(packet.client_id, "the client identifier")]
    if will is not None:
        flags |= 0x04 | _qos(will.qos) << 3 | (0x20 if will.retain else 0)
        parts += (
            encode_properties(will.properties, WILL),
            encode_string(will.topic, "the will topic"),
            encode_binary(will.payload, "the will payload"),
        )
    if packet.username is not None:
        parts.append(encode_string(packet.username, "the user name"))
    if packet.password is not None:
        parts.append(encode_binary(packet.password, "the password"))
    if not 0 <= packet.keep_alive <= 65_535:
        raise LocalProtocolError(f"mqtt: Keep Alive is 0..65535 seconds, not {packet.keep_alive}")
    head = b"\x00\x04MQTT" + bytes((packet.protocol_version, flags)) + packet.keep_alive.to_bytes(2, "big")
    return encode_frame(0x10, head, encode_properties(packet.properties, 1 << PacketType.CONNECT), *parts)


def _connack(packet: ConnAck) -> bytes:
    code = _reason(packet.reason_code, PacketType.CONNACK)
    head = bytes((1 if packet.session_present else 0, code))
    return encode_frame(0x20, head, encode_properties(packet.properties, 1 << PacketType.CONNACK))


def _publish(packet: Publish) -> bytes:
    qos = _qos(packet.qos)
    first = 0x30 | qos << 1 | (1 if packet.retain else 0) | (8 if packet.dup else 0)
    if packet.dup and not qos:
        raise LocalProtocolError("mqtt: DUP on a QoS 0 PUBLISH [MQTT-3.3.1-2]")
    identifier = _packet_id(packet.packet_id) if qos else b""
    topic = encode_string(packet.topic, "the topic")
    return encode_frame(
        first, topic, identifier, encode_properties(packet.optional_properties, _PUBLISH_CONTEXT), packet.payload
    )


def _acknowledgement(first: int, packet: PubAck | PubRec | PubRel | PubComp) -> bytes:
    identifier = _packet_id(packet.packet_id)
    packet_type = first >> 4
    code = bytes((_reason(packet.reason_code, packet_type),))
    given = packet.optional_properties
    properties = encode_properties(given, 1 << packet_type)
    if len(properties) > 1:
        return encode_frame(first, identifier, code, properties)
    return encode_frame(first, identifier, code) if packet.reason_code else encode_frame(first, identifier)


def _subscribe(packet: Subscribe) -> bytes:
    if not packet.subscriptions:
        raise LocalProtocolError("mqtt: SUBSCRIBE needs at least one topic filter [MQTT-3.8.3-2]")
    parts: list[bytes] = []
    for wanted in packet.subscriptions:
        if not 0 <= wanted.retain_handling <= 2:
            raise LocalProtocolError(f"mqtt: Retain Handling is 0, 1 or 2, not {wanted.retain_handling}")
        options = (
            _qos(wanted.qos)
            | (4 if wanted.no_local else 0)
            | (8 if wanted.retain_as_published else 0)
            | wanted.retain_handling << 4
        )
        parts += (encode_string(wanted.topic_filter, "a topic filter"), bytes((options,)))
    properties = encode_properties(packet.properties, 1 << PacketType.SUBSCRIBE)
    return encode_frame(0x82, _packet_id(packet.packet_id), properties, *parts)


def _unsubscribe(packet: Unsubscribe) -> bytes:
    if not packet.topic_filters:
        raise LocalProtocolError("mqtt: UNSUBSCRIBE needs at least one topic filter [MQTT-3.10.3-2]")
    properties = encode_properties(packet.properties, 1 << PacketType.UNSUBSCRIBE)
    filters = [encode_string(topic_filter, "a topic filter") for topic_filter in packet.topic_filters]
    return encode_frame(0xA2, _packet_id(packet.packet_id), properties, *filters)


def _reason_list(first: int, packet: SubAck | UnsubAck) -> bytes:
    codes = bytes(_reason(code, first >> 4) for code in packet.reason_codes)
    properties = encode_properties(packet.properties, 1 << (first >> 4))
    return encode_frame(first, _packet_id(packet.packet_id), properties, codes)


def _short(first: int, packet: Disconnect | Auth) -> bytes:
    """Encode the body of DISCONNECT or AUTH: empty for reason code 0x00 without properties.

    DISCONNECT may omit the property length, but paho.golang before 0.23 (and so the Go SDK of the state store) treats
    that as a broken connection and does not report the reason code, for example 0x8E when another client took over the
    session [MQTT-3.1.4-3].
    """
    packet_type = first >> 4
    code = bytes((_reason(packet.reason_code, packet_type),))
    properties = encode_properties(packet.properties, 1 << packet_type)
    if packet.reason_code or len(properties) > 1:
        return encode_frame(first, code, properties)
    return encode_frame(first)


def _qos(qos: int) -> int:
    if not 0 <= qos <= 2:
        raise LocalProtocolError(f"mqtt: QoS is 0, 1 or 2, not {qos}")
    return qos


def _packet_id(packet_id: int) -> bytes:
    if not 1 <= packet_id <= 65_535:
        raise LocalProtocolError(f"mqtt: a packet identifier is 1..65535, not {packet_id}")
    return packet_id.to_bytes(2, "big")


def _reason(code: int, packet_type: int) -> int:
    if code not in ALLOWED[packet_type]:
        raise LocalProtocolError(f"mqtt: {PacketType(packet_type).name} cannot carry reason code {reason_name(code)}")
    return code


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Connect: _connect,
    ConnAck: _connack,
    Publish: _publish,
    PubAck: lambda packet: _acknowledgement(0x40, packet),
    PubRec: lambda packet: _acknowledgement(0x50, packet),
    PubRel: lambda packet: _acknowledgement(0x62, packet),
    PubComp: lambda packet: _acknowledgement(0x70, packet),
    Subscribe: _subscribe,
    SubAck: lambda packet: _reason_list(0x90, packet),
    Unsubscribe: _unsubscribe,
    UnsubAck: lambda packet: _reason_list(0xB0, packet),
    PingReq: lambda _: b"\xc0\x00",
    PingResp: lambda _: b"\xd0\x00",
    Disconnect: lambda packet: _short(0xE0, packet),
    Auth: lambda packet: _short(0xF0, packet),
}
