"""Subscription identifiers of a client's message streams: what comes in is handed to the streams by them."""

from __future__ import annotations

from typing import Final

__all__ = ["StreamIdentifiers"]

FIRST_IDENTIFIER: Final = 1_000_001
"""Those below are the caller's."""


class StreamIdentifiers:
    """One identifier for all open streams of a filter, since a session has each filter once."""

    def __init__(self) -> None:
        self._by_filter: dict[str, tuple[int, int]] = {}
        """Filter of open streams -> identifier, and how many streams have it."""
        self._next = FIRST_IDENTIFIER

    def take(self, topic_filter: str) -> int:
        """A stream of the filter opens: its identifier."""
        identifier, streams = self._by_filter.get(topic_filter, (self._next, 0))
        if not streams:
            self._next += 1
        self._by_filter[topic_filter] = (identifier, streams + 1)
        return identifier

    def drop(self, topic_filter: str) -> bool:
        """A stream of the filter ended; True when it was the last."""
        identifier, streams = self._by_filter[topic_filter]
        if streams > 1:
            self._by_filter[topic_filter] = (identifier, streams - 1)
            return False
        del self._by_filter[topic_filter]
        return True
