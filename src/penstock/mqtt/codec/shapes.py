"""PUBLISHes that look like the one before: their properties without reading them one by one.

What one client publishes to one topic mostly has the same properties, but for the values of a few: correlation data, a
time stamp in a user property. From two like messages in a row a :class:`Shape` learns which bytes stay and which
change; the next one is cut up by one ``struct`` and its fixed parts are compared. Equal bytes decode equally, so a
match needs no further check but that of the texts that changed; anything else is decoded in full. A request to the
state store is decoded in a third of the time.

Who takes such messages may go further: a :class:`Form` is a whole packet, header and payload included, of which only
some pieces of known sizes change. It is taken apart by one ``struct``, and nothing of it is read a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.primitives import Reader, decode_text, encode_varint
from penstock.mqtt.codec.properties import BY_IDENTIFIER, LikeProperties, Properties, WireType

__all__ = ["Form", "Learner", "LikePublish", "Shape", "Value"]

LONGEST: Final = 1024
"""Bytes of topic and properties above which nothing is learned: a connection keeps a copy of them."""
MOST_CHANGING: Final = 8
MOST_PATIENCE: Final = 64
"""Messages decoded in full between two attempts to learn: few, since a missed shape costs each of them several times
what an attempt costs."""

_CORRELATION_DATA: Final = 0x09
_USER_PROPERTY: Final = 0x26


class Shape:
    """What like PUBLISHes have in common, from the topic to the end of the properties.

    ``size``: bytes of that. ``cut`` gives fixed and changing parts in turn, the packet identifier being the first that
    changes (an empty one at QoS 0). ``model``: the properties of the message it was learned from, not to be changed.
    ``values``: where correlation data and user properties stand, also those that do not change; ``changing_names``: the
    user properties whose values change. ``varies``: whether anything but the identifier does. ``correlation_at`` and
    ``texts`` say where among the parts the correlation data is (0: it does not change), and which user property has its
    value where: part, number of the property, name.

    ``taker`` is who wants its messages as :class:`LikePublish`; None: nobody.
    """

    __slots__ = (
        "changing_names",
        "correlation_at",
        "cut",
        "fixed",
        "has_identifier",
        "model",
        "properties_at",
        "size",
        "taker",
        "texts",
        "topic",
        "topic_wire",
        "values",
        "varies",
    )

    def __init__(
        self,
        wire: bytes,
        topic_end: int,
        topic: str,
        model: Properties,
        values: list[Value],
        changing: list[Value],
        *,
        has_identifier: bool,
    ) -> None:
        self.topic = topic
        self.topic_wire = wire[:topic_end]
        self.has_identifier = has_identifier
        self.properties_at = topic_end + 2 if has_identifier else topic_end
        self.size = len(wire)
        self.model = model
        self.values = values
        self.varies = bool(changing)
        self.correlation_at = 0
        self.texts: list[tuple[int, int, str]] = []
        self.taker: Callable[..., bool] | None = None
        for number, (identifier, _, _, index) in enumerate(changing):
            if identifier == _CORRELATION_DATA:
                self.correlation_at = 3 + 2 * number
            else:
                self.texts.append((3 + 2 * number, index, model.user_properties[index][0]))
        self.cut, self.fixed = _cutter(
            wire, topic_end, [(start, end) for _, start, end, _ in changing], has_identifier=has_identifier
        )
        self.changing_names = frozenset(name for _, _, name in self.texts)

    def fits(self, data: bytes, start: int, end: int) -> bool:
        """Whether the PUBLISH whose topic begins at ``start``, and which ends at ``end``, is one of these."""
        if start + self.size > end:
            return False
        parts = self.cut(data, start)
        if parts[::2] != self.fixed:
            return False
        try:
            for at, _, _ in self.texts:
                decode_text(parts[at])
        except RemoteProtocolError:
            return False
        return True

    def properties(self, parts: tuple[Any, ...]) -> LikeProperties:
        """The properties of a message whose fixed parts are those of this shape.

        Raises:
            RemoteProtocolError: a text that changed is none.
        """
        model = self.model
        like = _new(LikeProperties)
        like.shape = self
        like.model = model
        like.payload_format_indicator = model.payload_format_indicator
        like.message_expiry_interval = model.message_expiry_interval
        like.response_topic = model.response_topic
        like.topic_alias = model.topic_alias
        like.subscription_identifiers = model.subscription_identifiers
        at = self.correlation_at
        like.correlation_data = parts[at] if at else model.correlation_data
        users = model.user_properties
        if self.texts:
            users = users.copy()
            for at, index, name in self.texts:
                users[index] = (name, decode_text(parts[at]))
        like.user_properties = users
        return like


class LikePublish(Publish):
    """A PUBLISH of a known shape that was looked at no further, for the ``taker`` of the shape.

    ``first`` is its first byte, ``body`` what follows its fixed header; ``packet_id`` is set too. Everything else of it
    is there after :meth:`complete`, and must not be asked for before.
    """

    __slots__ = ("body", "first", "shape")

    def __init__(self, first: int, body: bytes, shape: Shape, packet_id: int) -> None:
        self.first = first
        self.body = body
        self.shape = shape
        self.packet_id = packet_id

    @property
    def wire(self) -> bytes:
        """The whole packet: its length is in the shortest form, else it would not have been decoded [MQTT-1.5.5-1]."""
        return bytes((self.first,)) + encode_varint(len(self.body)) + self.body

    def complete(self) -> None:
        """Make a whole PUBLISH of it.

        Raises:
            RemoteProtocolError: a text that changed is none.
        """
        shape, body, first = self.shape, self.body, self.first
        self.topic = shape.topic
        self.topic_wire = shape.topic_wire
        self.qos = first >> 1 & 3
        self.retain = first & 1 == 1
        self.dup = first & 8 == 8
        self.optional_properties = shape.properties(shape.cut(body))
        self.properties_wire = body[shape.properties_at : shape.size]
        self.payload = body[shape.size :]


class Form:
    """PUBLISHes of one size and shape, alike to the last byte but for the identifier and some pieces.

    ``cut``, at the first byte of a packet of ``size`` bytes, gives fixed and changing parts in turn, the packet
    identifier being the first that changes. One whose fixed parts are ``fixed`` goes to ``take`` as these parts: that
    the changing ones may be any bytes is for the taker to see to, who made the form of ``publish`` and ``places``
    (where the changing pieces stand in its body, in order). ``head``: its first three bytes, which hold its size.
    """

    __slots__ = ("cut", "fixed", "head", "size", "take", "topic")

    def __init__(self, publish: LikePublish, places: list[tuple[int, int]], take: Callable[..., bool]) -> None:
        shape = publish.shape
        wire = publish.wire
        shift = len(wire) - len(publish.body)
        self.head = wire[:3]
        self.size = len(wire)
        self.topic = shape.topic
        self.take = take
        self.cut, self.fixed = _cutter(
            wire,
            shift + len(shape.topic_wire),
            [(shift + start, shift + end) for start, end in places],
            has_identifier=True,
        )

    def fits(self, wire: bytes) -> bool:
        """Whether the packet, which has an identifier, is one of these."""
        return len(wire) == self.size and self.cut(wire, 0)[::2] == self.fixed


def _cutter(
    wire: bytes, topic_end: int, places: list[tuple[int, int]], *, has_identifier: bool
) -> tuple[Callable[..., tuple[Any, ...]], tuple[bytes, ...]]:
    """What cuts bytes like ``wire`` into fixed and changing parts, and the fixed ones; the identifier changes too."""
    layout = f">{topic_end}s" + ("H" if has_identifier else "0s")
    fixed = [wire[:topic_end]]
    position = topic_end + 2 if has_identifier else topic_end
    for start, end in places:
        layout += f"{start - position}s{end - start}s"
        fixed.append(wire[position:start])
        position = end
    fixed.append(wire[position:])
    return Struct(layout + f"{len(wire) - position}s").unpack_from, tuple(fixed)


Value = tuple[int, int, int, int]
"""A property's value in the bytes: identifier, start, end; of a user property, which one it is."""
_new = LikeProperties.__new__


class Learner:
    """Learn a shape from PUBLISHes of one connection that were decoded in full, two like ones in a row.

    A value counts as changing once it was seen to change: clients that send several requests at once give all of them
    the same time stamp, and only the next read shows that it varies. A shape that misses for that reason is widened.

    After each shape it waits twice as long for the next: where no two messages are alike, little is lost.
    """

    __slots__ = ("_changing", "_numbered", "_patience", "_previous", "_wait")

    def __init__(self) -> None:
        self._previous = b""
        self._numbered = False
        """Whether the previous one has a packet identifier: its properties begin two bytes later."""
        self._changing: set[int] = set()
        """Which values, by their number, changed among the messages that are like the previous one."""
        self._patience = 1
        self._wait = 0

    def compare(self, publish: Publish, properties: Properties) -> Shape | None:
        """:meth:`see` for a PUBLISH that was decoded; all of them are of one topic and QoS."""
        topic = publish.topic_wire
        identifier = b"\0\0" if publish.qos else b""
        wire = b"".join((topic, identifier, publish.properties_wire))
        return self.see(wire, len(topic), publish.topic, properties, has_identifier=publish.qos > 0)

    def see(self, wire: bytes, topic_end: int, topic: str, model: Properties, *, has_identifier: bool) -> Shape | None:
        """The shape of ``wire`` (topic to the end of the properties) and those before, if they are like."""
        if self._wait:
            self._wait -= 1
            return None
        previous, self._previous = self._previous, wire
        numbered, self._numbered = self._numbered, has_identifier
        known, self._changing = self._changing, set()
        if len(previous) != len(wire) or numbered is not has_identifier or previous[:topic_end] != wire[:topic_end]:
            return None
        at = topic_end + 2 if has_identifier else topic_end
        values = _values(wire, at)
        if _skeleton(wire, at, values) != _skeleton(previous, at, _values(previous, at)):
            return None
        changing = [
            number
            for number, (_, start, end, _) in enumerate(values)
            if number in known or wire[start:end] != previous[start:end]
        ]
        if len(changing) > MOST_CHANGING:
            return None
        self._changing.update(changing)
        self._wait = self._patience
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        return Shape(
            wire,
            topic_end,
            topic,
            model,
            values,
            [values[number] for number in changing],
            has_identifier=has_identifier,
        )


def _values(wire: bytes, position: int) -> list[Value]:
    """The values that may change in a property block that was decoded before: correlation data and user properties."""
    reader = Reader(wire, position, len(wire))
    reader.varint()
    found: list[Value] = []
    users = 0
    while reader.position < reader.end:
        identifier = reader.byte()
        wire_type = BY_IDENTIFIER[identifier].wire_type
        if wire_type is WireType.STRING_PAIR:
            reader.binary()
        if wire_type in (WireType.STRING_PAIR, WireType.STRING, WireType.BINARY):
            start = reader.position + 2
            reader.binary()
            if identifier in (_CORRELATION_DATA, _USER_PROPERTY):
                found.append((identifier, start, reader.position, users))
            users += identifier == _USER_PROPERTY
        elif wire_type is WireType.VARIABLE_BYTE_INTEGER:
            reader.varint()
        else:
            reader.position += _WIDTHS[wire_type]
    return found


_WIDTHS: Final = {WireType.BYTE: 1, WireType.TWO_BYTE_INTEGER: 2, WireType.FOUR_BYTE_INTEGER: 4}


def _skeleton(wire: bytes, position: int, values: list[Value]) -> list[bytes]:
    """What is left of the property block without those values."""
    left: list[bytes] = []
    for _, start, end, _ in values:
        left.append(wire[position:start])
        position = end
    return [*left, wire[position:]]
