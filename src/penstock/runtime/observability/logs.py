"""Logs on standard error: one event per line with fields as ``key=value``, or as JSON.

Modules log through ``logging.getLogger("penstock.<part>")`` with an event and its fields:

    log.info("broker registered", extra={"fields": {"broker_id": 1, "topics": 3}})

Text from peers is escaped here, so that a client can neither forge a log line nor control a terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import StrEnum
from typing import TextIO

from penstock.errors import PenstockError

__all__ = ["JsonFormatter", "LogFormat", "LogLevel", "LogLimiter", "TextFormatter", "configure", "error_fields"]


class LogFormat(StrEnum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """Minimum severity of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogLimiter:
    """Admits one log line per ``interval_ms`` and counts the events of the lines in between."""

    def __init__(self, interval_ms: int = 10_000) -> None:
        self._interval_ms = interval_ms
        self._next_ms: int | None = None
        self._count = 0

    def admit(self, now_ms: int, count: int = 1) -> int:
        """Number of events to log now, including suppressed ones; 0 for none."""
        self._count += count
        if self._next_ms is not None and now_ms < self._next_ms:
            return 0
        self._next_ms = now_ms + self._interval_ms
        admitted, self._count = self._count, 0
        return admitted


def configure(
    level: LogLevel = LogLevel.INFO, log_format: LogFormat = LogFormat.TEXT, stream: TextIO | None = None
) -> None:
    """Write the logs of penstock and its libraries to ``stream`` (default: standard error). Call once."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.value.upper())


def error_fields(error: PenstockError) -> dict[str, str]:
    """Log fields of ``error``: message, and cause and action if known."""
    parts = {"error": error.what, "why": error.why, "hint": error.hint}
    return {name: text for name, text in parts.items() if text}


def _instant(record: logging.LogRecord) -> str:
    """UTC with milliseconds, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class TextFormatter(logging.Formatter):
    """``2026-11-21T10:00:00.000Z info  mqtt: event key=value``; an error's further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Format an event, with the lines of its error below [logging.Formatter]."""
        part = record.name.removeprefix("penstock.")
        lines = record.getMessage().split("\n")
        pairs = "".join(f" {key}={self._value(value)}" for key, value in _fields(record).items())
        head = f"{_instant(record)} {record.levelname.lower():<7} {part}: {_printable(lines[0])}{pairs}"
        rest = [f"  {_printable(line)}" for line in lines[1:]]
        if record.exc_info and record.exc_info[0] is not None:
            rest += [f"  {_printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join([head, *rest])

    @staticmethod
    def _value(value: object) -> str:
        text = str(value)
        return text if text and text.isprintable() and not set(text) & set(" =\"'") else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``part``, ``event``, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format an event on one line [logging.Formatter]."""
        entry: dict[str, object] = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "part": record.name.removeprefix("penstock."),
            "event": record.getMessage(),
        }
        for key, value in _fields(record).items():
            entry.setdefault(key, value)
        if record.exc_info and record.exc_info[0] is not None:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
