"""Opening damaged stores: cut tails, lost and damaged indexes, holes, missing files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import LOG, commit, payloads, put

COUNT = 80
SMALL = StoreLimits(segment_bytes=1000, fill_bytes_least=256, fill_bytes_most=1024, tail_bytes=0)


def filled() -> dict[Path, bytes]:
    """A store of several segments as an abrupt end of the process leaves it."""
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=SMALL)
    for n in range(COUNT):
        put(store, n % 2, b"message %d" % n, now=1000 + n)
        if n % 7 == 0:
            commit(store)
    commit(store)
    return disk.files()


def names(files: dict[Path, bytes], suffix: str) -> list[Path]:
    return sorted(path for path in files if path.suffix == suffix)


def contents(store: Store) -> dict[int, bytes]:
    found = {}
    for partition in (0, 1):
        read = store.read(partition, store.min_offset, max_bytes=1 << 30)
        found.update(dict(zip(read.offsets, payloads(read), strict=True)))
    return found


ALL = {n * 28: b"message %d" % n for n in range(COUNT)}


def test_an_abrupt_end_loses_nothing() -> None:
    store = Store(RecordedDisk(filled()), LOG, 0, limits=SMALL)
    assert contents(store) == ALL
    report = store.recovery
    assert (report.records, report.torn_bytes, report.rebuilt_indexes, report.losses) == (COUNT, 0, 0, [])


def test_torn_tail_at_every_byte() -> None:
    files = filled()
    newest = names(files, ".tube")[-1]
    whole = files[newest].rstrip(b"\0")
    start = int(newest.name[:20])
    for cut in range(len(whole)):
        disk = RecordedDisk({**files, newest: whole[:cut] + bytes(len(whole) - cut + 100)})
        store = Store(disk, LOG, 0, limits=SMALL)
        kept = contents(store)
        assert kept == {offset: data for offset, data in ALL.items() if offset < store.end_offset}
        assert store.end_offset >= start
        assert store.recovery.losses == []
        assert len(disk.contents[disk.entries[newest]]) == store.data_end - int(newest.name[21:41])
        at = put(store, 0, b"next", now=5000)
        assert at == store.end_offset - 28
        commit(store)
        assert contents(Store(RecordedDisk(disk.files()), LOG, 0, limits=SMALL)) == {**kept, at: b"next"}


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_lost_or_damaged_index_is_rebuilt(place: int) -> None:
    files = filled()
    path = names(files, ".index")[place]
    for changed in (None, b"", files[path][:-1], files[path][:-28], b"\xff" * len(files[path])):
        damaged = {**files, path: changed} if changed is not None else {p: d for p, d in files.items() if p != path}
        disk = RecordedDisk(damaged)
        store = Store(disk, LOG, 0, limits=SMALL)
        assert contents(store) == ALL
        assert store.recovery.losses == []
        assert disk.files()[path] == files[path]


def test_a_flipped_bit_inside_a_closed_index_is_found_when_it_is_used() -> None:
    files = filled()
    path = names(files, ".index")[0]
    damaged = bytearray(files[path])
    damaged[28 * 3 + 11] ^= 4
    disk = RecordedDisk({**files, path: bytes(damaged)})
    store = Store(disk, LOG, 0, limits=SMALL)
    assert contents(store) == ALL
    assert disk.files()[path] == files[path]


def test_a_damaged_middle_is_set_aside_and_offsets_stay() -> None:
    files = filled()
    newest = names(files, ".tube")[-1]
    damaged = bytearray(files[newest])
    first = int(newest.name[:20])
    damaged[3 * 60 : 3 * 60 + 100] = b"\xaa" * 100
    disk = RecordedDisk({**files, newest: bytes(damaged)})
    store = Store(disk, LOG, 0, limits=SMALL)
    (loss,) = store.recovery.losses
    kept = contents(store)
    assert first < loss.start < loss.end < 28 * COUNT
    assert kept == {offset: data for offset, data in ALL.items() if not loss.start <= offset < loss.end}
    assert loss.kept is not None
    assert b"\xaa" * 90 in disk.files()[Path(loss.kept)]
    assert "messages lost" in str(loss)
    assert put(store, 0, b"next") == 28 * COUNT
    commit(store)
    # Reported once: the damaged segment was closed, and its fillers keep the offsets.
    again = Store(RecordedDisk(disk.files()), LOG, 0, limits=SMALL)
    assert again.recovery.losses == []
    assert contents(again) == {**kept, 28 * COUNT: b"next"}


def one_segment(*commits: int) -> tuple[RecordedDisk, Path]:
    """A segment of messages of 61 bytes, as an abrupt end leaves it; ``commits`` are the sizes of its commits."""
    disk = RecordedDisk()
    store = Store(disk, LOG, 0)
    for size in commits:
        for _ in range(size):
            put(store, 0, b"message %d" % (store.end_offset // 28))
        commit(store)
    (path,) = names(disk.files(), ".tube")
    return disk, path


def zeroed(disk: RecordedDisk, path: Path, ordinal: int) -> Store:
    """The store opened again after the page with one of its messages did not reach the disk."""
    disk.contents[disk.entries[path]][61 * ordinal : 61 * ordinal + 61] = bytes(61)
    return Store(RecordedDisk(disk.files()), LOG, 0)


@pytest.mark.parametrize("ordinal", [5, 7, 8])
def test_a_hole_in_an_interrupted_commit_was_never_acknowledged(ordinal: int) -> None:
    disk, path = one_segment(5, 4)
    store = zeroed(disk, path, ordinal)
    assert (store.end_offset, store.recovery.losses) == (28 * ordinal, [])
    assert store.first_gap(0, store.durable_end) is None
    assert (store.recovery.torn_bytes > 0) == (ordinal < 8)
    assert put(store, 0, b"next") == 28 * ordinal
    commit(store)
    again = Store(store._files, LOG, 0)
    assert payloads(again.read(0, 0))[-1] == b"next"


@pytest.mark.parametrize("ordinal", [0, 2, 4])
def test_a_hole_in_what_was_acknowledged_is_damage(ordinal: int) -> None:
    disk, path = one_segment(5, 4)
    store = zeroed(disk, path, ordinal)
    assert [(loss.start, loss.end) for loss in store.recovery.losses] == [(28 * ordinal, 28 * ordinal + 28)]
    assert len(store.read(0, 0).offsets) == 8


@pytest.mark.parametrize("ordinal", [0, 5, 8])
def test_after_an_orderly_end_every_hole_is_damage_even_at_the_end(ordinal: int) -> None:
    disk, path = one_segment(9)
    Store(disk, LOG, 0).close()
    store = zeroed(disk, path, ordinal)
    assert [(loss.start, loss.end) for loss in store.recovery.losses] == [(28 * ordinal, 28 * ordinal + 28)]
    assert (len(store.read(0, 0).offsets), store.end_offset, store.recovery.torn_bytes) == (8, 28 * 9, 0)
    assert put(store, 0, b"next") == 28 * 9


@pytest.mark.parametrize("cut", [1, 40, 61, 100])
def test_a_store_that_was_closed_in_order_lost_what_is_cut_off(cut: int) -> None:
    """Without that knowledge it is a torn tail, which nobody was told of, and its offsets go to other messages."""
    disk, path = one_segment(9)
    Store(disk, LOG, 0).close()
    files = disk.files()
    files[path] = files[path][:-cut]
    kept = 9 - -(-cut // 61)
    torn = Store(RecordedDisk(dict(files)), LOG, 0)
    assert (torn.end_offset, torn.recovery.losses) == (28 * kept, [])
    store = Store(RecordedDisk(dict(files)), LOG, 0, clean=True)
    assert [(loss.start, loss.end) for loss in store.recovery.losses] == [(28 * kept, 28 * 9)]
    assert (len(store.read(0, 0).offsets), store.end_offset) == (kept, 28 * 9)
    assert put(store, 0, b"next") == 28 * 9
    commit(store)
    store.close()
    again = Store(store._files, LOG, 0, clean=True)
    assert payloads(again.read(0, 28 * 9)) == [b"next"]
    assert again.recovery.losses == [], "told once"


def test_a_torn_end_without_an_index_is_one_message_at_least() -> None:
    disk, path = one_segment(9)
    Store(disk, LOG, 0).close()
    files = disk.files()
    files[path] = files[path][:-40]
    del files[names(files, ".index")[0]]
    store = Store(RecordedDisk(files), LOG, 0, clean=True)
    assert [(loss.start, loss.end) for loss in store.recovery.losses] == [(28 * 8, 28 * 9)]
    assert put(store, 0, b"next") == 28 * 9


@pytest.mark.parametrize("how", ["short", "gone", "noise"])
def test_a_damaged_closed_segment_costs_its_messages_only(how: str) -> None:
    files = filled()
    path, follower = names(files, ".tube")[1:3]
    first, end = int(path.name[:20]), int(follower.name[:20])
    if how == "gone":
        del files[path]
    else:
        files[path] = files[path][:1000] if how == "short" else b"\x22" * len(files[path])
    disk = RecordedDisk(files)
    store = Store(disk, LOG, 0, limits=SMALL, deep=True)
    kept = contents(store)
    lost = set(ALL) - set(kept)
    assert lost
    assert min(lost) >= first
    assert max(lost) < end
    assert {offset: ALL[offset] for offset in kept} == kept
    if how != "gone":
        (loss,) = store.recovery.losses
        assert lost == set(range(loss.start, loss.end, 28))
    assert put(store, 0, b"next") == 28 * COUNT


def test_names_that_are_not_ours_are_left_alone() -> None:
    files = filled()
    files[LOG / "notes.txt"] = b"mine"
    disk = RecordedDisk(files)
    assert contents(Store(disk, LOG, 0, limits=SMALL)) == ALL
    assert disk.files()[LOG / "notes.txt"] == b"mine"
