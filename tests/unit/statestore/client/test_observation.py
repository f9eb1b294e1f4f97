"""What is news of an observed key, and what its readers get."""

from __future__ import annotations

import pytest

from penstock.errors import UnavailableError
from penstock.statestore.client import observation
from penstock.statestore.client.observation import Change, Entry, Observation, Watched
from penstock.statestore.hlc import Hlc


def version(n: int) -> Hlc:
    return Hlc(n, 0, "n")


def change(n: int, value: bytes | None = b"v", *, missed: bool = False) -> Change:
    return Change(b"k", "DELETE" if value is None else "SET", value, version(n), missed)


async def read(changes: Observation) -> list[Change]:
    changes.close()
    return [told async for told in changes]


async def test_only_newer_versions_are_news() -> None:
    watched, reader = Watched(b"k"), Observation()
    watched.observations.add(reader)
    assert watched.accept(change(2))
    assert not watched.accept(change(2))
    assert not watched.accept(change(1))
    assert watched.accept(change(3, None))
    assert await read(reader) == [change(2), change(3, None)]


async def test_what_a_get_finds_is_news_where_it_differs() -> None:
    watched, reader = Watched(b"k"), Observation()
    watched.found(None)
    watched.found(Entry(b"v", version(1)))
    watched.observations.add(reader)
    watched.found(Entry(b"v", version(1)))
    watched.found(Entry(b"w", version(2)))
    watched.found(None)
    watched.found(None)
    assert watched.entry is None
    assert await read(reader) == [change(2, b"w", missed=True), Change(b"k", "DELETE", None, None, missed=True)]


async def test_a_slow_reader_loses_the_oldest_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "MAX_UNREAD", 2)
    reader = Observation()
    for n in range(3):
        reader.put(change(n))
    assert reader.dropped == 1
    assert await read(reader) == [change(1), change(2)]


async def test_an_error_comes_after_what_was_there() -> None:
    reader = Observation()
    reader.put(change(1))
    reader.close(UnavailableError("gone"))
    assert await anext(reader) == change(1)
    with pytest.raises(UnavailableError, match="gone"):
        await anext(reader)
