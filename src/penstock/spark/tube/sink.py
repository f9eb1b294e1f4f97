"""The sink of ``format("tubemq")``, for batches and streams, with any TubeMQ server.

Delivery: exactly once with penstock's brokers (:mod:`penstock.spark.tube.sink_writes`). At least once with others, or
where that is asked for: a task ends when every row of it is acknowledged; a task or batch that failed is run again, and
its rows are stored again. There rows that bring no id of their own get one that names query, batch, task and row: where
the rows of a task are the same each time (a source that replays exactly, no shuffle without an order) copies have equal
ids, and a reader drops them by it.

Imports stand where they are used: Spark imports this module for every user of any data source.

Columns: ``value``; ``key``, ``topic``, ``partition`` and ``headers`` where wanted. Headers are the record's attributes
by the names that the source gives them, so that what the source reads the sink writes.
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
    "value (string or binary), and where wanted key (string or binary), topic (string), partition (int), "
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


class TubeWriter(DataSourceArrowWriter):
    """Writes the rows of a batch."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send or stage the rows of one task; returns when the brokers have them. Runs on an executor."""
        return _write(self._options, iterator, self._job, streaming=False)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let readers see what all tasks have staged; nothing to do where rows were sent at once."""
        _finish(self._options, messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop what the tasks have staged."""
        _finish(self._options, messages, commit=False)


class TubeStreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of micro-batches."""

    def __init__(self, options: SinkOptions) -> None:
        if options.transaction is not None:
            raise ConfigError(
                "txnAppId and txnVersion are for batch writes",
                option="txnAppId",
                why="a stream is named by its query id and numbers its batches by itself",
                do="leave them out",
            )
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """As that of a batch, under the number of the batch."""
        return _write(self._options, iterator, self._job, streaming=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """As that of a batch; repeated for a batch that is committed it changes nothing."""
        _finish(self._options, messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Drop what the tasks have staged, unless it was decided already."""
        # Called after a commit that failed, too: what was decided cannot be undone, and is not.
        _finish(self._options, messages, commit=False)


def _write(options: SinkOptions, batches: Iterator[pa.RecordBatch], job: str, *, streaming: bool) -> SentRows:
    import asyncio

    from pyspark import TaskContext

    from penstock.spark.tube import sink_writes

    context = TaskContext.get()
    assert context is not None, "a task of Spark's"
    batch = sink_writes.batch_of(options, context.getLocalProperty, job, streaming=streaming)
    task = context.partitionId()
    # An id says where a row comes from, also in a batch write inside of a query's batch.
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

    told = [message for message in messages if isinstance(message, SentRows)]
    if told:
        staged = [message.staged for message in told]
        asyncio.run(sink_writes.finish(options, told[0].batch, staged, commit=commit))


def _records(
    options: SinkOptions, batch: pa.RecordBatch, name: str, first: int
) -> Iterator[tuple[str, int | None, Record, str]]:
    """Topic, partition (None: by key) and record of each row, and the id for one that has none of its own."""
    from penstock.spark.tube.arrow import record_of

    columns = ("value", "key", "topic", "partition", "headers")
    for number, (value, key, topic, partition, headers) in enumerate(sink_rows.read_rows(batch, columns), first):
        wanted = options.topic if topic is None else topic
        if value is None or wanted is None:
            raise ConfigError(
                f"the tubemq sink got a row without a {'value' if value is None else 'topic'}",
                option="value" if value is None else "topic",
                do="leave such rows out, or give the option topic" if wanted is None else "leave such rows out",
            )
        kept = headers if options.include_headers else None
        named = [(header["key"], sink_rows.as_bytes(header["value"] or b"")) for header in kept or ()]
        record = record_of(sink_rows.as_bytes(value), None if key is None else sink_rows.as_bytes(key), named)
        yield wanted, options.partition if partition is None else partition, record, f"{name}/{number}"
