"""The LMDB environment that stores share: one opening a process, a schema, growth, transactions whole or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, ShortageError, StorageError
from penstock.runtime.io.files import DirectFiles, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment, release_pages
from tests.resource_limits import descriptor_limit, file_size_limit


def an_environment(path: Path, *, schema: int = 1, many: bool = False) -> LmdbEnvironment:
    return LmdbEnvironment(
        path,
        "notes",
        "owner of them",
        ("meta", "rows"),
        schema=schema,
        durability=Durability.DURABLE,
        map_bytes=1 << 20,
        many=many,
    )


def rows_of(environment: LmdbEnvironment) -> list[tuple[bytes, bytes]]:
    def load(transaction: lmdb.Transaction[bytes]) -> list[tuple[bytes, bytes]]:
        return list(transaction.cursor(db=environment.tables["rows"]))

    return environment.open(load)


def test_committed_rows_exist_after_reopening(tmp_path: Path) -> None:
    environment = an_environment(tmp_path / "made" / "here")
    assert rows_of(environment) == []
    environment.transact(lambda t: t.put(b"k", b"v", db=environment.tables["rows"]), "writing")
    environment.close()
    environment.close()
    assert rows_of(environment) == [(b"k", b"v")]
    environment.close()


def test_the_names_of_a_new_environment_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[Path, set[str]] = {}
    monkeypatch.setattr(
        DirectFiles, "sync_dir", lambda _self, path: synced.update({path: {entry.name for entry in path.iterdir()}})
    )
    environment = an_environment(tmp_path / "made" / "here")
    rows_of(environment)
    environment.close()
    assert "made" in synced[tmp_path]
    assert "here" in synced[tmp_path / "made"]
    assert "data.mdb" in synced[tmp_path / "made" / "here"]


def test_the_map_grows_until_a_transaction_fits_and_keeps_its_size(tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)
    before = environment.stored_bytes()
    value = bytes(5 << 20)
    environment.transact(lambda t: t.put(b"k", value, db=environment.tables["rows"]), "writing")
    assert environment.stored_bytes() > before + len(value)
    environment.close()
    again = an_environment(tmp_path)
    assert rows_of(again) == [(b"k", value)]
    again.close()


@pytest.mark.parametrize("pages", range(2, 12))
def test_a_file_that_was_cut_off_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, pages: int) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)
    rows = [(b"%03d" % number, bytes(1000)) for number in range(100)]
    environment.transact(lambda t: t.cursor(db=environment.tables["rows"]).putmulti(rows), "writing")
    environment.close()
    os.truncate(tmp_path / "data.mdb", pages * 4096 + 100)
    with pytest.raises(StorageError, match="cannot be opened"):
        rows_of(an_environment(tmp_path))


def test_a_transaction_that_raises_leaves_nothing(tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)

    def write(transaction: lmdb.Transaction[bytes]) -> None:
        transaction.put(b"k", b"v", db=environment.tables["rows"])
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    with pytest.raises(StorageError) as caught:
        environment.transact(write, "writing one row")
    assert caught.value.what == f"notes {tmp_path}: writing one row failed: mdb_txn_commit: Input/output error"
    assert not isinstance(caught.value, ShortageError)
    assert (caught.value.why or "").endswith(" KiB are free on its file system")
    environment.close()
    assert rows_of(environment) == []
    environment.close()


def test_pages_are_released_between_transactions(tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)

    def write(key: bytes) -> None:
        environment.transact(lambda t: t.put(key, b"v" * 100_000, db=environment.tables["rows"]), "writing", sync=True)

    keys = [b"%02d" % number for number in range(40)]
    for key in keys:
        write(key)  # the map grows meanwhile
        release_pages()
    found = environment.read(lambda t: list(t.cursor(db=environment.tables["rows"]).iternext(values=False)))
    assert found == keys
    with pytest.raises(StorageError, match="already open"):
        rows_of(an_environment(tmp_path))
    environment.close()
    release_pages()
    assert environment.reusable_bytes() == 0


def test_an_environment_that_cannot_be_opened_again_is_opened_by_the_next_transaction(tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)

    def write() -> None:
        environment.transact(lambda t: t.put(b"k", b"v", db=environment.tables["rows"]), "writing")

    with descriptor_limit(3):
        release_pages()
        with pytest.raises(OutOfDescriptorsError, match="writing waits for a file descriptor") as caught:
            write()
        assert "Too many open files" in str(caught.value.why)
        with pytest.raises(StorageError, match="cannot be read"):
            environment.read(lambda t: t.stat(environment.tables["rows"]))
        assert environment.reusable_bytes() == 0
    write()
    assert environment.read(lambda t: t.get(b"k", db=environment.tables["rows"])) == b"v"
    with descriptor_limit(3):
        release_pages()
        with pytest.raises(StorageError, match="fsync failed"):
            environment.close()
    assert rows_of(environment) == [(b"k", b"v")]
    environment.close()


@pytest.mark.parametrize("removed", ["data", "data/data.mdb"])
def test_an_environment_that_was_removed_fails_at_the_next_transaction(tmp_path: Path, removed: str) -> None:
    environment = an_environment(tmp_path / "data")
    rows_of(environment)
    (tmp_path / removed).rename(tmp_path / "elsewhere")
    release_pages()  # it runs on its own and raises nothing
    with pytest.raises(StorageError, match="writing failed") as caught:
        environment.transact(lambda t: t.put(b"k", b"v", db=environment.tables["rows"]), "writing")
    assert "No such file or directory" in f"{caught.value.why}{caught.value}"
    with pytest.raises(StorageError, match="fsync failed"):
        environment.close()


def test_a_second_opening_in_the_process_is_refused(tmp_path: Path) -> None:
    first, second = an_environment(tmp_path), an_environment(tmp_path, many=True)
    rows_of(first)
    with pytest.raises(StorageError, match="are already open in this process") as caught:
        rows_of(second)
    assert caught.value.hint == "use the owner of them, or another directory"
    first.transact(lambda t: t.put(b"k", b"v", db=first.tables["rows"]), "writing")
    first.close()
    assert rows_of(second) == [(b"k", b"v")]
    second.close()


@pytest.mark.timeout(60)
def test_an_opening_beside_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens, may_open = threading.Event(), threading.Event()
    real = lmdb.open

    def slow(*args: Any, **options: Any) -> lmdb.Environment:
        opens.set()
        assert may_open.wait(30)
        return real(*args, **options)

    first, second = an_environment(tmp_path), an_environment(tmp_path)
    monkeypatch.setattr(lmdb, "open", slow)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(rows_of, first)
        assert opens.wait(30)
        with pytest.raises(StorageError, match="already open in this process"):
            rows_of(second)
        may_open.set()
        assert opening.result() == []
    first.close()
    assert rows_of(second) == []
    second.close()


def test_an_environment_that_could_not_be_opened_may_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise lmdb.Error("too many open files")

    environment = an_environment(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", fail)
        with pytest.raises(StorageError, match="cannot be opened: too many open files"):
            rows_of(environment)
    assert rows_of(environment) == []
    environment.close()


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    newer = an_environment(tmp_path, schema=2)
    rows_of(newer)
    newer.close()
    with pytest.raises(StorageError, match=r"notes .* has schema 00000002, this version reads up to 1"):
        rows_of(an_environment(tmp_path, schema=1))
    assert rows_of(newer) == []
    newer.close()


def test_a_file_that_is_not_an_environment_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not LMDB's" * 1000)
    with pytest.raises(StorageError, match="cannot be opened"):
        rows_of(an_environment(tmp_path))


def test_pages_that_were_freed_can_be_reused(tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)
    before = environment.reusable_bytes()
    environment.transact(lambda t: t.put(b"k", bytes(1 << 18), db=environment.tables["rows"]), "writing")
    assert environment.reusable_bytes() <= before + (1 << 16)
    for _ in range(2):
        environment.transact(lambda t: t.delete(b"k", db=environment.tables["rows"]), "deleting")
    assert environment.reusable_bytes() >= 1 << 18
    environment.close()
    assert environment.reusable_bytes() == 0


@pytest.mark.parametrize("found_by", ["the check before", "LMDB"])
def test_without_disk_space_nothing_is_written_and_the_same_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    environment = an_environment(tmp_path)
    rows_of(environment)
    full = found_by == "LMDB"

    def write(transaction: lmdb.Transaction[bytes]) -> None:
        transaction.put(b"k", b"v", db=environment.tables["rows"])
        if full:
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    with monkeypatch.context() as patch:
        if not full:
            patch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 100, 9, 9, 0, 0, 0, 0, 255)))
        with pytest.raises(OutOfSpaceError, match="writing one row waits for disk space") as caught:
            environment.transact(write, "writing one row", size=100)
    assert caught.value.path == str(tmp_path / "data.mdb")
    assert caught.value.hint == "free space on the file system: it continues by itself"
    full = False
    environment.transact(write, "writing one row", size=100)
    environment.close()
    assert rows_of(environment) == [(b"k", b"v")]
    environment.close()


def test_a_write_that_a_full_disk_cuts_short_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bytes of data may change many pages, for which there is no space."""
    environment = an_environment(tmp_path)
    rows_of(environment)
    rows = [(b"%04d" % number, bytes(1000)) for number in range(1000)]
    pages = iter([1000])  # free before the transaction, none afterwards

    def write(transaction: lmdb.Transaction[bytes]) -> None:
        transaction.cursor(db=environment.tables["rows"]).putmulti(rows)

    def statvfs(_: Path) -> os.statvfs_result:
        free = next(pages, 0)
        return os.statvfs_result((4096, 4096, 1000, free, free, 0, 0, 0, 0, 255))

    with file_size_limit(1 << 20):
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", statvfs)
            with pytest.raises(OutOfSpaceError, match="writing rows waits") as caught:
                environment.transact(write, "writing rows", size=100)
        assert "Input/output error; 0 KiB are free" in str(caught.value.why)
        # With space it is an error of the device.
        with pytest.raises(StorageError, match=r"writing rows failed: .*Input/output error") as failed:
            environment.transact(write, "writing rows", size=100)
        assert not isinstance(failed.value, ShortageError)
    environment.transact(write, "writing rows", size=100)
    environment.close()
    assert rows_of(environment) == rows
    environment.close()


def test_an_fsync_without_space_cannot_be_tried_again(tmp_path: Path) -> None:
    """Earlier transactions, which it would have made durable, may be lost."""

    class Full:
        def __init__(self, handle: lmdb.Environment) -> None:
            self._handle = handle

        def sync(self, *, force: bool) -> None:
            raise lmdb.DiskError("mdb_env_sync: No space left on device")

        def __getattr__(self, name: str) -> object:
            return getattr(self._handle, name)

    environment = an_environment(tmp_path)
    rows_of(environment)
    handle = environment._env
    assert handle is not None
    environment._env = Full(handle)  # type: ignore[assignment]
    with pytest.raises(StorageError, match="writing failed: mdb_env_sync") as caught:
        environment.transact(lambda t: t.put(b"k", b"v", db=environment.tables["rows"]), "writing", sync=True)
    assert not isinstance(caught.value, ShortageError)
    environment._env = handle
    environment.close()
