"""Packets in a row that differ in little, decoded as one: what a client sends without waiting comes in such runs.

A :class:`PublishRun` is PUBLISHes of one topic with equal flags and properties, a :class:`PubAckRun` is PUBACKs of
success. What one read brought is taken apart by ``struct``, a fifth of the work of packet after packet. A run ends
before the first packet that is not like the others, be it malformed: that one is decoded by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from struct import Struct, iter_unpack
from typing import Final

from penstock.mqtt.codec.packets import Publish

__all__ = ["PubAckRun", "PublishRun", "puback_run", "publish_run"]

LONGEST_RUN: Final = 128
"""Messages of one run: what was looked at in vain stays small, also where every second packet ends a run."""

_EIGHT_ACKS: Final = Struct(">16H")
_SHORT_ACK: Final = b"\x40\x02"
_HEADS: Final = (0x4002,) * 8


class PublishRun:
    """Two or more PUBLISHes without DUP and RETAIN, at QoS 0 or 1, whose topic and properties are those of ``model``.

    ``model`` is the first of them. ``wire`` is all of them as they came in: there the packet identifier of message n
    stands at ``places[n]``, or at ``offset + n * stride`` where all have one size (else ``stride`` is 0).
    """

    __slots__ = ("model", "offset", "packet_ids", "payloads", "places", "stride", "wire")

    def __init__(
        self, model: Publish, packet_ids: list[int], payloads: list[bytes], wire: bytes, offset: int, stride: int
    ) -> None:
        self.model = model
        self.packet_ids = packet_ids
        self.payloads = payloads
        self.wire = wire
        self.offset = offset
        self.stride = stride
        self.places: list[int] = []

    def __len__(self) -> int:
        return len(self.payloads)

    def __iter__(self) -> Iterator[Publish]:
        """Each message by itself; not to be used after ``model`` was changed."""
        model = self.model
        identifiers = self.packet_ids or [0] * len(self.payloads)
        topic, properties = model.topic, model.optional_properties
        yield model
        for packet_id, payload in islice(zip(identifiers, self.payloads, strict=True), 1, None):
            publish = Publish(topic, payload, model.qos, packet_id=packet_id, properties=properties)
            publish.topic_wire = model.topic_wire
            publish.properties_wire = model.properties_wire
            yield publish

    def __repr__(self) -> str:
        return f"<{len(self)} times like {self.model!r}>"


class PubAckRun:
    """Two or more PUBACKs of success."""

    __slots__ = ("packet_ids",)

    def __init__(self, packet_ids: list[int]) -> None:
        self.packet_ids = packet_ids

    def __len__(self) -> int:
        return len(self.packet_ids)

    def __repr__(self) -> str:
        return f"<{len(self)} PUBACKs>"


def puback_run(data: bytes, position: int) -> list[int]:
    """The packet identifiers of the short PUBACKs in a row from ``position`` on: four bytes each, none of them 0."""
    found: list[int] = []
    size = len(data)
    while position + 32 <= size:
        words = _EIGHT_ACKS.unpack_from(data, position)
        if words[::2] != _HEADS or 0 in words:
            break
        found += words[1::2]
        position += 32
    while position + 4 <= size and data[position : position + 2] == _SHORT_ACK:
        packet_id = data[position + 2] << 8 | data[position + 3]
        if packet_id == 0:
            break
        found.append(packet_id)
        position += 4
    return found


def publish_run(
    data: bytes, begin: int, end: int, publish: Publish, properties: bytes, largest: int
) -> PublishRun | None:
    """The PUBLISHes like ``publish``, which stands at ``data[begin:end]`` with ``properties`` on the wire.

    None where the next packet is none of them, or has more than ``largest`` bytes.
    """
    body = end - len(publish.payload)
    offset = body - len(properties) - begin
    if publish.qos:
        offset -= 2
    stride = end - begin
    count = min((len(data) - begin) // stride, LONGEST_RUN)
    if count < 2 or data[end : end + offset] != data[begin : begin + offset]:
        return _uneven_run(data, begin, end, publish, properties, largest)
    head = data[begin : begin + offset]
    wire = data[begin : begin + count * stride]
    identifier, width = ("H", 2) if publish.qos else ("0s", 0)
    rest = stride - offset - width - len(properties)
    packet_ids: list[int] = []
    payloads: list[bytes] = []
    for start, packet_id, block, payload in iter_unpack(f">{offset}s{identifier}{len(properties)}s{rest}s", wire):
        if start != head or block != properties or packet_id == 0:
            break
        packet_ids.append(packet_id)
        payloads.append(payload)
    found = len(payloads)
    if found < 2:
        return None
    if found < count:
        wire = wire[: found * stride]
    return PublishRun(publish, packet_ids if width else [], payloads, wire, offset, stride)


def _uneven_run(
    data: bytes, begin: int, end: int, publish: Publish, properties: bytes, largest: int
) -> PublishRun | None:
    """The same for messages of several sizes."""
    topic = publish.topic_wire
    first = data[begin]
    size = len(data)
    width = 2 if publish.qos else 0
    packet_ids = [publish.packet_id]
    payloads = [publish.payload]
    places = [end - len(publish.payload) - len(properties) - width - begin]
    position = end
    while position + 1 < size and data[position] == first and len(payloads) < LONGEST_RUN:
        length = data[position + 1]
        start = position + 2
        if length > 127:
            if start >= size or not 0 < data[start] < 128:
                break  # three bytes of length, or not in their shortest form
            length += (data[start] << 7) - 128
            start += 1
        stop = start + length
        place = start + len(topic)
        body = place + width + len(properties)
        if stop > size or stop - position > largest or body > stop:
            break
        if data[start:place] != topic or data[place + width : body] != properties:
            break
        if width:
            packet_id = data[place] << 8 | data[place + 1]
            if packet_id == 0:
                break
            packet_ids.append(packet_id)
        payloads.append(data[body:stop])
        places.append(place - begin)
        position = stop
    if len(payloads) < 2:
        return None
    run = PublishRun(publish, packet_ids if width else [], payloads, data[begin:position], 0, 0)
    run.places = places
    return run
