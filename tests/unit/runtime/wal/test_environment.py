"""An environment behind a log: what was committed is there after any end, in LMDB or out of the log."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io import wal
from penstock.runtime.io.files import DirectFile, DirectFiles, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, DROP, PUT, SECTOR, Operation, RowChanges

SEGMENT = 16 * SECTOR
META, ROWS = 0, 1


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


class _Unfollowed(LoggedEnvironment):
    """LMDB is as it was when the environment was opened, until a commit or the end brings it up to date."""

    def _follow(self) -> None: ...


class _Store:
    """An environment and its rows; closed at the end of the test."""

    def __init__(self, path: Path, durability: Durability = Durability.DURABLE, *, follows: bool = False) -> None:
        environment = LmdbEnvironment(path, "notes", "owner of them", ("meta", "rows"), schema=1, durability=durability)
        kind = LoggedEnvironment if follows else _Unfollowed
        self.environment = kind(environment, segment_bytes=SEGMENT)
        self.rows = dict(self.environment.open(self._load))

    def _load(self, transaction: lmdb.Transaction[bytes]) -> list[tuple[bytes, bytes]]:
        return list(transaction.cursor(db=self.environment.tables["rows"]))

    def put(self, **rows: str) -> None:
        self.commit(*((PUT, ROWS, name.encode(), value.encode()) for name, value in rows.items()))

    def commit(self, *operations: Operation) -> None:
        self.environment.commit(list(operations), "writing")


@pytest.fixture
def stores() -> Iterator[list[_Store]]:
    opened: list[_Store] = []
    yield opened
    for store in opened:
        store.environment.close()


def killed(path: Path) -> Path:
    """What a start finds after the process ended as it is now: a copy of the directory."""
    copy = path.with_name(path.name + "-killed")
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(path, copy))


def found(path: Path, durability: Durability = Durability.DURABLE) -> dict[bytes, bytes]:
    store = _Store(path, durability)
    store.environment.close()
    return store.rows


def in_lmdb(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), max_dbs=2, readonly=True, lock=False) as env:
        rows = env.open_db(b"rows", create=False)
        with env.begin() as transaction:
            return dict(transaction.cursor(db=rows))


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("emptied", [True, False])
def test_a_log_without_its_data_is_no_new_store(tmp_path: Path, durability: Durability, *, emptied: bool) -> None:
    path = tmp_path / "store"
    store = _Store(path)
    store.put(a="1")
    store.environment.close()
    (path / "data.mdb").unlink()
    if emptied:
        (path / "data.mdb").touch()
    for _ in range(2):  # the first try leaves nothing that would hide it from the second
        with pytest.raises(StorageError, match=r"data\.mdb has no position of a log") as caught:
            _Store(path, durability)
        assert "restore the whole directory from one copy; or move log-* away" in str(caught.value.hint)
    for log in path.glob("log-*"):
        log.unlink()
    assert found(path, durability) == {}


@pytest.mark.parametrize("durability", Durability)
def test_committed_changes_exist_after_a_close_or_a_kill(
    tmp_path: Path, stores: list[_Store], durability: Durability
) -> None:
    path = tmp_path / "deep" / "store"
    store = _Store(path)
    stores.append(store)
    store.put(a="1", b="2", c="3")
    store.commit((PUT, ROWS, b"a", b"4"), (DELETE, ROWS, b"b", b""))
    expected = {b"a": b"4", b"c": b"3"}
    assert in_lmdb(killed(path)) == {}
    assert found(killed(path), durability) == expected
    # Once applied, it is in LMDB, and is not applied again.
    again = killed(path)
    for _ in range(2):
        assert found(again, durability) == expected
        assert in_lmdb(again) == expected
    logs = list(again.glob("log-*"))
    assert len(logs) == (1 if durability is Durability.DURABLE else 0)
    store.environment.close()
    assert in_lmdb(path) == expected
    assert found(path) == expected
    with pytest.raises(StorageError, match="writing failed: it is closed"):
        store.put(a="5")


@pytest.mark.parametrize("durability", Durability)
def test_reading_sees_what_was_committed(tmp_path: Path, durability: Durability) -> None:
    store = _Store(tmp_path, durability)
    store.put(a="1")
    assert dict(store.environment.read(store._load)) == {b"a": b"1"}
    store.put(b="2")
    assert dict(store.environment.read(store._load)) == {b"a": b"1", b"b": b"2"}
    store.environment.close()


def test_an_environment_can_be_opened_again(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    for number in range(40):
        store.put(a=str(number))
    store.environment.close()
    assert store.environment.open(store._load) == [(b"a", b"39")]
    for number in range(40, 80):
        store.put(a=str(number))
        if number % 10 == 5:
            assert found(killed(tmp_path / "a")) == {b"a": str(number).encode()}


def test_without_fsyncs_there_is_no_log(tmp_path: Path) -> None:
    store = _Store(tmp_path, Durability.FLUSHED)
    store.put(a="1")
    assert in_lmdb(killed(tmp_path)) == {b"a": b"1"}
    store.environment.close()
    assert list(tmp_path.glob("log-*")) == []


def test_rows_up_to_a_key_are_dropped_wherever_they_are(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    store.put(a="1", b="2", c="3")
    store.environment.close()
    store = _Store(tmp_path / "a")
    stores.append(store)
    store.put(d="4", e="5")
    store.commit((DROP, ROWS, b"d", b""))
    store.put(f="6")
    assert found(killed(tmp_path / "a")) == {b"e": b"5", b"f": b"6"}


def test_a_log_without_place_is_back_pressure(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    expected = {}
    for number in range(200):
        name, value = f"k{number % 30}", str(number)
        store.put(**{name: value})
        expected[name.encode()] = value.encode()
        if number % 9 == 0:
            assert found(killed(tmp_path / "a")) == expected
    # Nobody followed: only a commit without place has brought anything into LMDB.
    assert 0 < len(in_lmdb(killed(tmp_path / "a"))) <= 30
    assert len(list((tmp_path / "a").glob("log-*"))) == 1


def test_a_commit_larger_than_the_log_goes_into_lmdb(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    store.put(a="1")
    store.put(large="x" * 2 * SEGMENT, b="2")
    assert set(in_lmdb(killed(tmp_path / "a"))) == {b"a", b"b", b"large"}
    store.put(a="3")
    recovered = found(killed(tmp_path / "a"))
    assert (recovered[b"a"], recovered[b"b"], len(recovered[b"large"])) == (b"3", b"2", 2 * SEGMENT)


def test_lmdb_is_updated_while_commits_continue(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a", follows=True)
    stores.append(store)
    expected = {}
    for number in range(1500):
        name, value = f"k{number % 70}", str(number)
        store.put(**{name: value})
        expected[name.encode()] = value.encode()
        if number % 300 == 299:
            assert found(_killed_between(store, tmp_path / "a")) == expected
    store.environment.close()
    assert in_lmdb(tmp_path / "a") == expected
    assert len(list((tmp_path / "a").glob("log-*"))) <= 8


def _killed_between(store: _Store, path: Path) -> Path:
    """A copy while LMDB is not written: a process that ends leaves its pages all at one moment, a copy does not."""
    with store.environment._applying:
        return killed(path)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_after_a_failed_write_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    store = _Store(tmp_path / "a")
    store.put(a="1")
    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, operation, fails)
        with pytest.raises(StorageError, match=r"writing failed: .*Input/output error") as raised:
            store.put(a="2")
    assert raised.value.path == str(tmp_path / "a")
    assert raised.value.hint is not None
    # A write that succeeds now would prove nothing.
    with pytest.raises(StorageError, match="writing failed"):
        store.put(a="3", b="3")
    store.environment.close()
    # What failed may be there or not; what came after it is not.
    assert found(tmp_path / "a") in ({b"a": b"1"}, {b"a": b"2"})


@pytest.mark.parametrize("large", [False, True], ids=["behind", "in the way"])
def test_after_lmdb_failed_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, large: bool
) -> None:
    store = _Store(tmp_path / "a", follows=not large)
    told: list[StorageError] = []
    store.environment.on_failure = told.append

    def is_full(*_: object, **__: object) -> None:
        raise StorageError("notes: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbEnvironment, "transact", is_full)
        store.put(a="1")
        if large:
            with pytest.raises(StorageError, match="disk is full"):
                store.put(b="x" * 2 * SEGMENT)
        else:
            store.environment._haste.set()
            thread = store.environment._follower
            assert thread is not None
            thread.join(60)
            assert not thread.is_alive()
            assert "read-only" in caplog.text
            assert [error.what for error in told] == ["notes: the disk is full"]
        with pytest.raises(StorageError, match="disk is full"):
            store.put(a="2")
    with pytest.raises(StorageError, match="disk is full"):
        store.put(a="3")
    store.environment.close()
    assert found(tmp_path / "a") == {b"a": b"1"}


class _WithoutMemory(_Unfollowed):
    """LMDB cannot be updated while ``fails``, for another reason than LMDB or the disk."""

    fails = True

    def _write(self, transaction: lmdb.Transaction[bytes], changes: RowChanges) -> None:
        if self.fails:
            raise MemoryError
        super()._write(transaction, changes)


def test_commits_that_could_not_be_applied_are_not_skipped_by_later_ones(tmp_path: Path) -> None:
    environment = LmdbEnvironment(
        tmp_path / "e", "notes", "owner of them", ("meta", "rows"), schema=1, durability=Durability.DURABLE
    )
    logged = _WithoutMemory(environment, segment_bytes=SEGMENT)
    logged.fails = False  # of the start
    logged.open(lambda _: None)
    logged.fails = True
    logged.commit([(PUT, ROWS, b"a", b"1")], "writing")
    with pytest.raises(StorageError, match="MemoryError"):
        logged.read(lambda _: None)
    logged.fails = False
    for _ in range(2):
        with pytest.raises(StorageError, match="MemoryError"):
            logged.commit([(PUT, ROWS, b"b", b"1")], "writing")
        with pytest.raises(StorageError, match="MemoryError"):
            logged.read(lambda _: None)
    logged.close()
    assert found(tmp_path / "e") == {b"a": b"1"}


@pytest.mark.parametrize(("owner", "operation"), [(DirectFiles, "create"), (DirectFile, "write")])
def test_a_disk_without_room_for_the_log_is_slower_and_no_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: type, operation: str
) -> None:
    monkeypatch.setattr(owner, operation, fails)
    store = _Store(tmp_path / "a")
    assert store.environment.may_wait()
    store.put(a="1")
    store.commit()
    store.put(a="2")
    assert in_lmdb(killed(tmp_path / "a")) == {b"a": b"2"}
    store.environment._grow()
    assert caplog.text.count("no room for the log") == 1
    assert list((tmp_path / "a").glob("log-*")) == []
    # There is room again.
    monkeypatch.undo()
    store.environment._grow()
    store.put(a="3")
    assert in_lmdb(killed(tmp_path / "a")) == {b"a": b"2"}
    assert found(killed(tmp_path / "a")) == {b"a": b"3"}
    store.environment.close()


@pytest.mark.parametrize(
    ("owner", "operation", "durability"),
    [
        (DirectFiles, "open", Durability.DURABLE),
        (DirectFile, "read", Durability.DURABLE),
        (DirectFiles, "remove", Durability.FLUSHED),
    ],
)
def test_an_unusable_log_is_reported_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, operation: str, durability: Durability
) -> None:
    store = _Store(tmp_path / "a")
    store.put(a="1")
    path = killed(tmp_path / "a")
    store.environment.close()
    with monkeypatch.context() as patch:
        patch.setattr(owner, operation, fails)
        with pytest.raises(StorageError, match=r"cannot be opened: .*Input/output error"):
            found(path, durability)
    # The environment was closed again, and nothing is lost.
    assert found(path, durability) == {b"a": b"1"}


def test_whether_a_commit_waits(tmp_path: Path) -> None:
    store = _Store(tmp_path / "a")
    assert not store.environment.may_wait()
    for number in range(9):
        store.put(a=str(number))
    assert store.environment.may_wait()
    store.environment.close()
    assert not store.environment.may_wait()


def test_a_gap_in_the_log_is_no_silent_loss(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    for number in range(5):
        store.put(a=str(number))
    for damaged in range(5):
        copy = killed(tmp_path / "a")
        log = copy / "log-0000"
        data = bytearray(log.read_bytes())
        data[damaged * SECTOR + 30] ^= 1
        log.write_bytes(data)
        if damaged == 4:  # nothing follows it: nobody can tell it from one that was never written to its end
            assert found(copy) == {b"a": b"3"}
            continue
        with pytest.raises(StorageError, match=f"commit {damaged + 1} of epoch 1 is missing in its log") as raised:
            found(copy)
        assert "log-*" in str(raised.value.hint)
        assert raised.value.path == str(copy)
        # The way out that the error names.
        log.unlink()
        assert found(copy) == {}


def test_lmdb_from_an_older_copy_does_not_hide_that_the_log_went_on(tmp_path: Path, stores: list[_Store]) -> None:
    path = tmp_path / "a"
    found(path)
    older = killed(path).rename(tmp_path / "older")
    store = _Store(path)
    stores.append(store)
    store.put(a="1")
    copy = killed(path)
    shutil.copy(older / "data.mdb", copy / "data.mdb")
    with pytest.raises(StorageError, match=r"commit 1 of epoch 1 is missing in its log, .* epoch 2"):
        found(copy)


def test_a_log_of_another_store_is_not_applied(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    store.put(a="theirs")
    found(tmp_path / "b")
    shutil.copy(tmp_path / "a" / "log-0000", tmp_path / "b" / "log-0000")
    assert found(tmp_path / "b") == {}


@pytest.mark.parametrize("stored", [b"", bytes(24), b"x" * 40])
def test_a_damaged_note_of_how_far_lmdb_got_is_refused(tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "a"
    found(path)
    with lmdb.open(str(path), max_dbs=2) as env, env.begin(write=True) as transaction:
        transaction.put(b"log", stored, db=env.open_db(b"meta", txn=transaction))
    with pytest.raises(StorageError, match="last applied commit of its log is damaged") as raised:
        found(path)
    assert raised.value.hint == "restore the whole directory from one copy"


def test_the_log_grows_when_it_gets_scarce(tmp_path: Path, stores: list[_Store]) -> None:
    store = _Store(tmp_path / "a", follows=True)
    stores.append(store)
    for number in range(9):
        store.put(a=str(number))
    deadline = time.monotonic() + 20
    while store.environment.may_wait() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(path.name for path in (tmp_path / "a").glob("log-*")) == ["log-0000", "log-0001"]


def test_no_thread_is_left(tmp_path: Path) -> None:
    store = _Store(tmp_path / "a", follows=True)
    names = {thread.name for thread in threading.enumerate()}
    assert "log of notes" in names
    store.environment.close()
    store.environment.close()
    assert "log of notes" not in {thread.name for thread in threading.enumerate()}


def is_full(*_: object, **__: object) -> None:
    raise OutOfSpaceError("notes: no space")


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_commit_without_disk_space_for_its_frame_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: list[_Store]
) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    store.put(a="1")
    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "_write", no_space)
        for _ in range(2):
            with pytest.raises(OutOfSpaceError, match="writing waits for disk space") as raised:
                store.put(a="2")
    assert raised.value.path == str(tmp_path / "a" / "log-0000")
    assert found(killed(tmp_path / "a")) == {b"a": b"1"}
    store.put(a="2")
    store.put(b="3")
    assert found(killed(tmp_path / "a")) == {b"a": b"2", b"b": b"3"}


def test_a_commit_without_place_in_the_log_and_without_disk_space_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: list[_Store]
) -> None:
    store = _Store(tmp_path / "a")
    stores.append(store)
    large = "x" * 2 * SEGMENT
    store.put(a="1")
    with monkeypatch.context() as patch:
        patch.setattr(LmdbEnvironment, "transact", is_full)
        for _ in range(2):
            with pytest.raises(OutOfSpaceError):
                store.put(large=large)
        # What is in the log already is neither lost nor applied twice.
        assert found_by_copy(tmp_path / "a", monkeypatch) == {b"a": b"1"}
    store.put(large=large)
    store.put(a="2")
    recovered = found(killed(tmp_path / "a"))
    assert (recovered[b"a"], len(recovered[b"large"])) == (b"2", 2 * SEGMENT)


def found_by_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """What a start finds that is not hindered by the patches of the test."""
    copy = killed(path)
    monkeypatch.undo()
    return found(copy)


def test_commits_continue_while_lmdb_has_no_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(vars(wal), "_RETRY_S", 0.001)
    store = _Store(tmp_path / "a", follows=True)
    told: list[StorageError] = []
    store.environment.on_failure = told.append
    with monkeypatch.context() as patch:
        patch.setattr(LmdbEnvironment, "transact", is_full)
        store.put(a="1")
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            store.environment._haste.set()
            time.sleep(0.001)
        store.put(a="2")
    assert "is not written to LMDB for now" in caplog.records[0].getMessage()
    deadline = time.monotonic() + 20
    while store.environment._pending.pending and time.monotonic() < deadline:
        store.environment._haste.set()
        time.sleep(0.001)
    assert in_lmdb(_killed_between(store, tmp_path / "a")) == {b"a": b"2"}
    with monkeypatch.context() as patch:
        patch.setattr(LmdbEnvironment, "transact", is_full)
        store.put(b="3")
        store.environment.close()
    assert told == []
    assert found(tmp_path / "a") == {b"a": b"2", b"b": b"3"}
