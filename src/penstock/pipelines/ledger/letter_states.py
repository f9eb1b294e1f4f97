"""States of the dead letters in a table. The last change of a letter is valid; a letter without changes is open.

    <table>/_redriven/<time>.json     redriven letters, see :mod:`penstock.pipelines.ledger.dead_letters`
    <table>/_states/<time>.json       other changes of state: corrected, resolved, discarded, reopened

A change is one of the letters of the named steps. Earlier versions stored no steps, or redriven letters without
``by_step``: these changes are those of all letters of the record.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from penstock.pipelines.state_dir.layout import listed, read_each, read_json, write_json
from penstock.pipelines.state_dir.replay import RecordPart
from penstock.spark.files.object_storage import StoragePath

__all__ = [
    "NOTE",
    "REDRIVEN",
    "LetterKey",
    "LetterState",
    "LetterStates",
    "LetterStatus",
    "letter_states",
    "place_of",
    "places_as_json",
    "places_in",
    "set_state",
    "status_of",
]

NOTE = re.compile(r"[0-9]+\.json")
"""Names of the files of changes: their times in ns since 1970."""
REDRIVEN, _STATES = "_redriven", "_states"
"""Directories with the changes of letters, one file per change."""


class LetterState(StrEnum):
    """State of a dead letter. A corrected letter has another payload, and is redriven with it."""

    OPEN = "open"
    CORRECTED = "corrected"
    REDRIVEN = "redriven"
    RESOLVED = "resolved"
    DISCARDED = "discarded"

    @property
    def is_closed(self) -> bool:
        """True if the letter needs no further action."""
        return self not in (LetterState.OPEN, LetterState.CORRECTED)


class LetterStatus(NamedTuple):
    """State of a letter, and the corrected payload."""

    state: LetterState
    value: bytes | None = None


class LetterKey(NamedTuple):
    """The record or part of a letter, and the step that rejected it; an empty step is any step."""

    place: RecordPart
    step: str

    def less_specific(self) -> tuple[LetterKey, ...]:
        """Return this key as older versions knew it, with the most specific one first, which is this key."""
        return tuple(
            dict.fromkeys(
                self._replace(place=place, step=step)
                for step in (self.step, "")
                for place in self.place.less_specific()
            )
        )


class _Letter(Protocol):
    @property
    def place(self) -> RecordPart:
        """The record and the part of it."""

    @property
    def step(self) -> str:
        """The step that rejected it."""


class LetterStates:
    """Changes of the states and payloads of letters, in their order."""

    def __init__(self) -> None:
        self._states: dict[LetterKey, tuple[int, LetterState]] = {}
        self._values: dict[LetterKey, tuple[int, bytes | None]] = {}
        self._steps: dict[RecordPart, set[str]] = {}

    def change(self, number: int, key: LetterKey, state: LetterState, value: bytes | None) -> None:
        """Add the change ``number`` of the letters ``key``. A redriven letter keeps its payload: it is redriven again
        with the same one."""
        self._states[key] = number, state
        if state is not LetterState.REDRIVEN:
            self._values[key] = number, value
            self._steps.setdefault(key.place, set()).add(key.step)

    def state(self, key: LetterKey) -> LetterState | None:
        """Return the state of the letters ``key``; None if it was not changed."""
        known = [self._states[each] for each in key.less_specific() if each in self._states]
        return max(known)[1] if known else None

    def state_at_any_time(self, key: LetterKey) -> LetterState | None:
        """Return the state of the letters ``key``, which an older version stored without the time of their record."""
        if (found := self.state(key)) is not None or key.place.at_us is not None:
            return found
        known = [
            change
            for each, change in self._states.items()
            if each.step in {key.step, ""} and each.place._replace(at_us=None) == key.place
        ]
        return max(known)[1] if known else None

    def value(self, key: LetterKey) -> bytes | None:
        """Return the corrected payload of the letters ``key``."""
        return self._value(key)[1]

    def correction(self, key: LetterKey) -> bytes | None:
        """Return the newest corrected payload of the letters of the record of ``key``; None without one.

        All of them are the same record in the source, which has one payload.
        """
        noted = (self._steps.get(place, ()) for place in key.place.less_specific())
        steps = {key.step}.union(*noted) - {""}
        found = [self._value(key._replace(step=step)) for step in steps]
        corrected = [(number, value) for number, value in found if value is not None]
        return max(corrected)[1] if corrected else None

    def _value(self, key: LetterKey) -> tuple[int, bytes | None]:
        known = (self._values[each] for each in key.less_specific() if each in self._values)
        return max(known, key=lambda change: change[0], default=(-1, None))


def letter_states(path: StoragePath, after_ns: int = -1) -> LetterStates:
    """Return the changes after ``after_ns`` (ns since 1970) of the dead letters in the table at ``path``."""
    found = LetterStates()
    for number, note in enumerate(_notes(path, after_ns)):
        state = LetterState(note.get("state", LetterState.REDRIVEN))
        value = None if note.get("value") is None else base64.b64decode(note["value"])
        places = places_in(note)
        is_by_step = state is not LetterState.REDRIVEN or note.get("by_step", False)
        steps = (note.get("steps") if is_by_step else None) or [""] * len(places)
        for place, step in zip(places, steps, strict=True):
            found.change(number, LetterKey(place, step), state, value)
    return found


def _notes(path: StoragePath, after_ns: int) -> list[dict[str, Any]]:
    """Return the changes of states after ``after_ns``, in their order: the names of the files are their times."""
    names = [
        (at_ns, directory, match[0])
        for directory in (REDRIVEN, _STATES)
        for match in listed(path / directory, NOTE)
        if (at_ns := int(match[0].removesuffix(".json"))) > after_ns
    ]
    return read_each(read_json, [path / directory / name for _, directory, name in sorted(names)])


def status_of(states: LetterStates, letter: _Letter) -> LetterStatus:
    """Return the state of ``letter``, as :func:`letter_states` has it."""
    key = LetterKey(letter.place, letter.step)
    return LetterStatus(states.state(key) or LetterState.OPEN, states.value(key))


def set_state(path: StoragePath, chosen: Sequence[_Letter], state: LetterState, value: bytes | None = None) -> None:
    """Store that the letters ``chosen`` have ``state``; ``value`` is the payload of a corrected letter."""
    if not chosen:
        return
    places = places_as_json(letter.place for letter in chosen)
    note: dict[str, Any] = {"state": state, **places, "steps": [letter.step for letter in chosen]}
    if value is not None:
        note["value"] = base64.b64encode(value).decode()
    write_json(path / _STATES / f"{time.time_ns()}.json", note)


def places_in(note: Mapping[str, Any]) -> list[RecordPart]:
    """Return the places in ``note``, which :func:`places_as_json` has written. Those of older versions lack the times,
    or also the sources."""
    places = note["places"]
    sources = note.get("sources") or [""] * len(places)
    times = note.get("times_us") or [None] * len(places)
    return [
        place_of(place)._replace(source=source, at_us=at_us)
        for place, source, at_us in zip(places, sources, times, strict=True)
    ]


def place_of(place: Sequence[Any]) -> RecordPart:
    """Return the record or part with the stored coordinates ``place``, without its source and time."""
    topic, broker, partition, offset, *part = place
    return RecordPart((str(topic), int(broker), int(partition), int(offset)), *part)


def places_as_json(places: Iterable[RecordPart]) -> dict[str, Any]:
    """Return the values of a note that store ``places``."""
    stored = list(places)
    return {
        "places": [[*place.record, *([] if place.part is None else [place.part])] for place in stored],
        "sources": [place.source for place in stored],
        "times_us": [place.at_us for place in stored],
    }
