"""Shared parts of the models: a frozen base that refuses unknown names; durations, keys, paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from penstock.errors import ConfigError, UnavailableError
from penstock.mqtt.url import SCHEMES, parse_broker_url

__all__ = [
    "BROKER_VARIABLE",
    "MASTER_VARIABLE",
    "REDRIVE",
    "REDRIVE_STEP",
    "BrokerUrl",
    "Column",
    "Duration",
    "Expression",
    "FieldPath",
    "KeyTemplate",
    "Name",
    "NewColumn",
    "Part",
    "Piece",
    "Stream",
    "directory",
    "duration_ms",
    "late_of",
    "lease_key",
    "names_setting",
    "pieces",
    "run_key",
    "sink_letter",
    "stop_key",
    "transaction_id",
]

directory: ContextVar[Path] = ContextVar("directory of the pipeline file", default=Path())
"""Directory of the file that is being read; paths of schema files are relative to it."""


class Part(BaseModel):
    """One part of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


_UNITS_MS = {"millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_DURATION = re.compile(r"(?P<count>[1-9][0-9]{0,8}) (?P<unit>" + "|".join(_UNITS_MS) + r")s?")
_PIECE = re.compile(r"\{\{|\}\}|\{(?P<column>[^{}]*)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

REDRIVE = "penstock.redrive"
"""Header of a dead letter that was sent again: how often."""
REDRIVE_STEP = "penstock.redrive.step"
"""Header of a dead letter that was sent again: which step, or sink, could not process it."""
_LATE = "late"
MAX_KEY_TEMPLATE = 1_024
"""Longer than any key that people read; the store itself takes longer ones."""


def duration_ms(text: str) -> int:
    """Milliseconds of ``3 hours``, ``500 milliseconds``, ``1 day``: a count and one unit up to days.

    Months and years are left out on purpose: they have no fixed length, so no watermark could be compared with them.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a duration such as '10 minutes' or '3 hours' (units: {', '.join(_UNITS_MS)})")
    return int(match["count"]) * _UNITS_MS[match["unit"]]


def _broker_url(text: str) -> str:
    try:
        parse_broker_url(text)
    except ConfigError as error:
        raise ValueError(f"{error.what}; {error.do or error.why}") from None
    return text


BrokerUrl = Annotated[
    str, AfterValidator(_broker_url), Field(json_schema_extra={"pattern": f"^({'|'.join(SCHEMES)})://|^[^/]+:[0-9]+$"})
]
"""The URL of an MQTT broker, or HOST:PORT; the pattern is for editors."""

BROKER_VARIABLE = "PENSTOCK_BROKER"
MASTER_VARIABLE = "PENSTOCK_TUBE_MASTER"
"""Environment variables with the addresses of a pipeline whose file has none."""


@contextmanager
def names_setting(setting: str, variable: str) -> Iterator[None]:
    """Have errors of an unreachable server say which ``setting`` of the pipeline file has its address.

    ``variable`` is the environment variable that counts without the setting.
    """
    try:
        yield
    except UnavailableError as error:
        settings = f"its address is {setting} in the pipeline file, else {variable}"
        error.do = settings if error.do is None else f"{error.do}; {settings}"
        raise


def transaction_id(sink: str, query: str) -> str:
    """Under which id the ``query`` (the id in its checkpoint) of ``sink`` writes transactions of Delta tables."""
    return f"penstock/{sink}/{query}"


def lease_key(pipeline: str) -> str:
    """The state store key that a run of ``pipeline`` holds while it runs."""
    return f"penstock/pipeline/{pipeline}/lease"


def run_key(pipeline: str) -> str:
    """Key of the status that the run with the lease of ``pipeline`` publishes."""
    return f"penstock/pipeline/{pipeline}/run"


def stop_key(pipeline: str) -> str:
    """Key of the request to stop a run of ``pipeline``."""
    return f"penstock/pipeline/{pipeline}/stop"


def late_of(stream: str) -> str | None:
    """The window step whose late records ``stream`` names; None where it is the name of a step."""
    name, dot, what = stream.partition(".")
    return name if dot and what == _LATE else None


def sink_letter(sink: str) -> str:
    """Step name in the dead letters of a sink; no step can have this name."""
    return f"sink:{sink}"


class Piece(NamedTuple):
    """One part of a key template: literal text, or the value of a column."""

    text: str
    column: bool


def pieces(template: str) -> list[Piece]:
    """Split ``water/limits/{branch}`` into text and columns; ``{{`` and ``}}`` stand for the braces themselves."""
    found: list[Piece] = []
    for match in _PIECE.finditer(template):
        if match["stray"] is not None:
            raise ValueError(
                f"expected every brace in {template!r} to be paired; write {{{{ or }}}} for a brace itself"
            )
        column = match["column"]
        if column is None:
            text = match["text"] or match[0][0]
            if found and not found[-1].column:
                text = found.pop().text + text
            found.append(Piece(text, column=False))
        elif _COLUMN.fullmatch(column):
            found.append(Piece(column, column=True))
        else:
            raise ValueError(f"expected the name of a column between the braces of {template!r}, found {column!r}")
    return found


def _checked_duration(text: str) -> str:
    duration_ms(text)
    return text


def _checked_template(text: str) -> str:
    pieces(text)
    return text


@dataclass(frozen=True, slots=True)
class _Form:
    """Text of a form: the ``pattern`` is for editors, ``words`` are for people."""

    pattern: str
    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}

    def _checked(self, text: str) -> str:
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"expected {self.words}")
        return text


Duration = Annotated[
    str, AfterValidator(_checked_duration), Field(json_schema_extra={"pattern": f"^{_DURATION.pattern}$"})
]
KeyTemplate = Annotated[str, Field(min_length=1, max_length=MAX_KEY_TEMPLATE), AfterValidator(_checked_template)]
_NAME = "[a-z][a-z0-9_-]{0,62}"
_NAME_WORDS = "a small letter first, then small letters, digits, _ or -, up to 63 in all"
Name = Annotated[str, _Form(_NAME, f"a name: {_NAME_WORDS}")]
Stream = Annotated[str, _Form(rf"{_NAME}(\.{_LATE})?", f"the name of a step, or <window step>.{_LATE}: {_NAME_WORDS}")]
_WORD = "[A-Za-z][A-Za-z0-9_]*"
NewColumn = Annotated[
    str, _Form("[A-Za-z_][A-Za-z0-9_]*", "the name of a column: letters, digits and _, no digit first")
]
FieldPath = Annotated[
    str,
    _Form(rf"{_WORD}(\.{_WORD})*", "a column, or a field of a struct such as limits.low, that begins with a letter"),
]
Column = Annotated[
    str, _Form(r"[^_](.|\s)*", "the name of a column that does not begin with _, which are the pipeline's")
]
Expression = Annotated[str, Field(min_length=1)]
