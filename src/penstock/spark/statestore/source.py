"""``format("aio-statestore")``: the keys of a state store as a batch, their changes as a stream, and a sink.

Batch: the driver lists the matching keys (SCAN), and the tasks read their values, many per request if the store
supports MGET. Each row has a value that the key had while the job ran; the rows are not a consistent snapshot.

Stream: a snapshot of the keys, then every change, from a TubeMQ topic. The node copies each change to the topic
(``statestore.capture_topic``) once, in the order of versions, so the offsets are those of the topic, and a range of
offsets always has the same rows. A stream with a snapshot stores the end of the topic *before* it reads the keys, so no
change is missed. A change during the snapshot appears again as a change, with a version that is not newer than the
snapshot's. If the first batch fails, its snapshot is read again and may be newer.

Sink: one row per key and batch. Tasks only collect rows, and the driver writes after all tasks have succeeded, so a
failed batch writes nothing. A repeated batch writes the same values. With a fencing token, the store refuses writes of
a run that was replaced. Rows with a null value delete their key.

Modules are imported where they are used: Spark imports this one for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
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

from penstock.errors import ConfigError, DataLossError
from penstock.spark import sink_rows
from penstock.spark.plain_errors import plain_errors
from penstock.spark.statestore.options import SnapshotOptions, StoreFeedOptions, StoreReadOptions, StoreWriteOptions
from penstock.spark.tube.offsets import Bounds, PartitionOffsets, Slice, TopicPartition, to_json
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import RangePartition, SupportsTriggerAvailableNow, TubeStreamReader, read_messages
from penstock.spark.tube.tube_client import ServerAccess, TubeClient, explain_missing_topic
from penstock.statestore.hlc import Hlc
from penstock.tube.codec.message import INDEX_RECORD_BYTES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

    from penstock.spark.statestore.rows import KeyRow
    from penstock.spark.statestore.writes import Row
    from penstock.statestore.client.client import StateStoreClient

__all__ = [
    "SNAPSHOT_DONE",
    "KeysPartition",
    "LastChange",
    "StateStoreDataSource",
    "StoreReader",
    "StoreStreamReader",
    "StoreStreamWriter",
    "StoreWriter",
    "WrittenRows",
    "connect",
    "offset_of_version",
    "plan_keys",
    "read_keys",
]

KEYS_PER_BATCH = 1_000
"""Keys per Arrow batch, which are read concurrently."""
CONCURRENT_REQUESTS = 64


class LastChange(NamedTuple):
    """Version and writer of the last change of a key in the topic of changes."""

    version: str
    writer: str | None


class KeysPartition(InputPartition):
    """Input of one task: some of the keys. ``writers``: the last change of each key, if writers were requested."""

    def __init__(self, keys: Sequence[bytes], writers: Mapping[bytes, LastChange] | None = None) -> None:
        super().__init__(keys)
        self.keys = keys
        self.writers = writers or {}

    def __repr__(self) -> str:
        return f"{len(self.keys)} keys"


@plain_errors
class StoreReader(DataSourceReader):
    """Batch reader of the current values of the matching keys."""

    def __init__(self, options: SnapshotOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """List the existing keys and return at least one task; tasks have similar numbers of keys."""
        return list(plan_keys(self._options)) or [KeysPartition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the current values of the keys of one task."""
        assert isinstance(partition, KeysPartition)
        return read_keys(self._options, partition)


def plan_keys(options: SnapshotOptions) -> list[KeysPartition]:
    """List the matching keys and distribute them over tasks, none of which is empty."""
    import asyncio

    async def scan() -> list[bytes]:
        async with connect(options.broker, options.timeout_s) as store:
            return [key async for key in store.scan(options.keys)]

    keys = asyncio.run(scan())
    writers = _writers(options.changes, options.keys) if options.changes is not None else {}
    tasks = min(options.tasks, len(keys))
    pieces = [keys[number::tasks] for number in range(tasks)]
    return [KeysPartition(piece, {key: writers[key] for key in piece if key in writers}) for piece in pieces]


def _writers(changes: SourceOptions, keys: str) -> dict[bytes, LastChange]:
    """Find the writer of the last change of each matching key, from all changes in the topic."""
    from penstock.spark.statestore.rows import change_batches
    from penstock.spark.tube.offsets import Slice
    from penstock.spark.tube.tube_client import TubeClient

    found: dict[bytes, LastChange] = {}
    with TubeClient.from_options(changes) as tube:
        for partition, bound in tube.bounds(tube.partitions(changes.topics)).items():
            messages = tube.read(Slice(partition, bound.oldest, bound.end), fail_on_data_loss=changes.fail_on_data_loss)
            for batch in change_batches(partition.topic, messages, keys):
                columns = (batch.column(name).to_pylist() for name in ("key", "version", "writer"))
                found.update((key, LastChange(version, writer)) for key, version, writer in zip(*columns, strict=True))
    return found


def read_keys(options: SnapshotOptions, partition: KeysPartition) -> Iterator[pa.RecordBatch]:
    """Read the rows of one task. Keys that no longer exist have no row."""
    import asyncio

    from penstock.spark.statestore.rows import key_batch

    keys = partition.keys
    with asyncio.Runner() as runner:
        reader = _KeyRows(options)
        runner.run(reader.open())
        try:
            for start in range(0, len(keys), KEYS_PER_BATCH):
                rows = runner.run(reader.read(keys[start : start + KEYS_PER_BATCH]))
                yield key_batch([_with_writer(row, partition.writers.get(row.key)) for row in rows])
        finally:
            runner.run(reader.close())


def _with_writer(row: KeyRow, last: LastChange | None) -> KeyRow:
    """Add the writer if the last change in the topic has the row's version; a newer one may have another writer."""
    if last is None or last.version != str(row.version):
        return row
    return row._replace(writer=last.writer)


def connect(broker: str, timeout_s: float) -> StateStoreClient:
    """Return a client of the state store; ``async with`` connects it."""
    from penstock.statestore.client.client import StateStoreClient

    return StateStoreClient.connect(broker, timeout_s=timeout_s)


class _KeyRows:
    """Reads rows of keys over one connection."""

    def __init__(self, options: SnapshotOptions) -> None:
        from penstock.spark.statestore.lookup import BatchKeyReader

        self._include_expiry = options.include_expiry
        self._store = connect(options.broker, options.timeout_s)
        self._many = BatchKeyReader(self._store)

    async def open(self) -> None:
        """Connect."""
        await self._store.__aenter__()

    async def close(self) -> None:
        """Disconnect."""
        await self._store.__aexit__(None, None, None)

    async def read(self, keys: Sequence[bytes]) -> list[KeyRow]:
        """Return the rows of the ``keys`` that exist, in order."""
        import asyncio

        from penstock.spark.statestore.rows import KeyRow

        found = await self._many.read(keys)
        rows = [KeyRow(key, entry.value, entry.version) for key in keys if (entry := found.get(key)) is not None]
        if not self._include_expiry:
            return rows
        limit = asyncio.Semaphore(CONCURRENT_REQUESTS)

        async def with_expiry(row: KeyRow) -> KeyRow:
            async with limit:
                return row._replace(expires_at_ms=await self._expires_at_ms(row.key))

        return list(await asyncio.gather(*map(with_expiry, rows)))

    async def _expires_at_ms(self, key: bytes) -> int | None:
        import time

        from penstock.statestore.errors import InvalidRequestError

        try:
            left_ms = (await self._store.expiry(key)).left_ms
        except InvalidRequestError as error:
            raise ConfigError(
                "the state store does not return expiry times of keys",
                option="includeExpiry",
                why=error.what,
                hint="enable the extension ttl in the node's statestore.extensions, or remove includeExpiry",
            ) from error
        return None if left_ms is None else int(time.time() * 1000) + left_ms


SNAPSHOT_DONE: Final = "$snapshot"
"""Key in the offset: 1 if the snapshot was read, otherwise 0. No topic can have this name."""

Offset = dict[str, dict[str, int]]


@plain_errors
class StoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader. It runs in one process next to the driver for the whole query; executors ``read`` with copies."""

    def __init__(self, options: StoreFeedOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._topic = options.source.topics[0]
        given = options.starting
        starting = given if isinstance(given, str) and given in ("earliest", "latest") else None
        self._changes = TubeStreamReader(replace(options.source, starting=starting), servers)
        self._initial: Offset | None = None
        self._ends = False
        """True if the run ends with the currently existing changes."""
        self._is_placed = False
        """True if this process knows the query's offsets; Spark 4.1 does not pass them."""
        self._done: int | None = None
        """1 if the snapshot was read, otherwise 0; None for a query without a snapshot."""

    def initialOffset(self) -> Offset:
        """Return the start of a query without a checkpoint. Spark calls it twice, so the first result is kept."""
        self._is_placed = True
        if self._initial is None:
            starting = self._options.starting
            with self._explaining_capture():
                if starting == "snapshot" or isinstance(starting, Hlc):
                    source = replace(self._options.source, starting=to_json(self._start(starting)))
                    self._changes.stop()
                    self._changes = TubeStreamReader(source, self._servers)
                    if self._ends:
                        self._changes.prepareForTriggerAvailableNow()
                self._initial = self._changes.initialOffset()
            if starting == "snapshot":
                self._initial |= {SNAPSHOT_DONE: {"done": 0}}
                self._done = 0
        return self._initial

    def latestOffset(
        self, start: Mapping[str, Mapping[str, int]] | None = None, limit: ReadLimit | None = None
    ) -> Offset:
        """Return the end of the next batch. The snapshot is one batch, regardless of its size."""
        if start is None and not self._is_placed:  # Spark 4.1, first call of a query
            self.initialOffset()
        done = self._done if start is None else _done(start)
        if done == 0:
            begin = self.initialOffset() if start is None else start
            return {**_without_snapshot(begin), SNAPSHOT_DONE: {"done": 1}}
        end = self._changes.latestOffset(None if start is None else _without_snapshot(start), limit)
        return end if done is None else {**end, SNAPSHOT_DONE: {"done": done}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of the source of changes."""
        return self._changes.getDefaultReadLimit()

    def reportLatestOffset(self) -> Offset | None:
        """Return the end of the topic at the last request: progress reports contain the lag."""
        newest = self._changes.reportLatestOffset()
        return newest if newest is None or self._done is None else {**newest, SNAPSHOT_DONE: {"done": 1}}

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run: the snapshot and the current end of the topic. Spark calls this method first."""
        self._ends = True
        with self._explaining_capture():
            self._changes.prepareForTriggerAvailableNow()

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """Return the tasks of one batch: the keys of the snapshot, if the batch contains it, and ranges of changes."""
        self._is_placed = True
        self._done = _done(end)
        pieces = self._changes.partitions(_without_snapshot(start), _without_snapshot(end))
        if self._done != 1 or _done(start) == 1:
            return pieces
        if self._options.snapshot is None:
            raise ConfigError(
                "the checkpoint is from a query with a snapshot, but startingVersion is not snapshot",
                option="startingVersion",
                hint="set startingVersion=snapshot, or use a separate checkpoint location for this query",
            )
        return [*plan_keys(self._options.snapshot), *pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task: keys of the snapshot, or a range of changes."""
        if isinstance(partition, KeysPartition):
            assert self._options.snapshot is not None, "such tasks are planned with a snapshot only"
            yield from read_keys(self._options.snapshot, partition)
        elif isinstance(partition, RangePartition):
            from penstock.spark.statestore.rows import change_batches

            messages = read_messages(self._options.source, partition, self._servers)
            yield from change_batches(self._topic, messages, self._options.keys)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Do nothing: the query's checkpoint stores the offsets."""

    def stop(self) -> None:
        """Close the connection to the topic."""
        self._changes.stop()

    def _start(self, starting: Hlc | str) -> PartitionOffsets:
        """Return the offsets at which changes begin: the end of the topic before the snapshot, or a version."""
        with TubeClient.from_options(self._options.source, servers=self._servers) as tube:
            bounds = tube.bounds(tube.partitions(self._options.source.topics))
            if not isinstance(starting, Hlc):
                return {partition: bound.end for partition, bound in bounds.items()}
            loses = not self._options.source.fail_on_data_loss
            return {p: offset_of_version(tube, p, bound, starting, may_lose=loses) for p, bound in bounds.items()}

    def _explaining_capture(self) -> AbstractContextManager[None]:
        """Explain the error about a missing topic: most likely the node is not configured to copy changes to it."""
        return explain_missing_topic(
            "the changes of the state store are not stored",
            why="a node copies changes to a topic only if statestore.capture_topic is set",
            hint=f"set statestore.capture_topic: {self._topic} in the node's configuration and restart it",
        )


def offset_of_version(
    tube: TubeClient, partition: TopicPartition, bounds: Bounds, version: Hlc, *, may_lose: bool = False
) -> int:
    """Return the offset of the first change with ``version`` or a later one; the end of the log if there is none.

    Versions increase with offsets, so a binary search finds it, with two small requests per step.

    Raises:
        DataLossError: the topic's oldest change is newer (not with ``may_lose``).
        PenstockError: a record is not a change.
    """
    from penstock.spark.statestore.rows import version_at

    def first_from(offset: int) -> Hlc | None:
        """Return the version of the first change at ``offset`` or later; None if there is none."""
        reached, count = tube.plan(Slice(partition, offset, bounds.end), 1)
        if not count:
            return None
        return next(version_at(partition.topic, batch) for batch in tube.read(Slice(partition, offset, reached)))

    wanted = version.position
    low, high = bounds.oldest // INDEX_RECORD_BYTES, bounds.end // INDEX_RECORD_BYTES
    while low < high:
        middle = (low + high) // 2
        found = first_from(middle * INDEX_RECORD_BYTES)
        if found is None or found.position >= wanted:
            high = middle
        else:
            low = middle + 1
    offset = low * INDEX_RECORD_BYTES
    if offset == bounds.oldest > 0 and not may_lose:
        oldest = first_from(offset)
        if oldest is not None and oldest.position > wanted:
            raise DataLossError(
                f"{partition}: changes from version {version} on are no longer stored (oldest version: {oldest})",
                why="the retention of the topic removed them",
                hint="start with a snapshot (startingVersion=snapshot), at a later version, or set "
                "failOnDataLoss=false to start at the oldest change",
            )
    return offset


def _without_snapshot(offset: Mapping[str, Mapping[str, int]]) -> Offset:
    """Return the offset without the entry of the snapshot."""
    return {topic: dict(named) for topic, named in offset.items() if topic != SNAPSHOT_DONE}


def _done(offset: Mapping[str, Mapping[str, int]]) -> int | None:
    named: Any = offset.get(SNAPSHOT_DONE)
    return None if named is None else int(named["done"])


NAME = "aio-statestore"
"""Not ``statestore``: Spark has a source with this name, which reads the state of streaming queries."""

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


@plain_errors
class StateStoreDataSource(DataSource):
    """The format ``aio-statestore``. Options: ``READ_OPTIONS`` of the source, ``WRITE_OPTIONS`` of the sink."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns: the state of a key (``operation`` SNAPSHOT) or a change (SET, DELETE, also on expiry).

        ``version`` is the hybrid logical clock as text, ``timestamp`` its wall clock. ``writer`` is the client id of
        the writer, null if the key expired; for a snapshot see the option includeWriter. ``value`` is null for a
        delete, and for a value that is too large for the topic of changes: ``omitted_bytes`` is its size.
        """
        StoreReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> StoreReader:
        """Return the reader of the current keys. Raises ConfigError: an option or the schema is invalid."""
        return StoreReader(self._read_options(schema).for_batch())

    def streamReader(self, schema: StructType) -> StoreStreamReader:
        """Return the reader of a stream of changes. Raises ConfigError: an option or the schema is invalid."""
        return StoreStreamReader(self._read_options(schema).for_stream())

    def writer(self, schema: StructType, overwrite: bool) -> StoreWriter:
        """Return the writer of a batch. Raises ConfigError: overwrite mode, or an invalid option or column."""
        if overwrite:
            raise sink_rows.refuse_overwrite(
                NAME,
                why="it would have to delete every other key",
                hint='write with mode("append"): rows set their keys, and rows with a null value delete them',
            )
        return StoreWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StoreStreamWriter:
        """Return the writer of a stream. Raises ConfigError: an option or column is invalid."""
        return StoreStreamWriter(self._write_options(schema))

    def _read_options(self, schema: StructType) -> StoreReadOptions:
        if schema != _SCHEMA:
            raise ConfigError(
                f"the {NAME} source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {_SCHEMA.simpleString()}",
                hint="remove .schema(...) and select columns of the data frame instead",
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
    """The rows of one task, which the driver writes."""

    rows: list[Row]


@plain_errors
class StoreWriter(DataSourceArrowWriter):
    """Batch writer: writes the rows of a data frame to the state store."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Collect the rows of one task for the driver, which orders and writes the rows of all tasks."""
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Write the rows of all tasks. Runs in the driver after all tasks have succeeded."""
        _store(self._options, messages)


@plain_errors
class StoreStreamWriter(DataSourceStreamArrowWriter):
    """Stream writer: writes the rows of each micro-batch to the state store."""

    def __init__(self, options: StoreWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Collect the rows of one task for the driver."""
        return _collected(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Write the rows of all tasks of the batch."""
        _store(self._options, messages)


def _collected(options: StoreWriteOptions, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Collect the rows of a task."""
    return WrittenRows([row for batch in batches for row in _rows(options, batch)])


def _rows(options: StoreWriteOptions, batch: pa.RecordBatch) -> Iterator[Row]:
    from penstock.spark.statestore.writes import KeyWrite, Row

    columns = ("key", "value", "ttl_ms", options.order_by or "")
    for key, value, ttl_ms, order in sink_rows.read_rows(batch, columns):
        if not key:
            raise ConfigError(
                f"the {NAME} sink got a row with {'no' if key is None else 'an empty'} key",
                option="key",
                hint="filter such rows: .where(\"key <> ''\")",
            )
        if ttl_ms is not None and ttl_ms < 1:
            raise ConfigError(
                f"the {NAME} sink got a row with ttl_ms {ttl_ms}",
                option="ttl_ms",
                why="the minimum is 1 ms",
                hint="set ttl_ms to null for a key that does not expire, or the value to null to delete the key",
            )
        yield Row(
            KeyWrite(sink_rows.as_bytes(key), None if value is None else sink_rows.as_bytes(value), ttl_ms), order
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
