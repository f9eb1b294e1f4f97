"""A copy of an environment while it changes: its rows in parts, and the commits meanwhile, are the state at the end."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from penstock.errors import StorageError
from penstock.runtime.io import wal
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, DROP, PUT, SECTOR, Operation, encode_operations

TABLES = ("meta", "one", "two")


def opened(path: Path, durability: Durability = Durability.DURABLE) -> LoggedEnvironment:
    environment = LoggedEnvironment(
        LmdbEnvironment(path, "rows", "owner", TABLES, schema=7, durability=durability), segment_bytes=64 * SECTOR
    )
    environment.open(lambda _: None)
    return environment


def content(environment: LoggedEnvironment) -> dict[str, list[tuple[bytes, bytes]]]:
    found: dict[str, list[tuple[bytes, bytes]]] = environment.read(
        lambda transaction: {
            name: [row for row in transaction.cursor(db=environment.tables[name]) if row[0] != b"log"]
            for name in TABLES
        }
    )
    return found


class Changes:
    """Random commits: rows of table 1 change and go; table 2 is a log that grows and loses its beginning."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._number = 1000

    def next(self) -> list[Operation]:
        random = self._random
        found: list[Operation] = []
        for _ in range(random.randrange(1, 6)):
            key, value = b"%03d" % random.randrange(300), random.randbytes(random.randrange(60))
            kind = random.choices(("put", "delete", "append", "drop"), (20, 6, 20, 2))[0]
            if kind == "put":
                found.append((PUT, 1, key, value))
            elif kind == "delete":
                found.append((DELETE, 1, key, b""))
            elif kind == "append":
                self._number += 1
                found.append((PUT, 2, b"%06d" % self._number, value))
            else:
                found.append((DROP, 2, b"%06d" % random.randrange(self._number - 50, self._number), b""))
        return found


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("seed", range(8))
def test_rows_and_commits_are_the_state_at_the_end(tmp_path: Path, durability: Durability, seed: int) -> None:
    random = Random(seed)
    changes = Changes(random)
    source = opened(tmp_path / "source", durability)
    for _ in range(200):
        source.commit(changes.next(), "before")
    rows, commits = [], []
    source.start_copy()
    for table in range(len(TABLES)):
        after = b""
        while True:
            for _ in range(random.randrange(3)):
                source.commit(changes.next(), "meanwhile")
            body, after = source.copy_rows(table, after, 200)
            rows.append(body)
            if random.random() < 0.3:
                commits.append(source.take_copied())
            if not after:
                break
    source.commit(changes.next(), "last")
    commits.append(source.take_copied())
    source.end_copy()
    expected = content(source)
    source.commit(changes.next(), "later")
    target = opened(tmp_path / "target", Durability.FLUSHED)
    for body in (*rows, *commits):
        target.commit_body(body, "restore")
    assert content(target) == expected
    target.close()
    source.close()


def test_the_position_in_the_log_is_not_copied(tmp_path: Path) -> None:
    source = opened(tmp_path)
    source.start_copy()
    body, last = source.copy_rows(0, b"", 1 << 20)
    assert b"schema" in body
    assert b"\0\3" + b"log" not in body
    assert source.copy_rows(0, last, 1 << 20) == (b"", b"")
    source.close()


def test_a_copy_that_is_not_read_ends_and_commits_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "_COPIED_BYTES", 1000)
    source = opened(tmp_path)
    source.start_copy()
    operation = (PUT, 1, b"key", bytes(700))
    source.commit([operation], "first")
    assert source.take_copied() == encode_operations([operation])
    source.commit([operation], "second")
    source.commit([operation], "third")
    with pytest.raises(StorageError, match="the copy was not read in time"):
        source.take_copied()
    source.commit([operation], "fourth")
    assert content(source)["one"] == [(b"key", bytes(700))]
    source.close()
