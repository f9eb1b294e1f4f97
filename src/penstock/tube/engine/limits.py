"""Limits of the master and the broker, in one place: each field is a setting, described by the text below it.

Each limit says what happens beyond it; the codes are those of TubeMQ's responses.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_LIMITS", "TubeLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TubeLimits:
    """Limits of one master and one broker. Sizes in bytes; ``_ms`` milliseconds."""

    max_connections: int = 10_000
    """Network connections of a server (master or broker); a further one is closed at once."""
    max_partial_frame_bytes: int = 512 * 1024 * 1024
    """Incomplete frames of all connections of a server; beyond it, a connection with a large one (1 MiB) is closed."""
    max_unwritten_bytes: int = 64 * 1024 * 1024
    """Messages of one store that no commit has written yet; sends beyond it are answered 419."""
    max_registrations: int = 100_000
    """Partitions that consumers have registered at a broker; further registrations are answered 500."""
    max_group_offsets: int = 1_000_000
    """Committed offsets that a broker stores, one per group and partition; registrations beyond it are answered 500."""
    max_waiting_fetches: int = 20_000
    """Fetches that wait for messages at a broker; further ones are answered at once."""
    max_idempotent_producers: int = 200_000
    """Producer numbers, per partition, whose last sequence a broker remembers; the idle ones are forgotten first."""
    max_producers: int = 100_000
    """Producers that are registered at a master; further ones are answered 500."""
    max_consumers: int = 100_000
    """Consumers that are registered at a master, per kind of balancing; further ones are answered 500."""
    max_brokers: int = 1000
    """Brokers that a master knows; further ones are answered 500."""
    producer_session_ms: int = 30_000
    """A producer that sent no heartbeat to the master for this long has to register again."""
    broker_session_ms: int = 30_000
    """A broker that sent no heartbeat to the master for this long serves nothing until it registers again."""
    segment_bytes: int = 64 * 1024 * 1024
    """Data of a segment of a store, which is deleted as a whole; the newest one is read in full after a crash."""
    segment_messages: int = 700_000
    """Messages of a segment; it ends at the first of both limits."""
    cached_bytes: int = 16 * 1024 * 1024
    """Newest messages of one store that stay in memory; consumers further behind are served from disk."""


DEFAULT_LIMITS = TubeLimits()
