"""Progress of messages per hop: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["Display", "Hops", "JsonDisplay", "LineDisplay", "LiveDisplay", "display"]

LINE_EVERY_S = 2.0


@dataclass(slots=True)
class Hops:
    """Messages per hop. ``batches`` has the latest counts of each batch of the pipeline."""

    total: int
    sent: int = 0
    acknowledged: int = 0
    logged: int = 0
    alarms: int = 0
    batches: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Record a ``batch`` event; a repeated batch counts once."""
        self.batches[event["sink"], event["batch"]] = event

    def read(self, sink: str) -> int:
        """Messages that the query of ``sink`` has read."""
        return self._sum(sink, "read")

    def watermark_ms(self, sink: str) -> int:
        """The newest watermark of ``sink``'s query."""
        return max((event["watermark_ms"] for (name, _), event in self.batches.items() if name == sink), default=0)

    def rows(self) -> list[tuple[str, int, int]]:
        """Hops: name, messages that reached it, messages that did not yet."""
        hops = [
            ("sent over MQTT", self.sent),
            ("acknowledged", self.acknowledged),
            ("in the TubeMQ log", self.logged),
            ("through to the table", self.read("readings")),
            ("through to the windows", self.read("alarms")),
        ]
        behind = [self.total, *(count for _, count in hops)]
        return [
            (name, count, max(before - count, 0)) for (name, count), before in zip(hops, _before(behind), strict=True)
        ]

    def _sum(self, sink: str, what: str) -> int:
        return sum(event[what] or 0 for (name, _), event in self.batches.items() if name == sink)


def _before(counts: list[int]) -> list[int]:
    """Count of the previous hop for each hop; table and windows both follow the log."""
    total, sent, acknowledged, logged, _, _ = counts
    return [total, sent, acknowledged, logged, logged]


class Display(Protocol):
    """Output of the demo while it runs."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def say(self, text: str) -> None:
        """Show a step."""

    def alarm(self, text: str) -> None:
        """Show an alarm."""

    def show(self, hops: Hops, *, at_once: bool = False) -> None:
        """Show the progress, several times a second; ``at_once`` without rate limit."""


class _Quiet:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class LineDisplay(_Quiet):
    """Plain lines with the seconds since the start, on standard error: for logs and pipes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = 0.0
        self._shown = ""

    def say(self, text: str) -> None:
        """A line on standard error, after the seconds since the start [Display]."""
        sys.stderr.write(f"[{time.monotonic() - self._start:5.1f} s] {text}\n")
        sys.stderr.flush()

    def alarm(self, text: str) -> None:
        """A line of its own [Display]."""
        self.say(f"ALARM  {text}")

    def show(self, hops: Hops, *, at_once: bool = False) -> None:
        """A line every few seconds, where something moved [Display]."""
        now = time.monotonic()
        text = ", ".join(f"{name} {count}" + (f" (lag {lag})" if lag else "") for name, count, lag in hops.rows())
        if (at_once or now - self._last >= LINE_EVERY_S) and text != self._shown:
            self._last, self._shown = now, text
            self.say(text)


def _emit(event: dict[str, object]) -> None:
    """Print one JSON object as a line and flush, since the reader of a pipe waits for it."""
    sys.stdout.write(json.dumps(event, ensure_ascii=False) + "\n")
    sys.stdout.flush()


class JsonDisplay(_Quiet):
    """One JSON object a line on standard output; the demo's last line follows them."""

    def __init__(self) -> None:
        self._last = 0.0
        self._shown: list[tuple[str, int, int]] = []

    def say(self, text: str) -> None:
        """An event ``step`` [Display]."""
        _emit({"event": "step", "text": text})

    def alarm(self, text: str) -> None:
        """An event ``alarm`` [Display]."""
        _emit({"event": "alarm", "text": text})

    def show(self, hops: Hops, *, at_once: bool = False) -> None:
        """An event ``progress`` every few seconds, where something moved [Display]."""
        now, rows = time.monotonic(), hops.rows()
        if (at_once or now - self._last >= LINE_EVERY_S) and rows != self._shown:
            self._last, self._shown = now, rows
            _emit({"event": "progress", "hops": {name: {"messages": count, "lag": lag} for name, count, lag in rows}})


class LiveDisplay(_Quiet):
    """A live table, with other output above it, for terminals."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def say(self, text: str) -> None:
        """A line above the table [Display]."""
        self._print(text, "")

    def alarm(self, text: str) -> None:
        """A line above the table, in red [Display]."""
        self._print(f"ALARM  {text}", "bold red")

    def show(self, hops: Hops, *, at_once: bool = False) -> None:  # noqa: ARG002 - redrawn at a rate of its own
        """Update the table, at its own rate [Display]."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("hop", min_width=24)
        table.add_column("messages", justify="right")
        table.add_column("lag", justify="right")
        table.add_column("", width=40)
        for name, count, lag in hops.rows():
            table.add_row(name, str(count), str(lag), ProgressBar(total=hops.total, completed=count, width=40))
        self._live.update(table)

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"[{time.monotonic() - self._start:5.1f} s] {text}", style))


def display(*, as_json: bool) -> Display:
    """Select the display by the type of output."""
    if as_json:
        return JsonDisplay()
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return LiveDisplay()
    return LineDisplay()
