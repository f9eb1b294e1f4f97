"""Retention of a store: determines expired segments. Data and index of a segment are deleted together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.tube.storage.segment import Segment

__all__ = ["Retention", "expired", "parse_policy"]

_POLICY = re.compile(r"delete,(\d+)([smh]?)", re.IGNORECASE)
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "": 3_600_000}
_DEFAULT_MS = 168 * 3_600_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Age and size limits of a store; ``max_bytes`` None: no limit by size."""

    max_age_ms: int = _DEFAULT_MS
    max_bytes: int | None = None


def parse_policy(policy: str) -> int:
    """Return the milliseconds of ``delete,<n>[s|m|h]``; 168 hours for any other text, as in the reference."""
    match = _POLICY.fullmatch(policy.strip())
    return int(match[1]) * _UNIT_MS[match[2].lower()] if match else _DEFAULT_MS


def expired(closed: Sequence[Segment], newest: Segment, retention: Retention, now_ms: int) -> int:
    """Return the number of ``closed`` segments (oldest first) that have expired: all their messages are too old, or the
    store exceeds its size limit."""
    total = newest.data_bytes + sum(segment.data_bytes for segment in closed)
    count = 0
    for segment in closed:
        old = segment.last_time < now_ms - retention.max_age_ms
        if not old and (retention.max_bytes is None or total <= retention.max_bytes):
            break
        total -= segment.data_bytes
        count += 1
    return count
