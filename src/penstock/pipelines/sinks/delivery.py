"""Write the rows of a batch to a sink and its dead letters to their table, idempotent by batch number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.pipelines.rows import data_columns, key_column, mark_dead, too_large
from penstock.pipelines.sinks.delta import DeltaSink
from penstock.pipelines.sinks.messages import WriteIdentity, failures, send
from penstock.pipelines.sinks.table import Table
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink, StateStoreSink
from penstock.pipelines.spec.values import pieces, sink_letter
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.steps.expressions import condition, conditions, sure
from penstock.spark.mqtt.sink import check_broker
from penstock.spark.statestore.writes import KeyChange
from penstock.spark.tube.sink_options import SinkOptions
from penstock.spark.tube.sink_writes import check_topic

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.spec.plan import SinkPlan
    from penstock.pipelines.spec.sinks import Sink, StateStoreEntry, StateStoreSink

__all__ = [
    "COORDINATES",
    "LOOK_S",
    "FencedStore",
    "SinkWriter",
    "Targets",
    "changes_of",
    "check_sinks",
    "entry_value",
    "marked",
]

COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")
"""Fields of ``_source`` that a table stores for each row, as ``_topic`` and so on, next to ``_id``."""


class FencedStore(Protocol):
    """The state store under the run's fencing token."""

    @property
    def token(self) -> object:
        """The fencing token of the run."""

    def write(self, changes: Sequence[KeyChange]) -> int:
        """Apply ``changes``, in order for each key; return the number of requests."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the sinks of a run; ``show`` gets the rows of console sinks: sink, batch, lines of JSON."""

    pipeline: Pipeline
    store: FencedStore
    dead_letters: Path | None
    show: Callable[[str, int, list[str]], None]


class SinkWriter:
    """Writes the batches of one query to its targets."""

    def __init__(self, plan: SinkPlan, checkpoint: Checkpoint, targets: Targets) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._targets = targets
        self._tables: dict[tuple[str, str], Table] = {}

    def rows(self, sink: Sink, rows: DataFrame, batch: int, count: int) -> int:
        """Write ``count`` rows, all of them alive, to the sink; return the number written."""
        if sink.statestore is not None:
            self._write_back(rows, sink.statestore)
        elif sink.messages is not None:
            send(rows, sink, self._targets.pipeline, count, self._named(batch))
        elif sink.table is not None:
            coordinates = [sf.col(f"_source.{name}").alias(f"_{name}") for name in COORDINATES]
            made = rows.select(*data_columns(rows), "_id", *coordinates)
            return self._into(sink).write(batch, made, count)
        else:
            self._show(sink, rows, batch)
        return count

    def windows(self, rows: DataFrame, batch: int, count: int) -> int:
        """Write ``count`` windows to the sink; return the number, for the state store the number of requests."""
        sink = self._plan.sink
        if sink.statestore is not None:
            return self._write_back(rows, sink.statestore)
        if sink.messages is not None:
            send(rows, sink, self._targets.pipeline, count, self._named(batch), windows=True)
        elif sink.table is not None:
            return self._into(sink).write(batch, rows, count)
        else:
            self._show(sink, rows, batch)
        return count

    def letters(self, rows: Sequence[DataFrame], batch: int) -> int:
        """Write the dead rows that this query is responsible for as dead letters; return their number."""
        path = self._targets.dead_letters
        if path is None or not rows or not self._plan.dead_letters_of:
            return 0
        letters = reduce(DataFrame.unionByName, map(self._letters, rows))
        return self._table(self._plan.sink.name, str(path)).write(batch, letters, letters.count())

    def _letters(self, rows: DataFrame) -> DataFrame:
        mine = rows.where(sf.col("_dead.step").isin(*sorted(self._plan.dead_letters_of)) & ~sf.col("_dead.again"))
        return mine.select("_dead.step", "_dead.code", "_dead.reason", sf.col("_id").alias("id"), "_source.*")

    def _named(self, batch: int) -> WriteIdentity:
        return WriteIdentity(self._checkpoint.query_id(), batch, str(self._targets.store.token))

    def _into(self, sink: Sink) -> Table | DeltaSink:
        assert sink.table is not None
        if sink.table.format == "delta":
            return DeltaSink(sink.table, sink.name, self._checkpoint.query_id())
        return self._table(sink.name, sink.table.path)

    def _table(self, writer: str, path: str) -> Table:
        if (writer, path) not in self._tables:
            self._tables[writer, path] = Table(Path(path), writer, self._checkpoint.query_id())
        return self._tables[writer, path]

    def _show(self, sink: Sink, rows: DataFrame, batch: int) -> None:
        assert sink.console is not None
        lines = rows.select(sf.to_json(sf.struct(*data_columns(rows)), {"ignoreNullFields": "false"}).alias("line"))
        shown = [row["line"] for row in lines.limit(sink.console.rows).collect()]
        self._targets.show(sink.name, batch, shown)

    def _write_back(self, rows: DataFrame, sink: StateStoreSink) -> int:
        return self._targets.store.write(changes_of(rows, sink))


def changes_of(rows: DataFrame, sink: StateStoreSink) -> list[KeyChange]:
    """Return the changes of ``rows`` in the state store, in order."""
    if sink.order_by is not None:
        rows = rows.orderBy(sink.order_by)
    values = [entry_value(rows, entry) for entry in sink.entries]
    rows = conditions(rows, {f"_when{index}": entry.when for index, entry in enumerate(sink.entries)})
    made: list[Column] = []
    for index, (entry, value) in enumerate(zip(sink.entries, values, strict=True)):
        holds = sf.coalesce(sf.col(f"_when{index}"), sf.expr("false"))
        made += [key_column(rows, entry.key).alias(f"key{index}"), sf.when(holds, value).alias(f"value{index}")]
    return list(_changes(rows.select(*made).collect(), len(sink.entries)))


def entry_value(rows: DataFrame, entry: StateStoreEntry) -> Column:
    """Return the JSON value of a row for ``entry``."""
    return sf.to_json(sf.struct(*(entry.value or data_columns(rows))))


def _changes(rows: list[Row], entries: int) -> Iterator[KeyChange]:
    for row in rows:
        for index in range(entries):
            key: str | None = row[f"key{index}"]
            value: str | None = row[f"value{index}"]
            # A row may leave out some of its keys: see where rows are marked.
            if key is not None:
                yield KeyChange(key, None if value is None else value.encode())


def marked(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark ``rows`` that ``sink`` cannot write as dead, and those that its ``when`` excludes as filtered."""
    name = sink_letter(sink.name)
    if sink.statestore is not None:
        return _nameable(rows, name, sink.statestore)
    if sink.messages is None:
        return rows
    if sink.messages.when != "true":
        rows = condition(rows, name, name, sink.messages.when)
    return mark_dead(rows, name, failures(rows, sink, sink.messages))


def _nameable(rows: DataFrame, name: str, sink: StateStoreSink) -> DataFrame:
    # A key with a null in it names nothing; a row may leave out some of its keys, but not all.
    keys = [key_column(rows, entry.key) for entry in sink.entries]
    templates = " and ".join(entry.key for entry in sink.entries)
    nameless = sf.when(sf.coalesce(*keys).isNull(), sf.lit(f"there is a null in {templates}"))
    reasons = [("sink.key", nameless)]
    whens = {f"_when{n}": entry.when for n, entry in enumerate(sink.entries)}
    if sink.max_bytes is not None:
        # Of a row that deletes its key no value is sent.
        values = [entry_value(rows, entry) for entry in sink.entries]
        sizes = (sf.when(sf.col(when), sf.octet_length(value)) for when, value in zip(whens, values, strict=True))
        reasons += [("sink.size", too_large(size, sink.max_bytes)) for size in sizes]
        rows = conditions(rows, whens)
    return sure(mark_dead(rows, name, reasons).drop(*whens), name, list(whens.values()))


LOOK_S = 10.0
"""Seconds that a broker may take to answer."""


def check_sinks(pipeline: Pipeline) -> list[str]:
    """Check that sinks can be written to; return warnings about targets that may become available later.

    Topics and brokers that depend on data are not checked.

    Raises:
        StorageError: a table, or that of the dead letters, cannot be created.
        PenstockError: a broker refuses: the topic does not exist, or the pipeline may not write to it.
    """
    for sink in pipeline.sinks:
        if sink.table is not None:
            _check_directory(f"sink {sink.name!r}", Path(sink.table.path))
    if pipeline.dead_letters is not None:
        _check_directory("dead_letters", Path(pipeline.dead_letters.path))
    doubts = [_doubt(pipeline, sink) for sink in pipeline.sinks]
    return [doubt for doubt in doubts if doubt is not None]


def _check_directory(whose: str, path: Path) -> None:
    """Check that ``path`` can be created, without creating it: a table begins with its first batch."""
    why = None
    try:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if not there.is_dir():
            why = f"{str(there)!r} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            why = f"this user may not write to {str(there)!r}"
    except OSError as error:
        why = str(error.strerror)
    if why is not None:
        raise StorageError(
            f"{whose}: nothing can be written to {str(path)!r}",
            path=str(path),
            why=why,
            do="name another path in the pipeline file, or give this user the right to write there",
        )


def _doubt(pipeline: Pipeline, sink: Sink) -> str | None:
    """Return the reason why ``sink`` cannot be written to at the moment."""
    try:
        if sink.tubemq is not None:
            named = {"topic": topic} if (topic := _fixed(sink.tubemq.topic)) is not None else {}
            check_topic(SinkOptions.parse(pipeline.tube_options(sink.tubemq) | named), LOOK_S)
        elif sink.mqtt is not None and sink.mqtt.broker not in (None, pipeline.statestore.broker):
            assert sink.mqtt.broker is not None
            check_broker(sink.mqtt.broker, LOOK_S)
    except UnavailableError as error:
        return f"sink {sink.name!r}: {error.what}; what is for it is tried again when it comes"
    except PenstockError as error:
        raise PenstockError(f"sink {sink.name!r}: {error.what}", why=error.why, do=error.do) from error
    return None


def _fixed(template: str) -> str | None:
    """Return the topic if it is the same for all rows."""
    parts = pieces(template)
    return None if any(part.column for part in parts) else "".join(part.text for part in parts)
