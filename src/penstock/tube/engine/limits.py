"""Limits of the master and the broker: each field is a setting, described by its docstring.

The annotation of a field has the accepted values; a field without an annotation is 0 or more.

Each docstring states the reaction beyond the limit; codes are error codes of TubeMQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Interval

__all__ = ["DEFAULT_LIMITS", "TubeLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TubeLimits:
    """Limits of one master and one broker. Sizes in bytes; ``_ms`` milliseconds."""

    max_connections: Annotated[int, Ge(1)] = 10_000
    """Maximum network connections of a server (master or broker); beyond it a new one is closed at once."""
    max_partial_frame_bytes: Annotated[int, Ge(1 << 20)] = 512 * 1024 * 1024
    """Maximum bytes of incomplete frames of all connections of a server; beyond it, a connection with more than 1
    MiB is closed."""
    max_unwritten_bytes: Annotated[int, Ge(1 << 20)] = 64 * 1024 * 1024
    """Maximum bytes of unwritten messages of one store; beyond it sends are refused with 419."""
    max_registrations: int = 100_000
    """Maximum partitions registered by consumers at a broker; beyond it registrations are refused with 500."""
    max_group_offsets: int = 1_000_000
    """Maximum committed offsets of a broker, one per group and partition; beyond it registrations are refused with
    500."""
    max_waiting_fetches: int = 20_000
    """Maximum fetches that wait for messages at a broker; beyond it fetches are answered at once."""
    max_idempotent_producers: Annotated[int, Ge(1)] = 200_000
    """Maximum idempotent producers per partition whose last sequence number a broker remembers; idle ones are
    removed first."""
    max_producers: int = 100_000
    """Maximum producers registered at a master; beyond it registrations are refused with 500."""
    max_consumers: int = 100_000
    """Maximum consumers registered at a master, per kind of balancing; beyond it registrations are refused with
    500."""
    max_brokers: int = 1000
    """Maximum brokers registered at a master; beyond it registrations are refused with 500."""
    producer_session_ms: Annotated[int, Interval(ge=1000, le=3_600_000)] = 30_000
    """Time in ms without a heartbeat after which a producer must register again."""
    broker_session_ms: Annotated[int, Interval(ge=1000, le=3_600_000)] = 30_000
    """Time in ms without a heartbeat after which a broker is offline until it registers again. It ends the session of a
    machine that disappeared without closing its connection."""
    broker_overdue_ms: Annotated[int, Interval(ge=500, le=3_600_000)] = 3000
    """Time in ms after a broker's next heartbeat was due after which producers get its partitions only if no other
    broker has the topic, until its next heartbeat. The largest recent interval of its heartbeats determines when one is
    due: penstock's brokers send one every half second, Apache's every 8 s."""
    broker_reconnect_ms: Annotated[int, Interval(ge=0, le=3_600_000)] = 3000
    """Time in ms after the end of a broker's connection to the master after which the broker is offline until it
    registers again. A killed broker's connection ends at once. penstock's brokers register again within a second,
    Apache's with their next heartbeat (every 8 s)."""
    segment_bytes: Annotated[int, Interval(ge=1 << 20, le=1 << 30)] = 64 * 1024 * 1024
    """Size of a segment of a store in bytes. Segments are deleted as a whole; the newest one is read completely
    after a crash."""
    segment_messages: Annotated[int, Interval(ge=1000, le=10_000_000)] = 700_000
    """Maximum messages of a segment; a segment ends when it reaches one of both limits."""
    cached_bytes: int = 16 * 1024 * 1024
    """Bytes of the newest messages of one store that are cached in memory; older messages are read from disk."""


DEFAULT_LIMITS = TubeLimits()
