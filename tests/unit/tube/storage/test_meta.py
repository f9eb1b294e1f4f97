"""Positions and configuration in LMDB: long names, removal, damage, another version."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.runtime.io.wal_segments import PendingCommits
from penstock.tube.storage.meta import GroupOffset, MetaStore


def test_committed_metadata_exists_after_reopening(tmp_path: Path) -> None:
    long = GroupOffset("g" * 1024, "t" * 64, 10002, 28 << 33, 1_795_249_426_525)
    other = GroupOffset("gruppe-ä", "topic", 0, 0, 5)
    store = MetaStore(tmp_path / "meta")
    store.commit([long, other, GroupOffset("gone", "topic", 0, 7, 5)])
    store.commit([GroupOffset("gone", "topic", 0, None, 6), other._replace(offset=28)], b"config")
    store.close()
    again = MetaStore(tmp_path / "meta")
    assert sorted(again.offsets()) == sorted([long, other._replace(offset=28)])
    assert again.config() == b"config"
    assert again.damaged == []
    again.close()


def test_damaged_values_are_named_and_skipped(tmp_path: Path) -> None:
    store = MetaStore(tmp_path)
    store.commit([GroupOffset("a", "t", 0, 1, 1), GroupOffset("b", "t", 0, 2, 1)], b"config")
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=4) as env:
        with env.begin(write=True, db=env.open_db(b"offsets")) as txn:
            key, value = next(iter(txn.cursor()))
            txn.put(key, value[:-1] + b"X")
        with env.begin(write=True, db=env.open_db(b"meta")) as txn:
            txn.put(b"config", b"1234damaged")
    again = MetaStore(tmp_path)
    assert len(again.offsets()) == 1
    assert again.config() is None
    assert len(again.damaged) == 2
    again.close()


def test_a_newer_version_s_directory_is_refused(tmp_path: Path) -> None:
    MetaStore(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"schema", (99).to_bytes(4, "big"))
    with pytest.raises(StorageError, match="a newer version of penstock"):
        MetaStore(tmp_path)


def test_more_than_the_first_map_holds(tmp_path: Path) -> None:
    store = MetaStore(tmp_path, map_bytes=1 << 17)
    store.commit([GroupOffset(f"group-{n}", "topic", 0, n, 5) for n in range(2000)], notes={"n": b"x" * 70_000})
    assert len(store.offsets()) == 2000
    store.close()


def test_a_failed_commit_leaves_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MetaStore(tmp_path)
    store.commit([GroupOffset("a", "t", 0, 1, 1)], b"old", {"note": b"1"})

    class Full(PendingCommits):
        def append(self, body: bytes) -> bool:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store._environment, "_pending", Full(store._environment._log, 0))
        with pytest.raises(StorageError, match="No space left") as caught:
            store.commit([GroupOffset("a", "t", 0, 2, 2)], b"new", {"note": None})
    assert caught.value.hint is not None
    with pytest.raises(StorageError, match="No space left"):
        store.commit([GroupOffset("a", "t", 0, 3, 3)])
    store.close()
    again = MetaStore(tmp_path)
    assert ([found.offset for found in again.offsets()], again.config(), again.notes()) == ([1], b"old", {"note": b"1"})
    again.close()


def test_metadata_that_is_only_in_the_log_is_recovered_after_a_kill(tmp_path: Path) -> None:
    store = MetaStore(tmp_path / "first")
    store.commit([GroupOffset("a", "t", 0, 28, 1), GroupOffset("b", "t", 0, 28, 1)], b"config", {"note": b"1"})
    store.commit([GroupOffset("a", "t", 0, 56, 2), GroupOffset("b", "t", 0, None, 2)], notes={"note": None})
    # What a kill leaves: the files as they are now, LMDB behind the log.
    shutil.copytree(tmp_path / "first", tmp_path / "left")
    store.close()
    again = MetaStore(tmp_path / "left")
    assert again.offsets() == [GroupOffset("a", "t", 0, 56, 2)]
    assert (again.config(), again.notes()) == (b"config", {})
    again.close()
