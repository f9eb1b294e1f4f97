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
from penstock.mqtt.codec.primitives import Reader, malformed, protocol_error, quoted
from penstock.mqtt.codec.properties import WILL, Properties
from penstock.mqtt.codec.property_blocks import read_properties
from penstock.mqtt.codec.reasons import ALLOWED, PacketType, reason_name
from penstock.mqtt.codec.topics import SHARE_PREFIX, filter_problem, name_problem

__all__ = ["BODIES", "BRIDGE_LEVEL", "decode_acknowledgement"]

_Ack = TypeVar("_Ack", bound=PubAck | PubRec | PubRel | PubComp)


BRIDGE_LEVEL: Final = 0x84
"""Protocol level with which a bridge of Mosquitto and others connects: 3.1.1, and the top bit says that it is a bridge.

A convention, not part of the standard. A broker that does not know it answers with return code 1, and the bridge tries
again with level 4.
"""


def _connect(data: bytes, position: int, end: int) -> Connect:
    """CONNECT of MQTT 5 (level 5) and MQTT 3.1.1 (level 4, without properties; with the bridge bit 0x84)."""
    reader = Reader(data, position, end)
    name = reader.binary()
    level = reader.byte()
    bridge = level == BRIDGE_LEVEL
    if bridge:
        level = 4
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
            raise RemoteProtocolError(f"mqtt: will topic {quoted(topic)} cannot be used", reason_code=0x90, why=problem)
        will = Will(topic, reader.binary(), will_qos, bool(flags & 0x20), will_properties)
    username = reader.string() if flags & 0x80 else None
    password = reader.binary() if flags & 0x40 else None
    _finish(reader)
    return Connect(client_id, bool(flags & 2), keep_alive, username, password, will, properties, level, bridge)


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
    """A topic filter. An ill-formed one is malformed: 0x8F is for a filter that is "correctly formed" [section 2.4]."""
    topic_filter = reader.string()
    problem = filter_problem(topic_filter)
    if problem is not None:
        raise malformed(f"topic filter {quoted(topic_filter)}: {problem}")
    return topic_filter


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
