"""What stands behind the fixed header of each packet, decoded: one function a packet type.

The functions take the whole buffer with the bounds of the packet's body, and raise RemoteProtocolError with the reason
code to answer with. PUBLISH and the short acknowledgements are in ``decoder``, on the hot path.

Source: MQTT 5.0 chapter 3; which code for which mistake: sections 2.4, 4.13 and the prose of each packet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

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
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.primitives import Reader, decode_text, malformed, protocol_error
from penstock.mqtt.codec.properties import ALLOWED_IN, BY_IDENTIFIER, WILL, Properties, WireType
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, reason_name
from penstock.mqtt.codec.topics import SHARE_PREFIX, name_problem

__all__ = ["BODIES", "decode_acknowledgement", "decode_properties", "read_properties"]

_Ack = TypeVar("_Ack", PubAck, PubRec, PubRel, PubComp)


_STRING, _BINARY, _PAIR, _VARINT = 0, -1, -2, -3
_CODES: dict[WireType, int] = {
    WireType.BYTE: 1,
    WireType.TWO_BYTE_INTEGER: 2,
    WireType.FOUR_BYTE_INTEGER: 4,
    WireType.STRING: _STRING,
    WireType.BINARY: _BINARY,
    WireType.STRING_PAIR: _PAIR,
    WireType.VARIABLE_BYTE_INTEGER: _VARINT,
}
_ROWS: dict[int, dict[int, tuple[int, str, int, int, bool]]] = {
    context: {
        spec.identifier: (
            _CODES[spec.wire_type],
            spec.attribute,
            spec.low,
            spec.high,
            bool(spec.repeats & context),
        )
        for spec in specs
    }
    for context, specs in ALLOWED_IN.items()
}
"""The property table, ready to read: context -> identifier -> (type or width, attribute, low, high, repeats)."""

PAIRS_KEPT: Final = 4096
_pairs: dict[bytes, tuple[str, str]] = {}
"""Short user properties by their bytes: the same few come with every message. Emptied when full."""


def decode_properties(data: bytes, position: int, end: int, context: int) -> Properties:
    """The properties in ``data[position:end]`` (without their length); ``context`` says what they belong to.

    Written out flat: it runs once a message, and calls would cost more than the work.

    Raises:
        RemoteProtocolError: 0x81 for an unknown or misplaced property or bytes that do not decode, 0x82 for a repeat or
            a value out of range.
    """
    properties = Properties()
    rows = _ROWS[context]
    user_properties = properties.user_properties
    seen = 0
    while position < end:
        identifier = data[position]
        row = rows.get(identifier)
        if row is None:
            spec = BY_IDENTIFIER.get(identifier)
            raise malformed(
                f"property {spec.name if spec is not None else f'0x{identifier:02X}'} does not belong in this packet"
            )
        kind, attribute, low, high, repeats = row
        position += 1
        if kind == _PAIR:
            if position + 2 > end:
                raise malformed("a property ends within a field")
            middle = position + 2 + (data[position] << 8 | data[position + 1])
            if middle + 2 > end:
                raise malformed("a property ends within a field")
            stop = middle + 2 + (data[middle] << 8 | data[middle + 1])
            if stop > end:
                raise malformed("a length goes beyond the properties")
            if stop - position > 40:
                pair = (decode_text(data[position + 2 : middle]), decode_text(data[middle + 2 : stop]))
            else:
                wire = data[position:stop]
                known = _pairs.get(wire)
                if known is None:
                    known = (decode_text(data[position + 2 : middle]), decode_text(data[middle + 2 : stop]))
                    if len(_pairs) >= PAIRS_KEPT:
                        _pairs.clear()
                    _pairs[wire] = known
                pair = known
            user_properties.append(pair)
            position = stop
            continue
        bit = 1 << identifier
        if seen & bit and not repeats:
            raise protocol_error(f"property {BY_IDENTIFIER[identifier].name} stands twice in one packet")
        seen |= bit
        if kind <= 0 and kind != _VARINT:
            if position + 2 > end:
                raise malformed("a property ends within a field")
            stop = position + 2 + (data[position] << 8 | data[position + 1])
            if stop > end:
                raise malformed("a length goes beyond the properties")
            raw = data[position + 2 : stop]
            setattr(properties, attribute, decode_text(raw) if kind == _STRING else raw)
            position = stop
            continue
        if kind == _VARINT:
            reader = Reader(data, position, end)
            number = reader.varint()
            position = reader.position
        else:
            stop = position + kind
            if stop > end:
                raise malformed("a property ends within a field")
            number = int.from_bytes(data[position:stop], "big")
            position = stop
        if not low <= number <= high:
            code = 0x94 if identifier == 0x23 else 0x82
            name = BY_IDENTIFIER[identifier].name
            raise RemoteProtocolError(f"mqtt: property {name} cannot be {number}", reason_code=code)
        if identifier == 0x0B:
            properties.subscription_identifiers.append(number)
        else:
            setattr(properties, attribute, number)
    if properties.response_topic is not None and name_problem(properties.response_topic) is not None:
        raise protocol_error(f"response topic {properties.response_topic!r} is no topic name [MQTT-3.3.2-14]")
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise protocol_error("Authentication Data without an Authentication Method")
    return properties


def read_properties(reader: Reader, context: int) -> Properties:
    """The property block at the reader: its length, then the properties."""
    length = reader.varint()
    start = reader.position
    if start + length > reader.end:
        raise malformed("the property length goes beyond the packet")
    reader.position = start + length
    return decode_properties(reader.data, start, start + length, context) if length else Properties()


def _connect(data: bytes, position: int, end: int) -> Connect:
    """CONNECT of MQTT 5 (level 5) and MQTT 3.1.1 (level 4, without properties)."""
    reader = Reader(data, position, end)
    name = reader.binary()
    level = reader.byte()
    if name != b"MQTT" or level not in (4, 5):  # [MQTT-3.1.2-1], [MQTT-3.1.2-2]
        raise RemoteProtocolError(
            f"mqtt: protocol {name[:16]!r} level {level} is not spoken here",
            reason_code=0x84,
            do="use MQTT 5.0 or 3.1.1",
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
            raise RemoteProtocolError(f"mqtt: will topic {topic!r} cannot be used", reason_code=0x90, why=problem)
        will = Will(topic, reader.binary(), will_qos, bool(flags & 0x20), will_properties)
    username = reader.string() if flags & 0x80 else None
    password = reader.binary() if flags & 0x40 else None
    _finish(reader)
    return Connect(client_id, bool(flags & 2), keep_alive, username, password, will, properties, level)


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
    """PUBACK, PUBREC, PUBREL or PUBCOMP, also in their short forms [MQTT 5.0 section 3.4.2.1]."""
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
        topic_filter = reader.string()
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
    if not subscriptions:
        raise protocol_error("SUBSCRIBE without a topic filter [MQTT-3.8.3-2]")
    return Subscribe(packet_id, subscriptions, properties)


def _unsubscribe(data: bytes, position: int, end: int) -> Unsubscribe:
    reader = Reader(data, position, end)
    packet_id = _packet_id(reader)
    properties = read_properties(reader, 1 << PacketType.UNSUBSCRIBE)
    filters: list[str] = []
    while reader.position < end:
        filters.append(reader.string())
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


def _reason(code: int, packet_type: int) -> int:
    """``code``, if the packet may carry it."""
    if code not in ALLOWED[packet_type]:
        raise protocol_error(f"{PacketType(packet_type).name} cannot carry reason code {reason_name(code)}")
    return code


def _finish(reader: Reader) -> None:
    if reader.position != reader.end:
        raise malformed(f"{reader.end - reader.position} bytes follow the last field")


BODIES: dict[int, Callable[[bytes, int, int], Packet]] = {
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
"""Packet type -> decoder of its body; PUBLISH has its own."""
