"""Model of a small plant: machines with sensors, their limits and alarms, and faults that can be switched.

Time is an argument, and a seed determines everything else: the same calls return the same messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, NamedTuple

__all__ = [
    "FAULTS",
    "FAULTS_KEY",
    "LOCK_KEY",
    "ROOT",
    "TURNS",
    "Machine",
    "Plant",
    "PlantMessage",
    "faults_in_turn",
    "parse_faults",
    "parse_limits",
    "parse_setpoint",
]

ROOT: Final = "demo"
"""First level of all topics and keys."""
FAULTS_KEY: Final = f"{ROOT}/faults"
"""Key with the faults that operators want, see :func:`parse_faults`."""
LOCK_KEY: Final = f"{ROOT}/lock"
"""Lock of the program that writes the alarms."""

FAULTS: Final[Mapping[str, str]] = {
    "drift": "the temperature that it reports rises by 2 °C a second",
    "stuck": "the temperature that it reports does not change any more",
    "dead": "it is disconnected, and the broker publishes its will",
    "burst": "it sends 20 times as many readings",
    "late": "its readings arrive 10 s after they were taken",
    "duplicate": "it sends each reading twice",
    "broken": "every second payload cannot be parsed",
}
"""The faults, each of one machine, with what it does."""
TURNS: Final = "turns"
"""Name of the mode in which each fault has its turn."""
_NONE: Final = "none"
_ALL: Final = "all"
_TURN_S: Final = 20.0
_PAUSE_S: Final = 5.0
"""Time without a fault at the start of each turn."""

_LINES: Final = 3
_BURST: Final = 20
_DRIFT_PER_S: Final = 2.0
_LATE_S: Final = 10.0
_CLEAR: Final = 0.97
"""Share of a limit below which its alarm ends, so that a value close to the limit does not raise it repeatedly."""
_WARM_UP_S: Final = 20.0
_RUNS_S: Final = 120.0
_RESTS_S: Final = 15.0
"""Mean durations for which a machine runs, and for which it is idle."""
_PART_S: Final = 2.0
_SCRAP: Final = 0.02
_LIMITS: Final[Mapping[str, float]] = {"pressure": 1.25, "vibration": 2.0}
"""Limits as multiples of the usual values; that of the temperature is 15 °C above the set point."""


class _Kind(NamedTuple):
    """Usual values of a kind of machine: °C, bar, mm/s, l/min."""

    temperature: float
    pressure: float
    vibration: float
    flow: float


_KINDS: Final[Mapping[str, _Kind]] = {
    "press": _Kind(60.0, 180.0, 2.5, 12.0),
    "oven": _Kind(220.0, 1.1, 0.8, 90.0),
    "pump": _Kind(45.0, 6.5, 1.6, 140.0),
}
_UNITS: Final[Mapping[str, str]] = {"temperature": "°C", "pressure": "bar", "vibration": "mm/s", "flow": "l/min"}


class PlantMessage(NamedTuple):
    """A message of a machine. ``id`` is the same for a message and its duplicate."""

    topic: str
    payload: bytes
    id: str


def parse_faults(text: str) -> frozenset[str] | None:
    """Return the faults that ``text`` names, separated by spaces or commas; None for ``turns``.

    Raises:
        ValueError: a name is not known.
    """
    names = set(text.replace(",", " ").split())
    if unknown := sorted(names - {*FAULTS, TURNS, _NONE, _ALL}):
        raise ValueError(f"{', '.join(unknown)}: expected {', '.join(FAULTS)}, {_ALL}, {_NONE} or {TURNS}")
    if TURNS in names:
        return None
    return frozenset(FAULTS) if _ALL in names else frozenset(names - {_NONE})


def parse_setpoint(value: bytes) -> float:
    """Parse the value of a set point in °C.

    Raises:
        ValueError: it is not a number.
    """
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"expected a number of °C, not {found}")
    return found


def parse_limits(value: bytes) -> dict[str, float]:
    """Parse the limits of a machine: a JSON object with numbers for some of its quantities.

    Raises:
        ValueError: it is something else.
    """
    found = json.loads(value)
    if not isinstance(found, dict) or not found.keys() <= _UNITS.keys():
        raise ValueError(f"expected a JSON object with some of {', '.join(_UNITS)}")
    if not all(type(limit) in (int, float) for limit in found.values()):
        raise ValueError("expected numbers as limits")
    return found


def faults_in_turn(at_s: float) -> frozenset[str]:
    """Return the fault whose turn it is ``at_s`` seconds after the start, if any."""
    turn, since = divmod(at_s, _TURN_S)
    return frozenset() if since < _PAUSE_S else frozenset([list(FAULTS)[int(turn) % len(FAULTS)]])


@dataclass
class Machine:
    """A machine: its sensors, and the values that operators set."""

    line: str
    name: str
    random: Random
    usual: _Kind
    setpoint: float
    limits: dict[str, float]
    temperature: float
    running: bool = True
    good: int = 0
    scrap: int = 0
    sent: int = 0
    alarm: str | None = None
    """The quantity that is above its limit."""
    taken_at_s: float = 0.0
    faulty_since_s: dict[str, float] = field(default_factory=dict)
    stuck_at: float | None = None
    held: list[tuple[float, PlantMessage]] = field(default_factory=list)
    """Late messages, with the times at which they are sent."""
    _part: float = 0.0

    @property
    def path(self) -> str:
        """Line and name."""
        return f"{self.line}/{self.name}"

    @property
    def telemetry_topic(self) -> str:
        """Topic of its readings."""
        return f"{ROOT}/{self.path}/telemetry"

    @property
    def status_topic(self) -> str:
        """Topic of its birth and its will, both retained."""
        return f"{ROOT}/{self.path}/status"

    @property
    def limits_key(self) -> str:
        """Key of its limits."""
        return f"{ROOT}/limits/{self.path}"

    @property
    def setpoint_key(self) -> str:
        """Key of the temperature that operators want."""
        return f"{ROOT}/setpoint/{self.path}"

    @property
    def alarm_key(self) -> str:
        """Key of its alarm state."""
        return f"{ROOT}/alarm/{self.path}"

    def birth(self) -> bytes:
        """Return the payload of its status when it connects."""
        value = {"online": True, "line": self.line, "machine": self.name, "units": dict(_UNITS)}
        return json.dumps(value, ensure_ascii=False).encode()

    def will(self) -> bytes:
        """Return the payload of its status after it was disconnected."""
        return json.dumps({"online": False, "line": self.line, "machine": self.name}).encode()

    def advance(self, at_s: float) -> None:
        """Let the machine work until ``at_s``."""
        passed = max(0.0, at_s - self.taken_at_s)
        self.taken_at_s = at_s
        if self.random.random() < passed / (_RUNS_S if self.running else _RESTS_S):
            self.running = not self.running
        target = self.setpoint if self.running else self.setpoint * 0.8
        self.temperature += (target - self.temperature) * (1 - math.exp(-passed / _WARM_UP_S))
        self._part += passed / _PART_S if self.running else 0.0
        while self._part >= 1:
            self._part -= 1
            if self.random.random() < _SCRAP:
                self.scrap += 1
            else:
                self.good += 1

    def measure(self) -> dict[str, float]:
        """Return what its sensors show, without faults."""
        load = 1.0 if self.running else 0.2
        return {
            "temperature": self.temperature + self.random.gauss(0, 0.3),
            "pressure": self.usual.pressure * max(load, 0.6) * (1 + self.random.gauss(0, 0.02)),
            "vibration": self.usual.vibration * load * abs(1 + self.random.gauss(0, 0.08)),
            "flow": self.usual.flow * load * abs(1 + self.random.gauss(0, 0.03)),
        }


class Plant:
    """Three lines with a press, an oven and a pump each.

    Args:
        seed: determines the values, the states of the machines, and which machine has which fault.
        start: the time of the readings at 0 s.
    """

    def __init__(self, seed: int, start: datetime) -> None:
        self.start = start
        self.machines = [
            _machine(f"line-{line}", name, kind, seed) for line in range(1, _LINES + 1) for name, kind in _KINDS.items()
        ]
        chosen = Random(f"{seed}/faults").sample(self.machines, len(FAULTS))  # noqa: S311 - not for security
        self.faulty: dict[str, Machine] = dict(zip(FAULTS, chosen, strict=True))
        """The machine of each fault."""
        self.faults: frozenset[str] = frozenset()

    def time(self, at_s: float) -> str:
        """Return the time ``at_s`` seconds after the start, as in a reading."""
        return (self.start + timedelta(seconds=at_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def switch(self, faults: frozenset[str], at_s: float) -> None:
        """Begin and end faults, so that ``faults`` are active."""
        for fault in faults - self.faults:
            self.faulty[fault].faulty_since_s[fault] = at_s
        for fault in self.faults - faults:
            machine = self.faulty[fault]
            del machine.faulty_since_s[fault]
            machine.stuck_at = None
        self.faults = faults

    def messages(self, machine: Machine, at_s: float) -> list[PlantMessage]:
        """Return what ``machine`` sends ``at_s`` seconds after the start, when it takes its next reading."""
        faults = machine.faulty_since_s
        due = [message for when, message in machine.held if when <= at_s]
        machine.held = [each for each in machine.held if each[0] > at_s]
        before, readings = machine.taken_at_s, _BURST if "burst" in faults else 1
        for number in range(1, readings + 1):
            machine.advance(before + (at_s - before) * number / readings)
            message = self._reading(machine)
            if "late" in faults:
                machine.held.append((at_s + _LATE_S, message))
            elif "dead" not in faults:
                due += [message] * (2 if "duplicate" in faults else 1)
        return due

    def _reading(self, machine: Machine) -> PlantMessage:
        shown = machine.measure()
        faults = machine.faulty_since_s
        if "drift" in faults:
            shown["temperature"] += _DRIFT_PER_S * (machine.taken_at_s - faults["drift"])
        if "stuck" in faults:
            if machine.stuck_at is None:
                machine.stuck_at = shown["temperature"]
            shown["temperature"] = machine.stuck_at
        values = {name: round(value, 2) for name, value in shown.items()}
        machine.alarm = _alarm(machine, values)
        machine.sent += 1
        reading: dict[str, Any] = {
            "line": machine.line,
            "machine": machine.name,
            "time": self.time(machine.taken_at_s),
            "state": "running" if machine.running else "idle",
            **values,
            "good": machine.good,
            "scrap": machine.scrap,
        }
        payload = json.dumps(reading).encode()
        if "broken" in faults and machine.sent % 2 == 0:
            payload = _broken(reading, payload, machine.sent // 2)
        # The start is part of it, because ids of an earlier run would be taken for duplicates.
        return PlantMessage(
            machine.telemetry_topic, payload, f"{machine.path}/{self.start:%Y%m%dT%H%M%S}/{machine.sent}"
        )


def _machine(line: str, name: str, kind: _Kind, seed: int) -> Machine:
    limits = {quantity: round(getattr(kind, quantity) * factor, 1) for quantity, factor in _LIMITS.items()}
    return Machine(
        line,
        name,
        Random(f"{seed}/{line}/{name}"),  # noqa: S311 - not for security
        usual=kind,
        setpoint=kind.temperature,
        limits={"temperature": kind.temperature + 15, **limits},
        temperature=kind.temperature,
    )


def _alarm(machine: Machine, values: Mapping[str, float]) -> str | None:
    """Return the quantity that is above its limit: the current one until it is clearly below."""
    current = machine.alarm
    if current is not None and values[current] > machine.limits.get(current, math.inf) * _CLEAR:
        return current
    return next((name for name, limit in machine.limits.items() if values[name] > limit), None)


def _broken(reading: Mapping[str, Any], payload: bytes, number: int) -> bytes:
    """Return a payload that a parser with a schema refuses, in one of three ways."""
    if number % 3 == 0:
        return payload[: len(payload) // 2]
    if number % 3 == 1:
        return json.dumps({**reading, "temperature": "n/a"}).encode()
    return b"\xff" + payload  # not UTF-8
