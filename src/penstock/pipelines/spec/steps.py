"""The steps of a pipeline file."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from penstock.payloads.avro_resolution import check_defaults
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.protobuf_schema import ProtobufSchema
from penstock.pipelines.spec.message_schemas import is_message_schema, message_schema_ddl
from penstock.pipelines.spec.values import (
    Column,
    Duration,
    Expression,
    FieldPath,
    KeyTemplate,
    Name,
    NewColumn,
    Part,
    directory,
    duration_ms,
    schema_content,
    template_parts,
)
from penstock.runtime.kafka.config import SchemaRegistry

__all__ = [
    "CLOUDEVENT_ATTRIBUTES",
    "JOIN_COUNTS",
    "JOIN_OUTCOMES",
    "JOIN_SIDES",
    "LOOKUP_BYTES",
    "LOOKUP_DATASETS",
    "LOOKUP_VALUES",
    "SPARKPLUG_COLUMNS",
    "STEP_KINDS",
    "AsOf",
    "Deadband",
    "Dedupe",
    "Enrich",
    "Expectation",
    "Explode",
    "Flatten",
    "Join",
    "Map",
    "Parse",
    "PythonFunction",
    "Step",
    "Window",
    "Within",
    "registries_of",
]


CLOUDEVENT_ATTRIBUTES = (
    "ce_id STRING NOT NULL, ce_source STRING NOT NULL, ce_type STRING NOT NULL, ce_subject STRING, ce_time TIMESTAMP, "
    "ce_dataschema STRING, ce_extensions MAP<STRING, STRING>"
)
"""DDL of the columns with the attributes of CloudEvents."""
SPARKPLUG_COLUMNS = (
    "group_id STRING NOT NULL, edge_node_id STRING NOT NULL, message_type STRING NOT NULL, "
    "message_timestamp TIMESTAMP, seq INT, bd_seq BIGINT, metrics ARRAY<STRUCT<device_id: STRING, name: STRING, "
    "alias: BIGINT, datatype: STRING, timestamp: TIMESTAMP, is_historical: BOOLEAN, is_transient: BOOLEAN, "
    "is_null: BOOLEAN, is_stale: BOOLEAN, long_value: BIGINT, unsigned_value: DECIMAL(20, 0), double_value: DOUBLE, "
    "boolean_value: BOOLEAN, string_value: STRING, timestamp_value: TIMESTAMP, binary_value: BINARY, "
    "json_value: STRING, properties: MAP<STRING, STRING>>>"
)
"""DDL of the columns of a Sparkplug message."""


_POLICIES: dict[str, Literal["keep", "dead_letter", "fail"]] = {
    "add": "keep",
    "dead_letter": "dead_letter",
    "fail": "fail",
}
"""Action of the expectation that counts the rows of a policy for changes of the schema."""


class Parse(Part):
    """Parse the payload into columns: one JSON object, CBOR or MessagePack map, CloudEvent, Avro record, Protobuf
    message, Sparkplug B message or line of CSV, or the unchanged bytes (``raw``).

    The columns of Avro and Protobuf are the fields of their schema; those of Sparkplug are fixed. A record that does
    not have the format, or lacks a ``NOT NULL`` column, becomes a dead letter.
    """

    format: Literal["json", "cbor", "messagepack", "cloudevents", "avro", "protobuf", "sparkplug", "csv", "raw"] = (
        Field(default="json", description="format of the payload")
    )
    columns: Annotated[str | None, Field(min_length=1, alias="schema")] = Field(
        default=None,
        description="columns as DDL: `name TYPE [NOT NULL], ...`; for `raw` one column of type STRING or BINARY, for "
        "`cloudevents` those of the data; for `avro` the Avro schema, a record, in JSON; none for `sparkplug`. Also a "
        "message schema of Azure IoT Operations: JSON Schema or Delta",
    )
    schema_file: str | None = Field(
        default=None,
        min_length=1,
        description="file with the schema, relative to the pipeline file; instead of `schema`. For `protobuf` a "
        "descriptor set of `protoc`",
    )
    message: str | None = Field(
        default=None, min_length=1, description="name of the Protobuf message; the package may be omitted"
    )
    encoding: Literal["plain", "single_object", "confluent"] | None = Field(
        default=None,
        description="what precedes an Avro record, a Protobuf message or JSON: nothing (`plain`, default), the "
        "fingerprint of the schema (`single_object`, Avro only), or a byte 0 and the id of the schema in a registry "
        "(`confluent`; for JSON with `registry`)",
    )
    schema_id: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 32,
        description="id of the schema with `encoding: confluent`; messages with another id are dead letters",
    )
    registry: SchemaRegistry | None = Field(
        default=None,
        description="schema registry with the schemas of the messages, instead of `schema_id`, with `format: avro`, "
        "`protobuf` or `json` and `encoding: confluent`; the schema in the file is then that of the columns",
    )
    delimiter: str | None = Field(
        default=None, min_length=1, max_length=1, description="separator of CSV columns; default: a comma"
    )
    allow_empty: bool = Field(
        default=False,
        description="accept records without a payload (tombstones, such as the deletes of a state store): all columns, "
        "also `NOT NULL` ones, are null; otherwise they are dead letters. For `json`, `cbor`, `messagepack`, `avro` "
        "and `csv`",
    )
    new_fields: Literal["ignore", "add", "dead_letter", "fail"] = Field(
        default="ignore",
        description="action for fields that the schema lacks: leave them out, write them to the column "
        "`new_fields_as`, a dead letter, or stop the run; for `json`, `cbor`, `messagepack`, `cloudevents`, "
        "`protobuf`, and `avro` with a registry",
    )
    new_fields_as: NewColumn | None = Field(
        default=None,
        description="new column of type MAP<STRING, STRING> with the new fields of a payload, with `new_fields: add`",
    )
    changed_types: Literal["dead_letter", "fail"] = Field(
        default="dead_letter",
        description="action for values that do not have the type of their column, and messages of another schema: a "
        "dead letter, or stop the run",
    )
    unknown_enums: Literal["dead_letter", "add", "fail"] = Field(
        default="dead_letter",
        description="action for values of an enum that the schema lacks: a dead letter, the number or, with a "
        "registry, the symbol as text in the column (not for `avro` without a registry), or stop the run; for `avro` "
        "and `protobuf`",
    )
    unknown_metrics: Literal["dead_letter", "fail"] = Field(
        default="dead_letter",
        description="action for DATA messages and commands of `sparkplug` without a birth of their edge node or "
        "device, or with a metric that the birth lacks: a dead letter, or stop the run",
    )

    _message_schema: bytes = PrivateAttr(default=b"")

    @property
    def message_schema(self) -> bytes:
        """The Avro schema in JSON, or the descriptor set of Protobuf."""
        return self._message_schema

    @property
    def has_own_schema(self) -> bool:
        """True if the format has schemas of its own, from which the columns are derived."""
        return self.format in ("avro", "protobuf")

    @property
    def registry_name(self) -> str:
        """Short name of the registry for directories; another one for Protobuf, whose schemas have another form."""
        assert self.registry is not None
        return self.registry.digest("descriptors" if self.format == "protobuf" else "")

    @property
    def ddl(self) -> str:
        """The DDL of all columns: those from ``schema`` or ``schema_file``, and the attributes of CloudEvents."""
        assert self.columns is not None, "checked when the file was read"
        found = f"{CLOUDEVENT_ATTRIBUTES}, {self.columns}" if self.format == "cloudevents" else self.columns
        if self.new_fields_as is None:
            return found
        # A schema file may end with a comment.
        found = f"{found}\n" if "--" in found else found
        return f"{found}, {self.new_fields_as} MAP<STRING, STRING>"

    @property
    def policies(self) -> list[Expectation]:
        """The policies for changes of the schema that count rows, as expectations: ``fail`` stops the run like one."""
        chosen = {"new_fields": self.new_fields, "changed_types": self.changed_types}
        if self.unknown_enums != "add":
            chosen["unknown_enums"] = self.unknown_enums
        chosen["unknown_metrics"] = self.unknown_metrics
        return [
            Expectation.model_construct(
                name=name, expression=f"{name}: {action}", on_violation=_POLICIES[action], threshold=None
            )
            for name, action in chosen.items()
            if action != Parse.model_fields[name].default
        ]

    @property
    def needs_headers(self) -> bool:
        """True if the columns depend on the headers of a record."""
        return self.format in ("cloudevents", "sparkplug")

    @model_validator(mode="after")
    def _one_schema(self) -> Parse:
        if self.format == "sparkplug":
            return self._sparkplug()
        if (self.columns is None) == (self.schema_file is None):
            raise ValueError("expected exactly one of schema, schema_file")
        if not self.has_own_schema and self.schema_id is not None:
            raise ValueError("expected schema_id only with `format: avro` or `protobuf`")
        if not self.has_own_schema and self.encoding is not None and self.format != "json":
            raise ValueError("expected encoding only with `format: avro`, `protobuf` or `json`")
        if self.format == "protobuf" and (self.schema_file is None or self.message is None):
            raise ValueError("expected schema_file, a descriptor set, and message with `format: protobuf`")
        if self.format != "protobuf" and self.message is not None:
            raise ValueError("expected message only with `format: protobuf`")
        if self.format != "avro" and self.encoding == "single_object":
            raise ValueError("expected `encoding: single_object` only with `format: avro`")
        if (self.encoding == "confluent") != ((self.schema_id is None) != (self.registry is None)):
            either = "a registry" if self.format == "json" else "a schema_id or a registry"
            raise ValueError(f"expected {either} with `encoding: confluent`, and only there")
        if self.delimiter is not None and self.format != "csv":
            raise ValueError("expected delimiter only with `format: csv`")
        self._check_policies()
        given = (self.columns or "").encode() if self.schema_file is None else schema_content(self.schema_file)
        if self.format == "protobuf":
            columns = ProtobufSchema(given, self.message or "").ddl()
        else:
            try:
                columns = given.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"expected a readable schema_file: {error}") from None
            if self.format != "avro" and is_message_schema(columns):
                columns = message_schema_ddl(columns)
            if self.format == "avro":
                schema = parse_avro_schema(columns)
                if self.registry is not None:
                    check_defaults(schema.record)
                columns = schema.ddl
        made = self.model_copy(update={"columns": columns})
        made._message_schema = given  # noqa: SLF001 - an attribute of this class
        return made

    def _sparkplug(self) -> Parse:
        given = {
            "schema": self.columns,
            "schema_file": self.schema_file,
            "message": self.message,
            "encoding": self.encoding,
            "schema_id": self.schema_id,
            "registry": self.registry,
            "delimiter": self.delimiter,
        }
        named = next((name for name, value in given.items() if value is not None), None)
        if named is not None:
            raise ValueError(f"expected no {named} with `format: sparkplug`, whose columns are fixed")
        self._check_policies()
        return self.model_copy(update={"columns": SPARKPLUG_COLUMNS})

    def _check_policies(self) -> None:
        """Raise ValueError for a policy that the format cannot have."""
        if self.allow_empty and self.format in ("cloudevents", "protobuf", "sparkplug", "raw"):
            raise ValueError(f"expected no allow_empty with `format: {self.format}`, which may have no payload")
        if self.unknown_metrics != "dead_letter" and self.format != "sparkplug":
            raise ValueError("expected unknown_metrics only with `format: sparkplug`")
        has_names = self.registry is not None or self.format not in ("avro", "csv", "raw", "sparkplug")
        if self.new_fields != "ignore" and not has_names:
            raise ValueError(f"expected no new_fields with `format: {self.format}`, whose payloads have no new fields")
        if (self.new_fields == "add") != (self.new_fields_as is not None):
            raise ValueError("expected new_fields_as with `new_fields: add`, and only there")
        if self.new_fields_as is not None and self.new_fields_as.startswith("_"):
            raise ValueError("expected a name for new_fields_as that does not start with _, which is reserved")
        if self.changed_types != "dead_letter" and self.format == "raw":
            raise ValueError("expected no changed_types with `format: raw`, which has one type")
        if self.unknown_enums != "dead_letter" and not self.has_own_schema:
            raise ValueError("expected unknown_enums only with `format: avro` or `protobuf`, which have enums")
        if self.unknown_enums == "add" and self.format == "avro" and self.registry is None:
            raise ValueError(
                "expected `unknown_enums: add` only with `format: protobuf` or a registry: Avro has an index, no value"
            )


_CURRENT_ONLY = ("match", "unavailable", "wait", "refresh")
"""Options of an enrich step for current values."""
_GLOB_MARK = re.compile(r"[*?\[]")


class AsOf(Part):
    """Look up the value that a key had at the time of the row, in the topic with the changes of the state store."""

    time: str = Field(min_length=1, description="column with the event time of the row")
    topic: str = Field(
        min_length=1, description="TubeMQ topic with the changes: `statestore.capture_topic` of the node"
    )
    master: str | None = Field(
        default=None, description="TubeMQ masters of the topic; default: those of the first source that reads TubeMQ"
    )
    history: Duration | None = Field(
        default=None,
        description="how far an event time may be before the batch that processes it; rows before that have no value, "
        "and older values are removed from memory and disk. Default: all changes are kept",
    )


LOOKUP_DATASETS = 64
"""Maximum number of datasets whose index a worker keeps."""
LOOKUP_VALUES, LOOKUP_BYTES = 100_000, 64 << 20
"""Maximum number and size of the values that a worker caches: those of ``spark.statestore.lookup``."""


class Enrich(Part):
    """Look up a key of the state store and add its JSON value as a struct column.

    With ``match`` the value is a dataset (a JSON array of objects, or one object per line), and the column has the
    object whose fields are equal to columns of the row, compared as text. A dataset is indexed once per change. With
    ``as_of`` the column has the value that the key had at the time of the row, instead of the current one.
    """

    key: KeyTemplate = Field(description="key to look up; `{column}` inserts a column")
    match: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict, description="maps fields of the dataset to columns of the row; all must be equal"
    )
    into: Annotated[NewColumn, Field(alias="as", description="name of the struct column")]
    columns: Annotated[
        str, Field(min_length=1, alias="schema", description="fields of the struct as DDL: `name TYPE, ...`")
    ]
    missing: Literal["pass", "fail", "dead_letter"] = Field(
        default="pass",
        description="action if there is no value: null in the column, stop the run, or a dead letter",
    )
    unavailable: Literal["fail", "pass", "dead_letter"] = Field(
        default="fail",
        description="action if the store does not respond; `fail` retries the batch until it responds, with `--once` "
        "for two minutes",
    )
    wait: Duration = Field(default="30 seconds", description="timeout of a lookup")
    refresh: Duration = Field(default="5 seconds", description="maximum age of a cached value")
    as_of: AsOf | None = Field(
        default=None, description="as-of join: the value at the time of the row, from the changes of the state store"
    )

    @model_validator(mode="after")
    def _check_as_of(self) -> Enrich:
        if self.as_of is not None:
            given = next((name for name in _CURRENT_ONLY if name in self.model_fields_set), None)
            if given is not None:
                raise ValueError(f"expected no {given} with as_of, which reads changes instead of current values")
        return self

    @property
    def keys(self) -> str:
        """Glob of the keys that rows can have."""
        literals = ("*" if part.column else _GLOB_MARK.sub(r"[\g<0>]", part.text) for part in template_parts(self.key))
        return "".join(literals)


class Dedupe(Part):
    """Drop duplicates: keep one record of each key.

    ``arrival`` compares append times, so that late events are kept. ``event`` precedes a window and uses its time and
    watermark, because a query has one watermark.
    """

    key: str = Field(default="id", description="column that identifies a record; `id` is the identifier of the record")
    on: Literal["arrival", "event"] = Field(default="arrival", description="compare append times or event times")
    within: Duration | None = Field(
        default=None, description="maximum time between two duplicates; required with `on: arrival`"
    )

    @model_validator(mode="after")
    def _check_within(self) -> Dedupe:
        if (self.on == "arrival") != (self.within is not None):
            raise ValueError("expected `within: <duration>` with `on: arrival`, and only there")
        return self


_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?%")


def _checked_limit(given: object) -> object:
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < math.inf:
        return float(given)
    if isinstance(given, str) and (given == "change" or _PERCENT.fullmatch(given)):
        return given
    raise ValueError("expected a number from 0, a percentage such as `1 %`, or `change`")


DeadbandLimit = Annotated[
    float | str,
    BeforeValidator(_checked_limit),
    Field(description="a number, a percentage such as `1 %`, or `change`"),
]


class Deadband(Part):
    """Report only changes: leave out rows whose values differ little from what was last reported of their key.

    A row is reported if it is the first of its key, if one of ``columns`` is further from its last reported value than
    its limit, is null or NaN and was not, or the reverse, or if ``max_interval`` has passed. Other rows are counted as
    filtered. A row without a time becomes a dead letter.
    """

    by: list[Column] = Field(min_length=1, description="columns of the key; null equals null")
    time: Column = Field(description="column with the event time: rows of a batch are compared in its order")
    columns: dict[Column, DeadbandLimit] = Field(
        min_length=1,
        description="columns to compare, and how far each may be from its last reported value: a number (`0.5`), a "
        "share of the last reported value (`1 %`), or `change` for any other value",
    )
    max_interval: Duration | None = Field(
        default=None,
        description="a row this long after the last report of its key is reported in any case; default: no limit",
    )
    expire: Duration | None = Field(
        default=None,
        description="a key without a row for this time, by append times, is forgotten, and its next row reported; "
        "default: all keys are kept",
    )

    @property
    def limits(self) -> dict[str, tuple[Decimal | None, bool]]:
        """Limit of each column, and whether it is a share of the last reported value; None for any change."""
        found: dict[str, tuple[Decimal | None, bool]] = {}
        for column, given in self.columns.items():
            percent = _PERCENT.fullmatch(given) if isinstance(given, str) else None
            if percent is not None:
                found[column] = (Decimal(percent[1]) / 100, True)
            else:
                found[column] = (None if given == "change" else Decimal(str(given)), False)
        return found

    @model_validator(mode="after")
    def _check_columns(self) -> Deadband:
        for option, names in (("by", self.by), ("columns", list(self.columns))):
            lower = [name.lower() for name in names]
            if len(set(lower)) < len(lower):
                raise ValueError(f"expected each column of {option} once")
        both = {name.lower() for name in self.by} & {name.lower() for name in self.columns}
        if both:
            raise ValueError(f"expected no column of the key in columns, found {min(both)!r}: it never changes")
        return self


class Window(Part):
    """Aggregate events in windows of event time, per group.

    ``duration`` alone defines tumbling windows, with ``slide`` sliding windows; ``gap`` defines session windows, which
    end when a group has no event for that time. ``emit: changes`` emits a window each time it changes; ``closed`` once,
    when the watermark has passed its end, which session windows and Parquet tables require. An event without a time, or
    for which an aggregate fails, becomes a dead letter; an aggregate that overflows is null.
    """

    time: str = Field(description="column with the event time")
    duration: Duration | None = Field(default=None, description="length of a window")
    slide: Duration | None = Field(
        default=None, description="interval between the starts of windows; at most `duration`"
    )
    gap: Duration | None = Field(
        default=None, description="session windows, instead of `duration`: pause that ends a session"
    )
    watermark: Duration = Field(
        description="how far an event may be behind the latest event time; older events are late"
    )
    max_ahead: Duration = Field(
        default="1 day",
        description="how far the event time may be after the append time; other events become dead letters, because "
        "they would advance the watermark",
    )
    by: list[str] = Field(
        default_factory=list,
        description="columns of the groups, or fields of structs (`limits.zone`), which become columns of their names",
    )
    aggregates: dict[NewColumn, Expression] = Field(
        min_length=1, description="new columns: name to SQL aggregate expression"
    )
    emit: Literal["changes", "closed"] | None = Field(
        default=None, description="when a window is emitted; default: `changes`, for session windows `closed`"
    )

    @property
    def only_closed(self) -> bool:
        """True if each window is emitted once, when it is complete."""
        return self.emit == "closed" or self.gap is not None

    @model_validator(mode="after")
    def _one_kind_of_window(self) -> Window:
        if (self.duration is None) == (self.gap is None):
            raise ValueError("expected exactly one of duration, gap")
        if self.slide is not None:
            if self.duration is None:
                raise ValueError("expected slide only with duration")
            if duration_ms(self.slide) > duration_ms(self.duration):
                raise ValueError("expected slide no longer than duration: events between two windows would be lost")
        if self.gap is not None and self.emit == "changes":
            raise ValueError("expected `emit: closed`: Spark emits session windows only when they are closed")
        return self


class Within(Part):
    """Times of the other stream that a row is joined with, relative to its own; without an option the time is equal."""

    before: Duration | None = Field(default=None, description="how far the other row may be before the row")
    after: Duration | None = Field(default=None, description="how far the other row may be after the row")

    @property
    def before_ms(self) -> int:
        """``before`` in ms."""
        return 0 if self.before is None else duration_ms(self.before)

    @property
    def after_ms(self) -> int:
        """``after`` in ms."""
        return 0 if self.after is None else duration_ms(self.after)

    @model_validator(mode="after")
    def _check_not_empty(self) -> Within:
        if self.before is None and self.after is None:
            raise ValueError("expected at least one of before, after: it limits the rows that are kept for the join")
        return self


JOIN_SIDES = ("left", "right")
JOIN_OUTCOMES = ("joined", "unmatched_left", "unmatched_right")
JOIN_COUNTS = (*JOIN_SIDES, *JOIN_OUTCOMES, "late_left", "late_right")
"""Counts of a join: rows of each stream that were added to it, pairs and rows without a partner that came out of it,
and late rows."""


class Join(Part):
    """Join the rows of the input (left) with those of another stream (right): an interval join of two streams.

    Two rows are joined if their columns ``on`` are equal and not null, and the time of the right row is ``within`` the
    interval around that of the left row; a row is joined with each such row of the other stream. ``inner`` leaves out
    rows that are joined with none, ``left`` keeps those of the left stream, with null in ``as``, once the watermark has
    passed their interval. Both streams are kept until then, and share the watermark of the slower one. A row without a
    time, or dated more than ``max_ahead`` after it arrived, becomes a dead letter.
    """

    other: Annotated[str, Field(alias="with", description="step or source with the right stream")]
    on: list[Column] = Field(min_length=1, description="columns of both streams that must be equal")
    kind: Literal["inner", "left"] = Field(default="inner", description="action for left rows without a right row")
    left_time: str = Field(min_length=1, description="column with the event time of the left stream")
    right_time: str = Field(min_length=1, description="column with the event time of the right stream")
    within: Within = Field(description="interval of the right time around the left time, with both ends")
    watermark: Duration = Field(
        description="how far a row may be behind the latest event time of the slower stream; older rows are late"
    )
    max_ahead: Duration = Field(
        default="1 day",
        description="how far the event time may be after the append time; other rows become dead letters, because "
        "they would advance the watermark",
    )
    late: Literal["count", "dead_letter"] = Field(
        default="count", description="action for late rows: count them, or also make them dead letters"
    )
    into: Annotated[
        NewColumn, Field(alias="as", description="name of the struct column with the columns of the right row")
    ]

    @model_validator(mode="after")
    def _check_columns(self) -> Join:
        lower = [name.lower() for name in self.on]
        if len(set(lower)) < len(lower):
            raise ValueError("expected each column of on once")
        if self.into.startswith("_"):
            raise ValueError("expected a name for as that does not start with _, which is reserved")
        return self


class Map(Part):
    """Rename, compute and drop columns, in this order; other columns do not change.

    Names with dots are fields of structs: `limits.low`. An expression uses the columns after renaming, but no other
    computed columns. If an expression fails (a cast, a division by zero), the record becomes a dead letter.
    """

    rename: dict[FieldPath, Column] = Field(
        default_factory=dict,
        description="old name to new name, of all columns at once; no other column may have the new name",
    )
    compute: dict[FieldPath, Expression] = Field(default_factory=dict, description="name to SQL expression")
    drop: list[FieldPath] = Field(default_factory=list, description="columns to remove")

    @model_validator(mode="after")
    def _check_not_empty(self) -> Map:
        if not (self.rename or self.compute or self.drop):
            raise ValueError("expected at least one of rename, compute, drop")
        return self


class Explode(Part):
    """Make a row for each element of an array; the element takes the place of the array, other columns are repeated.

    Rows of one record have the same id and different parts: `_part` is the name of the step and the index of the
    element, such as `each.0`, after several explode steps all of them. Dead letters have the part, and a redrive of a
    part makes only its row.
    """

    column: Column = Field(description="array column")
    into: Annotated[
        NewColumn | None,
        Field(alias="as", description="name of the column with the element; default: that of the array"),
    ] = None
    position: NewColumn | None = Field(default=None, description="new column with the index of the element, from 0")
    empty: Literal["drop", "keep", "dead_letter"] = Field(
        default="drop",
        description="action if the array is empty or null: count the record as filtered, keep one row with a null "
        "element, or a dead letter",
    )

    @property
    def element(self) -> str:
        """Name of the column with the element."""
        return self.into or self.column


class Flatten(Part):
    """Replace struct columns by a column for each of their fields, at all levels; arrays and maps do not change.

    The field `c` in the field `b` of the column `a` becomes the column `a_b_c`; fields of a null struct are null.
    """

    columns: list[Column] | None = Field(
        default=None, min_length=1, description="struct columns to replace; default: all"
    )
    separator: Annotated[str, Field(pattern="^[A-Za-z0-9_]*$")] = Field(
        default="_", description="text between the names in a new name"
    )
    prefix: bool = Field(
        default=True, description="begin new names with that of the column; `false`: `b_c` instead of `a_b_c`"
    )


class PythonFunction(Part):
    """Compute columns with a Python function over Arrow batches, in a file next to the pipeline file.

    The function gets a `pyarrow.RecordBatch`, and returns a record batch, a table, or a dict of columns, with one row
    for each row of the batch, in order. It may be called again with a part of a batch, to find a row on which it fails.
    """

    file: str = Field(min_length=1, description="Python file, relative to the pipeline file")
    function: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        default="transform", description="name of the function"
    )
    input: list[Column] | None = Field(
        default=None, min_length=1, description="columns that the function gets; default: all"
    )
    columns: Annotated[
        str,
        Field(min_length=1, alias="schema", description="columns that it returns as DDL: `name TYPE [NOT NULL], ...`"),
    ]
    on_error: Literal["dead_letter", "fail"] = Field(
        default="dead_letter",
        description="action for a row on which the function fails: a dead letter, or the run stops",
    )
    _code: str = PrivateAttr(default="")

    @property
    def code(self) -> str:
        """The text of the file."""
        return self._code

    @model_validator(mode="after")
    def _check_file(self) -> PythonFunction:
        path = directory.get() / self.file
        try:
            self._code = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a readable file: {error}") from None
        try:
            tree = ast.parse(self._code)
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            words = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"expected Python in {self.file}{line}: {words}") from None
        found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        named = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        imported = {
            alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        if self.function not in found.keys() | named | imported:
            known = ", ".join(name for name in found if not name.startswith("_")) or "no function"
            raise ValueError(f"expected a function {self.function!r} in {self.file}, which has {known}")
        if isinstance(found.get(self.function), ast.AsyncFunctionDef):
            raise ValueError(f"expected a plain function; {self.function!r} in {self.file} is asynchronous")
        return self


class Expectation(Part):
    """A SQL condition that rows should meet. Rows for which it is false, null, or fails are counted as violations.

    ``on_violation`` keeps these rows, drops them (counted as filtered), or makes them dead letters; a row that violates
    several expectations has the first of these actions that is not ``keep``. ``fail`` stops the run before the batch is
    written. With a ``threshold`` the same happens if a larger share of a batch violates the expectation.
    """

    name: Name = Field(description="name of the expectation; ledger and metrics show it as `<step>.<name>`")
    expression: Expression = Field(description="SQL condition; write `x IS NULL OR ...` if null is acceptable")
    on_violation: Literal["keep", "drop", "dead_letter", "fail"] = Field(
        default="keep", description="action for rows that violate it"
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share of the rows of a batch, from 0 to below 1, that may violate it; if more rows do, the batch "
        "is not written and the run stops. Default: 0 for `fail`, otherwise no limit",
    )

    @property
    def limit(self) -> float | None:
        """Share of the rows of a batch that may violate it; None without a limit."""
        return 0.0 if self.threshold is None and self.on_violation == "fail" else self.threshold


STEP_KINDS = (
    *("parse", "explode", "flatten", "sql", "map", "python", "filter", "expect"),
    *("enrich", "dedupe", "deadband", "window", "join", "concat"),
)


class Step(Part):
    """One step: a name, its input, and exactly one of ``parse``, ``explode``, ``flatten``, ``sql``, ``map``,
    ``python``, ``filter``, ``expect``, ``enrich``, ``dedupe``, ``deadband``, ``window``, ``join`` and ``concat``.
    """

    name: Name = Field(description="name of the step and of its stream")
    source: Annotated[str | None, Field(alias="from")] = Field(
        default=None, description="step or source to read; default: the step before it"
    )
    parse: Parse | None = Field(default=None, description="parse the payload into columns")
    explode: Explode | None = Field(default=None, description="make a row for each element of an array")
    flatten: Flatten | None = Field(default=None, description="replace struct columns by their fields")
    sql: Expression | None = Field(default=None, description="`SELECT ... FROM <name of the input>`")
    map: Map | None = Field(default=None, description="rename, compute and drop columns")
    python: PythonFunction | None = Field(default=None, description="compute columns with a Python function")
    filter: Expression | None = Field(default=None, description="SQL condition; other rows are counted as filtered")
    expect: list[Expectation] | None = Field(
        default=None, min_length=1, description="conditions that rows should meet, and actions for rows that do not"
    )
    enrich: Enrich | None = Field(default=None, description="look up a key of the state store")
    dedupe: Dedupe | None = Field(default=None, description="drop duplicates")
    deadband: Deadband | None = Field(default=None, description="report only changes of values")
    window: Window | None = Field(default=None, description="aggregate in windows of event time")
    join: Join | None = Field(default=None, description="join with another stream in intervals of event time")
    concat: list[str] | None = Field(
        default=None,
        min_length=2,
        description="steps and sources to combine; columns are matched by name, missing columns are null",
    )

    @property
    def checks(self) -> list[Expectation]:
        """The expectations of the step, and those that count the rows of its policies for changes of the schema."""
        return self.parse.policies if self.parse is not None else self.expect or []

    @property
    def kind(self) -> str:
        """The kind of this step."""
        return next(kind for kind in STEP_KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _one_kind(self) -> Step:
        given = [kind for kind in STEP_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one of {', '.join(STEP_KINDS)}, found {found}")
        names = [each.name for each in self.expect or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"expected unique names of expectations, found {twice!r} twice")
        if self.concat is not None and self.source is not None:
            raise ValueError("expected no `from` with `concat`, which names its inputs")
        return self


def registries_of(steps: Iterable[Step]) -> dict[str, SchemaRegistry]:
    """Return the schema registries of ``steps``, by their short names."""
    parses = (step.parse for step in steps)
    return {parse.registry_name: parse.registry for parse in parses if parse is not None and parse.registry is not None}
