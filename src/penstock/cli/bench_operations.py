"""Measured operations of `penstock bench`: distribution of latencies, progress, and the result as text or JSON."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.output import Cell, escape, fold, note, print_json, print_table, shown_count

__all__ = ["Latencies", "Operation", "paced", "print_operations", "show_progress"]

_PER_OCTAVE = 64
"""Buckets for each doubling of a latency: 1.1 % wide."""
_BUSY = 0.85
"""Share of one processor from which the rate may be that of this command."""


class Latencies:
    """Distribution of durations, with an error of about 1 %, in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self.longest_s = max(self.longest_s, seconds)
        self._buckets[math.ceil(math.log2(max(seconds, 1e-9)) * _PER_OCTAVE)] += 1

    def quantile_s(self, share: float) -> float | None:
        """Return the duration that ``share`` (0 to 1) of them do not exceed; None without any."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 1e-9:
                return min(float(2 ** (bucket / _PER_OCTAVE)), self.longest_s)
        return None


@dataclass
class Operation:
    """Measured operations of one kind: the bytes of values in them, the time in which they were counted, and errors by
    their text. ``fields``: more fields of its line of JSON."""

    name: str
    latencies: Latencies = field(default_factory=Latencies)
    count: int = 0
    size: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        """Operations per second."""
        return self.count / self.seconds if self.seconds else 0.0

    def done(self, started: float, size: int) -> None:
        """Count an operation that began at ``started`` (``perf_counter``) and moved ``size`` bytes."""
        self.latencies.add(time.perf_counter() - started)
        self.count += 1
        self.size += size


async def paced(rate: float, *, turn_s: float = 0.002) -> AsyncIterator[float]:
    """Yield the time (``perf_counter``) at which each of ``rate`` operations per second is due, at that time.

    Timers are not exact: a sleep takes at least ``turn_s`` seconds, and what is due after it is yielded at once.
    """
    began = time.perf_counter()
    for number in itertools.count():
        due = began + number / rate
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(max(early, turn_s))
        yield due


def show_progress(text: str, *, as_json: bool = False) -> None:
    """Replace the line of progress on standard error, if that is a terminal."""
    if not as_json and sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K\r")
        sys.stderr.flush()


def print_operations(
    operations: Sequence[Operation], settings: Mapping[str, object], *, client_cpu: float, as_json: bool
) -> None:
    """Print the result.

    Args:
        operations: a row, or a line of JSON, for each.
        settings: the load, and what is known about the server.
        client_cpu: processors that this command used.
        as_json: whether the result is JSON.
    """
    rows = [_row(operation) for operation in operations]
    if as_json:
        for operation, row in zip(operations, rows, strict=True):
            seconds = round(operation.seconds, 3)
            print_json({**settings, "seconds": seconds, "client_cpu": round(client_cpu, 3), **row, **operation.fields})
        return
    show_progress("")
    known = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    sys.stdout.write(fold("", known) + "\n\n")
    shown: list[dict[str, Cell]] = [
        {
            "operation": operation.name,
            "rate/s": shown_count(round(operation.per_s)),
            "MB/s": f"{row['bytes_per_s'] / 1e6:.1f}",
            **{name: _ms(row[f"{name.replace('.', '_')}_ms"]) for name in ("p50", "p99", "p99.9", "max")},
            "errors": operation.errors.total(),
        }
        for operation, row in zip(operations, rows, strict=True)
    ]
    columns = ["operation", "rate/s", "MB/s", "p50", "p99", "p99.9", "max", "errors"]
    print_table(shown, columns, as_json=False)
    sys.stdout.write(f"\nlatencies in ms; this command used {client_cpu:.0%} of a processor\n")
    sys.stdout.flush()
    for operation in operations:
        for text, times in operation.errors.most_common(3):
            note(f"{operation.name}: {times} times: {escape(text)}")
        if not operation.count and not operation.errors:
            note(f"{operation.name}: none began and ended in the time that is measured: set a longer --duration")
    if client_cpu >= _BUSY:
        note("the rate may be that of this command, not of the server: run several at once, and add their rates")


def _row(operation: Operation) -> dict[str, Any]:
    found = operation.latencies
    row: dict[str, Any] = {
        "operation": operation.name,
        "count": operation.count,
        "per_s": round(operation.per_s, 1),
        "bytes_per_s": round(operation.size / operation.seconds) if operation.seconds else 0,
    }
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99_9", 0.999)):
        value = found.quantile_s(share)
        row[f"{name}_ms"] = None if value is None else round(value * 1000, 3)
    row["max_ms"] = round(found.longest_s * 1000, 3) if found.count else None
    return {**row, "errors": dict(operation.errors)}


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
