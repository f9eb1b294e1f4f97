"""Write the rows of a batch to a sink and its dead letters to their table, idempotent by batch number.

``DELIVERY`` has an entry for each kind of sink: how it writes, which rows it cannot write, and what is checked before a
run starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.pipelines.rows import data_columns, key_column, mark_dead, too_large
from penstock.pipelines.sinks.delta import DeltaSink
from penstock.pipelines.sinks.messages import WriteIdentity, failures, send
from penstock.pipelines.sinks.table import Table
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink, StateStoreEntry, StateStoreSink
from penstock.pipelines.spec.values import pieces, sink_letter
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.steps.expressions import condition, conditions, sure
from penstock.spark.mqtt.sink import check_broker
from penstock.spark.statestore.writes import KeyChange
from penstock.spark.tube.options import SinkOptions
from penstock.spark.tube.sink_writes import check_topic

if TYPE_CHECKING:
    from penstock.pipelines.spec.plan import SinkPlan

__all__ = [
    "CHECK_TIMEOUT_S",
    "COORDINATES",
    "DELIVERY",
    "Delivery",
    "FencedStore",
    "SinkBatch",
    "SinkWriter",
    "Targets",
    "check_sinks",
    "entry_value",
    "key_changes",
    "mark_unwritable",
]

COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")
"""Fields of ``_source`` that a table stores for each row, as ``_topic`` and so on, next to ``_id``."""
CHECK_TIMEOUT_S = 10.0
"""Time that a broker has to answer the check before the start."""


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


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """The ``count`` rows of a batch that a sink writes; ``windows`` have no source record."""

    number: int
    rows: DataFrame
    count: int
    windows: bool = False


class SinkWriter:
    """Writes the batches of one query to its targets."""

    def __init__(self, plan: SinkPlan, checkpoint: Checkpoint, targets: Targets) -> None:
        self.targets = targets
        self._plan = plan
        self._checkpoint = checkpoint
        self._tables: dict[tuple[str, str], Table] = {}

    def write(self, sink: Sink, batch: SinkBatch) -> int:
        """Write the rows, which :func:`mark_unwritable` has accepted.

        Returns the number of rows written; for windows in the state store, the number of requests.
        """
        return DELIVERY[sink.kind].write(self, sink, batch)

    def write_dead_letters(self, rows: Sequence[DataFrame], batch: int) -> int:
        """Write the dead rows that this query is responsible for to their table; return their number."""
        path = self.targets.dead_letters
        if path is None or not rows or not self._plan.dead_letters_of:
            return 0
        letters = reduce(DataFrame.unionByName, map(self._dead_letters, rows))
        return self._parquet(self._plan.sink.name, str(path)).write(batch, letters, letters.count())

    def _dead_letters(self, rows: DataFrame) -> DataFrame:
        mine = rows.where(sf.col("_dead.step").isin(*sorted(self._plan.dead_letters_of)) & ~sf.col("_dead.again"))
        return mine.select("_dead.step", "_dead.code", "_dead.reason", sf.col("_id").alias("id"), "_source.*")

    def identity(self, batch: int) -> WriteIdentity:
        """Identity of a write of this query, which brokers compare with earlier ones."""
        return WriteIdentity(self._checkpoint.query_id(), batch, str(self.targets.store.token))

    def table(self, sink: Sink) -> Table | DeltaSink:
        """The table of ``sink``."""
        assert sink.table is not None
        if sink.table.format == "delta":
            return DeltaSink(sink.table, sink.name, self._checkpoint.query_id())
        return self._parquet(sink.name, sink.table.path)

    def _parquet(self, writer: str, path: str) -> Table:
        if (writer, path) not in self._tables:
            self._tables[writer, path] = Table(Path(path), writer, self._checkpoint.query_id())
        return self._tables[writer, path]


def _write_table(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    rows = batch.rows
    if not batch.windows:
        coordinates = [sf.col(f"_source.{name}").alias(f"_{name}") for name in COORDINATES]
        rows = rows.select(*data_columns(rows), "_id", *coordinates)
    return writer.table(sink).write(batch.number, rows, batch.count)


def _write_keys(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.statestore is not None
    requests = writer.targets.store.write(key_changes(batch.rows, sink.statestore))
    return requests if batch.windows else batch.count


def _send_messages(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    identity = writer.identity(batch.number)
    send(batch.rows, sink, writer.targets.pipeline, batch.count, identity, windows=batch.windows)
    return batch.count


def _print_rows(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.console is not None
    columns = sf.struct(*data_columns(batch.rows))
    lines = batch.rows.select(sf.to_json(columns, {"ignoreNullFields": "false"}).alias("line"))
    printed = [row["line"] for row in lines.limit(sink.console.rows).collect()]
    writer.targets.show(sink.name, batch.number, printed)
    return batch.count


def key_changes(rows: DataFrame, sink: StateStoreSink) -> list[KeyChange]:
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
            # A row may have some of its keys only; rows with none are dead (_mark_rows_without_key).
            if key is not None:
                yield KeyChange(key, None if value is None else value.encode())


def mark_unwritable(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark ``rows`` that ``sink`` cannot write as dead, and those that its ``when`` excludes as filtered."""
    mark = DELIVERY[sink.kind].mark
    return rows if mark is None else mark(rows, sink)


def _mark_rows_without_key(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows of which no key can be written, because of a null in all of them or the size of a value."""
    target, name = sink.statestore, sink_letter(sink.name)
    assert target is not None
    keys = [key_column(rows, entry.key) for entry in target.entries]
    templates = " and ".join(entry.key for entry in target.entries)
    no_key = sf.when(sf.coalesce(*keys).isNull(), sf.lit(f"there is a null in {templates}"))
    reasons = [("sink.key", no_key)]
    whens = {f"_when{n}": entry.when for n, entry in enumerate(target.entries)}
    if target.max_bytes is not None:
        # A row that deletes its key sends no value, so its size does not matter.
        values = [entry_value(rows, entry) for entry in target.entries]
        sizes = (sf.when(sf.col(when), sf.octet_length(value)) for when, value in zip(whens, values, strict=True))
        reasons += [("sink.size", too_large(size, target.max_bytes)) for size in sizes]
        rows = conditions(rows, whens)
    return sure(mark_dead(rows, name, reasons).drop(*whens), name, list(whens.values()))


def _mark_unsendable(rows: DataFrame, sink: Sink) -> DataFrame:
    assert sink.messages is not None
    name = sink_letter(sink.name)
    if sink.messages.when != "true":
        rows = condition(rows, name, name, sink.messages.when)
    return mark_dead(rows, name, failures(rows, sink, sink.messages))


def check_sinks(pipeline: Pipeline) -> list[str]:
    """Check that sinks can be written to; return warnings about targets that may become available later.

    Topics and brokers that depend on data are not checked.

    Raises:
        StorageError: a table, or that of the dead letters, cannot be created.
        PenstockError: a broker refuses: the topic does not exist, or the pipeline may not write to it.
    """
    if pipeline.dead_letters is not None:
        _check_directory("dead_letters", Path(pipeline.dead_letters.path))
    warnings = []
    for sink in pipeline.sinks:
        check = DELIVERY[sink.kind].check
        if check is None:
            continue
        try:
            check(pipeline, sink)
        except StorageError:
            raise
        except UnavailableError as error:
            warnings.append(f"sink {sink.name!r}: {error.what}; each batch is retried until the broker is available")
        except PenstockError as error:
            raise PenstockError(f"sink {sink.name!r}: {error.what}", why=error.why, do=error.do) from error
    return warnings


def _check_table(_pipeline: Pipeline, sink: Sink) -> None:
    assert sink.table is not None
    _check_directory(f"sink {sink.name!r}", Path(sink.table.path))


def _check_directory(whose: str, path: Path) -> None:
    """Check that ``path`` can be created, without creating it: a table begins with its first batch."""
    why = None
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            why = f"{str(existing)!r} is a file"
        elif not os.access(existing, os.W_OK | os.X_OK):
            why = f"this user may not write to {str(existing)!r}"
    except OSError as error:
        why = str(error.strerror)
    if why is not None:
        raise StorageError(
            f"{whose}: nothing can be written to {str(path)!r}",
            path=str(path),
            why=why,
            do="name another path in the pipeline file, or give this user the right to write there",
        )


def _check_topic(pipeline: Pipeline, sink: Sink) -> None:
    assert sink.tubemq is not None
    named = {"topic": topic} if (topic := _constant_topic(sink.tubemq.topic)) is not None else {}
    check_topic(SinkOptions.parse(pipeline.tube_options(sink.tubemq) | named), CHECK_TIMEOUT_S)


def _constant_topic(template: str) -> str | None:
    """Return the topic if it is the same for all rows."""
    parts = pieces(template)
    return None if any(part.column for part in parts) else "".join(part.text for part in parts)


def _check_broker(pipeline: Pipeline, sink: Sink) -> None:
    assert sink.mqtt is not None
    # The lease has connected to the broker of the state store already.
    if sink.mqtt.broker is not None and sink.mqtt.broker != pipeline.statestore.broker:
        check_broker(sink.mqtt.broker, CHECK_TIMEOUT_S)


class Delivery(NamedTuple):
    """Functions for one kind of sink; ``mark`` and ``check`` are None where nothing can be wrong.

    ``write`` writes a batch, ``mark`` marks rows that cannot be written, ``check`` raises an error before the start.
    """

    write: Callable[[SinkWriter, Sink, SinkBatch], int]
    mark: Callable[[DataFrame, Sink], DataFrame] | None = None
    check: Callable[[Pipeline, Sink], None] | None = None


DELIVERY: Mapping[str, Delivery] = {
    "table": Delivery(_write_table, check=_check_table),
    # The lease of the run is a key of the same state store: a run that starts has connected to it.
    "statestore": Delivery(_write_keys, _mark_rows_without_key),
    "tubemq": Delivery(_send_messages, _mark_unsendable, _check_topic),
    "mqtt": Delivery(_send_messages, _mark_unsendable, _check_broker),
    "console": Delivery(_print_rows),
}
"""An entry for each kind in ``SINK_KINDS``."""
