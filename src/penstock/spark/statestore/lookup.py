"""Lookups of the keys of rows in the state store, from executors.

Each Python worker has one connection per store, in a separate thread, so that the MQTT keep alive works while the
worker waits for rows. Workers, and with them connections, are reused across micro-batches; a broken connection is
replaced. The distinct keys of an Arrow batch are read concurrently: with MGET requests of many keys if the store
supports them, otherwise with one request per key.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.errors import PenstockError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.loop import LoopThread
from penstock.statestore.client.client import Entry, Snapshot
from penstock.statestore.errors import InvalidRequestError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["BatchKeyReader", "Connect", "KeyReader", "ReadableStore", "read_values", "values_of", "with_lookup"]

CONCURRENT_GETS = 256
"""Maximum number of concurrent single-key requests; the broker's Receive Maximum may reduce it."""
CONCURRENT_MGETS = 8
KEYS_PER_REQUEST = 256
"""Maximum number of keys in one MGET, which takes the store about a millisecond; larger requests are hardly faster per
key."""
FIRST_KEYS = 4
"""Number of keys in the first MGETs, while the size of the values is unknown."""
RESPONSE_BYTES = 1 << 20
"""Approximate size of a response: a broker limits the data queued for one client."""


T = TypeVar("T")


class ReadableStore(Protocol):
    """The used part of :class:`penstock.statestore.client.client.StateStoreClient`."""

    async def get(self, key: bytes, /) -> Entry | None: ...
    async def get_many(self, keys: Sequence[bytes], /) -> Snapshot: ...
    async def get_values(self, keys: Sequence[bytes], /) -> dict[bytes, bytes | None]: ...


class BatchKeyReader:
    """Reads keys over one connection; checks once whether the store supports MGET."""

    def __init__(self, store: ReadableStore) -> None:
        self._store = store
        self._has_mget: bool | None = None
        self._read_keys = 0
        self._read_bytes = 0

    async def read(self, keys: Collection[bytes]) -> Mapping[bytes, Entry]:
        """Return the entries of the ``keys`` (distinct) that exist. They are not a consistent snapshot.

        Raises:
            UnavailableError: the store did not respond.
            RefusedError: the store refused the request for a key.
        """

        async def many(piece: Sequence[bytes]) -> dict[bytes, Entry | None]:
            return (await self._store.get_many(piece)).entries

        return await self._read(list(keys), many, self._store.get, lambda entry: len(entry.value))

    async def values(self, keys: Collection[bytes]) -> Mapping[bytes, bytes]:
        """Return the values only, which is cheaper than :meth:`read`; raises the same errors."""

        async def one(key: bytes) -> bytes | None:
            entry = await self._store.get(key)
            return None if entry is None else entry.value

        return await self._read(list(keys), self._store.get_values, one, len)

    async def _read(
        self,
        named: Sequence[bytes],
        many: Callable[[Sequence[bytes]], Awaitable[dict[bytes, T | None]]],
        one: Callable[[bytes], Awaitable[T | None]],
        size_of: Callable[[T], int],
    ) -> dict[bytes, T]:
        if self._has_mget is None and len(named) > 1:
            self._has_mget = await self._supports_mget(named[0])
        if not self._has_mget:
            return await _one_by_one(named, one)
        found: dict[bytes, T] = {}
        begun = 0

        async def work() -> None:
            nonlocal begun
            while begun < len(named):  # shared by the concurrent workers
                piece = named[begun : begun + self._keys_per_request()]
                begun += len(piece)
                existing = {key: value for key, value in (await many(piece)).items() if value is not None}
                found.update(existing)
                self._read_keys += len(piece)
                self._read_bytes += sum(map(size_of, existing.values()))

        await _concurrently(work, min(CONCURRENT_MGETS, -(-len(named) // FIRST_KEYS)))
        return found

    def _keys_per_request(self) -> int:
        if not self._read_keys:
            return FIRST_KEYS
        mean = self._read_bytes // self._read_keys
        return max(1, min(KEYS_PER_REQUEST, RESPONSE_BYTES // (mean + 1)))

    async def _supports_mget(self, key: bytes) -> bool:
        try:
            await self._store.get_many([key])
        except InvalidRequestError:
            return False
        return True


async def _one_by_one(keys: Sequence[bytes], one: Callable[[bytes], Awaitable[T | None]]) -> dict[bytes, T]:
    found: dict[bytes, T] = {}
    waiting = iter(keys)

    async def work() -> None:
        for key in waiting:  # shared by the concurrent workers
            value = await one(key)
            if value is not None:
                found[key] = value

    await _concurrently(work, min(CONCURRENT_GETS, len(keys)))
    return found


async def _concurrently(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


_TIMEOUT_MS = 30_000
_CACHED = 100_000  # maximum values in a worker's cache; the oldest are evicted first
_CACHED_BYTES = 64 << 20  # maximum size of these values
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


def with_lookup(
    df: DataFrame,
    key_column: str,
    output_column: str,
    broker: str,
    *,
    refresh_ms: int = 0,
    timeout_ms: int = _TIMEOUT_MS,
) -> DataFrame:
    """Add ``output_column`` to ``df``: the value (binary) of the key in ``key_column``, null if it does not exist.

    ``key_column`` is string or binary; a null key results in null. ``broker`` is the URL of the MQTT broker of the
    state store. A worker caches values for ``refresh_ms``; with 0, it reads every key in every Arrow batch. Works for
    streams and batches. A repeated micro-batch reads the keys again and may get newer values.

    Raises (in the task):
        UnavailableError: the store did not respond within ``timeout_ms``.
    """
    import pyarrow as pa
    from pyspark.sql import functions as sf
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import BinaryType

    def look_up(keys: pa.Array[Any]) -> pa.Array[Any]:
        return values_of(keys, broker, refresh_ms=refresh_ms, timeout_ms=timeout_ms)

    # Spark selects the kind of UDF by the annotations, which must be types: in this module they are strings.
    look_up.__annotations__ = {"keys": pa.Array, "return": pa.Array}
    # Nondeterministic, so that Spark neither evaluates it for each use of the column nor moves it across a filter.
    function = arrow_udf(look_up, BinaryType()).asNondeterministic()  # type: ignore[call-overload]  # needs no kind
    name = key_column.replace("`", "``")
    return df.withColumn(output_column, function(sf.col(f"`{name}`")))


Connect = Callable[[], AbstractAsyncContextManager[ReadableStore]]


class KeyReader:
    """Blocking reader of key values over one connection, which is opened on first use.

    Not thread-safe. ``connect`` returns an asynchronous context manager of a store.
    """

    def __init__(self, connect: Connect, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._cache: dict[bytes, tuple[float, bytes | None]] = {}
        self._cached_bytes = 0
        self._thread: LoopThread | None = None
        self._open: AbstractAsyncContextManager[ReadableStore] | None = None
        self._store: ReadableStore | None = None

    def values(self, keys: Collection[bytes], *, refresh_ms: int, timeout_ms: int) -> Mapping[bytes, bytes | None]:
        """Return the value of each of ``keys``; None if a key does not exist.

        Raises:
            UnavailableError: the store did not respond within ``timeout_ms``.
            RefusedError: the store refused the request for a key.
        """
        now = self._clock()
        found: dict[bytes, bytes | None] = {}
        missing: list[bytes] = []
        for key in dict.fromkeys(keys):
            cached = self._cache.get(key)
            if cached is not None and (now - cached[0]) * 1000 < refresh_ms:
                found[key] = cached[1]
            else:
                missing.append(key)
        if missing:
            if self._thread is None:
                self._thread = LoopThread("penstock-lookup")
            fetched = self._thread.run(self._fetch(missing, timeout_ms))
            found |= fetched
            if refresh_ms:
                self._store_in_cache(fetched, now)
        return found

    def close(self) -> None:
        """Disconnect and stop the thread. If a worker is killed, the operating system closes both."""
        if self._thread is None:
            return
        self._thread.run(self._disconnect())
        self._thread.close()
        self._thread = None

    def _store_in_cache(self, fetched: Mapping[bytes, bytes | None], now: float) -> None:
        for key, value in fetched.items():
            self._remove_from_cache(key)  # reinserted at the end: the dictionary is ordered by time
            self._cache[key] = (now, value)
            self._cached_bytes += len(value or b"")
        while len(self._cache) > _CACHED or self._cached_bytes > _CACHED_BYTES:
            self._remove_from_cache(next(iter(self._cache)))

    def _remove_from_cache(self, key: bytes) -> None:
        _, value = self._cache.pop(key, (0.0, None))
        self._cached_bytes -= len(value or b"")

    async def _fetch(self, keys: Collection[bytes], timeout_ms: int) -> dict[bytes, bytes | None]:
        """Read all ``keys``; after a failure, retry all of them over a new connection."""
        deadline = self._clock() + timeout_ms / 1000
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    return await self._read_values(keys)
            except (UnavailableError, OSError) as error:  # TimeoutError is an OSError
                await self._disconnect()
                pause_s = backoff.failed()
                if self._clock() + pause_s >= deadline:
                    raise UnavailableError(
                        f"the state store did not return {len(keys)} keys within {timeout_ms} ms: {error!r}",
                        applied=False,
                        hint="start the node, check the broker's URL, or increase timeout_ms",
                    ) from error
                await asyncio.sleep(pause_s)

    async def _read_values(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        if self._store is None:
            opened = self._connect()
            self._store = await opened.__aenter__()
            self._open = opened
            self._many = BatchKeyReader(self._store)
        found = await self._many.values(keys)
        return {key: found.get(key) for key in keys}

    async def _disconnect(self) -> None:
        opened, self._open, self._store = self._open, None, None
        if opened is not None:
            with suppress(PenstockError, OSError):
                await opened.__aexit__(None, None, None)


_readers: dict[tuple[int, str], KeyReader] = {}
"""One per process and store. The process id in the key prevents the use of a connection inherited by fork."""


def _reader(broker: str) -> KeyReader:
    def connect() -> AbstractAsyncContextManager[ReadableStore]:
        from penstock.statestore.client.client import StateStoreClient

        client_id = f"penstock-lookup-{secrets.token_hex(8)}"
        store: AbstractAsyncContextManager[ReadableStore] = StateStoreClient.connect(broker, client_id=client_id)
        return store

    key = (os.getpid(), broker)
    if key not in _readers:
        _readers[key] = KeyReader(connect)
    return _readers[key]


def read_values(
    keys: Collection[bytes], broker: str, *, refresh_ms: int, timeout_ms: int
) -> Mapping[bytes, bytes | None]:
    """Return the values of ``keys`` over the connection of this worker; see :meth:`KeyReader.values`."""
    return _reader(broker).values(keys, refresh_ms=refresh_ms, timeout_ms=timeout_ms)


def values_of(keys: pa.Array[Any], broker: str, *, refresh_ms: int, timeout_ms: int) -> pa.Array[Any]:
    """Return the values (binary) of ``keys`` (string or binary), in order; null for null and for missing keys."""
    import pyarrow as pa

    encoded = keys.dictionary_encode()  # so that only distinct keys are processed in Python
    distinct: list[Any] = encoded.dictionary.cast(pa.binary()).to_pylist()
    values = read_values(distinct, broker, refresh_ms=refresh_ms, timeout_ms=timeout_ms) if distinct else {}
    return pa.array([values[key] for key in distinct], pa.binary()).take(encoded.indices)
