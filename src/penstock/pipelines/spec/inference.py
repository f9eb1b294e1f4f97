"""Infer the columns of a parse step from samples: JSON objects, one per line or record.

Each place of the samples (a column, a field, the elements of an array) counts the kinds of its values, and keeps an
example of each with its place. The type is the narrowest one that holds all values; if there is none, it is STRING, as
which JSON values of any kind can be read, and a note says which kinds were found where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from penstock.errors import shortened
from penstock.pipelines.spec.columns import RESERVED
from penstock.pipelines.spec.values import quoted_name
from penstock.spark.option_parsing import json_value

__all__ = ["InferredColumn", "InferredSchema", "infer", "infer_samples"]

_MAX_DEPTH = 20
"""Objects and arrays below are read as text."""
_LONG = 1 << 63
_KINDS = {
    "boolean": "BOOLEAN",
    "integer": "BIGINT",
    "large": "DECIMAL(38, 0)",
    "fraction": "DOUBLE",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "local": "TIMESTAMP_NTZ",
    "text": "STRING",
    "deep": "STRING",
}
_WORDS = {
    "boolean": "a boolean",
    "integer": "an integer",
    "large": "an integer of more than 64 bits",
    "fraction": "a number with a fraction",
    "date": "a date",
    "timestamp": "a time with a time zone",
    "local": "a time without a time zone",
    "text": "a text",
    "object": "an object",
    "array": "an array",
    "deep": f"a value below {_MAX_DEPTH} levels",
}
_COMMON = {
    frozenset({"integer", "large"}): "DECIMAL(38, 0)",
    frozenset({"integer", "fraction"}): "DOUBLE",
    frozenset({"integer", "large", "fraction"}): "DOUBLE",
    frozenset({"large", "fraction"}): "DOUBLE",
}
"""Types of columns with values of several kinds."""
_TEXTS = frozenset({"text", "date", "timestamp", "local"})


class InferredColumn(NamedTuple):
    """A column; ``notes`` explain what the samples leave open, or contradict."""

    name: str
    type: str
    nullable: bool
    notes: tuple[str, ...]

    def ddl(self, *, nullable: bool) -> str:
        """Return the column as in a schema; ``nullable``: without NOT NULL."""
        return f"{quoted_name(self.name)} {self.type}{'' if nullable or self.nullable else ' NOT NULL'}"


class InferredSchema(NamedTuple):
    """The columns of ``samples`` JSON objects; ``refused`` samples were none, ``example`` is the first of them."""

    columns: tuple[InferredColumn, ...]
    notes: tuple[str, ...]
    samples: int
    refused: int
    example: str

    def ddl(self, *, nullable: bool) -> str:
        """Return the columns as a schema file, with the notes as comments; ``nullable``: without NOT NULL."""
        lines = [_comment(note) for note in self.notes]
        for place, column in enumerate(self.columns, 1):
            lines += [_comment(note) for note in column.notes]
            lines.append(f"{column.ddl(nullable=nullable)}{',' if place < len(self.columns) else ''}")
        return "\n".join(lines) + "\n"


def _comment(note: str) -> str:
    # A name in it may have a line break, which would end the comment.
    return f"-- {' '.join(note.splitlines())}"


@dataclass(slots=True)
class _Place:
    """Values at one place of the samples."""

    values: int = 0
    nulls: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    fields: dict[str, _Place] = field(default_factory=dict)
    items: _Place | None = None

    def add(self, value: object, place: str, depth: int) -> None:
        """Count ``value``, which is in the sample at ``place``."""
        self.values += 1
        if value is None:
            self.nulls += 1
            return
        kind = _kind(value) if depth < _MAX_DEPTH else "deep"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if kind not in self.examples:
            self.examples[kind] = f"{place}: {shortened(json.dumps(value, ensure_ascii=False, default=str), 40)}"
        if kind == "object" and isinstance(value, dict):
            for name, inner in value.items():
                self.fields.setdefault(name, _Place()).add(inner, place, depth + 1)
        if kind == "array" and isinstance(value, list):
            self.items = self.items or _Place()
            for inner in value:
                self.items.add(inner, place, depth + 1)

    def type(self, path: str, notes: list[str]) -> str:
        """Return the type for all values; adds to ``notes`` what a reader must know about the place ``path``."""
        kinds = frozenset(self.kinds)
        if not kinds:
            notes.append(f"{path} is always null; STRING is a guess")
            return "STRING"
        if kinds == {"object"}:
            return self._struct(path, notes)
        if kinds == {"array"}:
            if self.items is None or not self.items.values:
                notes.append(f"{path} is always empty; the type of its elements is a guess")
                return "ARRAY<STRING>"
            return f"ARRAY<{self.items.type(f'{path}[]', notes)}>"
        if len(kinds) == 1:
            return _KINDS[next(iter(kinds))]
        if found := _COMMON.get(kinds):
            return found
        if not kinds <= _TEXTS:
            counted = sorted(self.kinds.items(), key=lambda each: -each[1])
            shown = "; ".join(f"{_WORDS[kind]} in {count} ({self.examples[kind]})" for kind, count in counted)
            notes.append(f"{path} has values of several kinds, so it is STRING: {shown}")
        return "STRING"

    def _struct(self, path: str, notes: list[str]) -> str:
        fields = [
            f"{quoted_name(name)}: {inner.type(f'{path}.{name}', notes)}"
            for name, inner in _distinct(self.fields, path, notes)
        ]
        if not fields:
            notes.append(f"{path} has no fields; it is read as text")
            return "STRING"
        return f"STRUCT<{', '.join(fields)}>"


def infer(lines: Iterable[str]) -> InferredSchema:
    """Infer columns from ``lines`` of JSON."""
    return infer_samples((f"line {number}", line) for number, line in enumerate(lines, 1))


def infer_samples(samples: Iterable[tuple[str, str]]) -> InferredSchema:
    """Infer columns from ``samples``, each a place for people and JSON; empty ones are skipped.

    A column is not nullable if it is in all samples, and never null.
    """
    whole = _Place()
    refused, example = 0, ""
    for at, text in samples:
        if not text.strip():
            continue
        try:
            value = json_value(text)
        except ValueError as error:
            refused += 1
            example = example or f"{at}: {error}"
            continue
        if not isinstance(value, dict):
            refused += 1
            example = example or f"{at} is not a JSON object"
            continue
        whole.add(value, at, 0)
    notes: list[str] = []
    columns = []
    for name, place in _distinct(whole.fields, "", notes):
        own: list[str] = []
        kind = place.type(name, own)
        columns.append(InferredColumn(name, kind, place.values < whole.values or place.nulls > 0, tuple(own)))
    return InferredSchema(tuple(columns), tuple(notes), whole.values, refused, example)


def _distinct(fields: dict[str, _Place], path: str, notes: list[str]) -> list[tuple[str, _Place]]:
    """Return the fields that can be columns (without ``path``) or fields of a struct."""
    found: dict[str, str] = {}
    chosen = []
    for name, place in fields.items():
        shown = f"{path}.{name}" if path else name
        if not name or (not path and name.startswith(RESERVED)):
            notes.append(f"{shown!r} is left out: names of columns are not empty, and do not start with {RESERVED!r}")
        elif name.lower() in found:
            notes.append(f"{shown!r} is left out: Spark does not distinguish it from {found[name.lower()]!r}")
        else:
            found[name.lower()] = name
            chosen.append((name, place))
    return chosen


# Python accepts more than Spark, such as weeks and a comma before the fraction.
_DATE_OR_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?P<time>T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?P<zone>Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -_LONG <= value < _LONG else "large" if abs(value) < 10**38 else "fraction"
    if isinstance(value, float):
        return "fraction"
    if isinstance(value, str):
        return _kind_of_text(value)
    return "object" if isinstance(value, dict) else "array"


def _kind_of_text(text: str) -> str:
    """Return ``date``, ``timestamp`` or ``local`` for ISO 8601 in its long form, otherwise ``text``."""
    found = _DATE_OR_TIME.fullmatch(text)
    if found is None:
        return "text"
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return "text"
    return "date" if found["time"] is None else "local" if found["zone"] is None else "timestamp"
