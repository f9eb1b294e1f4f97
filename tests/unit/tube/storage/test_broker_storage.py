"""A broker's directory: one process, one commit over stores and offsets, topics that go."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError, UnavailableError
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.store import Store
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import LOG, put


def commit_of(disk: BrokerStorage, *topics: str) -> StorageCommit:
    commit = StorageCommit()
    for topic in topics:
        store = disk.open_store(topic, 0)
        put(store, 0, topic.encode())
        commit.works.append((store, store.take_unwritten(), True))
    return commit


def test_one_commit_covers_all_stores_and_the_offsets(tmp_path: Path) -> None:
    disk = BrokerStorage(tmp_path / "broker")
    commit = commit_of(disk, "one", "two")
    commit.offsets = [GroupOffset("g", "one", 0, 28, 5)]
    commit.config = b"config"
    disk.commit([commit])
    disk.close(clean=True)
    again = BrokerStorage(tmp_path / "broker")
    assert again.existing_stores() == [("one", 0), ("two", 0)]
    assert again.open_store("two", 0).durable_end == 28
    assert again.recovery.records == 1
    assert [offset.offset for offset in again.meta.offsets()] == [28]
    assert again.meta.config() == b"config"
    again.close(clean=True)


def test_a_store_that_only_let_segments_go_does_not_hide_what_another_turn_wrote() -> None:
    disk_files = RecordedDisk()
    store = Store(disk_files, LOG, 0)
    put(store, 0, b"message")
    first, second = StorageCommit(), StorageCommit()
    first.works.append((store, store.take_unwritten(), True))
    second.works.append((store, store.take_unwritten(), True))
    BrokerStorage.commit(object.__new__(BrokerStorage), [first, second])
    assert [op.kind for op in disk_files.ops if op.path.suffix == ".tube"][-1] == "sync"


def test_a_second_broker_is_refused(tmp_path: Path) -> None:
    disk = BrokerStorage(tmp_path)
    with pytest.raises(UnavailableError, match="in use"):
        BrokerStorage(tmp_path)
    disk.close(clean=True)
    BrokerStorage(tmp_path).close(clean=True)


def test_a_removed_topic_leaves_no_files_and_begins_anew(tmp_path: Path) -> None:
    disk = BrokerStorage(tmp_path)
    disk.commit([commit_of(disk, "one", "one-more".replace("-", "_"))])
    commit = StorageCommit()
    commit.removed_topics.append(("one", disk.forget("one")))
    with pytest.raises(StorageError, match="being removed"):
        disk.open_store("one", 0)
    disk.commit([commit])
    assert list((tmp_path / "log" / "one-0").iterdir()) == []
    assert disk.open_store("one", 0).end_offset == 0
    assert disk.open_store("one_more", 0).end_offset == 28
    disk.close(clean=True)
