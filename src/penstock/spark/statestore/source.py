"""``format("aio-statestore")``: the keys of a state store as a batch, their changes as a stream, and a sink.

The source is in ``snapshot`` (the keys as they are) and ``feed`` (what changes).

The sink takes one row a key and batch: tasks only collect, the driver writes once all of them have succeeded, so a
failed batch writes nothing. What it writes depends on the rows alone, so a repeated batch leaves the store as it was.
Under a fencing token a run that was replaced is refused. Deletes are rows whose value is null.

Imports stand where they are used: Spark imports this module for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    AtomicType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError
from penstock.spark import sink_rows
from penstock.spark.statestore.feed import StoreStreamReader
from penstock.spark.statestore.options import StoreReadOptions, StoreWriteOptions
from penstock.spark.statestore.snapshot import StoreReader, connect

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.statestore.writes import Row

__all__ = ["StateStoreDataSource", "StoreStreamWriter", "StoreWriter", "WrittenRows"]

NAME = "aio-statestore"
"""Not ``statestore``: Spark has a source of its own by that name, which reads the state of streaming queries."""

_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("operation", StringType()),
        StructField("version", StringType()),
        StructField("writer", StringType()),
        StructField("timestamp", TimestampType()),
        StructField("expires_at", TimestampType()),
        StructField("omitted_bytes", LongType()),
    ]
)
_SINK_SCHEMA = sink_rows.SinkSchema(
    NAME,
    {"key": sink_rows.text, "value": sink_rows.text, "ttl_ms": sink_rows.one_of(IntegerType, LongType)},
    "key and value (string or binary; a null value deletes), ttl_ms (int or bigint, optional), the column of orderBy",
    '"concat(\'device/\', id) AS key", "to_json(struct(*)) AS value"',
)


class StateStoreDataSource(DataSource):
    """The format ``aio-statestore``. Options: `store_options.READ_OPTIONS` and `store_options.WRITE_OPTIONS`."""

    @classmethod
    def name(cls) -> str:
        """Name for ``format``."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns: the state of a key (``operation`` SNAPSHOT) or a change (SET, DELETE, also on expiry).

        ``version`` is the hybrid logical clock as text, ``timestamp`` its wall clock. ``writer`` is the client id that
        made a change, null if the key expired; for a snapshot see the option includeWriter. ``value`` is null for a
        delete, and for a value too large for the topic of changes: ``omitted_bytes`` is its size.
        """
        StoreReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> StoreReader:
        """The keys as they are while they are read. Raises ConfigError: an option or column is wrong."""
        return StoreReader(self._read_options(schema).for_batch())

    def streamReader(self, schema: StructType) -> StoreStreamReader:
        """Every change in the order of versions, after the keys where that is wanted. Raises ConfigError."""
        return StoreStreamReader(self._read_options(schema).for_stream())

    def writer(self, schema: StructType, overwrite: bool) -> StoreWriter:
        """Sets and deletes keys. Raises ConfigError: the mode is overwrite, or an option or column is wrong."""
        if overwrite:
            raise sink_rows.refuse_overwrite(
                NAME,
                why="it would have to delete every other key",
                do='write with mode("append"): rows set their keys, rows without a value delete them',
            )
        return StoreWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StoreStreamWriter:
        """As :meth:`writer`, batch after batch; a repeated batch has the same effect."""
        return StoreStreamWriter(self._write_options(schema))

    def _read_options(self, schema: StructType) -> StoreReadOptions:
        if schema != _SCHEMA:
            raise ConfigError(
                f"the {NAME} source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {_SCHEMA.simpleString()}",
                do="leave .schema(...) out and select what is needed from the data frame",
            )
        return StoreReadOptions.parse(self.options)

    def _write_options(self, schema: StructType) -> StoreWriteOptions:
        options = StoreWriteOptions.parse(self.options)
        accepted, required = _SINK_SCHEMA, ["key", "value"]
        if options.order_by is not None:
            accepted = _SINK_SCHEMA._replace(
                columns={options.order_by: sink_rows.one_of(AtomicType), **_SINK_SCHEMA.columns}
            )
            required.append(options.order_by)
        accepted.check(schema, required)
        return options


@dataclass
class WrittenRows(WriterCommitMessage):
    """The rows of one task, for the driver to write."""

    rows: list[Row]


class StoreWriter(DataSourceArrowWriter):
    """Rows of a batch into the state store."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Collect the rows of one task for the driver, which alone writes: order and fence need one place."""
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Write what all tasks have collected. Runs on the driver, once all of them are done."""
        _store(self._options, messages)


class StoreStreamWriter(DataSourceStreamArrowWriter):
    """Rows of micro-batches into the state store. A batch that is repeated writes the same again."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """As that of a batch."""
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Write what all tasks of the batch have collected; a batch that is repeated is written again."""
        _store(self._options, messages)


def _collected(options: StoreWriteOptions, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """The rows of a task; see the module for why nothing is written here."""
    return WrittenRows([row for batch in batches for row in _rows(options, batch)])


def _rows(options: StoreWriteOptions, batch: pa.RecordBatch) -> Iterator[Row]:
    from penstock.spark.statestore.writes import KeyChange, Row

    columns = ("key", "value", "ttl_ms", options.order_by or "")
    for key, value, ttl_ms, order in sink_rows.read_rows(batch, columns):
        if not key:
            raise ConfigError(
                f"the {NAME} sink got a row with {'no' if key is None else 'an empty'} key",
                option="key",
                do="leave such rows out: .where(\"key <> ''\")",
            )
        if ttl_ms is not None and ttl_ms < 1:
            raise ConfigError(
                f"the {NAME} sink got a row with ttl_ms {ttl_ms}",
                option="ttl_ms",
                why="a key lives for at least a millisecond",
                do="leave ttl_ms null for a key that stays, or make the value null to delete the key",
            )
        yield Row(
            KeyChange(sink_rows.as_bytes(key), None if value is None else sink_rows.as_bytes(value), ttl_ms), order
        )


def _store(options: StoreWriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    import asyncio

    from penstock.spark.statestore.writes import last_of_each, write_changes

    written = (row for message in messages if isinstance(message, WrittenRows) for row in message.rows)
    changes = last_of_each(written, options.order_by)

    async def write() -> None:
        async with connect(options.broker, options.timeout_s) as store:
            await write_changes(store, changes, options.token)

    if changes:
        asyncio.run(write())
