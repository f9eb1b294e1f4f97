"""Rows into a tube: the sink of ``format("tubemq")``, for batches and streams, with any TubeMQ server.

Delivery: at least once. A task ends when every row of it is acknowledged; a task or batch that failed is run again, and
its rows are stored again. Rows that bring no id of their own get one that names query, batch, task and row: where the
rows of a task are the same each time (a source that replays exactly, no shuffle without an order) copies have equal
ids, and a reader drops them by it.

Imports stand where they are used: Spark imports this module for every user of any data source.

Columns: ``value``; ``key``, ``topic``, ``partition`` and ``headers`` where wanted. Headers are the record's attributes
by the names that the source gives them, so that what the source reads the sink writes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from penstock.errors import ConfigError
from penstock.spark import rows
from penstock.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from penstock.tube.record import Record

__all__ = ["SentRows", "TubeStreamWriter", "TubeWriter", "check_columns"]

_TAKEN = rows.Taken(
    "tubemq",
    {
        "value": rows.text,
        "key": rows.text,
        "topic": rows.one_of(StringType),
        "partition": rows.one_of(IntegerType, LongType),
        "headers": rows.pairs(rows.text),
    },
    "value (string or binary), and where wanted key (string or binary), topic (string), partition (int), "
    "headers (array<struct<key: string, value: binary>>)",
    '"machine AS key", "to_json(struct(*)) AS value"',
)
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Whether rows of ``schema`` can be written.

    Raises:
        ConfigError: a column too many, too few, or of another type.
    """
    _TAKEN.check(schema, ["value", "topic"], topic=options.topic)


@dataclass
class SentRows(WriterCommitMessage):
    """How many rows of one task were acknowledged."""

    rows: int


class TubeWriter(DataSourceArrowWriter):
    """Rows of a batch into a tube."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _sent(self._options, iterator, self._job)


class TubeStreamWriter(DataSourceStreamArrowWriter):
    """Rows of micro-batches into a tube."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _sent(self._options, iterator, "")


def _sent(options: SinkOptions, batches: Iterator[pa.RecordBatch], job: str) -> SentRows:
    import asyncio

    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "a task of Spark's"
    name = "/".join(filter(None, (context.getLocalProperty(_QUERY) or job, context.getLocalProperty(_BATCH))))
    return asyncio.run(_send(options, batches, f"{name}/{context.partitionId()}"))


async def _send(options: SinkOptions, batches: Iterator[pa.RecordBatch], name: str) -> SentRows:
    from penstock.tube.producer import Producer

    sent = 0
    async with Producer(options.masters, delivery_timeout_s=options.timeout_s, **options.login.client()) as producer:
        waiting: list[asyncio.Future[Any]] = []
        for batch in batches:
            for topic, partition, record in _records(options, batch, name, sent):
                waiting.append(await producer.queue(topic, record, partition))
            sent += batch.num_rows
            # Arrow batch by Arrow batch, so that a task of any size keeps only one in memory.
            for future in waiting:
                await future
            waiting.clear()
    return SentRows(sent)


def _records(
    options: SinkOptions, batch: pa.RecordBatch, name: str, first: int
) -> Iterator[tuple[str, int | None, Record]]:
    """Topic, partition (None: by key) and record of each row."""
    from penstock.spark.headers import record_of

    columns = ("value", "key", "topic", "partition", "headers")
    for number, (value, key, topic, partition, headers) in enumerate(rows.read_rows(batch, columns), first):
        wanted = options.topic if topic is None else topic
        if value is None or wanted is None:
            raise ConfigError(
                f"the tubemq sink got a row without a {'value' if value is None else 'topic'}",
                option="value" if value is None else "topic",
                do="leave such rows out, or give the option topic" if wanted is None else "leave such rows out",
            )
        named = [(header["key"], rows.as_bytes(header["value"] or b"")) for header in headers or ()]
        record = record_of(rows.as_bytes(value), None if key is None else rows.as_bytes(key), named)
        if record.id is None:
            record.id = f"{name}/{number}"
        yield wanted, partition, record
