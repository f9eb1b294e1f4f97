"""Power is lost after any operation of a log in front of LMDB: every commit that returned is there, whole and in order.

The writes and fsyncs of the log are recorded, and a copy of LMDB is kept after each of its transactions (it is durable
when one returns). For every prefix of the record the store is opened on what the disk may hold then: everything
unsynced lost, everything kept, the last write cut at either end, unsynced writes dropped and cut at random.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, DROP, PUT, SECTOR, Operation
from tests.faults.lmdb_copies import LmdbCopies, notes_of
from tests.unit.runtime.recorded_disk import Op, RecordedDisk, after_power_loss

ROWS = 1
Rows = dict[bytes, bytes]


class _Unfollowed(LoggedEnvironment):
    def _follow(self) -> None: ...


class Store:
    """A store whose log is on a recorded disk; LMDB follows when it is told to, or when the log has no place."""

    def __init__(self, path: Path, disk: RecordedDisk) -> None:
        environment = LmdbEnvironment(
            path, "rows", "owner of them", ("meta", "rows"), schema=1, durability=Durability.DURABLE
        )
        self.disk = disk
        self.environment = _Unfollowed(environment, files=disk, segment_bytes=6 * SECTOR)
        self.found: Rows = dict(self.environment.open(self._load))

    def _load(self, transaction: lmdb.Transaction[bytes]) -> list[tuple[bytes, bytes]]:
        return list(transaction.cursor(db=self.environment.tables["rows"]))

    def leave(self) -> None:
        """Let go of the files as they are."""
        # After a failure closing writes nothing.
        self.environment._failure = StorageError("stopped here")
        self.environment.close()


def some_operations(random: Random, commit: int) -> list[Operation]:
    # A row of its own, as the log of changes has one for each, of which the first are dropped now and then.
    operations: list[Operation] = [(PUT, ROWS, b"change %04d" % commit, b"")]
    if random.random() < 0.1:
        operations.append((DROP, ROWS, b"change %04d" % random.randrange(commit), b""))
    for _ in range(random.randrange(1, 4)):
        key = b"k%02d" % random.randrange(25)
        chance = random.random()
        if chance < 0.7:
            size = 4 * SECTOR if chance < 0.03 else random.randrange(400)
            operations.append((PUT, ROWS, key, b"%d:" % commit + bytes(size)))
        else:
            operations.append((DELETE, ROWS, key, b""))
    return operations


def carried_out(rows: Rows, operations: list[Operation]) -> Rows:
    """What the operations mean, one after the other."""
    after = dict(rows)
    for kind, _, key, value in operations:
        if kind == PUT:
            after[key] = value
        elif kind == DELETE:
            after.pop(key, None)
        else:
            after = {name: value for name, value in after.items() if name > key}
    return after


def recovered(folder: Path, copy: Path, disk: RecordedDisk) -> tuple[Rows, Store]:
    """What a start finds in the copy of LMDB and on the disk."""
    path = folder / "recovered"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(copy, path)
    logs = {path / name.name: data for name, data in disk.files().items()}
    store = Store(path, RecordedDisk(logs))
    return store.found, store


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "power"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_store_recovers_from_power_loss_after_any_operation(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(11)
    disk = RecordedDisk()
    path = fresh / "store"
    copies = LmdbCopies(path, fresh, disk)
    states: list[Rows] = [{}]
    with monkeypatch.context() as patch:
        copies.after_transactions(patch)
        store = Store(path, disk)
        first = len(disk.ops)
        copies.copy()
        for number in range(1, 60):
            operations = some_operations(random, number)
            states.append(carried_out(states[-1], operations))
            disk.note(("begun", number))
            store.environment.commit(operations, "writing")
            disk.note(("acknowledged", number))
            if random.random() < 0.1:
                store.environment._apply("following")
            if random.random() < 0.05:
                store.environment._grow()
    ops = disk.ops
    store.leave()
    assert copies.count > 8
    assert len({op.path for op in ops if op.kind == "create"}) == 2
    # A segment was used again.
    assert len([op for op in ops if op.kind == "write" and op.position == 0]) > 4
    tried = sum(check(fresh, ops[:end], states, random) for end in range(first + 1, len(ops) + 1, 3))
    assert tried > 200


def check(folder: Path, ops: list[Op], states: list[Rows], random: Random) -> int:
    """Recover from every disk after ``ops``: the rows are those of a commit that began, and of no earlier one than was
    acknowledged; what is committed after that start is there at the next."""
    notes = notes_of(ops)
    tried = 0
    for name, after in after_power_loss(ops, {}, random):
        found, store = recovered(folder, folder / f"copy-{notes['lmdb']}", after)
        assert found in states[notes.get("acknowledged", 0) : notes.get("begun", 0) + 1], (len(ops), name)
        tried += 1
        if tried % 4 == 0:
            store.environment.commit([(PUT, ROWS, b"next", b"1")], "writing")
            again = store.disk
            shutil.copytree(store.environment.path, folder / "copied")
            store.leave()
            after_next, store = recovered(folder, folder / "copied", again)
            shutil.rmtree(folder / "copied")
            assert after_next == {**found, b"next": b"1"}
        store.leave()
    return tried
