"""Property blocks, decoded by the table of properties; on the path of every message that has any.

Short texts are kept by their bytes, since the same few come with every message: what is found there was checked.

Source: MQTT 5.0 section 2.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.primitives import Reader, decode_text, malformed, protocol_error
from penstock.mqtt.codec.properties import ALLOWED_IN, BY_IDENTIFIER, Properties, WireType
from penstock.mqtt.codec.reasons import PacketType
from penstock.mqtt.codec.topics import name_problem

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["decode_properties", "decode_publish_properties", "read_properties"]

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

KEPT: Final = 4096
LONGEST_KEPT: Final = 40
_CONTENT_TYPES: Final = {text.encode(): text for text in ("application/octet-stream", "application/json", "text/plain")}
"""The content types that nearly every message has."""
_NEVER_REPEATED: Final = ("__ts", "__ft", "Timestamp", "FencingToken")
"""User properties with a clock value: another one in each message."""
_pairs: dict[bytes, tuple[str, str]] = {}
_response_topics: dict[bytes, str] = {}
"""Checked texts by their bytes; each is emptied when it holds :data:`KEPT`."""


def read_properties(reader: Reader, context: int) -> Properties:
    """The property block at the reader: its length, then the properties."""
    length = reader.varint()
    start = reader.position
    if start + length > reader.end:
        raise malformed("the property length goes beyond the packet")
    reader.position = start + length
    return decode_properties(reader.data, start, start + length, context) if length else Properties()


def decode_properties(data: bytes, position: int, end: int, context: int) -> Properties:
    """The properties in ``data[position:end]`` (without their length); ``context`` says what they belong to.

    Raises:
        RemoteProtocolError: 0x81 for an unknown or misplaced property or bytes that do not decode, 0x82 for a repeat or
            a value out of range.
    """
    properties = Properties()
    rows = _ROWS[context]
    seen = 0
    while position < end:
        identifier = data[position]
        row = rows.get(identifier)
        if row is None:
            raise _misplaced(identifier)
        kind, attribute, low, high, repeats = row
        position += 1
        if kind == _PAIR:
            stop = _pair_end(data, position, end)
            properties.user_properties.append(_pair(data[position:stop]))
            position = stop
            continue
        bit = 1 << identifier
        if seen & bit and not repeats:
            raise protocol_error(f"property {BY_IDENTIFIER[identifier].name} stands twice in one packet")
        seen |= bit
        if kind > 0:
            stop = position + kind
            if stop > end:
                raise malformed("a property ends within a field")
            number = int.from_bytes(data[position:stop], "big")
            position = stop
            if not low <= number <= high:
                raise _out_of_range(identifier, number)
            setattr(properties, attribute, number)
        elif kind != _VARINT:
            stop = position + 2
            if stop <= end:
                stop += data[position] << 8 | data[position + 1]
            if stop > end:
                raise malformed("a property ends within a field, or a length goes beyond the properties")
            raw = data[position + 2 : stop]
            if kind == _BINARY:
                setattr(properties, attribute, raw)
            else:
                setattr(properties, attribute, _response_topic(raw) if identifier == 0x08 else decode_text(raw))
            position = stop
        else:
            reader = Reader(data, position, end)
            number = reader.varint()
            position = reader.position
            if not low <= number <= high:
                raise _out_of_range(identifier, number)
            properties.subscription_identifiers.append(number)
    if seen & _AUTHENTICATION_DATA and properties.authentication_method is None:
        raise protocol_error("Authentication Data without an Authentication Method")
    return properties


_AUTHENTICATION_DATA: Final = 1 << 0x16
_PUBLISH: Final = 1 << PacketType.PUBLISH


def decode_publish_properties(data: bytes, position: i64, end: i64) -> Properties:
    """The properties of a PUBLISH in ``data[position:end]``: what :func:`decode_properties` gives, without the table.

    Half of the time that a message with properties takes to decode goes into them, so its few properties are written
    out here. A property test compares the two, errors included.

    Raises:
        RemoteProtocolError: as :func:`decode_properties`.
    """
    properties = Properties()
    begin = position
    seen: i64 = 0
    middle: i64
    stop: i64
    while position < end:
        identifier: i64 = data[position]
        position += 1
        if identifier == 0x26:
            middle = position + 2
            if middle <= end:
                middle += data[position] << 8 | data[position + 1]
            if middle + 2 > end:
                raise malformed("a property ends within a field")
            stop = middle + 2 + (data[middle] << 8 | data[middle + 1])
            if stop > end:
                raise malformed("a length goes beyond the properties")
            wire = data[position:stop]
            pair = _pairs.get(wire)
            if pair is None:
                pair = _pair(wire)
            properties.user_properties.append(pair)
            position = stop
            continue
        if identifier > 0x26:
            return decode_properties(data, begin, end, _PUBLISH)  # it raises the error
        bit: i64 = 1 << identifier
        if seen & bit and identifier != 0x0B:
            return decode_properties(data, begin, end, _PUBLISH)  # it raises the error
        seen |= bit
        if identifier == 0x09 or identifier == 0x08 or identifier == 0x03:  # noqa: PLR1714 - compared as numbers
            stop = position + 2
            if stop <= end:
                stop += data[position] << 8 | data[position + 1]
            if stop > end:
                raise malformed("a property ends within a field, or a length goes beyond the properties")
            raw = data[position + 2 : stop]
            if identifier == 0x09:
                properties.correlation_data = raw
            elif identifier == 0x08:
                topic = _response_topics.get(raw)
                properties.response_topic = _response_topic(raw) if topic is None else topic
            else:
                properties.content_type = _CONTENT_TYPES.get(raw) or decode_text(raw)
            position = stop
        elif identifier == 0x02 and position + 4 <= end:
            properties.message_expiry_interval = (
                data[position] << 24 | data[position + 1] << 16 | data[position + 2] << 8 | data[position + 3]
            )
            position += 4
        elif identifier == 0x01 and position < end and data[position] <= 1:
            properties.payload_format_indicator = data[position]
            position += 1
        elif identifier == 0x23 and position + 2 <= end and (data[position] or data[position + 1]):
            properties.topic_alias = data[position] << 8 | data[position + 1]
            position += 2
        elif identifier == 0x0B:
            reader = Reader(data, position, end)
            number = reader.varint()
            if not number:
                raise _out_of_range(identifier, number)
            properties.subscription_identifiers.append(number)
            position = reader.position
        else:
            return decode_properties(data, begin, end, _PUBLISH)  # it raises the error
    return properties


def _misplaced(identifier: int) -> RemoteProtocolError:
    spec = BY_IDENTIFIER.get(identifier)
    name = spec.name if spec is not None else f"0x{identifier:02X}"
    return malformed(f"property {name} does not belong in this packet")


def _out_of_range(identifier: int, number: int) -> RemoteProtocolError:
    code = 0x94 if identifier == 0x23 else 0x82
    name = BY_IDENTIFIER[identifier].name
    return RemoteProtocolError(f"mqtt: property {name} cannot be {number}", reason_code=code)


def _pair_end(data: bytes, position: int, end: int) -> int:
    """Where the two strings at ``position`` end."""
    middle = position + 2
    if middle <= end:
        middle += data[position] << 8 | data[position + 1]
    if middle + 2 > end:
        raise malformed("a property ends within a field")
    stop = middle + 2 + (data[middle] << 8 | data[middle + 1])
    if stop > end:
        raise malformed("a length goes beyond the properties")
    return stop


def _pair(wire: bytes) -> tuple[str, str]:
    """The two strings that ``wire`` is, with their lengths."""
    known = _pairs.get(wire)
    if known is not None:
        return known
    middle = 2 + (wire[0] << 8 | wire[1])
    pair = (decode_text(wire[2:middle]), decode_text(wire[middle + 2 :]))
    if len(wire) <= LONGEST_KEPT and pair[0] not in _NEVER_REPEATED:
        if len(_pairs) >= KEPT:
            _pairs.clear()
        _pairs[wire] = pair
    return pair


def _response_topic(raw: bytes) -> str:
    """A Response Topic, which must be a topic name."""
    known = _response_topics.get(raw)
    if known is not None:
        return known
    topic = decode_text(raw)
    if name_problem(topic) is not None:
        raise protocol_error(f"response topic {topic!r} is no topic name [MQTT-3.3.2-14]")
    if len(raw) <= 4 * LONGEST_KEPT:
        if len(_response_topics) >= KEPT:
            _response_topics.clear()
        _response_topics[raw] = topic
    return topic
