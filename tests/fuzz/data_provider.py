"""Split fuzzed bytes into the values that a target needs; any bytes are accepted."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["head", "in_pieces", "records"]


def head(data: bytes, size: int) -> tuple[bytes, bytes]:
    """The first ``size`` bytes, filled with zeros, and the rest."""
    return data[:size].ljust(size, b"\0"), data[size:]


def in_pieces(data: bytes, seed: int) -> Iterator[bytes]:
    """``data`` in pieces of 1 to 32 bytes, whose sizes follow from ``seed``."""
    at = 0
    while at < len(data):
        seed = (seed * 75 + 74) % 65_537
        size = seed % 32 + 1
        yield data[at : at + size]
        at += size


def records(data: bytes, most: int = 64) -> Iterator[tuple[int, bytes]]:
    """At most ``most`` pairs of a number and bytes: number (1 byte), length (2, cut to what is left), bytes."""
    at = 0
    for _ in range(most):
        if at + 3 > len(data):
            return
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        yield data[at], data[at + 3 : at + 3 + size]
        at += 3 + size
