"""Output of `penstock pipeline run`: a live table on a terminal, lines elsewhere, events as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.cli.output import (
    LiveTable,
    note,
    print_json,
    shown_bytes,
    shown_count,
    shown_duration,
    use_colour,
)

__all__ = ["LineRunDisplay", "LiveRunDisplay", "RunDisplay", "display"]

Event = Mapping[str, Any]

LIVE_S = 1.0
LINES_S = 10.0


class RunDisplay(Protocol):
    """Display of the events of a run. ``progress_s``: interval of progress events."""

    progress_s: float
    has_dead: bool
    """Whether a batch had records that a step could not process."""

    def show_event(self, event: dict[str, Any]) -> None:
        """Show an event."""


class JsonRunDisplay:
    """Prints each event as a line of JSON."""

    progress_s = LINES_S
    has_dead = False

    def show_event(self, event: dict[str, Any]) -> None:
        print_json(event)


class LineRunDisplay:
    """Prints batches and rows to standard output, everything else to standard error."""

    progress_s = LINES_S

    def __init__(self, *, several: bool = False) -> None:
        self.has_dead = False
        self._several = several
        self._shown: dict[str, Any] = {}

    def show_event(self, event: dict[str, Any]) -> None:
        if self._several:
            event = _with_pipeline(event)
        self.note_dead(event)
        match event["event"]:
            case "batch":
                self._write(_batch(event))
            case "rows":
                for row in event["rows"]:
                    self._write(f"{event['sink']}: {row}")
            case "progress":
                self._progress(event["sinks"])
            case _:
                for line in _event_lines(event):
                    self._note(line)

    def note_dead(self, event: Event) -> None:
        """Remember whether a batch had dead records."""
        self.has_dead = self.has_dead or (event["event"] == "batch" and event["dead"] > 0)

    def _progress(self, sinks: Mapping[str, Mapping[str, Any]]) -> None:
        for name, sink in sinks.items():
            # An idle sink is reported once.
            idle = {key: sink[key] for key in ("batches", "lag_records", "in_batch_records", "restarts")}
            if self._shown.get(name) != idle or sink["in_batch_records"] or sink["lag_records"]:
                self._shown[name] = idle
                self._note(_progress(name, sink))

    def _write(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        note(text)


class LiveRunDisplay(LineRunDisplay):
    """A live table of the sinks; other events are printed above it."""

    progress_s = LIVE_S

    def __init__(self, *, several: bool = False) -> None:
        super().__init__(several=several)
        self._sinks: dict[str, Mapping[str, Any]] = {}
        self.live = LiveTable(redraws_per_s=4)

    def show_event(self, event: dict[str, Any]) -> None:
        from rich.spinner import Spinner

        # Not earlier, because Java writes a line during its start, which would be mixed with the table.
        if event["event"] == "started":
            self.live.update(Spinner("dots", "the first batches are planned"))
        self.note_dead(event)
        if event["event"] != "batch":
            super().show_event(event)

    def _progress(self, sinks: Mapping[str, Mapping[str, Any]]) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        shown = [head for head in HEADS if self.live.width >= WIDE or head not in FOR_WIDE]
        for index, head in enumerate(shown):
            table.add_column(head, justify="right" if index else "left", no_wrap=True)
        # An event has the sinks of one pipeline.
        self._sinks |= sinks
        for name, sink in self._sinks.items():
            cells = dict(zip(HEADS, [name, *_cells(sink)], strict=True))
            table.add_row(*(cells[head] for head in shown))
        self.live.update(table)

    def _write(self, text: str) -> None:
        self.live.print_line(text)

    def _note(self, text: str) -> None:
        self.live.print_line(text)


HEADS = (
    "sink",
    "batch",
    "read",
    "out",
    "dead",
    "rows/s",
    "waiting",
    "oldest",
    "in batch",
    "since",
    "took",
    "state",
)

FOR_WIDE = frozenset({"in batch", "since", "state"})
"""Columns that are omitted on a terminal narrower than ``WIDE`` columns."""
WIDE = 110


@contextmanager
def display(*, as_json: bool, several: bool = False) -> Iterator[RunDisplay]:
    """Select the display by the type of output; of ``several`` pipelines, sinks are shown as ``<pipeline>/<sink>``."""
    if as_json:
        yield JsonRunDisplay()
    elif sys.stdout.isatty() and use_colour(sys.stderr):
        live = LiveRunDisplay(several=several)
        with live.live:
            yield live
    else:
        yield LineRunDisplay(several=several)


def _with_pipeline(event: dict[str, Any]) -> dict[str, Any]:
    """Return ``event`` with the names of sinks after that of their pipeline."""
    pipeline = event["pipeline"]
    if "sink" in event:
        return {**event, "sink": f"{pipeline}/{event['sink']}"}
    if event["event"] == "progress":
        return {**event, "sinks": {f"{pipeline}/{name}": sink for name, sink in event["sinks"].items()}}
    return event


def _cells(sink: Mapping[str, Any]) -> list[str]:
    state = (
        "-"
        if sink["state_rows"] is None
        else f"{shown_count(sink['state_rows'])} rows, {shown_bytes(sink['state_bytes'])}"
    )
    return [
        shown_count(sink["batch"]),
        *(shown_count(sink[name]) for name in ("read", "out", "dead", "rows_per_s", "waiting_records")),
        shown_duration(sink["waiting_s"]),
        shown_count(sink["in_batch_records"]),
        shown_duration(sink["in_batch_s"]),
        shown_duration(sink["batch_s"]),
        state,
    ]


def _batch(event: Event) -> str:
    left = ", ".join(f"{event[name]} {name}" for name in ("dead", "filtered", "duplicates", "late") if event[name])
    exploded = f", {event['exploded']} added by explode" if event["exploded"] else ""
    unmatched = sum(event["join"].get(f"unmatched_{side}", 0) for side in ("left", "right"))
    joined = f"; {event['join']['joined']} joined, {unmatched} unmatched" if event["join"] else ""
    violated = "".join(
        f"; {name} violated by {counts['violations']} of {counts['rows']} rows"
        for name, counts in event["expectations"].items()
        if counts["violations"]
    )
    return (
        f"{event['sink']} batch {event['batch']}: {event['read']} read{exploded}, {event['out']} out"
        f"{', ' + left if left else ''}{joined}{violated}; took {shown_duration(event['took_s'])}"
    )


def _progress(name: str, sink: Mapping[str, Any]) -> str:
    """Progress of a sink as one line, without absent batch, backlog and state."""
    parts = [
        f"{shown_count(sink['read'])} read, {shown_count(sink['out'])} out, {shown_count(sink['rows_per_s'])} rows/s"
    ]
    if sink["waiting_records"] is None:
        parts.append("the backlog is unknown")
    elif sink["waiting_records"]:
        # Kafka does not say how old the oldest one is.
        oldest = "" if sink["waiting_s"] is None else f", the oldest for {shown_duration(sink['waiting_s'])}"
        parts.append(f"{shown_count(sink['waiting_records'])} waiting{oldest}")
    else:
        parts.append("nothing waiting")
    if sink["in_batch_s"]:
        parts.append(
            f"{shown_count(sink['in_batch_records'])} in the active batch for {shown_duration(sink['in_batch_s'])}"
        )
    if sink["batch_s"] is not None:
        parts.append(f"last batch took {shown_duration(sink['batch_s'])}")
    if sink["state_rows"]:
        parts.append(f"state {shown_count(sink['state_rows'])} rows, {shown_bytes(sink['state_bytes'])}")
    if sink["restarts"]:
        parts.append(
            f"started again {shown_count(sink['restarts'])} times" if sink["restarts"] > 1 else "started again once"
        )
    if sink["failing_s"]:
        parts.append(f"failing for {shown_duration(sink['failing_s'])}")
    return f"{name}: {'; '.join(parts)}"


def _shared(event: Event) -> Iterator[str]:
    """Describe which sinks share a query, if any do."""
    if any(len(sinks) > 1 for sinks in event["queries"]) or event["event"] == "queries":
        text = "; ".join(" + ".join(sinks) for sinks in event["queries"])
        yield f"pipeline {event['pipeline']}: queries {text}"


def _event_lines(event: Event) -> Iterator[str]:
    """Format an event as lines."""
    match event["event"]:
        case "starting":
            yield f"pipeline {event['pipeline']}: run {event['run']} starts Spark, state in {event['state_dir']}"
        case "metrics":
            yield f"pipeline {event['pipeline']}: metrics at http://{event['address']}/metrics"
        case "waiting":
            left = (
                "" if event["left_ms"] is None else f", for another {event['left_ms'] / 1000:.1f} s unless it renews it"
            )
            yield (
                f"pipeline {event['pipeline']}: {event['text']} holds the lease{left}; "
                f"waiting {'up to ' + shown_duration(event['wait_s']) if event['wait_s'] < 1e7 else 'forever'}"
            )
        case "started":
            yield f"pipeline {event['pipeline']}: running {', '.join(event['sinks'])}; lease {event['fencing_token']}"
            for prefix in event["not_fenced"]:
                yield f"{prefix}: this state store fences no prefixes; keys are fenced as they are written"
            yield from _shared(event)
        case "queries":
            yield from _shared(event)
        case "applying":
            yield f"pipeline {event['pipeline']}: changing to version {event['version']} after the active batches"
        case "applied":
            yield f"pipeline {event['pipeline']}: version {event['version']} is in operation"
        case "rolled_back":
            yield f"pipeline {event['pipeline']}: version {event['version']} is in operation again"
            yield f"version {event['failed']} failed: {event['why']}"
        case "warning":
            yield f"pipeline {event['pipeline']}: {event['text']}"
        case "retry":
            # Cause and action are shown with the error if the run ends.
            why = event["why"].partition("\n")[0]
            yield f"{event['sink']}: next attempt in {shown_duration(event['in_s'])}: {why}"
        case "sinks_failed":
            what, *more = event["error"].splitlines()
            yield f"{event['pipeline']}: {what}; the other sinks continue"
            yield from more
        case "maintenance":
            yield (
                f"{event['sink']}: maintained its table: {event['combined']} files combined into {event['written']}, "
                f"{event['removed']} old files removed; took {shown_duration(event['took_s'])}"
            )
        case "stack":
            yield from event["text"].splitlines()
        case "stopping":
            yield f"pipeline {event['pipeline']}: stopping after the active batches"
        case "failed":
            what, *more = event["error"].splitlines()
            yield f"pipeline {event['pipeline']}: failed: {what}"
            yield from more
        case "stopped":
            yield f"pipeline {event['pipeline']}: stopped"
