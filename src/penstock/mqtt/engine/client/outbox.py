"""The bytes that a client is about to send, collected so that one write takes all of them."""

from __future__ import annotations

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Packet

__all__ = ["Outbox"]


class Outbox:
    """Encoded packets in order. ``last_sent``: when the last one was added, in ms; keep alive counts from there."""

    __slots__ = ("last_sent", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.last_sent = 0

    def send(self, packet: Packet, now: int) -> None:
        """Encode and add a packet."""
        self.pieces.append(encode(packet))
        self.last_sent = now

    def add(self, data: bytes, now: int) -> None:
        """Add a packet that is encoded."""
        self.pieces.append(data)
        self.last_sent = now

    def take(self) -> bytes:
        """Everything, to be written now."""
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data
