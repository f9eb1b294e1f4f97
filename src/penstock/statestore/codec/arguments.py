"""Arguments that are no plain bytes: versions, and how long a key lives."""

from __future__ import annotations

from typing import Final

from penstock.statestore.hlc import Hlc, parse_wire

__all__ = ["MAX_TTL_MS", "ttl_of", "version_of"]

MAX_TTL_MS: Final = 1000 * 365 * 86_400_000
"""The longest expiry, 1,000 years: the instant stays one that every language's date type can hold."""
_MAX_TTL_DIGITS: Final = len(str(MAX_TTL_MS))


def version_of(text: bytes) -> Hlc | None:
    """The clock value in ``text``; None where it is none."""
    return parse_wire(text)


def ttl_of(digits: bytes) -> int:
    """Milliseconds from 1 to :data:`MAX_TTL_MS` in plain decimal; 0 for anything else."""
    if not digits.isdigit() or digits[0] == 0x30 or len(digits) > _MAX_TTL_DIGITS:
        return 0
    ttl_ms = int(digits)
    return ttl_ms if ttl_ms <= MAX_TTL_MS else 0
