"""``format("aio-statestore")``: the keys of a state store as a batch source, and a sink that sets and deletes them.

The source lists the keys that match (SCAN) when Spark plans the job and reads their values (GET) in the tasks: each
row is a value that the key had while the job ran, not all of them at one moment.

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
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import AtomicType, BinaryType, IntegerType, LongType, StringType, StructField, StructType

from penstock.errors import ConfigError
from penstock.spark import rows
from penstock.spark.store_options import StoreReadOptions, StoreWriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.store_writes import Row
    from penstock.statestore.client import StateStoreClient

__all__ = ["KeysPartition", "StateStoreDataSource", "StoreReader", "StoreStreamWriter", "StoreWriter", "WrittenRows"]

NAME = "aio-statestore"
"""Not ``statestore``: Spark has a source of its own by that name, which reads the state of streaming queries."""
KEYS_A_BATCH = 1_000
"""Keys read at once and handed over as one Arrow batch."""
CONCURRENT_GETS = 64

_SCHEMA = StructType(
    [StructField("key", BinaryType()), StructField("value", BinaryType()), StructField("version", StringType())]
)
_TAKEN = rows.Taken(
    NAME,
    {"key": rows.text, "value": rows.text, "ttl_ms": rows.one_of(IntegerType, LongType)},
    "key and value (string or binary; a null value deletes), ttl_ms (int or bigint, optional), the column of orderBy",
    '"concat(\'device/\', id) AS key", "to_json(struct(*)) AS value"',
)


class StateStoreDataSource(DataSource):
    """The format ``aio-statestore``. Options: `store_options.READ_OPTIONS` and `store_options.WRITE_OPTIONS`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        """``key`` and ``value`` binary, ``version`` the text of the hybrid logical clock."""
        StoreReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> StoreReader:
        if schema != _SCHEMA:
            raise ConfigError(
                f"the statestore source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {_SCHEMA.simpleString()}",
                do="leave .schema(...) out and select what is needed from the data frame",
            )
        return StoreReader(StoreReadOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> StoreWriter:  # noqa: FBT001 - Spark's signature
        if overwrite:
            raise rows.refuse_overwrite(
                NAME,
                why="it would have to delete every other key",
                do='write with mode("append"): rows set their keys, rows without a value delete them',
            )
        return StoreWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StoreStreamWriter:  # noqa: FBT001, N802, ARG002 - Spark's
        return StoreStreamWriter(self._write_options(schema))

    def _write_options(self, schema: StructType) -> StoreWriteOptions:
        options = StoreWriteOptions.parse(self.options)
        taken, required = _TAKEN, ["key", "value"]
        if options.order_by is not None:
            taken = _TAKEN._replace(columns={options.order_by: rows.one_of(AtomicType), **_TAKEN.columns})
            required.append(options.order_by)
        taken.check(schema, required)
        return options


class KeysPartition(InputPartition):
    """What one task reads: some of the keys."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(keys)
        self.keys = keys


class StoreReader(DataSourceReader):
    """The values of the keys that match, as they are while the job runs."""

    def __init__(self, options: StoreReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        import asyncio

        keys = asyncio.run(self._keys())
        tasks = max(1, min(self._options.min_partitions, len(keys)))
        return [KeysPartition(keys[number::tasks]) for number in range(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import asyncio

        import pyarrow as pa

        assert isinstance(partition, KeysPartition)
        columns: list[pa.Field[Any]] = [
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("version", pa.string()),
        ]
        schema = pa.schema(columns)
        with asyncio.Runner() as runner:
            store = runner.run(_opened(self._options.broker, self._options.timeout_s))
            try:
                for start in range(0, len(partition.keys), KEYS_A_BATCH):
                    keys, values, versions = runner.run(_values(store, partition.keys[start : start + KEYS_A_BATCH]))
                    arrays: list[pa.Array[Any]] = [
                        pa.array(keys, pa.binary()),
                        pa.array(values, pa.binary()),
                        pa.array(versions, pa.string()),
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            finally:
                runner.run(store.__aexit__(None, None, None))

    async def _keys(self) -> list[bytes]:
        async with _client(self._options.broker, self._options.timeout_s) as store:
            return [key async for key in store.scan(self._options.keys)]


async def _values(store: StateStoreClient, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[str]]:
    """Keys, values and versions of those that still exist."""
    import asyncio

    limit = asyncio.Semaphore(CONCURRENT_GETS)

    async def one(key: bytes) -> tuple[bytes, bytes, str] | None:
        async with limit:
            entry = await store.get(key)
            return None if entry is None else (key, entry.value, str(entry.version))

    found = [row for row in await asyncio.gather(*map(one, keys)) if row is not None]
    return [key for key, _, _ in found], [value for _, value, _ in found], [version for _, _, version in found]


@dataclass
class WrittenRows(WriterCommitMessage):
    """The rows of one task, for the driver to write."""

    rows: list[Row]


class StoreWriter(DataSourceArrowWriter):
    """Rows of a batch into the state store."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _store(self._options, messages)


class StoreStreamWriter(DataSourceStreamArrowWriter):
    """Rows of micro-batches into the state store. A batch that is repeated writes the same again."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        _store(self._options, messages)


def _collected(options: StoreWriteOptions, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """The rows of a task; see the module for why nothing is written here."""
    return WrittenRows([row for batch in batches for row in _rows(options, batch)])


def _rows(options: StoreWriteOptions, batch: pa.RecordBatch) -> Iterator[Row]:
    from penstock.spark.store_writes import Change, Row

    columns = ("key", "value", "ttl_ms", options.order_by or "")
    for key, value, ttl_ms, order in rows.read_rows(batch, columns):
        if not key:
            raise ConfigError(
                f"the statestore sink got a row with {'no' if key is None else 'an empty'} key",
                option="key",
                do="leave such rows out: .where(\"key <> ''\")",
            )
        yield Row(Change(rows.as_bytes(key), None if value is None else rows.as_bytes(value), ttl_ms), order)


def _store(options: StoreWriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    import asyncio

    from penstock.spark.store_writes import last_of_each, write_changes

    written = (row for message in messages if isinstance(message, WrittenRows) for row in message.rows)
    changes = last_of_each(written, options.order_by)

    async def write() -> None:
        async with _client(options.broker, options.timeout_s) as store:
            await write_changes(store, changes, options.token)

    if changes:
        asyncio.run(write())


def _client(broker: str, timeout_s: float) -> StateStoreClient:
    from penstock.statestore.client import StateStoreClient

    return StateStoreClient.connect(broker, timeout_s=timeout_s)


async def _opened(broker: str, timeout_s: float) -> StateStoreClient:
    return await _client(broker, timeout_s).__aenter__()
