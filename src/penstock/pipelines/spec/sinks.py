"""The sinks of a pipeline file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.pipelines.spec.sources import Options, named_options
from penstock.pipelines.spec.values import BrokerUrl, Expression, KeyTemplate, Name, Part, Stream
from penstock.spark.login_options import LOGIN_OPTIONS

__all__ = [
    "LARGEST_RECORD",
    "SINK_KINDS",
    "ConsoleSink",
    "Entry",
    "Messages",
    "MqttSink",
    "Sink",
    "StateStoreSink",
    "TableSink",
    "TubeSink",
]


LARGEST_RECORD = 1 << 20
"""Bytes of a record's value that every topic of a tube takes [TubeMQ: maxMsgSizeInMB is 1 or more]."""


class TableSink(Part):
    """A table: Parquet with a commit log, exactly once for readers that honour the log; or Delta, for all its readers.

    Delta's jars are set up once (`make jars`). A Delta table may be merged by key: then windows that change may go into
    it, and the last row of a key is the one that stays.
    """

    format: Literal["parquet", "delta"] = "parquet"
    path: str = Field(min_length=1)
    mode: Literal["append", "merge"] = Field(default="append", description="`merge`, by `keys`, only of Delta")
    keys: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, description="columns, with `merge`")
    order_by: str | None = Field(
        default=None, description="with `merge`: the column by which one of several rows of a batch and key is the last"
    )

    @model_validator(mode="after")
    def _what_goes_together(self) -> TableSink:
        if self.mode == "merge" and self.format != "delta":
            raise ValueError("expected `format: delta` beside `mode: merge`")
        if (self.mode == "merge") != bool(self.keys):
            raise ValueError("expected keys with `mode: merge`, and only there")
        if self.order_by is not None and self.mode != "merge":
            raise ValueError("expected order_by only with `mode: merge`")
        return self


class Entry(Part):
    """Write of one row to the state store: SET if ``when`` holds, DEL if it does not."""

    key: KeyTemplate
    when: Expression = "true"
    value: list[str] | None = Field(default=None, description="columns of the JSON value; all when left out")


class StateStoreSink(Part):
    """Rows into the state store, fenced with the lease of the run; in the order of ``order_by``."""

    entries: list[Entry] = Field(min_length=1)
    order_by: str | None = None
    fence_prefixes: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="starts of keys that only this pipeline writes, from now on and for good: missing keys are fenced "
        "there too (needs the store's extension prefix-fence)",
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="largest value, in bytes; a row with a larger one becomes a dead letter. Left out: as much as the "
        "store takes, whose refusal ends the run",
    )


class Messages(Part):
    """Rows as messages of a broker. At least once: every copy of a message has the same id.

    The id is that of the source's record and ``<pipeline>.<sink>``; of a window: group, window, sink and batch.
    """

    topic: KeyTemplate
    value: list[str] | str | None = Field(
        default=None, description="columns of the JSON value, all when left out; or one column, as it is"
    )
    when: Expression = Field(default="true", description="rows for which this is not true are counted and left")
    order_by: str | None = Field(default=None, description="column in whose order a batch is sent, by one task")
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="largest value, in bytes; a row with a larger one becomes a dead letter. Left out: 1 MiB into a "
        "tube (what a topic takes unless it was given more), as much as the broker takes into MQTT",
    )

    @property
    def largest(self) -> int | None:
        """Bytes of the largest value that is sent; None: the broker decides, and its refusal ends the run."""
        return self.max_bytes


class TubeSink(Messages):
    """Rows as records of a tube. A row without a topic or a value becomes a dead letter."""

    master: str | None = Field(default=None, description="tube masters; those of the source when left out")
    options: Options = Field(
        default_factory=dict,
        description="who it is at the tube: tubemq.user, tubemq.passwordFile, tubemq.tls, ... as in the options of a "
        "source; those of the source of the same tube when left out",
        json_schema_extra=named_options(LOGIN_OPTIONS),
    )
    key: KeyTemplate | None = Field(default=None, description="equal keys go to one partition, in order")
    headers: dict[str, KeyTemplate] = Field(default_factory=dict)

    @property
    def largest(self) -> int | None:
        """Bytes of the largest value that is sent: what a topic takes, where the file says nothing."""
        return self.max_bytes or LARGEST_RECORD


class MqttSink(Messages):
    """Rows as MQTT messages. A row whose topic is null, or cannot be published to, becomes a dead letter."""

    broker: BrokerUrl | None = Field(
        default=None, description="URL of the broker; that of the state store when left out"
    )
    qos: Literal[1, 2] = 1
    retain: bool = False
    properties: dict[str, KeyTemplate] = Field(default_factory=dict, description="user properties")


class ConsoleSink(Part):
    """Rows to look at: the first of each batch, as lines of JSON on standard output."""

    rows: int = Field(default=20, ge=1, le=1_000)


SINK_KINDS = ("table", "statestore", "tubemq", "mqtt", "console")


class Sink(Part):
    """A sink: a name, its input (default: the last step), and exactly one kind."""

    name: Name
    source: Annotated[Stream | None, Field(alias="from")] = Field(
        default=None, description="the step that it reads, or <window step>.late; the last step when left out"
    )
    table: TableSink | None = None
    statestore: StateStoreSink | None = None
    tubemq: TubeSink | None = None
    mqtt: MqttSink | None = None
    console: ConsoleSink | None = None

    @property
    def kind(self) -> str:
        """The kind of this sink."""
        return next(kind for kind in SINK_KINDS if getattr(self, kind) is not None)

    @property
    def messages(self) -> TubeSink | MqttSink | None:
        """The sink as one of messages, where it is."""
        return self.tubemq if self.tubemq is not None else self.mqtt

    @property
    def refuses(self) -> bool:
        """True if some rows can be refused by this sink."""
        return self.messages is not None or self.statestore is not None

    @model_validator(mode="after")
    def _one_kind(self) -> Sink:
        given = [kind for kind in SINK_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one of {', '.join(SINK_KINDS)}, found {found}")
        return self
