"""Output that promises what is not committed yet: it waits here, and all that comes after it on its connection."""

from __future__ import annotations

from collections import deque

__all__ = ["UncommittedOutput"]


class UncommittedOutput:
    """The pieces that one connection would have written, each with the commit that it waits for; those only rise."""

    __slots__ = ("_pieces", "bytes", "first_is_connack")

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytes]] = deque()
        self.bytes = 0
        self.first_is_connack = False
        """The client was not even told that it is connected."""

    def add(self, gate: int, data: bytes) -> None:
        """Keep ``data`` until commit ``gate`` is done."""
        if not self._pieces:
            self.first_is_connack = data[:1] == b"\x20"
        self._pieces.append((gate, data))
        self.bytes += len(data)

    def take(self, committed: int) -> bytes:
        """What may leave now that commit ``committed`` is done."""
        pieces = self._pieces
        ready: list[bytes] = []
        while pieces and pieces[0][0] <= committed:
            ready.append(pieces.popleft()[1])
        data = b"".join(ready)
        self.bytes -= len(data)
        if data:
            self.first_is_connack = False
        return data

    def __len__(self) -> int:
        return len(self._pieces)
