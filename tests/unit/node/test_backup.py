"""Backups of a stopped data directory: what they contain, what is copied again, and what a restore refuses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from penstock.cli.main import main
from penstock.errors import PenstockError, RefusedError, RemoteProtocolError, StorageError, UnavailableError
from penstock.node import backup, backup_directory
from penstock.node.backup import Backups, BackupSource, Item, backup_items, encode_item, read_items, stopped_source
from penstock.node.backup_directory import (
    MANIFEST,
    BackupReceiver,
    Manifest,
    Received,
    find_backup,
    list_backups,
    read_manifest,
    restore,
    verify,
)
from penstock.node.backup_encryption import Recipients
from penstock.node.data_dir import DataDirectory
from penstock.node.fsck import check_directory
from penstock.node.tube_broker import _check_directory
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.storage import NODE, Storage
from penstock.tube.broker.maintenance import TopicDurability, open_logs
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.retention import Retention
from penstock.tube.storage.store import Store, StoreLimits

LIMITS = StoreLimits(segment_bytes=4000, fill_bytes_least=256, fill_bytes_most=1024, tail_bytes=0)
RECORD_BYTES = 500


def append(storage: BrokerStorage, count: int, *, offset: int = 0, now: int = 1000) -> Store:
    store = storage.open_store("events", 10)
    for number in range(count):
        data = b"%06d" % number + bytes(RECORD_BYTES)
        store.append(100_000, data, 0, crc32(data), -1, (now << 20) + store.end_offset // 28, now)
    commit = StorageCommit()
    work = store.take_unwritten()
    commit.works.append((store, work, True))
    commit.offsets = [GroupOffset("lake", "events", 0, offset, now)]
    storage.commit([commit])
    store.written(work)
    return store


def data_directory(path: Path, *, records: int = 30) -> Path:
    """A data directory as a node leaves it: keys, and a log of several segments."""
    (path / "tube").mkdir(parents=True)
    (path / "format.json").write_text('{"format": 1, "environments": ["statestore"]}')
    (path / "tube" / "admin-token").write_text("secret\n")
    (path / "tube" / "admin-token").chmod(0o600)
    store = Storage(path / "statestore")
    store.open()
    store.commit([change(number) for number in range(1, 4)])
    store.close()
    storage = BrokerStorage(path / "tube" / "broker-1", limits=LIMITS)
    append(storage, records, offset=28)
    storage.close(clean=True)
    return path


def change(number: int) -> Change:
    version = Hlc(number, 0, NODE)
    key = b"key-%d" % number
    return Change(key, Record(key, b"value-%d" % number, version), version)


def values(path: Path) -> dict[bytes, bytes]:
    store = Storage(path / "statestore")
    found = {record.key: record.value for record in store.open().records}
    store.close()
    return found


async def received(
    source: BackupSource, directory: Path, *, keep: int | None = None, recipients: Recipients | None = None
) -> Received:
    with BackupReceiver(directory, recipients) as receiver:
        async with aclosing(backup_items(source, receiver.have)) as items:
            async for item in items:
                receiver.take(item)
        return receiver.finish(keep=keep)


def back_up(data: Path, directory: Path, *, keep: int | None = None, recipients: Recipients | None = None) -> Received:
    with stopped_source(data) as source:
        return asyncio.run(received(source, directory, keep=keep, recipients=recipients))


def test_a_restored_directory_has_everything(tmp_path: Path) -> None:
    data = data_directory(tmp_path / "data")
    (data / "pipelines" / "lake").mkdir(parents=True)
    (data / "pipelines" / "lake" / "plan.json").write_text("{}")
    found = back_up(data, tmp_path / "backups")
    target = tmp_path / "new"
    restore(found.manifest, target)
    assert values(target) == {b"key-1": b"value-1", b"key-2": b"value-2", b"key-3": b"value-3"}
    assert json.loads((target / "format.json").read_text()) == json.loads((data / "format.json").read_text())
    assert (target / "pipelines" / "lake" / "plan.json").read_text() == "{}"
    assert (target / "tube" / "admin-token").read_text() == "secret\n"
    assert (target / "tube" / "admin-token").stat().st_mode & 0o777 == 0o600
    storage = BrokerStorage(target / "tube" / "broker-1")
    store = storage.open_store("events", 10)
    assert (store.end_offset, store.recovery.losses, store.recovery.torn_bytes) == (30 * 28, [], 0)
    assert [(each.group, each.offset) for each in storage.meta.offsets()] == [("lake", 28)]
    storage.close(clean=True)
    assert check_directory(target).ok
    assert not (target / "lock").stat().st_size


def test_consumers_beyond_the_backup_learn_that_its_log_is_another_one(tmp_path: Path) -> None:
    def epochs(path: Path) -> list[tuple[int, int]]:
        opened = open_logs(
            path / "tube" / "broker-1", TopicDurability(), files=None, limits=LIMITS,
            staging_limits=StagingLimits(), on_loss=lambda _: None,
        )  # fmt: skip
        found = opened.storage.open_store("events", 10).epochs
        opened.storage.close(clean=True)
        return found

    data = data_directory(tmp_path / "data")
    before = epochs(data)
    restore(back_up(data, tmp_path / "backups").manifest, tmp_path / "new")
    restored = epochs(tmp_path / "new")
    assert restored[:-1] == before == epochs(data), "the log is the same up to the backup"
    assert restored[-1][1] == 30 * 28


def test_closed_segments_are_not_copied_again(tmp_path: Path) -> None:
    data, backups = data_directory(tmp_path / "data"), tmp_path / "backups"
    first = back_up(data, backups)
    assert first.linked_bytes == 0
    storage = BrokerStorage(data / "tube" / "broker-1", limits=LIMITS)
    append(storage, 5)
    storage.close(clean=True)
    second = back_up(data, backups)
    assert [path.name for path in list_backups(backups)] == [first.manifest.path.name, second.manifest.path.name]
    log = "tube/broker-1/log/events-10"
    segments = sorted(name for name in first.manifest.files if name.endswith(".tube"))
    assert len(segments) == 4
    same = [(first.manifest.path / name).samefile(second.manifest.path / name) for name in segments]
    assert same == [True] * 3 + [False]
    assert second.linked_bytes > 3 * 4000
    assert second.copied_bytes < 11 * RECORD_BYTES + 4000
    # Each backup is complete without the others.
    shutil.rmtree(first.manifest.path)
    restore(second.manifest, tmp_path / "new")
    assert len(list((tmp_path / "new" / log).glob("*.tube"))) == len(segments) + 1


def test_a_recreated_file_of_the_same_name_and_size_is_copied(tmp_path: Path) -> None:
    data, backups = data_directory(tmp_path / "data"), tmp_path / "backups"
    back_up(data, backups)
    token = data / "tube" / "admin-token"
    token.write_text("public\n")
    second = back_up(data, backups)
    assert (second.manifest.path / "tube" / "admin-token").read_text() == "public\n"


def test_keep_deletes_the_oldest_backups(tmp_path: Path) -> None:
    data, backups = data_directory(tmp_path / "data", records=1), tmp_path / "backups"
    made = [back_up(data, backups, keep=2) for _ in range(3)]
    assert list(made[2].removed) == [made[0].manifest.path]
    assert list_backups(backups) == [each.manifest.path for each in made[1:]]
    assert find_backup(backups) == made[2].manifest.path


@pytest.mark.parametrize("is_broker", [False, True])
def test_a_directory_with_a_part_of_a_backup_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_broker: bool
) -> None:
    """A broker in its own process has no format.json, without which a node does not start."""
    data, target = data_directory(tmp_path / "data", records=1), tmp_path / "new"
    if is_broker:
        (data / "format.json").unlink()
    manifest = back_up(data, tmp_path / "backups").manifest

    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(backup_directory, "_note_restored", fail)
        with refused(StorageError, "cannot be written: No space left on device"):
            restore(manifest, target)
    starts: list[Callable[[Path], object]] = [DataDirectory, _check_directory, check_directory]
    for start in starts:
        with refused(StorageError, "has only a part of a backup"):
            start(target)
    shutil.rmtree(target)
    restore(manifest, target)
    _check_directory(target)
    assert check_directory(target).ok


def test_the_newest_backup_is_the_last_one_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, backups = data_directory(tmp_path / "data", records=1), tmp_path / "backups"
    monkeypatch.setattr(backup, "wall_clock_ms", lambda: 2_000_000_000_000)
    made = [back_up(data, backups, keep=2).manifest.path for _ in range(2)]
    monkeypatch.setattr(backup, "wall_clock_ms", lambda: 1_000_000_000_000)
    for number in range(3, 12):
        last = back_up(data, backups, keep=2)
        made.append(last.manifest.path)
        assert last.manifest.point_at == 1_000_000_000_000
        assert made[-1].name == f"2033-05-18T03-33-20Z-{number}"
        assert list(last.removed) == [made[-3]]
        assert list_backups(backups) == made[-2:]
        assert find_backup(backups) == made[-1]


@contextmanager
def refused(kind: type[PenstockError], match: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert match in str(caught.value)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("statestore/rows", flipped, "statestore/rows: its SHA-256 does not match"),
        ("tube/broker-1/log/events-10/00000000000000000000.index", flipped, "0.index: its SHA-256 does not match"),
        ("tube/admin-token", lambda path: path.unlink(), "tube/admin-token: No such file or directory"),
        ("tube/admin-token", lambda path: path.write_bytes(b"x"), "tube/admin-token: 1 bytes instead of 7"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_restored(
    tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    found = back_up(data_directory(tmp_path / "data"), tmp_path / "backups").manifest
    damage(found.path / name)
    assert [reason in line for line in verify(found)] == [True]
    with refused(StorageError, reason):
        restore(found, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_restore_into_existing_data_is_refused(tmp_path: Path) -> None:
    found = back_up(data_directory(tmp_path / "data"), tmp_path / "backups").manifest
    for target in (tmp_path / "data", found.path / MANIFEST):
        with refused(StorageError, "is not empty"):
            restore(found, target)
    (tmp_path / "empty").mkdir()
    restore(found, tmp_path / "empty")


def changed_manifest(path: Path, edit: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    from penstock.node.backup_directory import _digest

    stored = json.loads((path / MANIFEST).read_text())
    edit(stored)
    if sign:
        stored["sha256"] = _digest(stored)
    (path / MANIFEST).write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("changes", "sign", "reason"),
    [
        (
            {"environments": {"statestore": {"schema": 99, "tables": []}}},
            True,
            "statestore has schema 99, this version",
        ),
        ({"environments": {"graphs": {"schema": 1, "tables": []}}}, True, "it contains 'graphs', which this version"),
        ({"directory": {"format": 9}}, True, "its data directory has format 9, this version knows 1"),
        ({"format": 3}, False, "has backup format 3, this version reads up to 2\n  why: penstock 7.1 wrote it"),
    ],
)
def test_a_backup_of_a_newer_version_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str, *, sign: bool
) -> None:
    path = back_up(data_directory(tmp_path / "data"), tmp_path / "backups").manifest.path
    changed_manifest(path, lambda stored: stored.update(changes, version="7.1"), sign=sign)
    with refused(StorageError, reason):
        restore(read_manifest(path), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    path = back_up(data_directory(tmp_path / "data"), tmp_path / "backups").manifest.path
    changed_manifest(path, lambda stored: stored.update(point_at=5), sign=False)
    with refused(StorageError, f"{path / MANIFEST} is damaged\n  why: its checksum does not match"):
        read_manifest(path)
    changed_manifest(path, lambda stored: stored["files"].update({"../x": [0, 0, 0, ""]}))
    with refused(StorageError, "invalid name '../x'"):
        read_manifest(path)


def test_an_interrupted_backup_is_removed_and_leaves_earlier_ones(tmp_path: Path) -> None:
    data, backups = data_directory(tmp_path / "data"), tmp_path / "backups"
    first = back_up(data, backups)
    (backups / "4711.partial" / "statestore").mkdir(parents=True)
    (backups / "4711.partial" / MANIFEST).write_text("{}")
    assert list_backups(backups) == [first.manifest.path]
    with refused(RemoteProtocolError, "the backup is not complete"), BackupReceiver(backups) as receiver:
        receiver.take(Item({"file": "a", "at": 0, "crc": crc32(b"x")}, b"x"))
        receiver.finish()
    assert list(backups.glob("*.partial")) == []
    assert verify(first.manifest) == []
    with refused(UnavailableError, "is in use by process"), BackupReceiver(backups):
        BackupReceiver(backups)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (Item({"file": "a", "at": 0, "crc": 5}, b"x"), "is damaged at byte 0 of a"),
        (Item({"file": "a", "at": 7, "crc": crc32(b"x")}, b"x"), "is damaged at byte 7 of a"),
        (Item({"file": "../a", "at": 0, "crc": crc32(b"x")}, b"x"), "invalid name '../a'"),
        (Item({"error": {"what": "no", "why": "because", "hint": "wait"}}), "no\n  why: because\n  hint: wait"),
    ],
)
def test_a_bad_stream_is_refused(tmp_path: Path, item: Item, reason: str) -> None:
    with pytest.raises((RemoteProtocolError, RefusedError)) as caught, BackupReceiver(tmp_path / "b") as receiver:
        receiver.take(item)
    assert reason in str(caught.value)
    assert list((tmp_path / "b").iterdir()) == [tmp_path / "b" / "lock"]


def test_only_a_directory_of_backups_is_written(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with refused(StorageError, "is not a directory of backups"):
        BackupReceiver(tmp_path)
    with refused(StorageError, "contains no backup"):
        find_backup(tmp_path)
    with refused(StorageError, "is not a data directory"), stopped_source(tmp_path):
        pass


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    data = data_directory(tmp_path / "data")
    with stopped_source(data), refused(UnavailableError, f"is in use by process {os.getpid()}"):
        back_up(data, tmp_path / "backups")


def test_items_survive_their_encoding_and_a_cut_ends_the_stream() -> None:
    items = [Item({"file": "a", "at": 0}, b"abc"), Item({"end": {}})]
    stream = b"".join(map(encode_item, items))
    for size in range(len(stream) + 1):
        at = 0

        def read(count: int, end: int = size) -> bytes:
            nonlocal at
            found = stream[at : min(at + count, end)]
            at += len(found)
            return found

        whole = (size >= len(encode_item(items[0]))) + (size == len(stream))
        assert list(read_items(read)) == items[:whole]


def test_a_data_directory_on_the_command_line_overrides_the_variable_of_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_directory(tmp_path / "data")
    monkeypatch.setenv("PENSTOCK_HTTP", "127.0.0.1:1")
    assert main(["backup", str(tmp_path / "backups"), "--data-dir", str(data)]) == 0
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(data))
    assert main(["backup", str(tmp_path / "backups")]) == 1  # of two variables the address is used
    assert "127.0.0.1:1" in capsys.readouterr().err


# What happens while a backup runs


async def test_a_file_that_is_not_needed_after_the_point_is_kept_until_the_end(tmp_path: Path) -> None:
    data = data_directory(tmp_path / "data")
    with stopped_source(data) as source:
        storage = source.brokers["tube/broker-1"]
        staged = data / "tube" / "broker-1" / "staging" / "0000000000000001.rows"
        staged.parent.mkdir()
        staged.write_bytes(b"rows")
        items = [item async for item in decided_after_the_point(source, storage, staged)]
        assert not staged.exists()
    assert [item.payload for item in items if item.header.get("file", "").endswith("1.rows")] == [b"rows"]
    assert "tube/broker-1/staging/0000000000000001.rows" in items[-1].header["end"]["files"]


async def decided_after_the_point(source: BackupSource, storage: BrokerStorage, staged: Path) -> AsyncIterator[Item]:
    """A backup; the staged rows are decided when the newest segment, the first file after the point, arrives."""
    store = storage.open_store("events", 10)
    newest = store.written_segments()[-1][0].data_path.name
    decided = False
    async with aclosing(backup_items(source, {})) as items:
        async for item in items:
            yield item
            if item.header.get("file", "").endswith(newest) and not decided:
                decided = True
                commit = StorageCommit()
                commit.unstaged.append(staged)
                storage.commit([commit])
                kept = await asyncio.to_thread(staged.exists)
                assert kept
    assert decided


def test_the_messages_of_a_topic_that_is_deleted_after_the_point_are_left_out(tmp_path: Path) -> None:
    data = data_directory(tmp_path / "data")
    with stopped_source(data) as source:
        manifest = asyncio.run(deleted_after_the_point(source, tmp_path / "backups")).manifest
    assert [name for name in manifest.files if "/log/events-" in name] == []
    restore(manifest, tmp_path / "new")
    assert check_directory(tmp_path / "new").problems == []


async def deleted_after_the_point(source: BackupSource, directory: Path) -> Received:
    """A backup; its topic is deleted when the data of its newest segment arrive, before their index is read."""
    storage = source.brokers["tube/broker-1"]
    newest = storage.open_store("events", 10).written_segments()[-1][0].data_path.name
    with BackupReceiver(directory) as receiver:
        async with aclosing(backup_items(source, {})) as items:
            async for item in items:
                receiver.take(item)
                if item.header.get("file", "").endswith(newest) and storage.stores:
                    commit = StorageCommit()
                    commit.removed_topics.append(("events", storage.forget("events")))
                    storage.commit([commit])
        return receiver.finish()


@pytest.mark.parametrize("when", ["before the point", "after the point"])
def test_a_topic_that_is_created_again_during_a_backup_ends_it(tmp_path: Path, when: str) -> None:
    """Its files have the names of those that were sent, or are to be sent."""
    data = data_directory(tmp_path / "data", records=30 if when == "before the point" else 1)
    with stopped_source(data) as source, refused(StorageError, "or its topic was deleted and created again"):
        asyncio.run(created_again(source, tmp_path / "backups", when))


async def created_again(source: BackupSource, directory: Path, when: str) -> None:
    storage = source.brokers["tube/broker-1"]
    segments = [segment.data_path.name for segment, _, _ in storage.open_store("events", 10).written_segments()]
    last = segments[-1] if when == "after the point" else "rows"
    with BackupReceiver(directory) as receiver:
        async with aclosing(backup_items(source, {})) as items:
            async for item in items:
                receiver.take(item)
                if item.header.get("file", "").endswith(last) and storage.stores:
                    last = "none"
                    commit = StorageCommit()
                    commit.removed_topics.append(("events", storage.forget("events")))
                    storage.commit([commit])
                    for _ in range(30):
                        append(storage, 1)
        receiver.finish()


def test_expired_segments_are_not_in_the_backup(tmp_path: Path) -> None:
    """Those that were copied and expired before the point are left out."""
    data = data_directory(tmp_path / "data")
    with stopped_source(data) as source:
        manifest = asyncio.run(expired_before_the_point(source, tmp_path / "backups")).manifest
    kept = sorted(Path(name).name for name in manifest.files if name.endswith(".tube"))
    assert kept == sorted(path.name for path in data.glob("tube/broker-1/log/events-10/*.tube"))
    restore(manifest, tmp_path / "new")
    assert check_directory(tmp_path / "new").problems == []


async def expired_before_the_point(source: BackupSource, directory: Path) -> Received:
    storage = source.brokers["tube/broker-1"]
    store = storage.open_store("events", 10)
    expired = False
    with BackupReceiver(directory) as receiver:
        async with aclosing(backup_items(source, {})) as items:
            async for item in items:
                receiver.take(item)
                if item.header.get("file") == "statestore/rows" and not expired:
                    expired = True
                    commit = StorageCommit()
                    commit.expired.append((store, store.expire(Retention(max_bytes=9000), 1000)))
                    storage.commit([commit])
        assert expired
        return receiver.finish()


def test_commits_do_not_wait_for_the_rows_of_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_directory(tmp_path / "data")
    storage = BrokerStorage(data / "tube" / "broker-1", limits=LIMITS)
    storage.meta.commit([GroupOffset(f"group-{number}", "events", 0, 28, 1) for number in range(10)])
    storage.close(clean=True)
    monkeypatch.setattr(backup, "_ROWS_BYTES", 1)
    with stopped_source(data) as source:
        manifest, newest, files = asyncio.run(changed_during_later_rows(source, tmp_path / "backups"))
    rows, commits = "tube/broker-1/meta/rows", "statestore/commits"
    last = len(files) - files[::-1].index(rows)
    assert files[files.index(rows) : last].count(commits) > 5, "they wait in memory, which is limited"
    restore(manifest, tmp_path / "new")
    assert newest > 10
    assert len(values(tmp_path / "new")) == newest


async def changed_during_later_rows(source: BackupSource, directory: Path) -> tuple[Manifest, int, list[str]]:
    """A backup, the number of keys, and the files of its items in their order; a key is set whenever a row of the
    broker's environment, which is copied last, arrives."""
    keys = Storage(source.path / "statestore", environment=source.environments["statestore"])
    newest = 3
    files = []
    with BackupReceiver(directory) as receiver:
        async with aclosing(backup_items(source, receiver.have)) as items:
            async for item in items:
                receiver.take(item)
                files.append(str(item.header.get("file")))
                if item.header.get("file") == "tube/broker-1/meta/rows":
                    newest += 1
                    keys.commit([change(newest)])
        return receiver.finish().manifest, newest, files


class _Client(CommitClient[int]):
    def begin_commit(self) -> int:
        return 0

    def write_commit(self, batch: int) -> None: ...


async def test_a_point_that_commits_do_not_reach_ends_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: CommitQueue[int] = CommitQueue("slow", _Client())
    queue.start()
    monkeypatch.setattr(backup, "_PAUSE_S", 0.0)
    with stopped_source(data_directory(tmp_path / "data")) as source:
        with refused(UnavailableError, "commits of the node did not end in time"):
            await received(source._replace(queues=[queue]), tmp_path / "backups")
        monkeypatch.setattr(backup, "_PAUSE_S", 10.0)
        # Commits continue.
        assert (await received(source._replace(queues=[queue]), tmp_path / "backups")).manifest.files
    await queue.close()


async def test_a_second_backup_is_refused_and_a_close_ends_the_first(tmp_path: Path) -> None:
    with stopped_source(data_directory(tmp_path / "data")) as source:
        backups = Backups(source, list)
        began = asyncio.Event()

        async def read() -> None:
            async with aclosing(backups.items({}, 1)) as items:
                async for _ in items:
                    began.set()

        first = asyncio.create_task(read())
        await began.wait()
        with refused(RefusedError, "another backup of this node is running"):
            await anext(backups.items({}))
        await backups.close()
        assert first.cancelled() or first.cancelling()
        with pytest.raises(asyncio.CancelledError):
            await first
        with refused(RefusedError, "another backup"):
            await anext(backups.items({}))


def _descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def test_a_backup_that_is_ended_closes_its_files_at_once(tmp_path: Path) -> None:
    """Not when the garbage collector finds what is left of it."""
    with stopped_source(data_directory(tmp_path / "data")) as source:
        before = _descriptors()
        opened = 0
        for wanted in range(1, 12):
            async with aclosing(backup_items(source, {})) as items:
                for _ in range(wanted):
                    await anext(items)
                opened += _descriptors() != before
            assert _descriptors() == before
        assert opened > 3


async def test_a_node_with_a_failed_part_is_not_backed_up(tmp_path: Path) -> None:
    with stopped_source(data_directory(tmp_path / "data")) as source:
        backups = Backups(source, lambda: ["mqtt sessions: failed"])
        with refused(RefusedError, "why: mqtt sessions: failed"):
            await anext(backups.items({}))


# Check of a data directory


def test_fsck_finds_a_damaged_value_and_a_damaged_record(tmp_path: Path) -> None:
    data = data_directory(tmp_path / "data")
    found = check_directory(data)
    assert (found.ok, found.problems, found.messages, found.segments) == (True, [], 30, 4)
    assert found.rows > 3
    segment = sorted(data.glob("tube/broker-1/log/events-10/*.tube"))[1]
    flipped(segment)
    lmdb_file = data / "statestore" / "data.mdb"
    content = lmdb_file.read_bytes()
    assert b"value-2" in content
    lmdb_file.write_bytes(content.replace(b"value-2", b"value-X"))
    found = check_directory(data)
    assert not found.ok
    assert sorted({Path(problem.path).name for problem in found.problems if problem.damaged}) == sorted(
        ["data.mdb", segment.name]
    )
    assert any("of table keys: its checksum does not match" in problem.text for problem in found.problems)
