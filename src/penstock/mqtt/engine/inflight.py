"""Messages that were sent at QoS 1 or 2 and are not done, in the order in which they were sent."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Inflight"]

T = TypeVar("T")


class Inflight(dict[int, T]):
    """Packet identifier -> what was sent with it. The owner bounds it; identifiers go round so that a late
    acknowledgement of an old message does not hit a new one."""

    __slots__ = ("_last", "bytes")

    def __init__(self) -> None:
        super().__init__()
        self._last = 0
        self.bytes = 0
        """Of the large payloads among them; the owner counts."""

    def free_id(self) -> int:
        """A packet identifier that is free now [MQTT-2.2.1-3], [MQTT-2.2.1-4]. The owner keeps fewer than 65,535."""
        packet_id = self._last + 1
        if packet_id > 65_535:
            packet_id = 1
        while packet_id in self:
            packet_id = packet_id + 1 if packet_id < 65_535 else 1
        self._last = packet_id
        return packet_id
