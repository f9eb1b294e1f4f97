"""Abnormal stretches: alarms of neighbouring windows joined, and what the data itself says for comparison. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from penstock.demo.data import Limits, Reading, iso

__all__ = ["AbnormalSegment", "Alarm", "expected", "join", "parse_alarm"]


class Alarm(NamedTuple):
    """One abnormal window, as the pipeline writes it back."""

    kind: str
    window_start: datetime
    window_end: datetime
    abnormal_from: datetime
    abnormal_to: datetime
    readings: int
    extreme: float
    """The lowest flow of a low window, the highest of a high one."""

    def __str__(self) -> str:
        hours = f"{self.window_start:%Y-%m-%d %H:%M}-{self.window_end:%H:%M}"
        return f"{self.kind:<4} flow {self.extreme:g} l/s in {hours} UTC"


class AbnormalSegment(NamedTuple):
    """An abnormal stretch from its first to its last reading."""

    kind: str
    start: datetime
    end: datetime
    readings: int
    extreme: float

    def to_json(self) -> dict[str, Any]:
        """For the last line of the demo."""
        return {
            "kind": self.kind,
            "start": iso(self.start),
            "end": iso(self.end),
            "readings": self.readings,
            "flow_min" if self.kind == "low" else "flow_max": self.extreme,
        }


def parse_alarm(value: bytes) -> Alarm:
    """The value of an alarm key.

    Raises:
        ValueError, KeyError: it is not one.
    """
    found = json.loads(value)
    kind: str = found["kind"]
    start, end, first, last = (
        _time(found[name]) for name in ("window_start", "window_end", "abnormal_from", "abnormal_to")
    )
    return Alarm(
        kind,
        start,
        end,
        first,
        last,
        readings=int(found[kind]),
        extreme=float(found["flow_min"] if kind == "low" else found["flow_max"]),
    )


def join(alarms: Iterable[Alarm]) -> list[AbnormalSegment]:
    """Alarms of windows that touch are one segment, from the first abnormal reading to the last."""
    segments: list[AbnormalSegment] = []
    reaches: datetime | None = None
    for alarm in sorted(alarms, key=lambda alarm: alarm.window_start):
        if segments and segments[-1].kind == alarm.kind and reaches == alarm.window_start:
            last = segments.pop()
            segments.append(
                AbnormalSegment(
                    last.kind,
                    last.start,
                    alarm.abnormal_to,
                    last.readings + alarm.readings,
                    _extreme(last.kind, [last.extreme, alarm.extreme]),
                )
            )
        else:
            segments.append(
                AbnormalSegment(alarm.kind, alarm.abnormal_from, alarm.abnormal_to, alarm.readings, alarm.extreme)
            )
        reaches = alarm.window_end
    return segments


def expected(readings: Sequence[Reading], limits: Limits, duration: timedelta) -> list[AbnormalSegment]:
    """The segments by going through the data directly: abnormal readings of one kind less than a window apart."""
    segments: list[AbnormalSegment] = []
    for time, flow in sorted(readings):
        kind = "low" if flow < limits.low else "high" if flow > limits.high else None
        if kind is None:
            continue
        last = segments[-1] if segments else None
        if last is not None and last.kind == kind and time - last.end < duration:
            segments[-1] = AbnormalSegment(
                kind, last.start, time, last.readings + 1, _extreme(kind, [last.extreme, flow])
            )
        else:
            segments.append(AbnormalSegment(kind, time, time, 1, flow))
    return segments


def _extreme(kind: str, flows: list[float]) -> float:
    return min(flows) if kind == "low" else max(flows)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
