"""Sessions of consumers: how long a silent one keeps its partitions, at the master and at brokers."""

from __future__ import annotations

__all__ = ["LEAST_SESSION_MS", "session_of"]

LEAST_SESSION_MS = 3_000
"""The shortest session that a consumer can ask for."""


def session_of(asked_ms: int, server_ms: int) -> int:
    """The session of a consumer that asks for ``asked_ms`` (0: it does not), at most the server's own."""
    if asked_ms <= 0:
        return server_ms
    return min(max(asked_ms, LEAST_SESSION_MS), server_ms)
