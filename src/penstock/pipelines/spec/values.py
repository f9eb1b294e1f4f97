"""Shared parts of the models: a frozen base class that rejects unknown keys; durations, key templates, paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.mqtt.url import SCHEMES, parse_broker_url
from penstock.spark.files.object_storage import StoragePath, endpoint_url, is_object_url, storage_path

__all__ = [
    "BROKER_VARIABLE",
    "MASTER_VARIABLE",
    "REDRIVE",
    "REDRIVE_ID",
    "REDRIVE_PARTS",
    "REDRIVE_STEP",
    "SOURCE_LOGIN",
    "STORE_LOGIN",
    "BrokerUrl",
    "Column",
    "DataDirectory",
    "Duration",
    "Expression",
    "FieldPath",
    "KeyTemplate",
    "Name",
    "NewColumn",
    "Part",
    "Stream",
    "TemplatePart",
    "apply_key",
    "directory",
    "duration_ms",
    "is_uri",
    "late_of",
    "lease_key",
    "names_setting",
    "place_of",
    "quoted_name",
    "run_key",
    "schema_content",
    "sink_letter",
    "stop_key",
    "template_parts",
    "transaction_id",
]

directory: ContextVar[Path] = ContextVar("directory of the pipeline file", default=Path())
"""Directory of the pipeline file; paths of schema files are relative to it."""


class Part(BaseModel):
    """One part of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DataDirectory(Part):
    """A directory, also in a bucket. A subclass describes its ``path``."""

    path: str
    endpoint: Annotated[str, AfterValidator(endpoint_url)] | None = Field(
        default=None, description="URL of the storage with `path: s3://...`; default: `AWS_ENDPOINT_URL`, or AWS"
    )
    region: str | None = Field(
        default=None, min_length=1, description="region of the bucket; default: `AWS_REGION`, or us-east-1"
    )

    @property
    def location(self) -> StoragePath:
        """The directory; not of a URI of another kind, which only Spark can access.

        Raises:
            ConfigError: it is a URL without a bucket or a key, or AWS_ENDPOINT_URL is not a URL.
        """
        return self.location_of(self.path)

    def location_of(self, path: str) -> StoragePath:
        """Return the location of ``path``, which it had before."""
        return storage_path(path, self.endpoint, self.region)

    @model_validator(mode="after")
    def _check_bucket(self) -> Self:
        if (self.endpoint or self.region) and not is_object_url(self.path):
            raise ValueError("expected endpoint and region only with `path: s3://bucket/key`")
        if is_object_url(self.path):
            try:
                self.location_of(self.path)
            except ConfigError as error:
                raise ValueError(f"{error.what}; {error.hint}") from None
        return self


def schema_content(file: str) -> bytes:
    """Return the content of the schema ``file`` of the pipeline file that is being read.

    Raises:
        ValueError: it cannot be read, or is empty; the text begins with "expected".
    """
    path = directory.get() / file
    try:
        found = path.read_bytes()
    except OSError as error:
        raise ValueError(f"expected a readable schema_file: {error}") from None
    if not found.strip():
        raise ValueError(f"expected columns in {str(path)!r}, the file is empty")
    return found


_UNITS_MS = {"millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_DURATION = re.compile(r"(?P<count>[1-9][0-9]{0,8}) (?P<unit>" + "|".join(_UNITS_MS) + r")s?")
_PIECE = re.compile(r"\{\{|\}\}|\{(?P<column>[^{}]*)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

REDRIVE = "penstock.redrive"
"""Header of a redriven dead letter: number of redrives."""
REDRIVE_STEP = "penstock.redrive.step"
"""Header of a redriven dead letter: steps and sinks that could not process it, comma-separated."""
REDRIVE_PARTS = "penstock.redrive.parts"
"""Header of a redriven dead letter of parts of a record: the parts (``each.1``), comma-separated."""
REDRIVE_ID = "penstock.redrive.id"
"""Header of a dead letter that was redriven to Kafka: identifies this copy of the record."""
EXACT_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of Spark's JSON and CSV, which by default cut off microseconds."""
_LATE = "late"
MAX_KEY_TEMPLATE = 1_024
"""Maximum length of a key template; the state store itself accepts longer keys."""


def duration_ms(text: str) -> int:
    """Convert a duration, such as ``3 hours``, ``500 milliseconds`` or ``1 day``, to milliseconds.

    The grammar is Spark's, since Spark parses the same text: one number and one unit of at most a day. Months and years
    have no fixed length, so they cannot be compared with a watermark.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a duration such as '10 minutes' or '3 hours' (units: {', '.join(_UNITS_MS)})")
    return int(match["count"]) * _UNITS_MS[match["unit"]]


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|file:")


def is_uri(path: str) -> bool:
    """Return True if ``path`` is a URI, such as ``hdfs://host/table`` or ``s3://bucket/table``."""
    return _URI.match(path) is not None


def place_of(path: str) -> str:
    """Return one name for all paths and URIs of the same directory: absolute, ``s3`` for ``s3a``, no slash at its
    end."""
    if is_uri(path):
        return re.sub("^s3a:", "s3:", path).rstrip("/")
    return os.path.abspath(path)  # noqa: PTH100 - it resolves `..` without links


def _broker_url(text: str) -> str:
    try:
        parse_broker_url(text)
    except ConfigError as error:
        raise ValueError(f"{error.what}; {error.hint or error.why}") from None
    return text


BrokerUrl = Annotated[
    str, AfterValidator(_broker_url), Field(json_schema_extra={"pattern": f"^({'|'.join(SCHEMES)})://|^[^/]+:[0-9]+$"})
]
"""URL of an MQTT broker, or HOST:PORT; the pattern is for editors."""

BROKER_VARIABLE = "PENSTOCK_BROKER"
MASTER_VARIABLE = "PENSTOCK_TUBE_MASTER"
"""Environment variables with the addresses of a pipeline whose file does not set them."""

STORE_LOGIN: Final = "statestore.username and statestore.password_file"
SOURCE_LOGIN: Final = "tubemq.user and tubemq.passwordFile in the options of the source"
_LOGIN_REFUSED: Final = (0x86, 0x87, 415)
"""Reason codes of MQTT's CONNACK for a wrong password and a client that is not authorized; error code of TubeMQ."""


@contextmanager
def names_setting(setting: str, variable: str, login: str) -> Iterator[None]:
    """Add a hint to errors of an unreachable server: the ``setting`` in the pipeline file that has the address.

    ``variable`` is the environment variable that is used without the setting. ``login``: the settings of the
    credentials, for a server that refuses them.
    """
    try:
        yield
    except UnavailableError as error:
        settings = f"its address is {setting} in the pipeline file, otherwise {variable}"
        error.hint = settings if error.hint is None else f"{error.hint}; {settings}"
        raise
    except RefusedError as error:
        if error.code in _LOGIN_REFUSED:
            error.hint = f"set the credentials in the pipeline file: {login}"
        raise


def transaction_id(sink: str, query: str) -> str:
    """Return the id for Delta transactions of ``query`` (the id in its checkpoint) of ``sink``."""
    return f"penstock/{sink}/{query}"


def lease_key(pipeline: str) -> str:
    """Return the state store key of the lease of ``pipeline``."""
    return f"penstock/pipeline/{pipeline}/lease"


def run_key(pipeline: str) -> str:
    """Return the key of the status that the run of ``pipeline`` publishes."""
    return f"penstock/pipeline/{pipeline}/run"


def stop_key(pipeline: str) -> str:
    """Return the key for requests to stop a run of ``pipeline``."""
    return f"penstock/pipeline/{pipeline}/stop"


def apply_key(pipeline: str) -> str:
    """Return the key for requests to put another version of ``pipeline`` into operation, and their answers."""
    return f"penstock/pipeline/{pipeline}/apply"


def late_of(stream: str) -> str | None:
    """Return the window step if ``stream`` is the name of its late records, otherwise None."""
    name, dot, what = stream.partition(".")
    return name if dot and what == _LATE else None


def sink_letter(sink: str) -> str:
    """Return the step name in the dead letters of a sink, which no step can have."""
    return f"sink:{sink}"


class TemplatePart(NamedTuple):
    """One part of a key template: literal text, or the value of a column."""

    text: str
    column: bool


def template_parts(template: str) -> list[TemplatePart]:
    """Split ``water/limits/{branch}`` into text and columns; ``{{`` and ``}}`` are literal braces."""
    found: list[TemplatePart] = []
    for match in _PIECE.finditer(template):
        if match["stray"] is not None:
            raise ValueError(f"expected matching braces in {template!r}; write {{{{ or }}}} for a literal brace")
        column = match["column"]
        if column is None:
            text = match["text"] or match[0][0]
            if found and not found[-1].column:
                text = found.pop().text + text
            found.append(TemplatePart(text, column=False))
        elif _COLUMN.fullmatch(column):
            found.append(TemplatePart(column, column=True))
        else:
            raise ValueError(f"expected a column name between the braces of {template!r}, found {column!r}")
    return found


def quoted_name(name: str) -> str:
    """Return ``name`` as it is written in DDL."""
    return name if re.fullmatch("[A-Za-z_0-9]+", name) else "`" + name.replace("`", "``") + "`"


def _checked_duration(text: str) -> str:
    duration_ms(text)
    return text


def _checked_template(text: str) -> str:
    template_parts(text)
    return text


@dataclass(frozen=True, slots=True)
class _TextPattern:
    """Text that matches ``pattern``; ``words`` describe it in errors."""

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
_NAME_WORDS = "a lowercase letter, then lowercase letters, digits, _ or -, at most 63 characters"
Name = Annotated[str, _TextPattern(_NAME, f"a name: {_NAME_WORDS}")]
Stream = Annotated[
    str, _TextPattern(rf"{_NAME}(\.{_LATE})?", f"the name of a step, or <window step>.{_LATE}: {_NAME_WORDS}")
]
_WORD = "[A-Za-z][A-Za-z0-9_]*"
NewColumn = Annotated[
    str, _TextPattern("[A-Za-z_][A-Za-z0-9_]*", "a column name: letters, digits and _, not starting with a digit")
]
FieldPath = Annotated[
    str,
    _TextPattern(rf"{_WORD}(\.{_WORD})*", "a column, or a struct field such as limits.low, that starts with a letter"),
]
Column = Annotated[str, _TextPattern(r"[^_](.|\s)*", "a column name that does not start with _, which is reserved")]
Expression = Annotated[str, Field(min_length=1)]
