"""Changes of an observed key, and their delivery to its readers."""

from __future__ import annotations

import pytest

from penstock.errors import UnavailableError
from penstock.statestore.client import observations
from penstock.statestore.client.observations import Entry, KeyChange, Observation, ObservedKey, SharedKey
from penstock.statestore.hlc import Hlc


def version(n: int) -> Hlc:
    return Hlc(n, 0, "n")


def change(n: int, value: bytes | None = b"v", *, missed: bool = False) -> KeyChange:
    return KeyChange(b"k", "DELETE" if value is None else "SET", value, version(n), missed)


async def read(changes: Observation) -> list[KeyChange]:
    changes.close()
    return [told async for told in changes]


async def test_only_newer_versions_are_news() -> None:
    observed, reader = ObservedKey(b"k", SharedKey()), Observation()
    observed.observations.add(reader)
    assert observed.accept(change(2))
    assert not observed.accept(change(2))
    assert not observed.accept(change(1))
    assert observed.accept(change(3, None))
    assert await read(reader) == [change(2), change(3, None)]


async def test_a_get_that_finds_a_different_value_reports_a_missed_change() -> None:
    observed, reader = ObservedKey(b"k", SharedKey()), Observation()
    observed.compare(None)
    observed.compare(Entry(b"v", version(1)))
    observed.observations.add(reader)
    observed.compare(Entry(b"v", version(1)))
    observed.compare(Entry(b"w", version(2)))
    observed.compare(None)
    observed.compare(None)
    assert observed.entry is None
    assert await read(reader) == [change(2, b"w", missed=True), KeyChange(b"k", "DELETE", None, None, missed=True)]


async def test_a_slow_reader_loses_the_oldest_changes_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MAX_UNREAD", 2)
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
