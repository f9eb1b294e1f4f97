"""Changes of state store keys, as the sinks make them: many keys at once, each key's changes in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError
from penstock.statestore.client.writes import Write
from penstock.statestore.errors import WritesRefusedError
from penstock.statestore.hlc import Hlc

__all__ = ["KeyWrite", "Row", "WritableStore", "last_of_each", "write_changes"]


class KeyWrite(NamedTuple):
    """SET of ``value``, for ``ttl_ms`` where given, or DEL where it is None."""

    key: str | bytes
    value: bytes | None
    ttl_ms: int | None = None


class Row(NamedTuple):
    """A row for the sink, and what orders it among the rows of its key."""

    change: KeyWrite
    order: Any = None


class WritableStore(Protocol):
    """Required part of :class:`penstock.statestore.client.client.StateStoreClient`."""

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
    """Return the name of a value without an order: null or NaN; None if all have one."""
    if None in orders:
        return "null"
    return "NaN" if any(order != order for order in orders) else None  # noqa: PLR0124 - see above


async def write_changes(store: WritableStore, by_key: Mapping[Any, Sequence[KeyWrite]], token: Hlc | None) -> int:
    """Carry out the changes, those of one key in their order; how many there were.

    Raises:
        UnavailableError: the store did not answer; what of it was applied is unknown, and may be sent again.
        PenstockError: the store refused one, most likely since a later run has a higher token.
    """
    writes = [
        Write.delete(change.key) if change.value is None else Write.set(change.key, change.value, ttl_ms=change.ttl_ms)
        for changes in by_key.values()
        for change in changes
    ]
    try:
        # A run that was replaced must not go on with keys that the later one has not written yet.
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
