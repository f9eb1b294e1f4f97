"""Test cases of a pipeline file as data: input records, and the expected rows of each sink.

cases:
  - name: a low flow raises the alarm
    keys: {water/limits/main: {low: 70.0, high: 108.0}}
    input:
      - value: {branch: main, time: "2022-03-20T10:00:00Z", flow: 12.5}
      - value: not JSON
    expect:
      readings: [{branch: main, abnormal: low}]
      alarms: {water/alarm/main: {kind: low}, water/alarm/other: null}
    dead_letters: [{step: readings}]
    violations: {quality.plausible: 1}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.errors import ConfigError
from penstock.pipelines.spec.pipeline import Pipeline, plan
from penstock.runtime.config import loader as config

__all__ = ["Case", "Cases", "Difference", "Input", "KeyChange", "Rows", "cases_path", "compare", "lines", "load_cases"]

Rows = list[dict[str, Any]]
Keys = dict[str, Any]

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)")
_CLOSE = 1e-9


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Part):
    """One record of the source. ``value``: text is used unchanged, other values as JSON; or bytes in ``base64``."""

    value: Any = None
    base64: str | None = None
    key: str | None = None
    id: str | None = Field(default=None, description="id of the record; default: a unique id")
    headers: dict[str, str] = Field(default_factory=dict)
    source: str | None = Field(default=None, description="source of the record; default: every source")
    topic: str | None = Field(default=None, description="topic of the record; default: the first topic of the source")
    at: str | None = Field(
        default=None,
        description="append time, ISO 8601; default: now for the first record, then a second after the previous one",
    )

    @model_validator(mode="after")
    def _usable(self) -> Input:
        if self.base64 is not None:
            if self.value is not None:
                raise ValueError("expected value or base64, not both")
            try:
                base64.b64decode(self.base64, validate=True)
            except binascii.Error:
                raise ValueError("expected valid base64") from None
        if self.at is not None and _TIME.fullmatch(self.at) is None:
            raise ValueError("expected `at` to be a time with a time zone, such as 2024-05-01T06:00:00Z")
        return self

    @property
    def payload(self) -> bytes:
        """The bytes of the record."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        if self.value is None:
            return b""
        text = self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)
        return text.encode()

    @property
    def taken_at(self) -> datetime | None:
        """``at`` as a time."""
        return None if self.at is None else datetime.fromisoformat(self.at).astimezone(UTC)


class KeyChange(_Part):
    """A change of a key of the state store. ``value``: as in :class:`Input`; null deletes the key."""

    key: str
    value: Any = None
    at: str = Field(description="time of the change, ISO 8601")

    @model_validator(mode="after")
    def _check_time(self) -> KeyChange:
        if _TIME.fullmatch(self.at) is None:
            raise ValueError("expected `at` to be a time with a time zone, such as 2024-05-01T06:00:00Z")
        return self

    @property
    def time_ms(self) -> int:
        """``at`` in ms since 1970."""
        return int(datetime.fromisoformat(self.at).timestamp() * 1000)


class Case(_Part):
    """Input of a test case and its expected output.

    Sinks that ``expect`` does not name are ignored; dead letters and ``stopped_by`` are always compared. For a row, a
    message, a JSON value or a dead letter, only the named fields are compared. Rows may come in any order.
    """

    name: Annotated[str, Field(min_length=1)]
    keys: Keys = Field(default_factory=dict, description="contents of the state store for enrich steps")
    schemas: dict[int, str] = Field(
        default_factory=dict,
        description="schemas of the registry by id: files, relative to the file of the cases; of Protobuf descriptor "
        "sets, whose last file has the messages",
    )
    changes: list[KeyChange] = Field(
        default_factory=list, description="changes of the state store for as-of joins, in order"
    )
    input: list[Input] = Field(min_length=1)
    expect: dict[str, Rows | Keys] = Field(default_factory=dict)
    dead_letters: Rows = Field(default_factory=list)
    violations: dict[str, int] = Field(
        default_factory=dict,
        description="rows that violate an expectation, by `<step>.<name>`; others are not compared",
    )
    stopped_by: list[str] = Field(
        default_factory=list, description="expectations that would stop the run, because too many rows violate them"
    )


class Cases(_Part):
    """A file of cases."""

    cases: list[Case] = Field(min_length=1)


class Difference(BaseModel):
    """Expected rows that are missing, and unexpected rows (``more``), as lines of text."""

    where: str
    missing: list[str]
    more: list[str]


def cases_path(file: Path) -> Path:
    """Return the path of the test cases for ``file``: ``pipeline.test.yaml`` next to ``pipeline.yaml``."""
    return file.with_name(f"{file.stem}.test.yaml")


def load_cases(path: Path, pipeline: Pipeline) -> list[Case]:
    """Load the test cases of ``pipeline`` in ``path``.

    Raises:
        ConfigError: the file is not readable or invalid, names an unknown sink, or expects keys of a sink with rows.
    """
    found = [_with_schemas(case, path) for case in config.load(path, Cases).cases]
    sinks = {sink.name: sink for sink in pipeline.sinks}
    expectations = [name for sink_plan in plan(pipeline) for name in sink_plan.expectations]
    names: set[str] = set()
    for case in found:
        if case.name in names:
            raise ConfigError(f"{path}: two cases have the name {case.name!r}", hint="give each case a unique name")
        names.add(case.name)
        for name in (*case.violations, *case.stopped_by):
            if name not in expectations:
                raise ConfigError(
                    f"{path}: case {case.name!r} names {name!r}, which is not an expectation",
                    hint=f"use one of {', '.join(expectations)}"
                    if expectations
                    else "add an expect step to the pipeline",
                )
        for name, expected in case.expect.items():
            if name not in sinks:
                raise ConfigError(
                    f"{path}: case {case.name!r} has the key {name!r} in `expect`, which is not a sink",
                    hint=f"use one of {', '.join(sinks)}",
                )
            has_keys = sinks[name].statestore is not None
            if has_keys != isinstance(expected, dict):
                raise ConfigError(
                    f"{path}: case {case.name!r}: sink {name!r} has {'keys' if has_keys else 'rows'}",
                    hint="write {key: value, other: null}" if has_keys else "write a list of rows",
                )
    return found


def _with_schemas(case: Case, path: Path) -> Case:
    """Return ``case`` with the contents of its files of schemas, in base64."""
    schemas = {}
    for schema_id, name in case.schemas.items():
        file = path.parent / name
        try:
            schemas[schema_id] = base64.b64encode(file.read_bytes()).decode()
        except OSError as error:
            raise ConfigError(
                f"{path}: case {case.name!r}: the schema {str(file)!r} cannot be read",
                option="schemas",
                why=error.strerror,
                hint="write the path of a schema, relative to the file of the cases",
            ) from error
    return case.model_copy(update={"schemas": schemas})


def compare(where: str, expected: Rows | Keys, found: Rows | Keys) -> Difference | None:
    """Compare the output with the expectation; None if there are no differences."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        missing, more = _keys(expected, found)
    else:
        assert isinstance(found, list)
        missing, more = _rows(expected, found)
    return Difference(where=where, missing=missing, more=more) if missing or more else None


def _rows(expected: Rows, found: Rows) -> tuple[list[str], list[str]]:
    left = list(found)
    missing = []
    # Expectations with most fields are matched first, so that a less specific one does not take their only match.
    for row in sorted(expected, key=len, reverse=True):
        match = next((other for other in left if _fits(row, other)), None)
        if match is None:
            missing.append(_text(row))
        else:
            left.remove(match)
    return missing, [_text(row) for row in left]


def _keys(expected: Keys, found: Keys) -> tuple[list[str], list[str]]:
    missing, more = [], []
    for key in sorted(expected.keys() | found.keys()):
        wanted, value = expected.get(key), found.get(key)
        if key in expected and _fits(wanted, value):
            continue
        if wanted is None and value is None:
            continue
        if key in expected:
            missing.append(f"{key}: {_text(wanted)}")
        more.append(f"{key}: {_text(value)}")
    return missing, more


def _fits(expected: object, found: object) -> bool:
    """Return True if ``found`` equals ``expected`` or is an object with all of its fields."""
    if isinstance(expected, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and _fits(value, found[name]) for name, value in expected.items()
        )
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return (
            isinstance(found, Sequence)
            and not isinstance(found, str)
            and len(expected) == len(found)
            and all(map(_fits, expected, found))
        )
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return math.isclose(expected, found, rel_tol=_CLOSE)
    if isinstance(expected, str) and isinstance(found, str) and _TIME.fullmatch(expected) and _TIME.fullmatch(found):
        return datetime.fromisoformat(expected) == datetime.fromisoformat(found)
    return expected == found


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


def lines(difference: Difference) -> Iterator[str]:
    """Yield the lines of a diff: ``-`` for missing rows, ``+`` for unexpected rows."""
    yield f"{difference.where}:"
    yield from (f"  - {line}" for line in difference.missing)
    yield from (f"  + {line}" for line in difference.more)
