"""A run of messages on its way through the broker: bytes that are the same for many receivers are assembled once.

Where a receiver gets the messages as they came (same QoS, no subscription identifier), what came in is what leaves, but
for the packet identifiers. They are written into a copy, for messages of one size all of them by two slices.
"""

from __future__ import annotations

from typing import Final

from penstock.mqtt.codec.encoder import publish_head
from penstock.mqtt.codec.runs import PublishRun
from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.waiting import Delivery

__all__ = ["Bulk", "Form"]

_HIGH: Final = bytes(n >> 8 for n in range(65_536))
_LOW: Final = bytes(n & 255 for n in range(65_536))
"""The two bytes of each packet identifier."""


class Form:
    """The messages of a run as one kind of receiver gets them. ``largest``: bytes of the largest packet."""

    __slots__ = ("_offset", "_places", "_stride", "count", "data", "largest")

    def __init__(self, data: bytes, count: int, largest: int, offset: int, stride: int, places: list[int]) -> None:
        self.data = data
        self.count = count
        self.largest = largest
        self._offset = offset
        self._stride = stride
        self._places = places

    def numbered(self, packet_id: int) -> bytearray:
        """The packets with identifiers from ``packet_id`` on, one after the other; all of them at most 65,535."""
        data = bytearray(self.data)
        stride, offset = self._stride, self._offset
        if stride:
            data[offset::stride] = _HIGH[packet_id : packet_id + self.count]
            data[offset + 1 :: stride] = _LOW[packet_id : packet_id + self.count]
        else:
            for place in self._places:
                data[place] = packet_id >> 8
                data[place + 1] = packet_id & 255
                packet_id += 1
        return data


class Bulk:
    """A :class:`PublishRun` of a client of protocol level ``version``; ``many``: for more than one receiver."""

    __slots__ = ("_deliveries", "_forms", "_messages", "_now", "_urgent", "_version", "count", "many", "qos", "run")

    def __init__(self, run: PublishRun, version: int, now: int, *, many: bool, urgent: bool = False) -> None:
        self.run = run
        self.count = len(run)
        self.qos = run.model.qos
        self.many = many
        self._urgent = urgent
        self._version = version
        self._now = now
        self._messages: list[Message] | None = None
        self._forms: dict[tuple[int, bytes, int], Form] = {}
        self._deliveries: dict[bytes, list[Delivery]] = {}

    @property
    def messages(self) -> list[Message]:
        """Each by itself; made on first use, and the same for all receivers."""
        messages = self._messages
        if messages is None:
            first, now = Message(self.run.model, self._now), self._now
            first.urgent = self._urgent
            messages = self._messages = [first.like(payload, now) for payload in self.run.payloads]
            if self.many:
                for message in messages:
                    message.stored = -1
        return messages

    def deliveries(self, identifiers: bytes) -> list[Delivery]:
        """What stands in flight for a session that gets the messages at QoS 1 and is not kept."""
        found = self._deliveries.get(identifiers)
        if found is None:
            found = [(message, 1, 0, identifiers, None, 0) for message in self.messages]
            self._deliveries[identifiers] = found
        return found

    def form(self, qos: int, identifiers: bytes, version: int) -> Form:
        """The messages as they leave at ``qos`` with these subscription identifiers, at a protocol level."""
        key = qos, identifiers, version
        form = self._forms.get(key)
        if form is None:
            if qos == self.qos and not identifiers and version == self._version:
                form = self._as_it_came()
            else:
                form = self._made(qos, identifiers, version)
            self._forms[key] = form
        return form

    def _as_it_came(self) -> Form:
        run = self.run
        # Of several sizes: headers differ by a byte or two; a little too much does no harm.
        largest = run.stride or run.places[0] + len(run.model.properties_wire) + max(map(len, run.payloads)) + 4
        return Form(run.wire, self.count, largest, run.offset, run.stride, run.places)

    def _made(self, qos: int, identifiers: bytes, version: int) -> Form:
        model = self.messages[0]
        topic = model.topic_wire
        properties = model.properties_for(identifiers, self._now) if version == 5 else b""
        first = 0x30 | qos << 1
        number = b"\0\0" if qos else b""
        common = len(topic) + len(number) + len(properties)
        packets: list[bytes] = []
        places: list[int] = []
        at = 0
        for payload in self.run.payloads:
            head = publish_head(first, common + len(payload))
            packets.append(b"".join((head, topic, number, properties, payload)))
            places.append(at + len(head) + len(topic))
            at += len(packets[-1])
        sizes = [len(packet) for packet in packets]
        stride = sizes[0] if self.run.stride else 0
        return Form(b"".join(packets), self.count, max(sizes), places[0], stride, places)
