"""The keys of a state store as they are: the batch of ``format("aio-statestore")``, and the start of its stream.

The driver lists the keys that match (SCAN), the tasks read their values: each row is a value that the key had while the
job ran, not all of them at one moment. Where the store offers MGET, many keys are read with one request.

Imports stand where they are used: Spark imports this module for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.errors import ConfigError
from penstock.spark.statestore.options import SnapshotOptions
from penstock.spark.tube.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.statestore.rows import KeyRow
    from penstock.statestore.client.client import StateStoreClient

__all__ = ["KeysPartition", "StoreReader", "Written", "connect", "plan_keys", "read_keys"]

KEYS_A_BATCH = 1_000
"""Keys read at once and handed over as one Arrow batch."""
CONCURRENT_REQUESTS = 64


class Written(NamedTuple):
    """The last change of a key that the topic of the changes has."""

    version: str
    writer: str | None


class KeysPartition(InputPartition):
    """Input of one task: some of the keys. ``writers``: the writer of each version, if requested."""

    def __init__(self, keys: Sequence[bytes], writers: Mapping[bytes, Written] | None = None) -> None:
        super().__init__(keys)
        self.keys = keys
        self.writers = writers or {}

    def __repr__(self) -> str:
        return f"{len(self.keys)} keys"


class StoreReader(DataSourceReader):
    """The values of the keys that match, as they are while the job runs."""

    def __init__(self, options: SnapshotOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """The keys there are now, in tasks of about the same number; one at least."""
        return list(plan_keys(self._options)) or [KeysPartition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the keys of one task, as they are when it runs."""
        assert isinstance(partition, KeysPartition)
        return read_keys(self._options, partition)


def plan_keys(options: SnapshotOptions) -> list[KeysPartition]:
    """The keys that match now, dealt out to the tasks; no task has none."""
    import asyncio

    async def scan() -> list[bytes]:
        async with connect(options.broker, options.timeout_s) as store:
            return [key async for key in store.scan(options.keys)]

    keys = asyncio.run(scan())
    writers = _writers(options.changes, options.keys) if options.changes is not None else {}
    tasks = min(options.tasks, len(keys))
    pieces = [keys[number::tasks] for number in range(tasks)]
    return [KeysPartition(piece, {key: writers[key] for key in piece if key in writers}) for piece in pieces]


def _writers(changes: SourceOptions, keys: str) -> dict[bytes, Written]:
    """Find the writer of the last change of each matching key, from all changes in the topic."""
    from penstock.spark.statestore.rows import change_batches
    from penstock.spark.tube.offsets import Slice
    from penstock.spark.tube.tube_client import TubeClient

    found: dict[bytes, Written] = {}
    with TubeClient.of(changes) as tube:
        for partition, bound in tube.bounds(tube.partitions(changes.topics)).items():
            messages = tube.read(Slice(partition, bound.oldest, bound.end), fail_on_data_loss=changes.fail_on_data_loss)
            for batch in change_batches(partition.topic, messages, keys):
                columns = (batch.column(name).to_pylist() for name in ("key", "version", "writer"))
                found.update((key, Written(version, writer)) for key, version, writer in zip(*columns, strict=True))
    return found


def read_keys(options: SnapshotOptions, partition: KeysPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Keys that are gone by now have none."""
    import asyncio

    from penstock.spark.statestore.rows import key_batch

    keys = partition.keys
    with asyncio.Runner() as runner:
        reader = _KeyRows(options)
        runner.run(reader.open())
        try:
            for start in range(0, len(keys), KEYS_A_BATCH):
                rows = runner.run(reader.read(keys[start : start + KEYS_A_BATCH]))
                yield key_batch([_with_writer(row, partition.writers.get(row.key)) for row in rows])
        finally:
            runner.run(reader.close())


def _with_writer(row: KeyRow, last: Written | None) -> KeyRow:
    """Only where the last change in the topic is what the key is: a later one may be another client's."""
    if last is None or last.version != str(row.version):
        return row
    return row._replace(writer=last.writer)


def connect(broker: str, timeout_s: float) -> StateStoreClient:
    """A client of the state store, opened by ``async with``."""
    from penstock.statestore.client.client import StateStoreClient

    return StateStoreClient.connect(broker, timeout_s=timeout_s)


class _KeyRows:
    """Rows of keys, read over one connection."""

    def __init__(self, options: SnapshotOptions) -> None:
        from penstock.spark.statestore.reads import ManyKeys

        self._include_expiry = options.include_expiry
        self._store = connect(options.broker, options.timeout_s)
        self._many = ManyKeys(self._store)

    async def open(self) -> None:
        """Connect."""
        await self._store.__aenter__()

    async def close(self) -> None:
        """Disconnect."""
        await self._store.__aexit__(None, None, None)

    async def read(self, keys: Sequence[bytes]) -> list[KeyRow]:
        """The rows of those of ``keys`` that there are, in order."""
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
                "the state store does not tell when keys expire",
                option="includeExpiry",
                why=error.what,
                do="name the extension ttl in the node's statestore.extensions, or leave includeExpiry out",
            ) from error
        return None if left_ms is None else int(time.time() * 1000) + left_ms
