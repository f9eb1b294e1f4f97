"""Reading many keys of a state store: with one request for many where it offers MGET, else with one for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.statestore.client.client import Entry, Snapshot
from penstock.statestore.errors import InvalidRequestError

__all__ = ["ManyKeys", "StoreReader"]

CONCURRENT_GETS = 256
"""Requests for one key under way at once; the broker's receive maximum may allow fewer, the client then waits."""
CONCURRENT_MGETS = 8
KEYS_A_REQUEST = 256
"""Maximum number of keys in one MGET: it keeps the store busy for a millisecond; larger requests save little."""
FIRST_KEYS = 4
"""Keys of one MGET while nobody knows how large the values are."""
ANSWER_BYTES = 1 << 20
"""Approximate size of a response: a broker limits the data queued for one client."""


T = TypeVar("T")


class StoreReader(Protocol):
    """Required part of :class:`penstock.statestore.client.client.StateStoreClient`."""

    async def get(self, key: bytes, /) -> Entry | None: ...
    async def get_many(self, keys: Sequence[bytes], /) -> Snapshot: ...
    async def get_values(self, keys: Sequence[bytes], /) -> dict[bytes, bytes | None]: ...


class ManyKeys:
    """Reads keys over one connection; asks once whether the store has MGET."""

    def __init__(self, store: StoreReader) -> None:
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

        async def many(piece: Sequence[bytes]) -> dict[bytes, Entry | None]:
            return (await self._store.get_many(piece)).entries

        return await self._read(list(keys), many, self._store.get, lambda entry: len(entry.value))

    async def values(self, keys: Collection[bytes]) -> Mapping[bytes, bytes]:
        """As :meth:`read`, the values alone, which takes less work."""

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
            self._has_mget = await self._offers_mget(named[0])
        if not self._has_mget:
            return await _one_by_one(named, one)
        found: dict[bytes, T] = {}
        begun = 0

        async def work() -> None:
            nonlocal begun
            while begun < len(named):  # shared: each piece is taken by one worker
                piece = named[begun : begun + self._keys_a_request()]
                begun += len(piece)
                existing = {key: value for key, value in (await many(piece)).items() if value is not None}
                found.update(existing)
                self._read_keys += len(piece)
                self._read_bytes += sum(map(size_of, existing.values()))

        await _side_by_side(work, min(CONCURRENT_MGETS, -(-len(named) // FIRST_KEYS)))
        return found

    def _keys_a_request(self) -> int:
        if not self._read_keys:
            return FIRST_KEYS
        mean = self._read_bytes // self._read_keys
        return max(1, min(KEYS_A_REQUEST, ANSWER_BYTES // (mean + 1)))

    async def _offers_mget(self, key: bytes) -> bool:
        try:
            await self._store.get_many([key])
        except InvalidRequestError:
            return False
        return True


async def _one_by_one(keys: Sequence[bytes], one: Callable[[bytes], Awaitable[T | None]]) -> dict[bytes, T]:
    found: dict[bytes, T] = {}
    waiting = iter(keys)

    async def work() -> None:
        for key in waiting:  # shared
            value = await one(key)
            if value is not None:
                found[key] = value

    await _side_by_side(work, min(CONCURRENT_GETS, len(keys)))
    return found


async def _side_by_side(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
