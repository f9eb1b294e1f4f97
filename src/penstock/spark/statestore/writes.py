"""Writes of the state store sinks: many keys concurrently, and the changes of each key in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError
from penstock.statestore.client.writes import Write
from penstock.statestore.errors import WritesRefusedError
from penstock.statestore.hlc import Hlc

__all__ = ["KeyWrite", "Row", "WritableStore", "last_of_each", "write_changes"]


class KeyWrite(NamedTuple):
    """SET of ``value``, with an optional ``ttl_ms``; DEL if ``value`` is None."""

    key: str | bytes
    value: bytes | None
    ttl_ms: int | None = None


class Row(NamedTuple):
    """A row for the sink, and the value that orders it among the rows of its key."""

    change: KeyWrite
    order: Any = None


class WritableStore(Protocol):
    """The used part of :class:`penstock.statestore.client.client.StateStoreClient`."""

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
                do="set orderBy to a column that orders the rows, or write one row per key",
            )
        if row.order == other.order and row.change != other.change:
            raise PenstockError(
                f"state store sink: two rows of key {_shown(key)} have the same {order_by}, {row.order}",
                why="their order is undefined",
                do="set orderBy to a column that differs between the rows of a key",
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
            do="let the later run continue; to start over, stop it first",
        ) from error
    return len(writes)


def _shown(key: str | bytes) -> str:
    return repr(key if isinstance(key, str) else key.decode(errors="backslashreplace"))
