"""Changes of state store keys, as the sinks make them: many keys at once, each key's changes in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError, RefusedError
from penstock.statestore.hlc import Hlc

__all__ = ["Change", "Row", "Store", "last_of_each", "write_changes"]

CONCURRENT_KEYS = 64
"""Requests under way at once: enough to fill the store's group commit, few enough for any receive maximum."""


class Change(NamedTuple):
    """SET of ``value``, for ``ttl_ms`` where given, or DEL where it is None."""

    key: str | bytes
    value: bytes | None
    ttl_ms: int | None = None


class Row(NamedTuple):
    """A row for the sink, and what orders it among the rows of its key."""

    change: Change
    order: Any = None


class Store(Protocol):
    """What is needed of :class:`penstock.statestore.client.StateStoreClient`."""

    async def set(
        self, key: str | bytes, value: bytes, /, *, ttl_ms: int | None, fencing_token: Hlc | None
    ) -> object: ...
    async def delete(self, key: str | bytes, /, *, fencing_token: Hlc | None) -> int: ...


def last_of_each(rows: Iterable[Row], order_by: str | None) -> dict[str | bytes, list[Change]]:
    """What each key comes to: the row that ``order_by`` puts last.

    Raises:
        PenstockError: two rows of a key, and nothing that says which is the last.
    """
    last: dict[str | bytes, Row] = {}
    for row in rows:
        key = row.change.key
        other = last.get(key)
        if other is None:
            last[key] = row
            continue
        if order_by is None or None in (row.order, other.order):
            raise PenstockError(
                f"state store sink: a batch has two rows of key {_shown(key)}",
                why="no column says which is the last" if order_by is None else f"{order_by} is null in one of them",
                do="name a column in orderBy, or keep one row of each key",
            )
        if row.order == other.order and row.change != other.change:
            raise PenstockError(
                f"state store sink: two rows of key {_shown(key)} have the same {order_by}, {row.order}",
                why="which of them is the last would be chance",
                do="order by a column that is different in the rows of a key",
            )
        if row.order > other.order:
            last[key] = row
    return {key: [row.change] for key, row in last.items()}


async def write_changes(store: Store, by_key: Mapping[Any, Sequence[Change]], token: Hlc | None) -> int:
    """Carry out the changes, those of one key in their order; how many requests that took.

    Raises:
        UnavailableError: the store did not answer; what of it was applied is unknown, and may be sent again.
        PenstockError: the store refused one, most likely since a later run has a higher token.
    """
    limit = asyncio.Semaphore(CONCURRENT_KEYS)

    async def write_key(changes: Sequence[Change]) -> int:
        async with limit:
            for change in changes:
                await _write(store, change, token)
        return len(changes)

    # All are awaited before an error is raised: nothing of this batch may be under way when it is repeated.
    done = await asyncio.gather(*map(write_key, by_key.values()), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return sum(result for result in done if isinstance(result, int))


async def _write(store: Store, change: Change, token: Hlc | None) -> None:
    try:
        if change.value is None:
            await store.delete(change.key, fencing_token=token)
        else:
            await store.set(change.key, change.value, ttl_ms=change.ttl_ms, fencing_token=token)
    except RefusedError as error:
        if token is None:
            raise
        raise PenstockError(
            f"the state store refused key {_shown(change.key)}: {error.text or error.what}",
            why=f"the run writes under fencing token {token}; a key with a higher one belongs to a later run",
            do="let the later run go on; to start over, stop it first",
        ) from error


def _shown(key: str | bytes) -> str:
    return repr(key if isinstance(key, str) else key.decode(errors="backslashreplace"))
