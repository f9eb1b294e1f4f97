"""A pipeline as data: what the YAML file may say, checked without Spark.

``load`` gives a ``Pipeline`` whose references are known to hold: every step reads one that stands before it, names are
unique, durations are durations. What only Spark can know (a column that does not exist) is found when the pipeline
is built, before anything is read.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.pipelines.values import BrokerUrl, Duration, Expression, KeyTemplate, Name, duration_ms
from penstock.runtime import config

__all__ = [
    "SINK_KINDS",
    "ConsoleSink",
    "DeadLetters",
    "Dedupe",
    "Enrich",
    "Entry",
    "Messages",
    "MqttSink",
    "Parse",
    "Pipeline",
    "Sink",
    "Source",
    "StateStore",
    "StateStoreSink",
    "Step",
    "TableSink",
    "TubeSink",
    "Window",
    "json_schema",
    "load",
]

SOURCE = "source"
"""The name by which a step refers to the records as they come from the source."""


_directory: ContextVar[Path] = ContextVar("directory of the pipeline file", default=Path())
"""Where the file stands that is being read: schema files are found from there."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Source(_Part):
    """Where records come from: topics of a tube, with the options of the ``tubemq`` source."""

    format: Literal["tubemq"] = "tubemq"
    topics: list[str] = Field(min_length=1)
    master: str = Field(default="127.0.0.1:8715", description="tube masters, HOST:PORT[,HOST:PORT]")
    options: dict[str, str | int | bool] = Field(
        default_factory=dict, description="further options of the source, named as Kafka's connector names them"
    )

    def all_options(self) -> dict[str, str]:
        """What the ``tubemq`` source is given: what the file says, and what every pipeline needs of it."""
        given = {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in self.options.items()}
        # Unlike a bare stream: a pipeline that is set up after the first record came should have that one too.
        starting = {} if "startingoffsets" in map(str.lower, given) else {"startingOffsets": "earliest"}
        return {
            **starting,
            **given,
            "tubemq.master": self.master,
            "subscribe": ",".join(self.topics),
            "includeHeaders": "true",
        }


class StateStore(_Part):
    """The MQTT broker that the state store answers on."""

    broker: BrokerUrl = "mqtt://127.0.0.1:1883"


class Parse(_Part):
    """The payload as columns: one JSON object, one line of CSV, or as it is (``raw``).

    A record that is not of the format, or lacks a ``NOT NULL`` column, becomes a dead letter.
    """

    format: Literal["json", "csv", "raw"] = "json"
    columns: Annotated[str | None, Field(min_length=1, alias="schema")] = Field(
        default=None, description="columns in DDL: name TYPE [NOT NULL], ...; for raw one column, STRING or BINARY"
    )
    schema_file: str | None = Field(
        default=None, min_length=1, description="the same in a file, found from the directory of the pipeline file"
    )
    delimiter: str | None = Field(
        default=None, min_length=1, max_length=1, description="what separates the columns of CSV; a comma when left out"
    )

    @property
    def ddl(self) -> str:
        """The columns, wherever they were given."""
        assert self.columns is not None, "checked when the file was read"
        return self.columns

    @model_validator(mode="after")
    def _one_schema(self) -> Parse:
        if (self.columns is None) == (self.schema_file is None):
            raise ValueError("expected exactly one of schema, schema_file")
        if self.delimiter is not None and self.format != "csv":
            raise ValueError("expected delimiter only with `format: csv`")
        if self.schema_file is None:
            return self
        path = _directory.get() / self.schema_file
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a readable file of columns in schema_file: {error}") from None
        if not text.strip():
            raise ValueError(f"expected columns in {str(path)!r}, it is empty")
        return self.model_copy(update={"columns": text})


class Enrich(_Part):
    """The JSON value of a state store key, as a struct column; null where the key is missing."""

    key: KeyTemplate
    into: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", alias="as")]
    columns: Annotated[str, Field(min_length=1, alias="schema")]
    missing: Literal["pass", "dead_letter"] = "pass"
    refresh: Duration = "5 seconds"


class Dedupe(_Part):
    """One record of each key.

    ``arrival`` compares the times at which the tube took the records, so that events that are late are kept. ``event``
    stands before a window and uses its time and watermark, since one query has one watermark.
    """

    key: str = "id"
    on: Literal["arrival", "event"] = "arrival"
    within: Duration | None = Field(default=None, description="how far apart two copies may arrive; with `on: arrival`")

    @model_validator(mode="after")
    def _within_where_it_counts(self) -> Dedupe:
        if (self.on == "arrival") != (self.within is not None):
            raise ValueError("expected `within: <duration>` with `on: arrival`, and only there")
        return self


class Window(_Part):
    """Statistics of windows in event time, for each group.

    ``duration`` alone makes tumbling windows, with ``slide`` sliding ones; ``gap`` makes sessions, which end when a
    group had no event for so long. ``emit: changes`` brings a window out whenever it changes; ``closed`` once, when the
    watermark has passed its end, which is the only way for sessions, and for a table.
    """

    time: str
    duration: Duration | None = None
    slide: Duration | None = Field(default=None, description="how far apart windows start; not longer than `duration`")
    gap: Duration | None = Field(default=None, description="instead of `duration`: how long a pause ends a session")
    watermark: Duration = Field(description="how long after the latest event time seen an event still counts")
    by: list[str] = Field(default_factory=list)
    aggregates: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Expression] = Field(min_length=1)
    emit: Literal["changes", "closed"] | None = Field(
        default=None, description="`changes` when left out, `closed` for sessions"
    )

    @property
    def only_closed(self) -> bool:
        """Whether each window comes out once, when it is complete."""
        return self.emit == "closed" or self.gap is not None

    @model_validator(mode="after")
    def _one_kind_of_window(self) -> Window:
        if (self.duration is None) == (self.gap is None):
            raise ValueError("expected exactly one of duration, gap")
        if self.slide is not None:
            if self.duration is None:
                raise ValueError("expected slide only beside duration")
            if duration_ms(self.slide) > duration_ms(self.duration):
                raise ValueError("expected slide no longer than duration: events between two windows would be lost")
        if self.gap is not None and self.emit == "changes":
            raise ValueError("expected `emit: closed`: Spark brings sessions out when they are closed only")
        return self


STEP_KINDS = ("parse", "sql", "filter", "enrich", "dedupe", "window")


class Step(_Part):
    """One step: a name, what it reads (default: the step before it), and exactly one of the kinds."""

    name: Name
    source: Annotated[str | None, Field(alias="from")] = None
    parse: Parse | None = None
    sql: Expression | None = Field(default=None, description="SELECT expressions FROM <the step it reads>")
    filter: Expression | None = Field(default=None, description="rows for which this is not true are counted and left")
    enrich: Enrich | None = None
    dedupe: Dedupe | None = None
    window: Window | None = None

    @property
    def kind(self) -> str:
        """Which of the kinds this step is."""
        return next(kind for kind in STEP_KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _one_kind(self) -> Step:
        given = [kind for kind in STEP_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one of {', '.join(STEP_KINDS)}, found {found}")
        return self


class TableSink(_Part):
    """A Parquet table with a commit log: exactly once for readers that honour the log."""

    format: Literal["parquet"] = "parquet"
    path: str = Field(min_length=1)


class Entry(_Part):
    """What one row does in the state store: SET where ``when`` holds, DEL where it does not."""

    key: KeyTemplate
    when: Expression = "true"
    value: list[str] | None = Field(default=None, description="columns of the JSON value; all when left out")


class StateStoreSink(_Part):
    """Rows into the state store, fenced with the lease of the run; in the order of ``order_by``."""

    entries: list[Entry] = Field(min_length=1)
    order_by: str | None = None
    fence_prefixes: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="starts of keys that only this pipeline writes, from now on and for good: missing keys are fenced "
        "there too (needs the store's extension prefix-fence)",
    )


class Messages(_Part):
    """What rows are as messages, for sinks of brokers. At least once: every copy of a message has the same id.

    The id is that of the source's record and ``<pipeline>.<sink>``; of a window: group, window, sink and batch.
    """

    topic: KeyTemplate
    value: list[str] | str | None = Field(
        default=None, description="columns of the JSON value, all when left out; or one column, as it is"
    )
    when: Expression = Field(default="true", description="rows for which this is not true are counted and left")
    order_by: str | None = Field(default=None, description="column in whose order a batch is sent, by one task")


class TubeSink(Messages):
    """Rows as records of a tube. A row without a topic or a value becomes a dead letter."""

    master: str | None = Field(default=None, description="tube masters; those of the source when left out")
    key: KeyTemplate | None = Field(default=None, description="equal keys go to one partition, in order")
    headers: dict[str, KeyTemplate] = Field(default_factory=dict)


class MqttSink(Messages):
    """Rows as MQTT messages. A row whose topic is null, or cannot be published to, becomes a dead letter."""

    broker: BrokerUrl | None = Field(
        default=None, description="URL of the broker; that of the state store when left out"
    )
    qos: Literal[1, 2] = 1
    retain: bool = False
    properties: dict[str, KeyTemplate] = Field(default_factory=dict, description="user properties")


class ConsoleSink(_Part):
    """Rows to look at: the first of each batch, as lines of JSON on standard output."""

    rows: int = Field(default=20, ge=1, le=1_000)


SINK_KINDS = ("table", "statestore", "tubemq", "mqtt", "console")


class Sink(_Part):
    """Where rows go: a name, what it reads (default: the last step), and exactly one of the kinds."""

    name: Name
    source: Annotated[str | None, Field(alias="from")] = None
    table: TableSink | None = None
    statestore: StateStoreSink | None = None
    tubemq: TubeSink | None = None
    mqtt: MqttSink | None = None
    console: ConsoleSink | None = None

    @property
    def kind(self) -> str:
        """Which of the kinds this sink is."""
        return next(kind for kind in SINK_KINDS if getattr(self, kind) is not None)

    @property
    def messages(self) -> TubeSink | MqttSink | None:
        """The sink as one of messages, where it is."""
        return self.tubemq if self.tubemq is not None else self.mqtt

    @model_validator(mode="after")
    def _one_kind(self) -> Sink:
        given = [kind for kind in SINK_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one of {', '.join(SINK_KINDS)}, found {found}")
        return self


class DeadLetters(_Part):
    """The Parquet table of records that could not be processed: reason, coordinates, headers, original bytes."""

    path: str = Field(min_length=1)


class Pipeline(_Part):
    """One pipeline file."""

    name: Name
    source: Source
    statestore: StateStore = StateStore()
    trigger: Duration = Field(default="500 milliseconds", description="how often new records are looked for")
    steps: list[Step] = Field(default_factory=list)
    sinks: list[Sink] = Field(min_length=1)
    dead_letters: DeadLetters | None = None

    @model_validator(mode="after")
    def _references_hold(self) -> Pipeline:
        # Imported here: the checks read the model.
        from penstock.pipelines.check import problems_as_error

        error = problems_as_error(self)
        if error is not None:
            raise error
        return self


def load(path: Path | str) -> Pipeline:
    """The pipeline of the file at ``path``, with ``${VAR:-default}`` filled in from the environment.

    Raises:
        ConfigError: names file, line, column and option, what stands there and what is accepted.
    """
    before = _directory.set(Path(path).parent)
    try:
        return config.load(path, Pipeline)
    finally:
        _directory.reset(before)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the pipeline file, for editors."""
    schema = Pipeline.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # A plain copy: pydantic shares parts between calls.
    return json.loads(json.dumps(schema))  # type: ignore[no-any-return]
