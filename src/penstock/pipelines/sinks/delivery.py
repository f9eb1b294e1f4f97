"""Write the rows of a batch to a sink and its dead letters to their table, idempotent by batch number.

``DELIVERY`` has an entry for each kind of sink: how to write, which rows cannot be written, and checks before a run
starts. The writes are in modules of their own: Parquet tables in ``table``, Delta tables in ``delta`` and, with Delta's
jars, ``remote_delta``, tables of PostgreSQL in ``postgresql``, messages in ``messages`` and ``kafka``, keys in
``statestore``, files for other programs in ``files``.
"""

from __future__ import annotations

import errno
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, PenstockError, StorageError, UnavailableError
from penstock.pipelines.rows import (
    ADDED_ROWS,
    alive,
    data_columns,
    mark_dead,
    record_identity,
    reference,
    references,
    row_json,
)
from penstock.pipelines.sinks.delta import DELETES, DeltaWriter, discard
from penstock.pipelines.sinks.files import FileBatches, write_lines
from penstock.pipelines.sinks.kafka import write_kafka
from penstock.pipelines.sinks.messages import WriteIdentity, message_failures, ordered_messages, send_messages
from penstock.pipelines.sinks.one_pass import (
    RECORD,
    SHARED,
    Outcomes,
    PassResult,
    WrittenFiles,
    flattened,
    is_supported,
    outcome,
    outcome_column,
    structure,
    write_in_one_pass,
)
from penstock.pipelines.sinks.partitions import computed_columns, mark_unpartitionable
from penstock.pipelines.sinks.postgresql import mark_unstorable, write_postgresql
from penstock.pipelines.sinks.registered_values import (
    ENCODED,
    check_value_schema,
    encoded_value,
    framed_value,
    schema_id,
    schema_of_rows,
)
from penstock.pipelines.sinks.remote_delta import RemoteDeltaTable
from penstock.pipelines.sinks.statestore import mark_rows_without_key, write_keys
from penstock.pipelines.sinks.table import Table
from penstock.pipelines.spec.expectations import check_limits
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink, TableSink
from penstock.pipelines.spec.steps import registries_of
from penstock.pipelines.spec.values import sink_letter, template_parts
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.state_dir.letter_writers import LetterRange
from penstock.pipelines.steps.expectations import CHECKS
from penstock.pipelines.steps.expressions import (
    add_conditions,
    analysis_text,
    literal,
    mark_failed_conditions,
    mark_filtered,
    quoted,
    quoted_column,
)
from penstock.pipelines.steps.joins import LATE, OUTCOME
from penstock.pipelines.steps.registry import UNKNOWN_SCHEMA
from penstock.spark.files.object_storage import ObjectPath, StoragePath, absolute_path, spark_path
from penstock.spark.kafka.writes import TopicBatch
from penstock.spark.kafka.writes import check_topic as check_kafka_topic
from penstock.spark.mqtt.source import check_broker
from penstock.spark.postgresql.connection import connected
from penstock.spark.postgresql.writes import BatchWriter
from penstock.spark.statestore.writes import FencedTarget
from penstock.spark.tube.options import SinkOptions
from penstock.spark.tube.sink_writes import check_topic

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import SinkPlan

__all__ = [
    "CHECK_TIMEOUT_S",
    "COORDINATES",
    "DELIVERY",
    "NO_LETTERS",
    "DeadLetterCounts",
    "FencedStore",
    "OnePassCounts",
    "SinkBatch",
    "SinkDelivery",
    "SinkWriter",
    "Targets",
    "check_sinks",
    "last_of_each_key",
    "letter_condition",
    "letter_record",
    "mark_unwritable",
]

COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")
"""Fields of ``_source`` that a table stores for each row, as ``_topic`` and so on, next to ``_id``."""
CHECK_TIMEOUT_S = 10.0
"""Seconds to wait for a broker's answer in the check before the start."""


class FencedStore(Protocol):
    """The state store, written with the run's fencing token."""

    @property
    def token(self) -> object:
        """Fencing token of the run."""

    def target(self, sink: str, batch: int) -> FencedTarget:
        """Return the store as the tasks of a batch of ``sink`` write to it."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the sinks of a run; ``show`` is called for console sinks with sink, batch and lines of JSON.

    ``state``: the pipeline's state directory, for rows on their way to a sink. ``version``: that of the pipeline file,
    for the ledger. ``check_new`` is called before a sink creates a table, and raises an error if it must not.
    """

    pipeline: Pipeline
    store: FencedStore
    dead_letters: StoragePath | None
    show: Callable[[str, int, list[str]], None]
    state: StoragePath
    version: int | None = None
    check_new: Callable[[Sink], None] = lambda _: None

    def staged(self, sink: str) -> StoragePath:
        """Return a new directory for rows of one attempt on their way to ``sink``."""
        return absolute_path(layout.staged(self.state, sink) / uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """The ``count`` rows of a batch that a sink writes; ``windows`` have no source record."""

    number: int
    rows: DataFrame
    count: int
    windows: bool = False


class DeadLetterCounts(NamedTuple):
    """Number of dead letters that a batch has in their table, and of those that its rows have ``by_step``."""

    written: int
    by_step: Mapping[str, int]


NO_LETTERS = DeadLetterCounts(0, MappingProxyType({}))


class OnePassCounts(NamedTuple):
    """Counts of a batch by state, and the rows in the table and the dead letters that the batch wrote.

    ``checks``: number of rows for each name in the column ``_checks``; ``exploded``: rows that explode steps added.
    """

    out: int
    dead: int
    filtered: int
    written: int
    letters: DeadLetterCounts
    checks: Mapping[str, int]
    exploded: int


class SinkWriter:
    """Writes the batches of one query to its targets."""

    def __init__(
        self,
        plan: SinkPlan,
        checkpoint: Checkpoint,
        targets: Targets,
        letters: Mapping[str, Sequence[LetterRange]] | None = None,
    ) -> None:
        """``letters``: see :func:`letter_condition`."""
        self.targets = targets
        self._plan = plan
        self._letters = letters
        self._checkpoint = checkpoint
        self._tables: dict[tuple[str, str], Table | DeltaWriter] = {}
        self._schema_ids: dict[tuple[str, str], int] = {}
        """Ids in registries by sink and schema, for this run."""

    def write(self, sink: Sink, batch: SinkBatch) -> int:
        """Write rows that :func:`mark_unwritable` has accepted.

        Returns the number of rows written; for windows in the state store, the number of requests.
        """
        return DELIVERY[sink.kind].write(self, sink, batch)

    def prepare(self, rows: DataFrame) -> tuple[DataFrame, tuple[str, ...] | None]:
        """Return marked ``rows`` as :meth:`write_once` writes them, and the names of their columns.

        Returns ``rows``, and None instead of the names, if :meth:`write_once` cannot write them.
        """
        if not self._commits_files or not is_supported(rows.schema):
            return rows, None
        columns = self.columns(rows)
        shared = [f"{column} AS {quoted(SHARED + name)}" for name, (column, _) in columns.items()]
        outcome_ = f"{self.outcome(rows, [])} AS {outcome_column(0)}"
        return flattened(rows.selectExpr(*shared, outcome_, letter_record(rows)), 1), tuple(columns)

    def write_once(self, rows: DataFrame, batch: int, names: tuple[str, ...]) -> OnePassCounts:
        """Write the live rows and the dead letters of ``rows`` (:meth:`prepare`), with one computation of ``rows``."""
        found = write_in_one_pass(rows, [self.outcomes(batch, 0, names)])
        return self.deliver(rows.sparkSession, batch, found[0])

    def columns(self, rows: DataFrame) -> dict[str, tuple[str, str]]:
        """Return the columns that the sink writes of ``rows`` in SQL, by name, and the column of ``rows`` that each
        reads."""
        found = {name: (quoted(name), name) for name in data_columns(rows)}
        if self._plan.sink.table is None:
            return found | {name: (name, name) for name in record_identity(rows)}
        coordinates = {f"_{name}": (f"_source.{quoted(name)}", "_source") for name in COORDINATES}
        row_id = {name: (name, name) for name in _row_id(rows)}
        deletes = {} if self._plan.sink.table.delete_when is None else {DELETES: (DELETES, DELETES)}
        return {**found, **row_id, **coordinates, **computed_columns(self._plan.sink.table), **deletes}

    def outcome(self, rows: DataFrame, own: Sequence[str]) -> str:
        """Return in SQL what becomes of each of ``rows`` in the sink; ``own``: the columns that only it writes."""
        columns = self.columns(rows)
        counted = {}
        if CHECKS in rows.columns:
            counted["checks"] = CHECKS
        if "_more" in rows.columns:
            counted["more"] = ADDED_ROWS
        is_letter = self._is_letter
        letter = {} if is_letter is None else _LETTER_REASON
        return outcome({name: columns[name][0] for name in own}, letter, is_letter or "false", counted)

    def outcomes(self, batch: int, number: int, names: tuple[str, ...]) -> Outcomes:
        """Return the outcomes of the sink ``number`` with new directories for an attempt to write ``batch``."""
        letters = self._letters_table()
        table = self._committed_table()
        rows = self.targets.staged(self._plan.sink.name) if table is None else table.new_attempt(batch)
        found = Outcomes(number, names, rows, None if letters is None else letters.new_attempt(batch))
        if table is None or self._plan.sink.table is None:
            return found
        target = self._plan.sink.table
        partitions = tuple(field.name for field in target.partitions)
        return found._replace(partitions=partitions, file_bytes=target.file_bytes)

    def deliver(self, spark: SparkSession, batch: int, found: PassResult) -> OnePassCounts:
        """Commit the files ``found`` of ``batch``, or write their rows to a sink that has no files of its own.

        Raises:
            PenstockError: too many rows violate an expectation; nothing was committed.
        """
        sink, table, letters = self._plan.sink, self._committed_table(), self._letters_table()
        try:
            check_limits(self._plan.expectations, batch, found.checks)
        except PenstockError:
            for files in (found.rows, found.letters):
                if files is not None:
                    _discard_files(files)
            raise
        if table is not None:
            out = table.commit(batch, *found.rows)
        else:
            try:
                out = self._write_staged(spark, sink, batch, found.rows)
            finally:
                layout.remove_tree(found.rows.attempt)
        made = NO_LETTERS
        if letters is not None and found.letters is not None:
            made = DeadLetterCounts(letters.commit(batch, *found.letters), found.letters_by_step)
        return OnePassCounts(found.out, found.dead, found.filtered, out, made, found.checks, found.exploded)

    def _write_staged(self, spark: SparkSession, sink: Sink, batch: int, staged: WrittenFiles) -> int:
        if not staged.rows:
            # A file of an earlier attempt, which had rows, may not have its name yet.
            return 0 if sink.files is None else self.write(sink, SinkBatch(batch, spark.range(0), 0))
        rows = spark.read.parquet(*(spark_path(staged.attempt / name) for name in staged.names))
        if sink.table is not None:
            return self.write_table(sink, batch, rows, staged.rows)
        return self.write(sink, SinkBatch(batch, rows, staged.rows))

    @property
    def _commits_files(self) -> bool:
        """True if files that the executors have written can be committed to the sink's table."""
        table = self._plan.sink.table
        return table is not None and table.mode != "merge" and not (table.format == "delta" and table.is_remote)

    def _committed_table(self) -> Table | DeltaWriter | None:
        """Return the sink's table, if files that the executors have written can be committed to it."""
        if not self._commits_files:
            return None
        table = self.table(self._plan.sink)
        assert not isinstance(table, RemoteDeltaTable)
        return table

    def _letters_table(self) -> Table | None:
        """Return the dead letter table, if this query writes to it."""
        dead = self.targets.dead_letters
        return None if dead is None or self._is_letter is None else self._parquet(self._plan.sink.name, dead)

    @property
    def _is_letter(self) -> str | None:
        """A condition in SQL: the row is dead, and this query writes its dead letter; None if it writes none."""
        return None if self.targets.dead_letters is None else letter_condition(self._plan, self._letters)

    def write_dead_letters(self, rows: Sequence[DataFrame], batch: int) -> DeadLetterCounts:
        """Write the dead rows of which this query is the owner to the dead letter table, and count them."""
        path = self.targets.dead_letters
        if path is None or not rows or self._is_letter is None:
            return NO_LETTERS
        letters = reduce(DataFrame.unionByName, map(self._dead_letters, rows))
        counted = letters.groupBy("step").agg(sf.count("*").alias("letters")).collect()
        by_step = {str(row["step"]): int(row["letters"]) for row in counted}
        table = self._parquet(self._plan.sink.name, path)
        return DeadLetterCounts(table.write(batch, letters, sum(by_step.values())), by_step)

    def _dead_letters(self, rows: DataFrame) -> DataFrame:
        columns = _LETTER_REASON | _record_columns(rows)
        selected = (f"{column} AS {quoted(name)}" for name, column in columns.items())
        return rows.where(self._is_letter or "false").selectExpr(*selected)

    def identity(self, batch: int) -> WriteIdentity:
        """Return the identity of a write of this query, which brokers compare with earlier writes."""
        return WriteIdentity(self._checkpoint.query_id(), batch, str(self.targets.store.token))

    def framed_value(self, sink: Sink, rows: DataFrame) -> Column:
        """Return the column with the encoded values of ``rows`` for a sink with a schema registry.

        Raises:
            RefusedError: the registry refuses the schema, or does not have it.
            UnavailableError: the registry does not answer.
        """
        text = schema_of_rows(rows, sink)
        key = sink.name, text
        if key not in self._schema_ids:
            self._schema_ids[key] = schema_id(sink, text)
        return framed_value(rows, sink, self._schema_ids[key])

    def write_table(self, sink: Sink, batch: int, rows: DataFrame, count: int) -> int:
        """Write the ``count`` ``rows`` to the table of ``sink`` as ``batch``; return the number of rows written.

        Raises:
            PenstockError: two rows of the batch have the same key, and their order is undefined.
        """
        assert sink.table is not None
        if sink.table.mode == "merge":
            rows = last_of_each_key(rows, sink.table, sink.name)
        return self.table(sink).write(batch, rows, count)

    def table(self, sink: Sink) -> Table | DeltaWriter | RemoteDeltaTable:
        """Return the table of ``sink``."""
        assert sink.table is not None
        if sink.table.format == "parquet":
            return self._parquet(sink.name, Path(sink.table.path), partial(self.targets.check_new, sink))
        query = self._checkpoint.query_id()
        if sink.table.is_remote:
            return RemoteDeltaTable(sink.table, sink.name, query)
        key = (sink.name, sink.table.path)
        if key not in self._tables:
            self._tables[key] = DeltaWriter(
                sink.table.location,
                sink.name,
                query,
                sink.table.keys,
                sink.table.partitions,
                partial(self.targets.staged, sink.name),
                change_data_feed=sink.table.change_data_feed,
                check_new=partial(self.targets.check_new, sink),
            )
        table = self._tables[key]
        assert isinstance(table, DeltaWriter)
        return table

    def _parquet(self, writer: str, path: StoragePath, check_new: Callable[[], None] = lambda: None) -> Table:
        key = (writer, str(path))
        if key not in self._tables:
            staging = partial(self.targets.staged, writer)
            self._tables[key] = Table(path, writer, self._checkpoint.query_id(), staging, check_new)
        table = self._tables[key]
        assert isinstance(table, Table)
        return table


def _discard_files(files: WrittenFiles) -> None:
    """Remove files that are not committed. In a bucket the other objects of the directory stay."""
    if not isinstance(files.attempt, ObjectPath):
        discard(files.attempt)
        return
    # They are harmless: what cannot be removed is left.
    with suppress(StorageError, UnavailableError):
        for name in files.names:
            (files.attempt / name).unlink(missing_ok=True)


_LETTER_REASON = {name: f"_dead.{name}" for name in ("step", "code", "reason")}
"""The first columns of the dead letter table, in SQL, which depend on the sink."""


def letter_condition(plan: SinkPlan, letters: Mapping[str, Sequence[LetterRange]] | None = None) -> str | None:
    """Return the condition in SQL that the query of ``plan`` writes the dead letter of a row; None if it writes none.

    Late rows of a join are letters of each query: a row that is late in one may be joined in another. So are messages
    with an unknown schema: its id may be registered between the batches of two sinks.

    ``letters``: the ranges of the sink for the steps whose letters another sink may write, see ``letter_writers``;
    those of the other steps are in ``plan``.
    """
    ranges = letters or {}
    whole = {step for step, own in ranges.items() if any(each == LetterRange({}, None) for each in own)}
    mine = sorted((plan.dead_letters_of - ranges.keys()) | whole)
    owned = [f"_dead.step IN ({', '.join(map(literal, mine))})"] if mine else []
    steps_in: dict[str, list[str]] = {}
    for step, own in sorted(ranges.items()):
        if step not in whole:
            steps_in.setdefault(_in_ranges(own), []).append(step)
    owned += [
        # CASE: the offsets of rows that are not dead are not compared.
        f"CASE WHEN _dead.step IN ({', '.join(map(literal, steps))}) THEN {condition} END"
        for condition, steps in steps_in.items()
        if condition != "false"
    ]
    if plan.keeps_late_rows:
        owned.append(f"_dead.code = {literal(LATE)}")
    if registries_of(plan.steps):
        owned.append(f"_dead.code = {literal(UNKNOWN_SCHEMA)}")
    return f"coalesce(({' OR '.join(owned)}) AND NOT _dead.again, false)" if owned else None


def _in_ranges(ranges: Sequence[LetterRange]) -> str:
    """Return the condition in SQL that the record of a row is in one of ``ranges``.

    Partitions of which all records are, or none, are left out if those that no range names are as well. The others are
    in one literal, since Spark compiles each expression of a condition.
    """
    others = any(each.end is None for each in ranges)
    offsets = [at for each in ranges for at in (each.start, each.end or {})]
    spans = {
        f"{stream}/{name}": found
        for stream, name in sorted({(stream, name) for at in offsets for stream, named in at.items() for name in named})
        if (found := _spans(ranges, stream, name)) != ([_Span(0, None)] if others else [])
    }
    if not spans:
        return str(others).lower()
    # As in ``parse_offsets``: with several sources a stream has the prefix of its source. Kafka has no brokers.
    streams = ("_source.topic", "concat(_source.source, '/', _source.topic)")
    names = [
        name
        for mark, name in ((True, "concat(_source.broker, ':', _source.partition)"), (False, "_source.partition"))
        if any((":" in key.rpartition("/")[2]) is mark for key in spans)
    ]
    text = json.dumps({key: [span._asdict() for span in found] for key, found in spans.items()})
    known = f"from_json({literal(text)}, 'MAP<STRING, ARRAY<STRUCT<first: BIGINT, end: BIGINT>>>')"
    of_row = (f"try_element_at({known}, concat({stream}, '/', {name}))" for stream in streams for name in names)
    is_in = "_source.offset >= span.first AND (span.end IS NULL OR _source.offset < span.end)"
    return f"coalesce(exists(coalesce({', '.join(of_row)}), span -> {is_in}), {str(others).lower()})"


class _Span(NamedTuple):
    """Offsets of a partition; without an ``end`` all from the ``first`` on."""

    first: int
    end: int | None


def _spans(ranges: Sequence[LetterRange], stream: str, name: str) -> list[_Span]:
    """Return the offsets of a partition that are in ``ranges``, which are in order."""
    found: list[_Span] = []
    for each in ranges:
        first = each.start.get(stream, {}).get(name, 0)
        # A partition that the end lacks is not in the range.
        end = None if each.end is None else each.end.get(stream, {}).get(name, first)
        if end is not None and end <= first:
            continue
        if found and found[-1].end == first:
            first = found.pop().first
        found.append(_Span(first, end))
    return found


def letter_record(rows: DataFrame) -> str:
    """Return the column ``RECORD`` for ``flattened`` in SQL."""
    return f"{structure(_record_columns(rows))} AS {RECORD}"


def _record_columns(rows: DataFrame) -> dict[str, str]:
    """Return the other columns of the dead letter table for ``rows`` in SQL, by name."""
    source = rows.schema["_source"].dataType
    assert isinstance(source, StructType)
    part = "_part" if "_part" in rows.columns else "CAST(NULL AS STRING)"
    if OUTCOME in rows.columns:
        # A joined row is at the place of its left record, which may have other rows and a letter of its own.
        part = f"concat_ws('#', {', '.join(record_identity(rows))})"
    return {"id": "_id", "part": part, **{name: f"_source.{quoted(name)}" for name in source.names}}


def _table_columns(rows: DataFrame) -> list[Column]:
    """Return the columns of a table for ``rows`` of records."""
    coordinates = [sf.col(f"_source.{name}").alias(f"_{name}") for name in COORDINATES]
    return [*(quoted_column(name) for name in data_columns(rows)), *map(sf.col, _row_id(rows)), *coordinates]


def _row_id(rows: DataFrame) -> list[str]:
    """Return the columns of a table that identify a row: the id of its record, and its part after an explode step."""
    return ["_id", *(["_part"] if "_part" in rows.columns else [])]


def last_of_each_key(rows: DataFrame, sink: TableSink, writer: str) -> DataFrame:
    """Return one of ``rows`` for each key of a table that is merged by key: the last one by ``order_by``.

    Raises:
        PenstockError: two rows have the same key, and their order is undefined.
    """
    keys = references(rows, sink.keys)
    if sink.order_by is not None:
        last = sf.col(reference(rows, sink.order_by)).desc_nulls_last()
        order = Window.partitionBy(*keys).orderBy(last, *_row_id(rows))
        return rows.withColumn("_place", sf.row_number().over(order)).where("_place = 1").drop("_place")
    twice = rows.groupBy(*keys).count().where("count > 1").first()
    if twice is not None:
        named = ", ".join(f"{key} {twice[place]!r}" for place, key in enumerate(sink.keys))
        raise PenstockError(
            f"{twice['count']} rows of one batch have the key {named}",
            why=f"sink {writer!r} merges by key, and the order of these rows is undefined",
            hint="set order_by: <column> in the sink, or add a dedupe by that key before it",
        )
    return rows


def _write_table(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.table is not None
    computed = [sf.expr(column).alias(name) for name, (column, _) in computed_columns(sink.table).items()]
    if batch.windows:
        rows = batch.rows.select("*", *computed)
    else:
        deletes = [] if sink.table.delete_when is None else [sf.col(DELETES)]
        rows = batch.rows.select(*_table_columns(batch.rows), *computed, *deletes)
    return writer.write_table(sink, batch.number, rows, batch.count)


def _write_keys(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.statestore is not None
    if not batch.count:
        return 0
    target = writer.targets.store.target(sink.name, batch.number)
    requests = write_keys(batch.rows, batch.count, sink.statestore, target)
    return requests if batch.windows else batch.count


def _write_messages(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    identity = writer.identity(batch.number)
    send_messages(batch.rows, sink, writer.targets.pipeline, batch.count, identity, windows=batch.windows)
    return batch.count


def _write_kafka(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.kafka is not None
    pipeline = writer.targets.pipeline
    write = TopicBatch(sink.kafka.target, pipeline.name, sink.name, *writer.identity(batch.number))
    number = batch.number if batch.windows else None
    framed = None if sink.registered is None or not batch.count else writer.framed_value(sink, batch.rows)
    messages = ordered_messages(batch.rows.coalesce(1), sink, pipeline, batch=number, value=framed)
    return write_kafka(messages, batch.count, write)


def _write_postgresql(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.postgresql is not None
    identity = writer.identity(batch.number)
    target = BatchWriter(
        sink.postgresql.server,
        sink.postgresql.table_name,
        sink.postgresql.own_schema,
        writer.targets.pipeline.name,
        sink.name,
        identity.query,
        identity.token,
    )
    return write_postgresql(batch.rows, batch.count, sink, batch.number, target)


def _write_files(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    files = sink.files
    assert files is not None
    targets = writer.targets
    query = writer.identity(batch.number).query
    batches = FileBatches(files.location, (targets.pipeline.name, sink.name), query, targets.state, files.suffix)
    return batches.write(batch.number, batch.count, partial(write_lines, batch.rows, files))


def _print_rows(writer: SinkWriter, sink: Sink, batch: SinkBatch) -> int:
    assert sink.console is not None
    lines = batch.rows.select(row_json(batch.rows, nulls=True).alias("line"))
    printed = [row["line"] for row in lines.limit(sink.console.rows).collect()]
    writer.targets.show(sink.name, batch.number, printed)
    return batch.count


def mark_unwritable(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark ``rows`` that ``sink`` cannot write as dead, and rows that its ``when`` excludes as filtered.

    Raises:
        ConfigError: the sink uses columns that do not exist, or SQL that Spark does not accept.
    """
    mark = DELIVERY[sink.kind].mark
    try:
        return rows if mark is None else mark(rows, sink)
    except AnalysisException as error:
        raise ConfigError(
            f"sink {sink.name!r} cannot be built",
            option=f"sinks.{sink.name}",
            why=analysis_text(error),
            hint="correct its columns and expressions",
        ) from error


def _mark_unwritable_to_table(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows as dead that a table cannot have, and add the column ``DELETES`` for a table with ``delete_when``."""
    assert sink.table is not None
    rows = mark_unpartitionable(rows, sink)
    when = sink.table.delete_when
    if when is None:
        return rows
    rows = add_conditions(mark_failed_conditions(rows, sink_letter(sink.name), [when]), {DELETES: when})
    # As in SQL, a condition that is null is not true.
    return rows.withColumn(DELETES, sf.coalesce(DELETES, sf.lit(False)))


def _mark_unsendable(rows: DataFrame, sink: Sink) -> DataFrame:
    assert sink.messages is not None
    name = sink_letter(sink.name)
    if sink.messages.when != "true":
        rows = mark_filtered(rows, name, sink.messages.when)
    if sink.registered is not None:
        rows = rows.withColumn(ENCODED, encoded_value(rows, sink, alive()))
    return mark_dead(rows, name, message_failures(rows, sink, sink.messages)).drop(ENCODED)


def check_sinks(pipeline: Pipeline) -> list[str]:
    """Check that sinks are writable; return warnings about targets that may become available later.

    Topics and brokers that depend on data are not checked.

    Raises:
        StorageError: a table or the dead letter table cannot be created.
        PenstockError: a broker rejects the sink: the topic does not exist, or the pipeline may not write to it.
    """
    if pipeline.dead_letters is not None:
        _check_location("dead_letters", pipeline.dead_letters.location)
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
            warnings.append(f"sink {sink.name!r}: {error.what}; each batch is retried until the server is available")
        except PenstockError as error:
            raise PenstockError(f"sink {sink.name!r}: {error.what}", why=error.why, hint=error.hint) from error
    return warnings


def _check_table(_pipeline: Pipeline, sink: Sink) -> None:
    assert sink.table is not None
    if sink.table.is_remote:
        return
    _check_location(f"sink {sink.name!r}", sink.table.location)


def _check_files(_pipeline: Pipeline, sink: Sink) -> None:
    assert sink.files is not None
    _check_location(f"sink {sink.name!r}", sink.files.location)


def _check_location(whose: str, path: StoragePath) -> None:
    if isinstance(path, ObjectPath):
        path.check_writable(whose)
    else:
        _check_directory(whose, path)


_CHECKING = threading.Lock()
"""Held during a check: tables of several pipelines of a process may have a parent that the check removes again."""


def _check_directory(whose: str, path: Path) -> None:
    """Check that files can be created in ``path``, without leaving any: the first batch creates the table.

    A check of permissions would not be sufficient: root has all of them, but cannot write to a read-only or virtual
    file system.
    """
    with _CHECKING:
        _create_and_remove(whose, path)


def _create_and_remove(whose: str, path: Path) -> None:
    created: list[Path] = []
    try:
        for directory in (*reversed(path.absolute().parents), path.absolute()):
            if not directory.exists():
                directory.mkdir()
                created.append(directory)
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{str(directory)!r} is a file")
        probe = path / f".{uuid.uuid4().hex[:12]}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"{whose}: cannot write to {str(path)!r}",
            path=str(path),
            why=error.strerror,
            hint="set another path in the pipeline file, or give this user write permission",
        ) from error
    finally:
        for directory in reversed(created):
            with suppress(OSError):
                directory.rmdir()


def _check_topic(pipeline: Pipeline, sink: Sink) -> None:
    assert sink.tubemq is not None
    named = {"topic": topic} if (topic := _constant_topic(sink.tubemq.topic)) is not None else {}
    check_topic(SinkOptions.parse(pipeline.tube_options(sink.tubemq) | named), CHECK_TIMEOUT_S)


def _constant_topic(template: str) -> str | None:
    """Return the topic if it is the same for all rows."""
    parts = template_parts(template)
    return None if any(part.column for part in parts) else "".join(part.text for part in parts)


def _check_broker(pipeline: Pipeline, sink: Sink) -> None:
    assert sink.mqtt is not None
    # The lease has connected to the broker of the state store already, as its user.
    if sink.mqtt.broker is not None and sink.mqtt.broker != pipeline.statestore.url:
        check_broker(sink.mqtt.broker, CHECK_TIMEOUT_S)


def _check_kafka(pipeline: Pipeline, sink: Sink) -> None:
    assert sink.kafka is not None
    check_kafka_topic(sink.kafka.target, CHECK_TIMEOUT_S)
    check_value_schema(pipeline, sink)


def _check_postgresql(_pipeline: Pipeline, sink: Sink) -> None:
    assert sink.postgresql is not None
    with connected(sink.postgresql.server, f"penstock {sink.name}"):
        pass


class SinkDelivery(NamedTuple):
    """Functions for one kind of sink; ``mark`` and ``check`` are None if they are not needed.

    ``write`` writes a batch, ``mark`` marks rows that cannot be written, ``check`` raises an error before the start.
    """

    write: Callable[[SinkWriter, Sink, SinkBatch], int]
    mark: Callable[[DataFrame, Sink], DataFrame] | None = None
    check: Callable[[Pipeline, Sink], None] | None = None


DELIVERY: Mapping[str, SinkDelivery] = {
    "table": SinkDelivery(_write_table, _mark_unwritable_to_table, _check_table),
    # No check: the lease is a key of the same state store, so the run has already connected to it.
    "statestore": SinkDelivery(_write_keys, mark_rows_without_key),
    "tubemq": SinkDelivery(_write_messages, _mark_unsendable, _check_topic),
    "mqtt": SinkDelivery(_write_messages, _mark_unsendable, _check_broker),
    "kafka": SinkDelivery(_write_kafka, _mark_unsendable, _check_kafka),
    "postgresql": SinkDelivery(_write_postgresql, mark_unstorable, _check_postgresql),
    "files": SinkDelivery(_write_files, check=_check_files),
    "console": SinkDelivery(_print_rows),
}
"""An entry for each kind in ``SINK_KINDS``."""
