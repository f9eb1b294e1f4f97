"""Positions and configuration in LMDB: long names, removal, damage, another version."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.tube.storage.meta import GroupOffset, MetaStore


def test_what_was_stored_is_there_again(tmp_path: Path) -> None:
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


def test_another_version_s_directory_is_refused(tmp_path: Path) -> None:
    MetaStore(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"schema", b"penstock tube broker 99")
    with pytest.raises(StorageError, match="another version"):
        MetaStore(tmp_path)
