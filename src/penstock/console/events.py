"""The last events of a node: its log lines at level info and above, and limits that were reached."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from penstock.console.snapshots import Event

__all__ = ["EventRing"]

EVENTS: Final = 2000
MAX_TEXT: Final = 400
"""Longest text of an event in characters; clients choose parts of it."""


class EventRing(logging.Handler):
    """Stores the last events; handles records of the logger ``penstock``, from any thread.

    If an event repeats the previous one, the count of that one is incremented.
    """

    def __init__(self, size: int = EVENTS) -> None:
        super().__init__(logging.INFO)
        self._events: deque[Event] = deque(maxlen=size)
        self._guard = threading.Lock()
        self.number = 0
        """Number of the newest event."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a log line with its fields [logging.Handler]."""
        fields = getattr(record, "fields", None)
        pairs = "".join(f" {name}={value}" for name, value in fields.items()) if isinstance(fields, Mapping) else ""
        part = record.name.removeprefix("penstock").removeprefix(".") or "node"
        self.add(record.levelname.lower(), part, record.getMessage() + pairs, int(record.created * 1000))

    def add(self, level: str, part: str, text: str, at: int | None = None) -> None:
        """Add an event. ``at``: its time in ms since 1970; None for the current time."""
        if len(text) > MAX_TEXT:
            text = text[: MAX_TEXT - 1] + "…"
        now = int(time.time() * 1000) if at is None else at
        with self._guard:
            self.number += 1
            count = 1
            if self._events:
                last = self._events[-1]
                if (last.level, last.part, last.text) == (level, part, text):
                    count = last.count + 1
                    self._events.pop()
            self._events.append(Event(self.number, now, level, part, text, count))

    def since(self, number: int, limit: int, *, least: str = "info") -> list[Event]:
        """Return at most ``limit`` events of the level ``least`` or above after event ``number``, the newest first."""
        floor = logging.getLevelNamesMapping()[least.upper()]
        levels = logging.getLevelNamesMapping()
        found: list[Event] = []
        with self._guard:
            for event in reversed(self._events):
                if event.number <= number or len(found) == limit:
                    break
                if levels.get(event.level.upper(), logging.INFO) >= floor:
                    found.append(event)
        return found
