from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.errors import UnavailableError
from penstock.spark.statestore import lookup
from penstock.spark.statestore.lookup import BatchKeyReader
from penstock.statestore.client.client import Entry, Snapshot
from penstock.statestore.errors import InvalidRequestError
from penstock.statestore.hlc import Hlc

VERSION = Hlc(1, 0, "StateStore")


class FakeStore:
    """Has a value of ``size`` bytes for each key but ``missing``; the request number ``fails_at`` fails."""

    def __init__(self, size: int, *, has_mget: bool = True) -> None:
        self.size = size
        self.has_mget = has_mget
        self.pieces: list[int] = []
        self.under_way = self.most = 0
        self.fails_at: int | None = None

    async def get(self, key: bytes, /) -> Entry | None:
        return await self._answer([key], key)

    async def get_many(self, keys: Sequence[bytes], /) -> Snapshot:
        if not self.has_mget:
            raise InvalidRequestError("no such command", text="unknown command")
        return Snapshot({key: await self._answer(keys, key) for key in keys}, VERSION)

    async def get_values(self, keys: Sequence[bytes], /) -> dict[bytes, bytes | None]:
        entries = (await self.get_many(keys)).entries
        return {key: None if entry is None else entry.value for key, entry in entries.items()}

    async def _answer(self, piece: Sequence[bytes], key: bytes) -> Entry | None:
        if key == piece[0]:
            self.pieces.append(len(piece))
            number = len(self.pieces)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                await asyncio.sleep(0)
            finally:
                self.under_way -= 1
            if number == self.fails_at:
                raise UnavailableError("gone")
        return None if key == b"missing" else Entry(b"x" * self.size, VERSION)


def keys(count: int) -> list[bytes]:
    return [b"missing", *(b"%d" % number for number in range(count - 1))]


@pytest.mark.parametrize("has_mget", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 700])
async def test_existing_keys_are_found(count: int, has_mget: bool) -> None:
    store = FakeStore(3, has_mget=has_mget)
    wanted = keys(count) if count else []
    found = await BatchKeyReader(store).read(wanted)
    assert sorted(found) == sorted(wanted[1:])
    assert await BatchKeyReader(store).values(wanted) == {key: entry.value for key, entry in found.items()}
    if count == 700:
        assert max(store.pieces) == (lookup.KEYS_PER_REQUEST if has_mget else 1)


async def test_answers_stay_small_where_values_are_large() -> None:
    store = FakeStore(lookup.RESPONSE_BYTES // 3)
    many = BatchKeyReader(store)
    await many.read(keys(100))
    assert max(store.pieces) == lookup.FIRST_KEYS
    assert store.most <= lookup.CONCURRENT_MGETS
    store.pieces.clear()
    await many.read(keys(100))
    assert max(store.pieces) <= 3


async def test_one_that_fails_fails_all() -> None:
    store = FakeStore(3)
    store.fails_at = 4
    with pytest.raises(UnavailableError):
        await BatchKeyReader(store).read(keys(700))
    assert store.under_way == 0
