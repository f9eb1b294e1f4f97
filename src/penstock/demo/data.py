"""Measurements of the water branch, the messages that the demo creates from them, and abnormal segments.

Abnormal segments are merged from alarms of adjacent windows, and for comparison computed from the measurements
directly.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock.errors import ConfigError

__all__ = [
    "LATE",
    "AbnormalSegment",
    "Alarm",
    "Branch",
    "Limits",
    "Reading",
    "Telemetry",
    "example",
    "expected_segments",
    "iso",
    "join_alarms",
    "limits",
    "parse_alarm",
    "read",
    "window_starts",
]


class Reading(NamedTuple):
    """A measurement: time (UTC), litres per second."""

    time: datetime
    flow: float


LATE = Reading(datetime(2022, 3, 29, 2, tzinfo=UTC), 101.9)
"""A reading for an hour that is missing in the data, sent as if it were delayed by days."""


class Telemetry(NamedTuple):
    """A published message: the id is a user property, the event time is in the payload."""

    id: str
    payload: bytes


class Branch(NamedTuple):
    """A branch of the pipeline: names of its topics and keys, and its messages."""

    name: str

    @property
    def topic(self) -> str:
        """Topic of the meter."""
        return f"water/{self.name}/flow"

    @property
    def limits_key(self) -> str:
        """State store key of its limits."""
        return f"water/limits/{self.name}"

    @property
    def alarm_key(self) -> str:
        """State store key of its current alarm."""
        return f"water/alarm/{self.name}"

    def window_key(self, start: datetime) -> str:
        """State store key of the alarm of the window that starts at ``start``."""
        return f"water/alarms/{self.name}/{iso(start)}"

    def messages(self, readings: Sequence[Reading]) -> list[Telemetry]:
        """Return one message per measurement, with ids from the time."""
        return [self._message(f"{self.name}-{iso(reading.time)}", reading) for reading in readings]

    def malformed(self) -> Telemetry:
        """Return a message with a truncated payload."""
        return Telemetry(f"{self.name}-cut-off", b'{"branch": "main", "time": "2022-04-14T12:')

    def late(self) -> Telemetry:
        """Return a reading that arrives after its windows were closed."""
        return self._message(f"{self.name}-held-up", LATE)

    def _message(self, name: str, reading: Reading) -> Telemetry:
        value = {"branch": self.name, "time": iso(reading.time), "flow": reading.flow}
        return Telemetry(name, json.dumps(value).encode())


class Limits(NamedTuple):
    """Reference data of the branch: flow below ``low`` or above ``high`` is abnormal (l/s)."""

    low: float
    high: float
    baseline: float

    def to_json(self) -> bytes:
        """Return the value in the state store."""
        return json.dumps(self._asdict()).encode()


def example(name: str, *, of: str = "water") -> Path:
    """Return the path of a file of ``examples/water`` or another example, in the checkout or in the installed wheel.

    Raises:
        ConfigError: it does not exist.
    """
    package = Path(penstock.__file__).parent
    for directory in (package / "examples" / of, package.parents[1] / "examples" / of):
        if (directory / name).is_file():
            return directory / name
    raise ConfigError(
        f"examples/{of}/{name} is not installed", hint="install penstock from its wheel or a full checkout"
    )


def read(path: Path) -> list[Reading]:
    """Read the measurements, in the order of the file. Times have their offsets (including daylight saving time)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return [Reading(datetime.fromisoformat(time).astimezone(UTC), float(flow)) for time, flow in rows]


def limits(readings: Sequence[Reading]) -> Limits:
    """Return limits that an operator would choose: the normal flow is within four litres of the median.

    Less than two thirds of the median is a loss or maintenance, more than 105 % an overrun. No measurement is close to
    a limit: there are none between 66.7 and 73.8, or between 107.3 and 109.6.
    """
    baseline = round(statistics.median(reading.flow for reading in readings), 2)
    return Limits(low=70.0, high=108.0, baseline=baseline)


def iso(time: datetime) -> str:
    """Format a time in UTC, to the second, with a Z."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def window_starts(readings: Sequence[Reading], duration: timedelta) -> list[datetime]:
    """Return the starts of all windows of ``duration`` that may contain a reading, aligned to 1970 as in Spark."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    first = epoch + (min(readings).time - epoch) // duration * duration
    count = (max(readings).time - first) // duration + 1
    return [first + index * duration for index in range(count)]


class Alarm(NamedTuple):
    """An abnormal window, as written to the state store by the pipeline."""

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
    """An abnormal period from its first to its last reading."""

    kind: str
    start: datetime
    end: datetime
    readings: int
    extreme: float

    def to_json(self) -> dict[str, Any]:
        """Return the segment for the last line of the demo."""
        return {
            "kind": self.kind,
            "start": iso(self.start),
            "end": iso(self.end),
            "readings": self.readings,
            "flow_min" if self.kind == "low" else "flow_max": self.extreme,
        }


def parse_alarm(value: bytes) -> Alarm:
    """Parse the value of an alarm key.

    Raises:
        ValueError, KeyError: the value is invalid.
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


def join_alarms(alarms: Iterable[Alarm]) -> list[AbnormalSegment]:
    """Merge alarms of adjacent windows into segments, from the first abnormal reading to the last."""
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


def expected_segments(readings: Sequence[Reading], limits: Limits, duration: timedelta) -> list[AbnormalSegment]:
    """Compute the segments from the measurements: abnormal readings of one kind less than a window apart."""
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
