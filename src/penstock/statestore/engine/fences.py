"""Prefix fences (extension): a floor for the fencing tokens of every key under a prefix, missing and deleted ones too.

A fence of the protocol belongs to one key and goes with it, so a writer that lost its lock can still write a new key. A
floor outlives the keys: it is raised, never lowered, and durable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.statestore.hlc import Hlc

__all__ = ["MAX_PREFIXES", "MAX_PREFIX_BYTES", "Fences"]

MAX_PREFIXES: Final = 10_000
"""Floors kept; they are never removed, so a client that raises them in a loop meets the quota error."""

MAX_PREFIX_BYTES: Final = 4096


class Fences:
    """The floors by prefix."""

    def __init__(self) -> None:
        self.floors: dict[bytes, Hlc] = {}
        self._lengths: list[int] = []

    def restore(self, floors: Iterable[tuple[bytes, Hlc]]) -> None:
        """Take over what was stored."""
        self.floors.update(floors)
        self._lengths = sorted({len(prefix) for prefix in self.floors})

    def floor_of(self, key: bytes) -> Hlc | None:
        """The greatest floor of all prefixes of ``key``; None where none has one."""
        greatest: Hlc | None = None
        for length in self._lengths:
            if length > len(key):
                break
            floor = self.floors.get(key[:length])
            if floor is not None and (greatest is None or floor > greatest):
                greatest = floor
        return greatest

    def has_room_for(self, prefix: bytes) -> bool:
        """Whether a floor for ``prefix`` can be kept."""
        return prefix in self.floors or len(self.floors) < MAX_PREFIXES

    def lift(self, prefix: bytes, token: Hlc) -> bool:
        """Raise the floor of ``prefix`` to ``token``; False where it stands as high or higher."""
        floor = self.floors.get(prefix)
        if floor is not None and floor >= token:
            return False
        self.floors[prefix] = token
        if floor is None:
            self._lengths = sorted({*self._lengths, len(prefix)})
        return True
