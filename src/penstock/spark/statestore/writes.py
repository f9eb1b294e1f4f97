"""Changes of state store keys, as the sinks make them: many keys at once, each key's changes in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError, RefusedError
from penstock.statestore.hlc import Hlc

__all__ = ["Change", "Row", "Store", "last_of_each", "write_changes"]

CONCURRENT_KEYS = 256
"""Requests under way at once, over one connection: enough to fill the store's group commit. Where the broker's receive
maximum allows fewer, the client waits."""


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
    """What is needed of :class:`penstock.statestore.client.client.StateStoreClient`."""

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
        nowhere = None if order_by is None else _nowhere(row.order, other.order)
        if order_by is None or nowhere is not None:
            raise PenstockError(
                f"state store sink: a batch has two rows of key {_shown(key)}",
                why="no column says which is the last"
                if order_by is None
                else f"{order_by} is {nowhere} in one of them",
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


def _nowhere(*orders: Any) -> str | None:
    """What has no place in the order: null, and the number that is none (it differs from itself)."""
    if None in orders:
        return "null"
    return "NaN" if any(order != order for order in orders) else None  # noqa: PLR0124


async def write_changes(store: Store, by_key: Mapping[Any, Sequence[Change]], token: Hlc | None) -> int:
    """Carry out the changes, those of one key in their order; how many requests that took.

    Raises:
        UnavailableError: the store did not answer; what of it was applied is unknown, and may be sent again.
        PenstockError: the store refused one, most likely since a later run has a higher token.
    """
    waiting = iter(by_key.values())
    requests, failed = 0, False

    async def work() -> None:
        nonlocal requests, failed
        for changes in waiting:  # shared: the changes of a key are taken by one worker
            if failed:
                return
            for change in changes:
                try:
                    await _write(store, change, token)
                except BaseException:
                    failed = True
                    raise
                requests += 1

    # All end before an error is raised: nothing of this batch may be under way when it is repeated.
    workers = (work() for _ in range(min(CONCURRENT_KEYS, len(by_key))))
    for result in await asyncio.gather(*workers, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
    return requests


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
