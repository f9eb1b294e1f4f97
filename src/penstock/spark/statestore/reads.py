"""Reading many keys of a state store: with one request for many where it offers MGET, else with one for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Protocol

from penstock.statestore.client.client import Entry, Snapshot
from penstock.statestore.errors import InvalidRequestError

__all__ = ["ManyKeys", "Store"]

CONCURRENT_GETS = 256
"""Requests for one key under way at once; the broker's receive maximum may allow fewer, the client then waits."""
CONCURRENT_MGETS = 8
KEYS_A_REQUEST = 256
"""Keys of one MGET at most: the request itself costs little beside so many, which keep the store for a millisecond."""
FIRST_KEYS = 4
"""Keys of one MGET while nobody knows how large the values are."""
ANSWER_BYTES = 1 << 20
"""How large an answer shall be about: a broker bounds what waits for one client."""


class Store(Protocol):
    """What is needed of :class:`penstock.statestore.client.client.StateStoreClient`."""

    async def get(self, key: bytes, /) -> Entry | None: ...
    async def get_many(self, keys: Sequence[bytes], /) -> Snapshot: ...


class ManyKeys:
    """Reads keys over one connection; asks once whether the store has MGET."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._has_mget: bool | None = None
        self._read_keys = 0
        self._read_bytes = 0

    async def read(self, keys: Collection[bytes]) -> Mapping[bytes, Entry]:
        """The entries of those of ``keys`` (each once) that exist; not all of one moment.

        Raises:
            UnavailableError: the store did not answer.
            RefusedError: the store refuses a key.
        """
        named = list(keys)
        if self._has_mget is None and len(named) > 1:
            self._has_mget = await self._offers_mget(named[0])
        if not self._has_mget:
            return await self._one_by_one(named)
        found: dict[bytes, Entry] = {}
        begun = 0

        async def work() -> None:
            nonlocal begun
            while begun < len(named):  # shared: each piece is taken by one worker
                piece = named[begun : begun + self._keys_a_request()]
                begun += len(piece)
                entries = (await self._store.get_many(piece)).entries
                found.update((key, entry) for key, entry in entries.items() if entry is not None)
                self._read_keys += len(piece)
                self._read_bytes += sum(len(entry.value) for entry in entries.values() if entry is not None)

        await _side_by_side(work, min(CONCURRENT_MGETS, -(-len(named) // FIRST_KEYS)))
        return found

    def _keys_a_request(self) -> int:
        if not self._read_keys:
            return FIRST_KEYS
        mean = self._read_bytes // self._read_keys
        return max(1, min(KEYS_A_REQUEST, ANSWER_BYTES // (mean + 1)))

    async def _one_by_one(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        waiting = iter(keys)

        async def work() -> None:
            for key in waiting:
                entry = await self._store.get(key)
                if entry is not None:
                    found[key] = entry

        await _side_by_side(work, min(CONCURRENT_GETS, len(keys)))
        return found

    async def _offers_mget(self, key: bytes) -> bool:
        try:
            await self._store.get_many([key])
        except InvalidRequestError:
            return False
        return True


async def _side_by_side(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
