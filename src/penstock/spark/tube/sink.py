"""The sink of ``format("tubemq")``, for batches and streams, with any TubeMQ server.

Delivery: exactly once with penstock's brokers (:mod:`penstock.spark.tube.sink_writes`); at least once with other
brokers, or with ``deliveryGuarantee`` at-least-once. At least once: a task succeeds when all its rows are acknowledged;
a failed task or batch runs again and stores its rows again. Rows without an id get one from query, batch, task and row
number. If the rows of a task are the same in every attempt (a source that replays exactly, no shuffle without an
order), copies have equal ids, which readers can use to drop duplicates.

Modules are imported where they are used: Spark imports this one for every user of any data source.

Columns: ``value``; optional: ``key``, ``topic``, ``partition`` and ``headers``. Headers have the names that the source
uses, so rows of the source can be written unchanged.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from penstock.errors import ConfigError
from penstock.spark import sink_rows
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.tube.exactly_once import BatchId, Staged
    from penstock.tube.record import Record

__all__ = ["SentRows", "TubeStreamWriter", "TubeWriter", "check_columns"]

_SINK_SCHEMA = sink_rows.SinkSchema(
    "tubemq",
    {
        "value": sink_rows.text,
        "key": sink_rows.text,
        "topic": sink_rows.one_of(StringType),
        "partition": sink_rows.one_of(IntegerType, LongType),
        "headers": sink_rows.pairs(sink_rows.text),
    },
    "value (string or binary); optional: key (string or binary), topic (string), partition (int), "
    "headers (array<struct<key: string, value: binary>>)",
    '"machine AS key", "to_json(struct(*)) AS value"',
)


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Check that rows of ``schema`` can be written.

    Raises:
        ConfigError: a column is missing, unknown, or has another type.
    """
    _SINK_SCHEMA.check(schema, ["value", "topic"], topic=options.topic)


@dataclass
class SentRows(WriterCommitMessage):
    """Result of one task: number of written rows, and the staged rows (with their batch) for the commit."""

    rows: int
    batch: BatchId
    staged: Staged


@plain_errors
class TubeWriter(DataSourceArrowWriter):
    """Batch writer: sends or stages the rows of a data frame."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send or stage the rows of one task; returns when the brokers acknowledged them. Runs in an executor."""
        return _write(self._options, iterator, self._job, streaming=False)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the staged rows of all tasks, which makes them readable; rows sent directly need no commit."""
        _finish(self._options, messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the staged rows of all tasks."""
        _finish(self._options, messages, commit=False)


@plain_errors
class TubeStreamWriter(DataSourceStreamArrowWriter):
    """Stream writer: sends or stages the rows of each micro-batch."""

    def __init__(self, options: SinkOptions) -> None:
        if options.transaction is not None:
            raise ConfigError(
                "txnAppId and txnVersion are for batch writes",
                option="txnAppId",
                why="a stream is identified by its query id and batch numbers",
                hint="remove them",
            )
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send or stage the rows of one task of a micro-batch. Runs in an executor."""
        return _write(self._options, iterator, self._job, streaming=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit the staged rows of all tasks; has no effect if the batch is already committed."""
        _finish(self._options, messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Drop the staged rows of all tasks, unless the batch is already committed."""
        # Spark also calls this after a failed commit, which may have committed the batch: that is not undone.
        _finish(self._options, messages, commit=False)


def _write(options: SinkOptions, batches: Iterator[pa.RecordBatch], job: str, *, streaming: bool) -> SentRows:
    import asyncio

    from pyspark import TaskContext

    from penstock.spark.tube import sink_writes

    context = TaskContext.get()
    assert context is not None, "must be called in a Spark task"
    batch = sink_writes.batch_of(options, context.getLocalProperty, job, streaming=streaming)
    task = context.partitionId()
    # In foreachBatch, ids of a batch write contain the query and its batch, so that a repeated batch has equal ids.
    query, number = context.getLocalProperty(sink_writes.QUERY) or job, context.getLocalProperty(sink_writes.BATCH)
    name = "/".join(filter(None, (query, number, str(task))))

    def records() -> Iterator[list[tuple[str, int | None, Record, str]]]:
        first = 0
        for rows_of in batches:
            yield list(_records(options, rows_of, name, first))
            first += rows_of.num_rows

    written, staged = asyncio.run(sink_writes.write(options, batch, task, records()))
    return SentRows(written, batch, staged)


def _finish(options: SinkOptions, messages: Iterable[WriterCommitMessage | None], *, commit: bool) -> None:
    import asyncio

    from penstock.spark.tube import sink_writes

    sent = [message for message in messages if isinstance(message, SentRows)]
    if sent:
        staged = [message.staged for message in sent]
        asyncio.run(sink_writes.finish(options, sent[0].batch, staged, commit=commit))


def _records(
    options: SinkOptions, batch: pa.RecordBatch, name: str, first: int
) -> Iterator[tuple[str, int | None, Record, str]]:
    """Yield topic, partition (None: by key) and record of each row, and an id for a record that has none."""
    from penstock.spark.tube.arrow import record_of

    columns = ("value", "key", "topic", "partition", "headers")
    for number, (value, key, topic, partition, headers) in enumerate(sink_rows.read_rows(batch, columns), first):
        wanted = options.topic if topic is None else topic
        if value is None or wanted is None:
            raise ConfigError(
                f"the tubemq sink got a row without a {'value' if value is None else 'topic'}",
                option="value" if value is None else "topic",
                hint="filter such rows, or set the option topic" if wanted is None else "filter such rows",
            )
        kept = headers if options.include_headers else None
        named = [(header["key"], sink_rows.as_bytes(header["value"] or b"")) for header in kept or ()]
        record = record_of(sink_rows.as_bytes(value), None if key is None else sink_rows.as_bytes(key), named)
        yield wanted, options.partition if partition is None else partition, record, f"{name}/{number}"
