"""Output of a client, collected so that it is sent in one write."""

from __future__ import annotations

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Packet

__all__ = ["Outbox"]


class Outbox:
    """Encoded packets in order. ``last_sent``: time at which the last one was added, in ms; keep alive is measured from
    it."""

    __slots__ = ("last_sent", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.last_sent = 0

    def send(self, packet: Packet, now: int) -> None:
        """Encode and add a packet."""
        self.pieces.append(encode(packet))
        self.last_sent = now

    def add(self, data: bytes, now: int) -> None:
        """Add an encoded packet."""
        self.pieces.append(data)
        self.last_sent = now

    def take_output(self) -> bytes:
        """Return and remove the output."""
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data
