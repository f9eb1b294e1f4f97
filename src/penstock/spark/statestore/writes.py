"""Writes of the state store sinks: many keys concurrently, and the changes of each key in order.

A pipeline writes from Spark's tasks (:func:`write_rows`), each over a connection of its own. Its rows are sorted by
key; a task writes them in chunks, one after the other, so it needs the memory of a chunk and takes rows from Spark no
faster than the store accepts them.

All attempts of the task of a partition have the same client identifier, for which a broker accepts one connection: an
attempt that Spark has replaced, or a task of an earlier run, loses its connection and cannot write an older value after
a newer one. Before each chunk the task reads the lease: a fencing token does not protect a key that a later run has
deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.errors import PenstockError, UnavailableError
from penstock.runtime.io.network import without_secret
from penstock.statestore.client.client import Entry
from penstock.statestore.client.writes import Write
from penstock.statestore.errors import WritesRefusedError
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FencedTarget",
    "KeyWrite",
    "Row",
    "WritableStore",
    "collapse",
    "last_of_each",
    "write_changes",
    "write_rows",
]

CHUNK_CHANGES = 1_000
CHUNK_BYTES = 4 << 20
"""Size of the keys and values of a chunk, unless a single value is larger."""
WRITE_TIMEOUT_S = 60.0
"""Timeout of a chunk; the client reports an unreachable store much earlier."""


class KeyWrite(NamedTuple):
    """SET of ``value``, with an optional ``ttl_ms``; DEL if ``value`` is None."""

    key: str | bytes
    value: bytes | None
    ttl_ms: int | None = None


class Row(NamedTuple):
    """A row for the sink, and the value that orders it among the rows of its key."""

    change: KeyWrite
    order: Any = None


class FencedTarget(NamedTuple):
    """The state store as a run writes to it from tasks; ``holder`` is the value of the key ``lease`` while it may.

    ``writer``: the client identifiers of the tasks begin with it. ``traceparent``: context of the trace of
    the requests.
    """

    broker: str
    token: Hlc
    lease: str
    holder: str
    writer: str
    traceparent: str | None = None


class WritableStore(Protocol):
    """The used part of :class:`penstock.statestore.client.client.StateStoreClient`."""

    async def get(self, key: str, /) -> Entry | None: ...

    async def write_many(
        self, writes: Sequence[Write], /, *, fencing_token: Hlc | None, stop: bool
    ) -> Sequence[bool]: ...


def last_of_each(rows: Iterable[Row], order_by: str | None) -> dict[str | bytes, list[KeyWrite]]:
    """Return the last row of each key, by ``order_by``.

    Raises:
        PenstockError: a key has two rows and their order is undefined.
    """
    last: dict[str | bytes, Row] = {}
    for row in rows:
        key = row.change.key
        other = last.get(key)
        if other is None:
            last[key] = row
            continue
        unordered = None if order_by is None else _unordered(row.order, other.order)
        if order_by is None or unordered is not None:
            raise PenstockError(
                f"state store sink: a batch has two rows of key {_shown(key)}",
                why="their order is undefined" if order_by is None else f"{order_by} is {unordered} in one of them",
                hint="set orderBy to a column that orders the rows, or write one row per key",
            )
        if row.order == other.order and row.change != other.change:
            raise PenstockError(
                f"state store sink: two rows of key {_shown(key)} have the same {order_by}, {row.order}",
                why="their order is undefined",
                hint="set orderBy to a column that differs between the rows of a key",
            )
        if row.order > other.order:
            last[key] = row
    return {key: [row.change] for key, row in last.items()}


def _unordered(*orders: Any) -> str | None:
    """Return the name of a value without an order: null or NaN; None if all have one."""
    if None in orders:
        return "null"
    return "NaN" if any(order != order for order in orders) else None  # noqa: PLR0124 - see above


async def write_changes(store: WritableStore, by_key: Mapping[Any, Sequence[KeyWrite]], token: Hlc | None) -> int:
    """Write the changes, those of a key in order; return their number.

    Raises:
        UnavailableError: the store did not respond; some changes may have been applied, and all may be sent again.
        PenstockError: the store refused a change, most likely because a later run has a higher fencing token.
    """
    writes = [
        Write.delete(change.key) if change.value is None else Write.set(change.key, change.value, ttl_ms=change.ttl_ms)
        for changes in by_key.values()
        for change in changes
    ]
    try:
        # After a refusal, a replaced run must not write other keys that the later run has not written yet.
        await store.write_many(writes, fencing_token=token, stop=True)
    except WritesRefusedError as error:
        if token is None:
            raise
        raise PenstockError(
            f"the state store refused key {_shown(error.first.key)}: {error.text}",
            why=f"the run writes under fencing token {token}; a key with a higher one belongs to a later run",
            hint="let the later run continue; to start over, stop it first",
        ) from error
    return len(writes)


def collapse(changes: Iterable[KeyWrite]) -> dict[str | bytes, list[KeyWrite]]:
    """Group the changes by key, in order, without a delete that follows another delete of the key."""
    found: dict[str | bytes, list[KeyWrite]] = {}
    for change in changes:
        of_key = found.setdefault(change.key, [])
        if not (change.value is None and of_key and of_key[-1].value is None):
            of_key.append(change)
    return found


@asynccontextmanager
async def _connect(target: FencedTarget, partition: int) -> AsyncIterator[WritableStore]:
    from penstock.mqtt.client.client import MqttClient
    from penstock.statestore.client.client import StateStoreClient

    # A clean start, since the session of a replaced task is of no use; no reconnection, since it would take the
    # connection from the attempt that replaced this one.
    client_id = f"{target.writer}-{partition}"
    traced = {} if target.traceparent is None else {"traceparent": target.traceparent}
    async with (
        MqttClient(target.broker, client_id=client_id, clean_start=True, reconnect=False) as mqtt,
        StateStoreClient(mqtt, reconnect=False, user_properties=traced) as store,
    ):
        yield store


def write_rows(target: FencedTarget, batches: Iterable[pa.RecordBatch], partition: int) -> int:
    """Write the rows of a task in order; return the number of requests.

    The columns are ``key`` (string) and ``value`` (string, null deletes the key). Nothing is connected without rows.

    Raises:
        UnavailableError: the store did not answer, the run does not hold its lease, or another attempt of the task has
            replaced this one; some rows may be written, and all may be written again.
        PenstockError: the store refused a change, most likely because a later run has written.
    """
    chunks = _chunks(batches)
    first = next(chunks, None)
    return 0 if first is None else asyncio.run(_write_chunks(target, first, chunks, partition))


async def _write_chunks(
    target: FencedTarget, first: list[KeyWrite], chunks: Iterator[list[KeyWrite]], partition: int
) -> int:
    written = 0
    chunk: list[KeyWrite] | None = first
    async with _connect(target, partition) as store:
        while chunk is not None:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await _check_lease(store, target)
                    written += await write_changes(store, collapse(chunk), target.token)
            except TimeoutError:
                raise UnavailableError(
                    f"the state store at {without_secret(target.broker)} did not write {len(chunk)} keys within "
                    f"{WRITE_TIMEOUT_S:g} s",
                    why="the node is down or overloaded",
                    hint="start the node again; the pipeline repeats the batch",
                ) from None
            chunk = next(chunks, None)
    return written


async def _check_lease(store: WritableStore, target: FencedTarget) -> None:
    held = await store.get(target.lease)
    if held is None or held.value.decode(errors="replace") != target.holder:
        raise UnavailableError(
            f"the run {target.holder} currently does not hold its lease {target.lease!r}",
            why="it has expired, or another run holds it; writes of this run would be stale",
            hint="wait: the lease is reacquired if no other run has held it; the pipeline repeats the batch",
        )


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[list[KeyWrite]]:
    """Yield the rows of ``batches`` as changes, in order; no chunk is empty."""
    chunk: list[KeyWrite] = []
    size = 0
    for batch in batches:
        for key, value in zip(batch.column("key"), batch.column("value"), strict=True):
            text = value.as_py()
            change = KeyWrite(key.as_py(), None if text is None else text.encode())
            chunk.append(change)
            size += len(change.key) + len(change.value or b"")
            if len(chunk) >= CHUNK_CHANGES or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _shown(key: str | bytes) -> str:
    return repr(key if isinstance(key, str) else key.decode(errors="backslashreplace"))
