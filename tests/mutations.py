"""Seeded mutations of valid bytes, for tests that no input may break: the same seed gives the same bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["mutated"]

EDGES = (0x00, 0x01, 0x02, 0x04, 0x10, 0x23, 0x7F, 0x80, 0xFF)
"""Bytes that mean something to length fields, flags and property identifiers."""


def mutated(rng: random.Random, data: bytes, *, times: Sequence[int] = (1, 1, 1, 2, 3)) -> bytes:
    """``data`` with one or more changes: bytes replaced, flipped, deleted, inserted, copied or reversed."""
    out = bytearray(data)
    for _ in range(rng.choice(times)):
        if not out:
            break
        at = rng.randrange(len(out))
        match rng.randrange(7):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                del out[at : at + rng.randrange(1, 4)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 4))
            case 4:
                out[at] = rng.choice(EDGES)
            case 5:
                out[at:] = out[at:][::-1]
            case _:
                other = rng.randrange(len(out))
                out[at:at] = out[other : other + 4]
    return bytes(out)
