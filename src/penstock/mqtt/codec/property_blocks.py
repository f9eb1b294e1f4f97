"""Decode and encode property blocks by the table of properties; PUBLISH has a decoder of its own.

Source: MQTT 5.0 section 2.2.2.
"""

from __future__ import annotations

from typing import Any, Final, final

from librt.strings import read_i16_be, read_i32_be
from mypy_extensions import i64, mypyc_attr

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.mqtt.codec.primitives import (
    COMPILED,
    Reader,
    check_text,
    decode_text,
    encode_binary,
    encode_string,
    encode_varint,
    is_at,
    is_plain,
    malformed,
    protocol_error,
)
from penstock.mqtt.codec.properties import (
    ALLOWED_IN,
    BY_IDENTIFIER,
    PROPERTIES,
    WILL,
    Properties,
    PropertySpec,
    WireType,
)
from penstock.mqtt.codec.reasons import PacketType
from penstock.mqtt.codec.topics import name_problem

__all__ = [
    "HAS_CORRELATION",
    "HAS_EXPIRY",
    "HAS_SUBSCRIPTION_IDENTIFIER",
    "HAS_TOPIC_ALIAS",
    "HAS_USER_PROPERTY",
    "LastResponseTopic",
    "PropertyBlock",
    "block_of",
    "decode_properties",
    "decode_publish_properties",
    "encode_properties",
    "read_properties",
]

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
"""The property table for decoding: context -> identifier -> (type or width, attribute, low, high, repeats)."""

_MAX_CACHED_TOPICS: Final = 4096
_MAX_CACHED_BYTES: Final = 160
_response_topics: Final[dict[bytes, str]] = {}
"""Validated response topics by their bytes; emptied at :data:`_MAX_CACHED_TOPICS`; long ones are not cached."""


def read_properties(reader: Reader, context: int) -> Properties:
    """Read a property block: its length, then the properties."""
    length = reader.varint()
    start = reader.position
    if start + length > reader.end:
        raise malformed("the property length goes beyond the packet")
    reader.position = start + length
    return decode_properties(reader.data, start, start + length, context) if length else Properties()


def decode_properties(data: bytes, position: int, end: int, context: int) -> Properties:
    """Decode the properties in ``data[position:end]`` (without their length) of a packet of ``context``.

    Raises:
        RemoteProtocolError: 0x81 for malformed bytes or a property that the packet cannot have, 0x82 for a repeated
        property or a value out of range, 0x97 for too many user properties of a packet other than a message.
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
            if len(properties.user_properties) > MAX_USER_PROPERTIES and context not in (_PUBLISH, WILL):
                raise RemoteProtocolError(
                    f"mqtt: more than {MAX_USER_PROPERTIES} user properties in one packet", reason_code=0x97
                )
            position = stop
            continue
        bit = 1 << identifier
        if seen & bit and not repeats:
            raise protocol_error(f"property {BY_IDENTIFIER[identifier].name} occurs twice in one packet")
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


_BITS: Final = [1 << bit for bit in range(63)]
"""Numbers with one bit: compiled code would shift a literal in 32 bits, also if a variable has it."""
_NO_PAIRS: Final[dict[bytes, bytes]] = {}
"""Shared empty dictionary; never modified."""


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class PropertyBlock:
    """Validated properties of one PUBLISH in their encoded form; :class:`Properties` has the decoded ones.

    ``seen`` has bit n set if the property with identifier n is present; values of absent properties are 0 or empty.
    ``wire`` is the encoded block, ``user_at`` the start of the first user property (the end of the block without any).
    """

    user_count: i64 = 0
    """Number of user properties."""
    content_type_at: i64 = 0
    """Position of the Content Type in ``wire``; 0 without one."""
    name_lengths: i64 = 0
    """Bit n is set if a user property has a name of n bytes; bit 62 represents all longer names."""
    seen: i64 = 0
    payload_format_indicator: i64 = 0
    message_expiry_interval: i64 = 0
    topic_alias: i64 = 0
    response_topic: str = ""
    correlation_data: bytes = b""
    pairs: dict[bytes, bytes] = _NO_PAIRS
    """The user properties, with an empty value for a repeated name; used interpreted, where loops over bytes are
    expensive."""

    def __init__(self, wire: bytes) -> None:
        self.wire = wire
        self.user_at: i64 = len(wire)

    def content_type(self) -> str | None:
        """The Content Type as text."""
        position = self.content_type_at
        if not position:
            return None
        size = self.wire[position] << 8 | self.wire[position + 1]
        return self.wire[position + 2 : position + 2 + size].decode()

    def user_properties(self) -> list[tuple[str, str]]:
        """The user properties as text, in their order."""
        pairs: list[tuple[str, str]] = []
        wire = self.wire
        end: i64 = len(wire)
        position = self.user_at
        while position < end:
            if wire[position] == _USER_PROPERTY:
                middle = position + 3 + (wire[position + 1] << 8 | wire[position + 2])
                stop = middle + 2 + (wire[middle] << 8 | wire[middle + 1])
                pairs.append((wire[position + 3 : middle].decode(), wire[middle + 2 : stop].decode()))
                position = stop
            else:
                position = _after(wire, position)
        return pairs

    def user_property(self, name: bytes) -> bytes | None:
        """Return the value of the user property ``name``: empty if it is repeated, None if it is absent."""
        if not COMPILED:
            return self.pairs.get(name)
        wanted: i64 = len(name)
        if not self.name_lengths >> (min(62, wanted)) & 1:
            return None
        wire = self.wire
        end: i64 = len(wire)
        position = self.user_at
        found: bytes | None = None
        while position < end:
            if wire[position] != _USER_PROPERTY:
                position = _after(wire, position)
                continue
            size: i64 = wire[position + 1]
            size = size << 8 | wire[position + 2]
            position += 3
            value_at = position + size + 2
            same = size == wanted
            if same:
                at = size - 1  # names of the same length often differ only in their last bytes
                while at >= 0 and wire[position + at] == name[at]:
                    at -= 1
                same = at < 0
            size = wire[value_at - 2]
            position = value_at + (size << 8 | wire[value_at - 1])
            if same:
                found = wire[value_at:position] if found is None else b""
        return found

    def four_user_properties(
        self, first: bytes, usual: bytes, second: bytes, third: bytes, fourth: bytes
    ) -> tuple[bytes | None, bytes | None, bytes | None, bytes | None]:
        """Return the values of four user properties in one pass; ``usual`` is the expected value of the first one."""
        if not COMPILED:
            pairs = self.pairs
            return pairs.get(first), pairs.get(second), pairs.get(third), pairs.get(fourth)
        one: bytes | None = None
        two: bytes | None = None
        three: bytes | None = None
        four: bytes | None = None
        first_size: i64 = len(first)
        usual_size: i64 = len(usual)
        second_size: i64 = len(second)
        third_size: i64 = len(third)
        fourth_size: i64 = len(fourth)
        wire = self.wire
        end: i64 = len(wire)
        position = self.user_at
        while position < end:
            if wire[position] != _USER_PROPERTY:
                position = _after(wire, position)
                continue
            size = i64(read_i16_be(wire, position + 1)) & 0xFFFF
            name_at = position + 3
            value_at = name_at + size + 2
            position = value_at + (i64(read_i16_be(wire, value_at - 2)) & 0xFFFF)
            if size == first_size and is_at(wire, name_at, first):
                if one is not None:
                    one = b""
                elif position - value_at == usual_size and is_at(wire, value_at, usual):
                    one = usual
                else:
                    one = wire[value_at:position]
            elif size == second_size and is_at(wire, name_at, second):
                two = wire[value_at:position] if two is None else b""
            elif size == third_size and is_at(wire, name_at, third):
                three = wire[value_at:position] if three is None else b""
            elif size == fourth_size and is_at(wire, name_at, fourth):
                four = wire[value_at:position] if four is None else b""
        return one, two, three, four


def _after(wire: bytes, position: i64) -> i64:
    """Return the end of the property at ``position``, other than a user property."""
    identifier: i64 = wire[position]
    position += 1
    if identifier == 0x01:
        return position + 1
    if identifier == 0x02:
        return position + 4
    if identifier == 0x23:
        return position + 2
    if identifier == 0x0B:
        while wire[position] > 127:
            position += 1
        return position + 1
    size: i64 = wire[position]
    return position + 2 + (size << 8 | wire[position + 1])


MAX_USER_PROPERTIES: Final = 1_000
"""Maximum user properties of a packet other than PUBLISH, for which the broker has a limit; each becomes two objects.
User properties of a will in CONNECT are limited by the size of the packet."""

_USER_PROPERTY: Final = 0x26
HAS_EXPIRY: Final = 1 << 0x02
HAS_CORRELATION: Final = 1 << 0x09
HAS_SUBSCRIPTION_IDENTIFIER: Final = 1 << 0x0B
HAS_TOPIC_ALIAS: Final = 1 << 0x23
HAS_USER_PROPERTY: Final = 1 << 0x26
"""Bits of :attr:`PropertyBlock.seen`."""


@final
@mypyc_attr(acyclic=True)
class LastResponseTopic:
    """The last response topic of a client, encoded and decoded: most requests of a client have the same topic."""

    __slots__ = ("text", "wire")

    def __init__(self) -> None:
        self.wire = b""
        self.text = ""


def decode_publish_properties(data: bytes, position: i64, last: LastResponseTopic) -> PropertyBlock:
    """Validate the properties of a PUBLISH in ``data`` from ``position``, and read the properties that a broker needs.

    Accepts and refuses what :func:`decode_properties` does, with the same errors; a property test compares the two.
    ``last``: the cache of the packet's connection.

    Raises:
        RemoteProtocolError: as :func:`decode_properties`.
    """
    block = PropertyBlock(data)
    begin = position
    end: i64 = len(data)
    seen: i64 = 0
    stop: i64
    number: i64
    signed: int
    while position < end:
        identifier: i64 = data[position]
        position += 1
        if identifier == _USER_PROPERTY:
            if seen & HAS_USER_PROPERTY == 0:
                seen |= HAS_USER_PROPERTY
                block.user_at = position - 1
            position = _check_user_properties(block, data, position - 1, end)
            continue
        if identifier > 0x26:
            decode_properties(data, begin, end, _PUBLISH)  # it raises the error
        bit: i64 = _BITS[identifier]
        if seen & bit and identifier != 0x0B:
            decode_properties(data, begin, end, _PUBLISH)  # it raises the error
        seen |= bit
        if identifier == 0x09 or identifier == 0x08 or identifier == 0x03:  # noqa: PLR1714 - compared as numbers
            stop = position + 2
            if stop <= end:
                signed = read_i16_be(data, position)
                number = signed
                stop += number & 0xFFFF
            if stop > end:
                raise malformed("a property ends within a field, or a length goes beyond the properties")
            if identifier == 0x09:
                block.correlation_data = data[position + 2 : stop]
            elif identifier == 0x08:
                wire = data[position + 2 : stop]
                if wire != last.wire or not last.text:
                    last.text = _response_topic(wire)
                    last.wire = wire
                block.response_topic = last.text
            else:
                check_text(data, position + 2, stop)
                block.content_type_at = position
            position = stop
        elif identifier == 0x02 and position + 4 <= end:
            signed = read_i32_be(data, position)
            number = signed
            block.message_expiry_interval = number & 0xFFFFFFFF
            position += 4
        elif identifier == 0x01 and position < end and data[position] <= 1:
            block.payload_format_indicator = data[position]
            position += 1
        elif identifier == 0x23 and position + 2 <= end and (data[position] or data[position + 1]):
            number = data[position]
            block.topic_alias = number << 8 | data[position + 1]
            position += 2
        elif identifier == 0x0B:
            reader = Reader(data, position, end)
            if not reader.varint():
                raise _out_of_range(identifier, 0)
            position = reader.position
        else:
            decode_properties(data, begin, end, _PUBLISH)  # it raises the error
            raise AssertionError("the two decoders of properties differ")
    block.seen = seen
    return block


def block_of(properties: Properties) -> PropertyBlock:
    """Encode the properties of a PUBLISH that was created in this process.

    ``wire`` has only the user properties and the Content Type.
    """
    parts: list[bytes] = []
    for name, value in properties.user_properties:
        parts += (b"\x26", _sized(name), _sized(value))
    content_type_at = 0
    if properties.content_type is not None:
        content_type_at = sum(map(len, parts)) + 1
        parts += (b"\x03", _sized(properties.content_type))
    block = PropertyBlock(b"".join(parts))
    block.user_at = 0
    block.content_type_at = content_type_at
    for spec in ALLOWED_IN[_PUBLISH]:
        if getattr(properties, spec.attribute) not in (None, []):
            block.seen |= _BITS[spec.identifier]
    block.pairs = {}
    for name, value in properties.user_properties:
        encoded = name.encode(errors="replace")
        block.pairs[encoded] = b"" if encoded in block.pairs else value.encode(errors="replace")
        block.name_lengths |= _BITS[min(len(encoded), 62)]
    block.payload_format_indicator = properties.payload_format_indicator or 0
    block.message_expiry_interval = properties.message_expiry_interval or 0
    block.topic_alias = properties.topic_alias or 0
    block.response_topic = properties.response_topic or ""
    block.correlation_data = properties.correlation_data or b""
    return block


def _sized(text: str) -> bytes:
    return encode_binary(text.encode(errors="replace"), "a user property")


def encode_properties(properties: Properties | None, context: int) -> bytes:
    """Encode a property block with its length, in the order of the identifiers, for a packet of ``context``.

    Raises:
        LocalProtocolError: the packet cannot have a property, or its value is out of range.
    """
    if properties is None or properties.is_empty():
        return b"\x00"
    out: list[bytes] = []
    for spec in ALLOWED_IN[context]:
        value = getattr(properties, spec.attribute)
        if value is not None and (value or type(value) is not list):
            _encode_property(out, spec, value, context)
    if context != _PUBLISH:
        _refuse_misplaced(properties, context)
    block = b"".join(out)
    return encode_varint(len(block)) + block


def _encode_property(out: list[bytes], spec: PropertySpec, value: Any, context: int) -> None:
    key = bytes((spec.identifier,))
    wire_type = spec.wire_type
    if wire_type is WireType.STRING_PAIR:
        for name, text in value:
            out += (key, encode_string(name, spec.name), encode_string(text, spec.name))
    elif wire_type is WireType.STRING:
        out += (key, encode_string(value, spec.name))
    elif wire_type is WireType.BINARY:
        out += (key, encode_binary(value, spec.name))
    elif wire_type is WireType.VARIABLE_BYTE_INTEGER:
        if len(value) > 1 and not spec.repeats & context:
            raise LocalProtocolError(f"mqtt: property {spec.name} occurs at most once in this packet")
        for number in value:
            _check_range(spec, number)
            out += (key, encode_varint(number))
    else:
        _check_range(spec, value)
        out += (key, int(value).to_bytes(_WIDTHS[wire_type], "big"))


_WIDTHS = {WireType.BYTE: 1, WireType.TWO_BYTE_INTEGER: 2, WireType.FOUR_BYTE_INTEGER: 4}


def _check_range(spec: PropertySpec, number: int) -> None:
    high = min(spec.high, 0xFFFF) if spec.wire_type is WireType.TWO_BYTE_INTEGER else spec.high
    if not spec.low <= number <= high:
        raise LocalProtocolError(f"mqtt: property {spec.name} is {spec.low}..{high}, not {number}")


def _refuse_misplaced(properties: Properties, context: int) -> None:
    """Raise for a property that this packet cannot have. Not called for PUBLISH, which it would slow down."""
    for spec in PROPERTIES:
        if not spec.contexts & context and getattr(properties, spec.attribute) not in (None, []):
            raise LocalProtocolError(f"mqtt: property {spec.name} does not belong in this packet")


def _check_user_properties(block: PropertyBlock, data: bytes, position: i64, end: i64) -> i64:
    """Validate consecutive user properties from ``position``; return the end of the last one.

    All texts are validated at once: ASCII with no more zero bytes than the lengths contain has no U+0000.
    """
    start = position
    zeros: i64 = 0
    count: i64 = block.user_count
    lengths: i64 = block.name_lengths
    if not COMPILED and not count:
        block.pairs = {}
    while position < end and data[position] == _USER_PROPERTY:
        count += 1
        if position + 3 > end:
            raise malformed("a property ends within a field")
        signed: int = read_i16_be(data, position + 1)
        size: i64 = signed
        size &= 0xFFFF
        if size < 256:
            zeros += 1
        if size & 255 == 0:
            zeros += 1
        name_at = position + 3
        position = name_at + size
        if position + 2 > end:
            raise malformed("a property ends within a field")
        signed = read_i16_be(data, position)
        size = signed
        size &= 0xFFFF
        if size < 256:
            zeros += 1
        if size & 255 == 0:
            zeros += 1
        value_at = position + 2
        position = value_at + size
        if position > end:
            raise malformed("a length goes beyond the properties")
        if COMPILED:
            lengths |= _BITS[min(62, value_at - 2 - name_at)]
        else:
            name = data[name_at : value_at - 2]
            block.pairs[name] = b"" if name in block.pairs else data[value_at:position]
    block.name_lengths = lengths
    block.user_count = count
    if not is_plain(data, start, position, zeros):
        while start < position:
            middle = start + 3 + (data[start + 1] << 8 | data[start + 2])
            check_text(data, start + 3, middle)
            start = middle + 2 + (data[middle] << 8 | data[middle + 1])
            check_text(data, middle + 2, start)
    return position


def _misplaced(identifier: int) -> RemoteProtocolError:
    spec = BY_IDENTIFIER.get(identifier)
    name = spec.name if spec is not None else f"0x{identifier:02X}"
    return malformed(f"property {name} does not belong in this packet")


def _out_of_range(identifier: int, number: int) -> RemoteProtocolError:
    code = 0x94 if identifier == 0x23 else 0x82
    name = BY_IDENTIFIER[identifier].name
    return RemoteProtocolError(f"mqtt: property {name} cannot be {number}", reason_code=code)


def _pair_end(data: bytes, position: int, end: int) -> int:
    """Return the end of the string pair at ``position``."""
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
    """Decode a string pair; both strings have a length."""
    middle = 2 + (wire[0] << 8 | wire[1])
    return decode_text(wire[2:middle]), decode_text(wire[middle + 2 :])


def _response_topic(raw: bytes) -> str:
    """Validate a Response Topic, which must be a topic name."""
    known = _response_topics.get(raw)
    if known is not None:
        return known
    topic = decode_text(raw)
    if name_problem(topic) is not None:
        raise protocol_error(f"response topic {topic!r} is not a topic name [MQTT-3.3.2-14]")
    if len(raw) <= _MAX_CACHED_BYTES:
        if len(_response_topics) >= _MAX_CACHED_TOPICS:
            _response_topics.clear()
        _response_topics[raw] = topic
    return topic
