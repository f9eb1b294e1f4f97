from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pyarrow as pa
import pytest

from penstock.errors import RefusedError, UnavailableError
from penstock.spark.statestore import lookup
from penstock.spark.statestore.lookup import KeyReader, ReadableStore
from penstock.statestore.client.client import Entry, Snapshot
from penstock.statestore.errors import InvalidRequestError
from penstock.statestore.hlc import Hlc

VERSION = Hlc(1, 0, "StateStore")


class FakeStore:
    def __init__(self) -> None:
        self.data = {b"a": b"1", b"b": b"2"}
        self.asked: list[bytes] = []
        self.failures = 0
        self.connections = 0
        self.open = 0
        self.at_once = 0
        self.most_at_once = 0
        self.is_silent = False
        self.has_mget = False
        self.pieces: list[int] = []

    def connect(self) -> AbstractAsyncContextManager[ReadableStore]:
        return self._connection()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[FakeStore]:
        self.connections += 1
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    async def get(self, key: bytes, /) -> Entry | None:
        self.asked.append(key)
        if self.failures > 0:
            self.failures -= 1
            raise UnavailableError("lost", applied=False)
        if key == b"refused":
            raise RefusedError("the key is refused")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await (asyncio.Event().wait() if self.is_silent else asyncio.sleep(0))
        self.at_once -= 1
        value = self.data.get(key)
        return None if value is None else Entry(value, VERSION)

    async def get_many(self, keys: Sequence[bytes], /) -> Snapshot:
        if not self.has_mget:
            raise InvalidRequestError("no such command", text="unknown command")
        self.pieces.append(len(keys))
        found = {key: self.data.get(key) for key in keys}
        return Snapshot({key: None if v is None else Entry(v, VERSION) for key, v in found.items()}, VERSION)

    async def get_values(self, keys: Sequence[bytes], /) -> dict[bytes, bytes | None]:
        entries = (await self.get_many(keys)).entries
        return {key: None if entry is None else entry.value for key, entry in entries.items()}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(store: FakeStore, clock: Clock) -> Iterator[KeyReader]:
    reader = KeyReader(store.connect, clock=clock)
    yield reader
    reader.close()
    assert store.open == 0


def test_keys_are_read_at_the_same_time_over_one_connection(reader: KeyReader, store: FakeStore) -> None:
    store.data = {b"%d" % number: b"v%d" % number for number in range(1000)}
    keys = [*store.data, b"missing", b"7"]
    values = reader.values(keys, refresh_ms=0, timeout_ms=1000)
    assert values == store.data | {b"missing": None}
    assert len(store.asked) == 1001
    assert store.most_at_once == 256
    reader.values([b"7"], refresh_ms=0, timeout_ms=1000)
    assert store.connections == 1


def test_many_keys_are_read_with_one_request_where_the_store_can(reader: KeyReader, store: FakeStore) -> None:
    store.has_mget = True
    store.data = {b"%d" % number: b"v%d" % number for number in range(530)}
    values = reader.values([*store.data, b"missing"], refresh_ms=0, timeout_ms=1000)
    assert values == store.data | {b"missing": None}
    assert (sum(store.pieces), max(store.pieces), store.asked) == (532, 256, []), "one asks whether it can"
    assert reader.values([b"7", b"8"], refresh_ms=0, timeout_ms=1000) == {b"7": b"v7", b"8": b"v8"}
    assert store.pieces[-1] == 2


def test_values_are_used_again_until_they_are_too_old(reader: KeyReader, store: FakeStore, clock: Clock) -> None:
    assert reader.values([b"a", b"x"], refresh_ms=500, timeout_ms=1000) == {b"a": b"1", b"x": None}
    store.data[b"a"] = b"new"
    clock.now += 0.4
    assert reader.values([b"a", b"b", b"x"], refresh_ms=500, timeout_ms=1000) == {b"a": b"1", b"b": b"2", b"x": None}
    assert store.asked == [b"a", b"x", b"b"]
    clock.now += 0.2
    assert reader.values([b"a", b"b"], refresh_ms=500, timeout_ms=1000) == {b"a": b"new", b"b": b"2"}
    assert reader.values([b"b"], refresh_ms=0, timeout_ms=1000) == {b"b": b"2"}
    assert store.asked == [b"a", b"x", b"b", b"a", b"b"]


def test_the_cache_is_bounded(reader: KeyReader, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_CACHED", 2)
    reader.values([b"a", b"b"], refresh_ms=500, timeout_ms=1000)
    reader.values([b"c"], refresh_ms=500, timeout_ms=1000)
    store.asked.clear()
    reader.values([b"b", b"c"], refresh_ms=500, timeout_ms=1000)
    assert store.asked == []
    reader.values([b"a"], refresh_ms=500, timeout_ms=1000)
    assert store.asked == [b"a"]


def test_the_size_of_the_cache_is_bounded(reader: KeyReader, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_CACHED_BYTES", 10)
    store.data = {b"a": b"1" * 6, b"b": b"2" * 6, b"large": b"3" * 11}
    for key in (b"a", b"a", b"b", b"a"):
        assert reader.values([key], refresh_ms=500, timeout_ms=1000) == {key: store.data[key]}
    assert store.asked == [b"a", b"b", b"a"], "the second a is cached, and b replaced it"
    assert reader.values([b"large"], refresh_ms=500, timeout_ms=1000) == {b"large": b"3" * 11}
    assert (reader._cache, reader._cached_bytes) == ({}, 0)


def test_a_lost_connection_is_made_again(reader: KeyReader, store: FakeStore) -> None:
    store.failures = 2
    assert reader.values([b"a"], refresh_ms=0, timeout_ms=10_000) == {b"a": b"1"}
    assert (store.connections, store.open) == (3, 1)


def test_a_store_that_does_not_answer_is_an_error(store: FakeStore) -> None:
    store.is_silent = True
    reader = KeyReader(store.connect)
    with pytest.raises(UnavailableError, match="did not return 1 keys within 50 ms"):
        reader.values([b"a"], refresh_ms=0, timeout_ms=50)
    store.is_silent = False
    assert reader.values([b"a"], refresh_ms=0, timeout_ms=10_000) == {b"a": b"1"}
    reader.close()
    reader.close()


def test_a_refusal_is_not_tried_again(reader: KeyReader, store: FakeStore) -> None:
    with pytest.raises(RefusedError):
        reader.values([b"refused"], refresh_ms=0, timeout_ms=1000)
    assert store.asked == [b"refused"]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_columns(store: FakeStore, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType) -> None:
    reader = KeyReader(store.connect)
    monkeypatch.setattr(lookup, "_reader", lambda broker: reader)
    keys = pa.array(["a", None, "zz", "a", "b"], pa.string()).cast(kind)
    values = lookup.values_of(keys, "mqtt://h:1", refresh_ms=0, timeout_ms=1000)
    assert values.type == pa.binary()
    assert values.to_pylist() == [b"1", None, None, b"1", b"2"]
    assert sorted(store.asked) == [b"a", b"b", b"zz"]
    assert lookup.values_of(pa.array([None, None], kind), "mqtt://h:1", refresh_ms=0, timeout_ms=1).to_pylist() == [
        None,
        None,
    ]
    reader.close()
