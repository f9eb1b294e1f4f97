"""The steps of a pipeline file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
)

__all__ = ["STEP_KINDS", "Dedupe", "Enrich", "Map", "Parse", "Step", "Window"]


class Parse(Part):
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
        path = directory.get() / self.schema_file
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a readable file of columns in schema_file: {error}") from None
        if not text.strip():
            raise ValueError(f"expected columns in {str(path)!r}, it is empty")
        return self.model_copy(update={"columns": text})


class Enrich(Part):
    """The JSON value of a state store key as a struct column; with ``match`` an object of the dataset under the key.

    A dataset is a JSON array of objects, or one object a line; it is indexed once for each change. Values are compared
    as text.
    """

    key: KeyTemplate
    match: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict, description="field of the dataset to column of the row; all must be equal"
    )
    into: Annotated[NewColumn, Field(alias="as")]
    columns: Annotated[str, Field(min_length=1, alias="schema")]
    missing: Literal["pass", "fail", "dead_letter"] = Field(
        default="pass",
        description="what a row becomes for which there is nothing: null in the column, an error of the run",
    )
    unavailable: Literal["fail", "pass", "dead_letter"] = Field(
        default="fail",
        description="the same while the store does not answer; `fail` tries the batch again for two minutes",
    )
    wait: Duration = Field(default="30 seconds", description="how long the store may take to answer")
    refresh: Duration = Field(default="5 seconds", description="how old a value may be")


class Dedupe(Part):
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


class Window(Part):
    """Statistics of windows in event time, for each group.

    ``duration`` alone makes tumbling windows, with ``slide`` sliding ones; ``gap`` makes sessions, which end when a
    group had no event for so long. ``emit: changes`` brings a window out whenever it changes; ``closed`` once, when the
    watermark has passed its end, which is the only way for sessions, and for a table. An event without a time, or on
    which an aggregate fails, becomes a dead letter; a sum that overflows, and what cannot be made of aggregates, is
    null.
    """

    time: str
    duration: Duration | None = None
    slide: Duration | None = Field(default=None, description="how far apart windows start; not longer than `duration`")
    gap: Duration | None = Field(default=None, description="instead of `duration`: how long a pause ends a session")
    watermark: Duration = Field(description="how long after the latest event time seen an event still counts")
    ahead: Duration = Field(
        default="1 day",
        description="how far after its arrival an event may be dated; one beyond, which would move the watermark past "
        "all others, becomes a dead letter",
    )
    by: list[str] = Field(default_factory=list)
    aggregates: dict[NewColumn, Expression] = Field(min_length=1)
    emit: Literal["changes", "closed"] | None = Field(
        default=None, description="`changes` when left out, `closed` for sessions"
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
                raise ValueError("expected slide only beside duration")
            if duration_ms(self.slide) > duration_ms(self.duration):
                raise ValueError("expected slide no longer than duration: events between two windows would be lost")
        if self.gap is not None and self.emit == "changes":
            raise ValueError("expected `emit: closed`: Spark brings sessions out when they are closed only")
        return self


class Map(Part):
    """Columns renamed, computed and dropped, in this order; the others stay as they are.

    Names with dots are fields of structs: `limits.low`. An expression sees the columns as they are after renaming,
    and none of those that it is computed beside. One that fails (a cast, a division by zero) makes a dead letter.
    """

    rename: dict[FieldPath, Column] = Field(default_factory=dict, description="old name to new name")
    compute: dict[FieldPath, Expression] = Field(default_factory=dict, description="name to SQL expression")
    drop: list[FieldPath] = Field(default_factory=list)

    @model_validator(mode="after")
    def _something_to_do(self) -> Map:
        if not (self.rename or self.compute or self.drop):
            raise ValueError("expected at least one of rename, compute, drop")
        return self


STEP_KINDS = ("parse", "sql", "map", "filter", "enrich", "dedupe", "window", "concat")


class Step(Part):
    """One step: a name, what it reads (default: the step before it), and exactly one of the kinds."""

    name: Name
    source: Annotated[str | None, Field(alias="from")] = Field(
        default=None, description="the step or source that it reads; the step before it when left out"
    )
    parse: Parse | None = None
    sql: Expression | None = Field(default=None, description="SELECT expressions FROM <the step it reads>")
    map: Map | None = None
    filter: Expression | None = Field(default=None, description="rows for which this is not true are counted and left")
    enrich: Enrich | None = None
    dedupe: Dedupe | None = None
    window: Window | None = None
    concat: list[str] | None = Field(
        default=None,
        min_length=2,
        description="steps and sources whose rows become one stream; columns by name, null where one lacks a column",
    )

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
        if self.concat is not None and self.source is not None:
            raise ValueError("expected no `from` beside `concat`, which names what it reads")
        return self
