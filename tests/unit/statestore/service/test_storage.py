"""LMDB: what was committed comes back, damage is put aside, the map grows, and errors are ours."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.runtime.io.files import DirectFile, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal_frames import PUT
from penstock.statestore.engine.record import Change, Record, digest_of
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.storage import NODE, Storage, StoredState

START = Hlc(0, 0, "")


def put(key: bytes, value: bytes, number: int, *, expires_at: int = 0) -> Change:
    version = Hlc(number, 0, "StateStore")
    return Change(key, Record(key, value, version, Hlc(number, 1, "f"), expires_at), version)


def delete(key: bytes, number: int) -> Change:
    return Change(key, None, Hlc(number, 0, "StateStore"))


def reopened(path: Path) -> dict[bytes, Record]:
    storage = Storage(path)
    records = storage.open().records
    storage.close()
    return {record.key: record for record in records}


def edit(path: Path, database: bytes, key: bytes, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=5) as env, env.begin(write=True) as transaction:
        transaction.put(key, value, db=env.open_db(database, txn=transaction))


@pytest.mark.parametrize("durability", Durability)
def test_committed_changes_are_recovered(tmp_path: Path, durability: Durability) -> None:
    storage = Storage(tmp_path / "deep" / "store", durability)
    assert storage.open() == StoredState([], None, [], [], None, None)
    huge = b"\x00\xff" * 600
    storage.commit([put(b"a", b"1", 1), put(huge, b"", 2, expires_at=99), put(b"b", b"2", 3)])
    storage.commit([put(b"a", b"3", 4), delete(b"b", 5), delete(b"never there", 6)])
    storage.close()
    again = Storage(tmp_path / "deep" / "store", durability)
    records, clock, quarantined, *_ = again.open()
    again.close()
    assert {record.key: record for record in records} == {
        b"a": put(b"a", b"3", 4).record,
        huge: put(huge, b"", 2, expires_at=99).record,
    }
    # The clock is that of the last delete, which left no record behind.
    assert clock == Hlc(6, 0, "")
    assert quarantined == []


def test_the_last_change_to_a_key_wins_within_a_commit(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    storage.commit([put(b"a", b"1", 1), delete(b"a", 2), put(b"b", b"1", 3), put(b"a", b"2", 4), delete(b"b", 5)])
    storage.commit([])
    storage.close()
    assert {key: record.value for key, record in reopened(tmp_path).items()} == {b"a": b"2"}


def test_the_greatest_version_is_that_of_the_clock_or_of_a_record(tmp_path: Path) -> None:
    removed = put(b"c", b"1", 7)
    removed.kept = False
    commits: list[tuple[list[Change], Hlc | None, Hlc]] = [
        ([put(b"a", b"1", 1), put(b"b", b"1", 2)], None, Hlc(2, 0, "")),
        ([put(b"a", b"2", 3)], Hlc(3, 0, "StateStore"), Hlc(3, 0, "")),
        ([put(b"a", b"3", 4)], Hlc(4, 1, "StateStore"), Hlc(4, 1, "")),  # a version after that of the last SET
        ([put(b"b", b"2", 5), delete(b"a", 6)], None, Hlc(6, 0, "")),
        ([removed], None, Hlc(7, 0, "")),
        ([put(b"b", b"3", 8)], None, Hlc(8, 0, "")),
        ([delete(b"b", 9)], None, Hlc(9, 0, "")),
        ([], Hlc(10, 0, ""), Hlc(10, 0, "")),
    ]
    for changes, clock, greatest in commits:
        storage = Storage(tmp_path, Durability.FLUSHED)
        storage.open()
        storage.commit(changes, clock=clock)
        storage.close()
        again = Storage(tmp_path, Durability.FLUSHED)
        found = again.open()
        again.close()
        versions = [record.version for record in found.records] + ([] if found.clock is None else [found.clock])
        newest = max(versions)
        assert (newest.wall_ms, newest.counter) == (greatest.wall_ms, greatest.counter)


def test_a_damaged_value_is_put_aside_and_reported(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    storage.commit([put(b"good", b"1", 1), put(b"bad", b"2", 2)])
    storage.close()
    edit(tmp_path, b"keys", digest_of(b"bad"), b"damaged")
    storage = Storage(tmp_path)
    found = storage.open()
    storage.close()
    assert [record.key for record in found.records] == [b"good"]
    assert found.quarantined == [digest_of(b"bad").hex()]
    with lmdb.open(str(tmp_path), max_dbs=5) as env, env.begin() as transaction:
        aside = transaction.get(digest_of(b"bad"), db=env.open_db(b"quarantine", txn=transaction))
    assert aside == b"damaged"
    assert list(reopened(tmp_path)) == [b"good"]


@pytest.mark.parametrize("stored", [b"", b"x" * 20])
def test_a_damaged_clock_is_not_believed(tmp_path: Path, stored: bytes) -> None:
    storage = Storage(tmp_path)
    storage.open()
    storage.commit([put(b"a", b"1", 1)])
    storage.close()
    edit(tmp_path, b"meta", b"clock", stored)
    storage = Storage(tmp_path)
    found = storage.open()
    storage.close()
    assert found.clock is None
    assert len(found.records) == 1


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    storage.close()
    edit(tmp_path, b"meta", b"schema", (4).to_bytes(4, "big"))
    with pytest.raises(StorageError, match="schema 00000004"):
        Storage(tmp_path).open()
    # The environment was closed again.
    edit(tmp_path, b"meta", b"schema", (1).to_bytes(4, "big"))
    assert reopened(tmp_path) == {}


def test_the_map_grows_with_its_content(tmp_path: Path) -> None:
    storage = Storage(tmp_path, map_bytes=128 * 1024)
    storage.open()
    for number in range(8):
        storage.commit([put(b"k%d" % number, b"v" * 100_000, number)])
    storage.close()
    assert len(reopened(tmp_path)) == 8
    # A smaller map than the file is no obstacle.
    storage = Storage(tmp_path, map_bytes=64 * 1024)
    assert len(storage.open().records) == 8
    storage.commit([put(b"more", b"v" * 2_000_000, 9)])
    storage.close()
    assert len(reopened(tmp_path)) == 9


def test_one_open_per_process(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    with pytest.raises(StorageError, match="already open"):
        Storage(tmp_path / ".." / tmp_path.name).open()
    storage.commit([put(b"a", b"1", 1)])
    storage.close()
    storage.close()
    assert len(reopened(tmp_path)) == 1


def test_a_directory_that_cannot_be_used_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="cannot be opened") as raised:
        Storage(tmp_path / "file").open()
    assert raised.value.path == str(tmp_path / "file")


@pytest.mark.parametrize("durability", Durability)
def test_a_failed_commit_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability) -> None:
    storage = Storage(tmp_path, durability)
    storage.open()

    def is_full(*_: object) -> None:
        if durability is Durability.DURABLE:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", is_full)
        patch.setattr(LmdbEnvironment, "_carry_out", is_full)
        writes: list[Callable[[], None]] = [
            lambda: storage.commit([put(b"a", b"1", 1)]),
            lambda: storage.trim(Hlc(1, 0, "")),
            storage.end_log,
            lambda: storage.note_steady("boot", 1),
        ]
        for write in writes:
            with pytest.raises(StorageError, match="No space left") as raised:
                write()
            assert raised.value.hint is not None
    storage.close()
    assert reopened(tmp_path) == {}


def test_the_log_of_changes(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    changes = [put(b"a", b"1", 1), put(b"a", b"2", 2), delete(b"a", 3), put(b"b", b"3", 4)]
    for change in changes:
        change.writer = "client \N{GREEK SMALL LETTER MU}"
    storage.trim(Hlc(0, 5, ""))
    storage.commit(changes[:2], log=True)
    storage.commit(changes[2:], log=True)
    storage.close()

    def logged() -> tuple[list[tuple[bytes, bytes | None, int, str]], Hlc | None]:
        found = storage.open()
        changes = storage.changes_after(START).changes
        storage.close()
        return [
            (c.key, c.record.value if c.record is not None else None, c.version.wall_ms, c.writer) for c in changes
        ], found.floor

    writer = changes[0].writer
    expected = [(b"a", b"1", 1, writer), (b"a", b"2", 2, writer), (b"a", None, 3, writer), (b"b", b"3", 4, writer)]
    assert logged() == (expected, Hlc(0, 5, ""))
    storage.open()
    storage.trim(Hlc(2, 0, ""))
    storage.close()
    assert logged() == (expected[2:], Hlc(2, 0, ""))
    # A damaged change is put aside, and whoever resumes from before it is told that there is a gap.
    edit(tmp_path, b"changes", (3).to_bytes(8, "big") + bytes(8), b"damaged")
    assert logged() == (expected[3:], Hlc(3, 0, "StateStore"))
    storage.open()
    storage.end_log()
    storage.close()
    assert logged() == ([], None)


@pytest.mark.parametrize("durability", Durability)
def test_the_log_is_read_page_by_page(tmp_path: Path, durability: Durability) -> None:
    storage = Storage(tmp_path, durability)
    storage.open()
    assert storage.log_after(START) == (0, START)
    assert storage.changes_after(START) == ([], START, True, [])
    storage.commit([put(b"k", bytes(size), n) for n, size in enumerate((0, 5000, 10, 10, 10), 1)], log=True)
    assert storage.log_after(START) == (5, Hlc(5, 0, NODE))
    assert storage.log_after(Hlc(3, 0, "")) == (2, Hlc(5, 0, NODE))
    assert storage.log_after(Hlc(5, 0, "")) == (0, Hlc(5, 0, ""))
    seen: list[list[int]] = []
    after, complete = START, False
    while not complete:
        page = storage.changes_after(after, max_bytes=1000)
        seen.append([change.version.wall_ms for change in page.changes])
        assert page.through == page.changes[-1].version
        after, complete = page.through, page.complete
    assert seen == [[1, 2], [3, 4, 5]]
    edit_while_open(storage, (4).to_bytes(8, "big") + bytes(8))
    page = storage.changes_after(Hlc(3, 0, NODE))
    assert ([change.version.wall_ms for change in page.changes], page.through.wall_ms) == ([5], 5)
    assert page.damaged == [f"{4:016x}{0:016x}"]
    edit_while_open(storage, (5).to_bytes(8, "big") + bytes(8))
    assert storage.changes_after(Hlc(3, 0, NODE))[:3] == ([], Hlc(5, 0, NODE), True)
    storage.close()


def edit_while_open(storage: Storage, position: bytes) -> None:
    """Damage a change on disk."""
    storage._environment.commit([(PUT, 4, position, b"damaged")], "damaging")


@pytest.mark.parametrize("durability", Durability)
def test_all_data_exists_after_an_abrupt_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    # Nothing changes while it is copied.
    monkeypatch.setattr("penstock.runtime.io.wal.LoggedEnvironment._follow", lambda _: None)
    storage = Storage(tmp_path / "store")
    storage.open()
    storage.trim(Hlc(0, 5, ""))
    storage.note_steady("boot", 7)
    changes = [put(b"a", b"1", 1), put(b"b", b"2", 2), delete(b"a", 3), put(b"c", b"3", 4)]
    changes[1].floor = (b"line/", Hlc(5, 6, "n"))
    storage.commit(changes[:2], log=True)
    storage.commit(changes[2:], log=True, clock=Hlc(9, 9, ""), floor=Hlc(1, 0, ""))
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    storage.close()
    found = {}
    for name, chosen in (("store", Durability.DURABLE), ("killed", durability)):
        storage = Storage(tmp_path / name, chosen)
        found[name] = storage.open()
        assert [change.version.wall_ms for change in storage.changes_after(START).changes] == [2, 3, 4]
        storage.close()
    killed = found["killed"]
    assert {record.key: record.value for record in killed.records} == {b"b": b"2", b"c": b"3"}
    assert (killed.clock, killed.floor) == (Hlc(9, 9, ""), Hlc(1, 0, ""))
    assert (killed.fences, killed.steady) == ([(b"line/", Hlc(5, 6, "n"))], ("boot", 7))
    # As after an orderly end.
    assert [repr(part) for part in killed] == [repr(part) for part in found["store"]]


def test_a_directory_from_before_the_log_is_taken_over(tmp_path: Path) -> None:
    storage = Storage(tmp_path, Durability.FLUSHED)
    storage.open()
    storage.commit([put(b"a", b"1", 1)])
    storage.close()
    with lmdb.open(str(tmp_path), max_dbs=5) as env, env.begin(write=True) as transaction:
        meta = env.open_db(b"meta", txn=transaction)
        transaction.put(b"schema", (1).to_bytes(4, "big"), db=meta)
        transaction.delete(b"log", db=meta)
    assert list(reopened(tmp_path)) == [b"a"]
    with lmdb.open(str(tmp_path), max_dbs=5) as env, env.begin() as transaction:
        schema = transaction.get(b"schema", db=env.open_db(b"meta", txn=transaction))
    assert schema == (3).to_bytes(4, "big")


def test_keys_without_persistence_are_deleted(tmp_path: Path) -> None:
    storage = Storage(tmp_path, Durability.MEMORY)
    storage.open()
    storage.commit([put(b"a", b"1", 1)])
    change = put(b"a", b"2", 2)
    change.kept = False
    storage.commit([change], clock=Hlc(9, 9, ""))
    storage.commit([], clock=Hlc(10, 0, ""))
    storage.close()
    found = storage.open()
    storage.close()
    assert (found.records, found.clock) == ([], Hlc(10, 0, ""))


def test_prefix_fences_and_the_steady_clock_come_back(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.open()
    change = put(b"run", b"v", 1)
    change.floor = (b"line/" * 200, Hlc(5, 6, "n"))
    storage.commit([change])
    storage.note_steady("boot-1", -5)
    storage.close()
    found = storage.open()
    storage.close()
    assert found.fences == [(b"line/" * 200, Hlc(5, 6, "n"))]
    assert found.steady == ("boot-1", -5)
    edit(tmp_path, b"meta", b"steady", b"damaged, and long enough")
    assert storage.open().steady is None
    storage.close()
    edit(tmp_path, b"fences", digest_of(b"line/" * 200), b"damaged")
    with pytest.raises(StorageError, match="prefix fence"):
        storage.open()
