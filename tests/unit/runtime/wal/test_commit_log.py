"""An environment behind a log that is not made of files: what it asks of the log, and in which order."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.commit_log import CommitLog, LogPosition, decode_position
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import PUT, encode_operations

IDENTITY = b"identity"
Rows = dict[bytes, bytes]


class MemoryLog(CommitLog):
    """Commits that outlive the environments which use them; their sequences go on, without epochs."""

    def __init__(self, bodies: list[bytes]) -> None:
        self.bodies = bodies
        self.released = 0
        self.applied: LogPosition | None = None
        self.failure: StorageError | None = None
        self.closed = False

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        self.applied = applied
        last = applied.sequence if applied is not None else 0
        return self.bodies[last:], LogPosition(IDENTITY, 0, len(self.bodies))

    def append(self, sequence: int, body: bytes) -> bool:
        if self.failure is not None:
            raise self.failure
        assert sequence == len(self.bodies) + 1
        self.bodies.append(body)
        return True

    def release(self, sequence: int) -> None:
        self.released = sequence

    def may_wait(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class _Unfollowed(LoggedEnvironment):
    def _follow(self) -> None: ...


def opened(path: Path, log: CommitLog) -> tuple[LoggedEnvironment, Rows]:
    tables = LmdbEnvironment(path, "rows", "owner of them", ("meta", "rows"), schema=1, durability=Durability.DURABLE)
    environment = _Unfollowed(tables, log=log)

    def load(transaction: lmdb.Transaction[bytes]) -> Rows:
        return dict(transaction.cursor(db=environment.tables["rows"]))

    return environment, environment.open(load)


def body(key: str, value: str) -> bytes:
    return encode_operations([(PUT, 1, key.encode(), value.encode())])


def test_commits_of_another_node_are_applied_at_the_start(tmp_path: Path) -> None:
    log = MemoryLog([body("a", "1"), body("b", "1"), body("a", "2")])
    environment, rows = opened(tmp_path, log)
    new = log.applied
    assert new is None
    assert rows == {b"a": b"2", b"b": b"1"}
    environment.close()
    log.bodies.append(body("c", "1"))
    environment, rows = opened(tmp_path, log)
    assert log.applied == LogPosition(IDENTITY, 0, 3)
    assert rows == {b"a": b"2", b"b": b"1", b"c": b"1"}
    environment.close()
    assert log.closed


def test_sequences_continue_and_are_released_after_lmdb_has_them(tmp_path: Path) -> None:
    log = MemoryLog([body("a", "1")])
    environment, _ = opened(tmp_path, log)
    environment.commit_body(body("a", "2"), "writing")
    environment.commit_body(body("a", "3"), "writing")
    assert environment.may_wait()
    assert len(log.bodies) == 3
    assert log.released == 0
    assert environment.read(lambda transaction: transaction.get(b"a", db=environment.tables["rows"])) == b"3"
    assert log.released == 3
    environment.close()
    environment, rows = opened(tmp_path, log)
    assert log.applied == LogPosition(IDENTITY, 0, 3)
    assert rows == {b"a": b"3"}
    environment.close()


def test_nothing_is_committed_after_the_log_refused_a_commit(tmp_path: Path) -> None:
    log = MemoryLog([])
    environment, _ = opened(tmp_path, log)
    environment.commit_body(body("a", "1"), "writing")
    log.failure = StorageError("another node is active")
    for _ in range(2):
        with pytest.raises(StorageError, match="another node is active"):
            environment.commit_body(body("a", "2"), "writing")
        log.failure = None
    environment.close()
    _, rows = opened(tmp_path, log)
    assert rows == {b"a": b"1"}


def test_a_commit_without_space_is_repeated(tmp_path: Path) -> None:
    log = MemoryLog([])
    environment, _ = opened(tmp_path, log)
    log.failure = OutOfSpaceError("etcd is full")
    with pytest.raises(OutOfSpaceError, match="etcd is full"):
        environment.commit_body(body("a", "1"), "writing")
    log.failure = None
    environment.commit_body(body("a", "1"), "writing")
    environment.close()
    _, rows = opened(tmp_path, log)
    assert rows == {b"a": b"1"}


def test_a_damaged_position_is_recognized() -> None:
    stored = LogPosition(IDENTITY, 3, 1 << 40).encode()
    assert decode_position(stored) == LogPosition(IDENTITY, 3, 1 << 40)
    for at in range(len(stored)):
        assert decode_position(stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]) is None
        assert decode_position(stored[:at]) is None
