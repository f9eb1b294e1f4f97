"""Prefetched reads: their selection, number and consumers."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tube.engine.broker.fetch_handler import PendingRead, ReadAhead
from penstock.tube.storage.store import Store
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import commit, payloads, put


def stored(*messages: bytes) -> Store:
    """A store with ``messages`` on disk only."""
    disk, path = RecordedDisk(), Path("/log/demo-0")
    before = Store(disk, path, 0)
    for message in messages:
        put(before, 0, message)
    commit(before)
    before.close()
    return Store(RecordedDisk(disk.files()), path, 0)


def test_a_prefetched_read_is_returned_once() -> None:
    ahead, place = ReadAhead(), PendingRead(stored(b"one", b"two"), 0, 28, None, 1000)
    assert ahead.pop(place) is None
    ahead.expect(place, 0)
    ahead.expect(place, 0)
    assert len(ahead.due) == 1
    ahead.work()
    read = ahead.pop(place)
    assert read is not None
    assert (b"".join(read.messages), read.next_offset, read.from_disk) == (b"".join(place.read().messages), 56, True)
    assert ahead.pop(place) is None


def test_prefetched_messages_are_returned_only_for_the_same_request() -> None:
    store = stored(b"one", b"two")
    ahead, place = ReadAhead(), PendingRead(store, 0, 0, frozenset({7}), 1000)
    ahead.expect(place, 0)
    ahead.work()
    for other in (place._replace(keys=None), place._replace(start=28), place._replace(room=10)):
        assert ahead.pop(other) is None
    assert ahead.pop(place) is not None


def test_a_reader_that_was_quicker_is_not_read_for() -> None:
    ahead, place = ReadAhead(), PendingRead(stored(b"one"), 0, 0, None, 1000)
    ahead.expect(place, 0)
    assert ahead.pop(place) is None
    ahead.work()
    assert (ahead.pop(place), len(ahead.due)) == (None, 0)


def test_a_reader_that_comes_back_to_its_place_is_read_for_once() -> None:
    ahead, place = ReadAhead(), PendingRead(stored(b"one"), 0, 0, None, 1000)
    ahead.expect(place, 0)
    assert ahead.pop(place) is None
    ahead.expect(place, 5)
    assert len(ahead.due) == 2
    ahead.work()
    found, expected_at = ahead._held[place]
    ahead.work()
    assert found is not None
    assert ahead._held[place][0] is found
    assert expected_at == 5


def test_prefetched_reads_are_bounded_and_unused_ones_are_evicted() -> None:
    ahead, store = ReadAhead(), stored(b"one")
    places = [PendingRead(store, 0, 0, None, room) for room in range(1, 19)]
    for place in places[:17]:
        ahead.expect(place, 1000)
    assert len(ahead.due) == 16
    while ahead.due:
        ahead.work()
    ahead.expect(places[17], 2999)
    assert not ahead.due
    ahead.expect(places[17], 3000)
    ahead.work()
    assert [ahead.pop(place) is not None for place in places] == [False, *[True] * 15, False, True]


def test_expired_messages_and_removed_stores_are_not_prefetched() -> None:
    store, other = stored(b"one", b"two"), stored(b"one")
    ahead, place = ReadAhead(), PendingRead(store, 0, 0, None, 1000)
    ahead.expect(place, 0)
    store.min_offset = 28
    ahead.work()
    assert ahead.pop(place) is None
    for one in (store, other):
        ahead.expect(PendingRead(one, 0, 28, None, 1000), 0)
    ahead.forget(store)
    while ahead.due:
        ahead.work()
    assert ahead.pop(PendingRead(store, 0, 28, None, 1000)) is None
    assert ahead.pop(PendingRead(other, 0, 28, None, 1000)) is not None


def test_a_disk_that_has_no_descriptor_left_is_the_readers_to_hear_of(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(b"one")
    ahead, place = ReadAhead(), PendingRead(store, 0, 0, None, 1000)
    ahead.expect(place, 0)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "read", _refuse)
        ahead.work()
    assert ahead.pop(place) is None
    assert payloads(store.read(0, 0)) == [b"one"]


def _refuse(*_: object, **__: object) -> None:
    raise OSError(24, "Too many open files")
