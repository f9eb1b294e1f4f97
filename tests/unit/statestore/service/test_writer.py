"""The commit that a change is part of, and changes that are written behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.runtime.io.commit_queue import CommitWaiter
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import KeyPersistence
from penstock.statestore.service.delivery import ResponseSender
from penstock.statestore.service.interfaces import StoreStats
from penstock.statestore.service.storage import NODE, Storage
from penstock.statestore.service.writer import ChangeWriter


class _Disk(Storage):
    """Notes what is committed."""

    def __init__(self, path: Path, durability: Durability) -> None:
        super().__init__(path, durability)
        self.commits: list[list[bytes]] = []

    def commit(self, changes: Any, **options: Any) -> None:
        self.commits.append([change.key for change in changes])
        super().commit(changes, **options)


async def test_a_log_that_lmdb_cannot_follow_fails_the_store_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to write for it to be known."""

    def is_full(*_: object, **__: Any) -> None:
        raise StorageError("state store: the disk is full")

    async with _Writing(tmp_path, Durability.DURABLE) as writing:
        monkeypatch.setattr(LmdbEnvironment, "transact", is_full)
        writing.set(b"k")
        async with asyncio.timeout(60):
            while not writing.ended:
                await asyncio.sleep(0.001)
            writing.disk._environment._haste.set()
            while writing.writer.failure is None:
                await asyncio.sleep(0.001)
    assert writing.writer.failure.what == "state store: the disk is full"
    assert writing.failed == [writing.writer.failure]


class _Ended(CommitWaiter):
    """Notes that a commit has ended."""

    def __init__(self, ended: list[int], number: int) -> None:
        self._ended = ended
        self._number = number

    def commit_ended(self, failure: StorageError | None) -> None:
        assert failure is None
        self._ended.append(self._number)


class _Writing:
    """A writer over a disk, and what it told."""

    def __init__(self, path: Path, durability: Durability, *, logs: bool = False) -> None:
        self.disk = _Disk(path, durability)
        self.clock = Hlc(1, 0, NODE)
        self.ended: list[int] = []
        self.failed: list[StorageError] = []
        self.writer = ChangeWriter(
            self.disk,
            durability,
            KeyPersistence(),
            logs=logs,
            clock=lambda: self.clock,
            on_logged=lambda _: None,
            on_failure=self.failed.append,
            responses=ResponseSender(StoreStats(), lambda: 0),
        )

    async def __aenter__(self) -> _Writing:
        self.disk.open()
        self.writer.start([])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.writer.close()
        self.disk.close()

    def set(self, key: bytes, value: bytes = b"v", floor: bytes = b"") -> int:
        self.clock = Hlc(self.clock.wall_ms, self.clock.counter + 1, NODE)
        change = Change(key, Record(key, value, self.clock), self.clock)
        change.floor = (floor, self.clock) if floor else None
        number = self.writer.submit([change])
        if number:
            self.writer.add_notifications(number, _Ended(self.ended, number))
        return number

    async def until(self, number: int) -> None:
        async with asyncio.timeout(60):
            while number not in self.ended:
                await asyncio.sleep(0.001)


async def test_changes_made_before_a_commit_begins_are_part_of_it(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.FLUSHED) as writing:
        assert [writing.set(b"a"), writing.set(b"b"), writing.set(b"a")] == [1, 1, 1]
        assert [writing.writer.waits_for(key) for key in (b"a", b"b", b"c")] == [1, 1, 0]
        await writing.until(1)
        assert writing.writer.waits_for(b"a") == writing.writer.waits_for_any() == 0
        assert writing.set(b"c") == 2
        await writing.until(2)
        assert writing.disk.commits == [[b"a", b"b", b"a"], [b"c"]]
        assert writing.ended == [1, 1, 1, 2]


async def test_a_key_waits_for_its_newest_commit(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.FLUSHED) as writing:
        writing.set(b"a")
        await asyncio.sleep(0)  # the commit has begun, in its thread
        assert writing.set(b"a") == 2
        assert writing.writer.waits_for(b"a") == 2
        await writing.until(1)
        await writing.until(2)
        assert writing.writer.waits_for(b"a") == 0


@pytest.mark.parametrize("logs", [False, True])
async def test_written_behind_is_the_last_of_a_key_unless_there_is_a_log(tmp_path: Path, *, logs: bool) -> None:
    async with _Writing(tmp_path, Durability.MEMORY, logs=logs) as writing:
        for value in (b"1", b"2", b"3"):
            assert writing.set(b"a", value) == 0
        writing.set(b"b")
        assert writing.disk.commits == []
    assert writing.disk.commits == [[b"a", b"a", b"a", b"b"] if logs else [b"a", b"b"]]
    again = Storage(tmp_path)
    assert {record.key: record.value for record in again.open().records} == {b"a": b"3", b"b": b"v"}
    again.close()


async def test_a_floor_is_written_although_its_key_is_set_again(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.MEMORY) as writing:
        writing.set(b"a", b"1")
        writing.set(b"a", b"2", floor=b"p")
        writing.set(b"a", b"3")
    again = Storage(tmp_path)
    recovered = again.open()
    assert [record.value for record in recovered.records] == [b"3"]
    assert [prefix for prefix, _ in recovered.fences] == [b"p"]
    again.close()


class _Answer(CommitWaiter):
    """An answer, or with client "" a notification: notes when it leaves."""

    def __init__(self, writing: _Writing, left: list[str], number: int, client_id: str, text: str) -> None:
        self._writing = writing
        self._left = left
        self._number = number
        self._client_id = client_id
        self._text = text

    def commit_ended(self, failure: StorageError | None) -> None:
        assert failure is None
        if self._client_id:
            self._writing.writer.answer_leaves(self._number, self._client_id)
        self._left.append(f"{self._text}, a waits for {self._writing.writer.answer_waits_for('a', 0)}")


async def test_an_answer_waits_for_the_one_before_it_to_the_same_client_alone(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.FLUSHED) as writing:
        writer, left = writing.writer, list[str]()

        def add(number: int, client_id: str, text: str) -> None:
            writer.add_answer(number, client_id, _Answer(writing, left, number, client_id, text))

        assert writer.answer_waits_for("a", 0) == 0
        assert writing.set(b"1") == 1
        await asyncio.sleep(0)  # the commit has begun, in its thread
        add(1, "a", "first")
        assert writing.set(b"2") == 2
        assert [writer.answer_waits_for(*case) for case in (("a", 0), ("a", 2), ("b", 0))] == [1, 2, 0]
        add(2, "a", "second")
        add(2, "b", "other")
        assert (writer.waiting, left) == (3, [])
        await writing.until(2)
        # When the first one leaves, the last answer to its client still waits.
        assert left == ["first, a waits for 2", "second, a waits for 0", "other, a waits for 0"]
        assert (writer.waiting, writer.answer_waits_for("a", 0)) == (0, 0)


async def test_a_notification_keeps_its_order_without_delaying_others(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.FLUSHED) as writing:
        writer, left = writing.writer, list[str]()
        number = writing.set(b"1")
        writer.add_answer(number, "a", _Answer(writing, left, number, "a", "first"))
        writer.add_notifications(number, _Answer(writing, left, number, "", "news"))
        writer.add_answer(number, "b", _Answer(writing, left, number, "b", "second"))
        assert writer.waiting == 2
        await writing.until(number)
        await writer.queue.drain()
        assert [text.split(",")[0] for text in left] == ["first", "news", "second"]
        assert writer.waiting == 0


async def test_a_large_commit_does_not_stop_the_loop(tmp_path: Path) -> None:
    async with _Writing(tmp_path, Durability.DURABLE) as writing:
        queue = writing.writer.queue
        queue.inline_s, queue.expected_s = 60.0, 0.0
        inline: list[int] = []
        for size in (1, 64 << 10, (64 << 10) + 1):
            await writing.until(writing.set(b"k", bytes(size)))
            inline.append(queue.inline_commits)
        assert (inline, queue.commits) == ([1, 2, 2], 3)
