"""Group commit: order, batching, and that nothing is acknowledged after a failure."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.committer import GroupCommitter
from penstock.runtime.io.files import DiskFullError


async def test_operations_of_one_loop_turn_share_a_commit() -> None:
    batches: list[list[int]] = []
    committer: GroupCommitter[int] = GroupCommitter(lambda ops: batches.append(list(ops)), name="t")
    committer.start()
    done: list[int] = []

    def noted(n: int, error: StorageError | None) -> None:
        assert error is None
        done.append(n)

    for n in range(5):
        committer.submit(n, partial(noted, n))
    assert done == []
    await committer.close()
    assert batches == [[0, 1, 2, 3, 4]]
    assert done == [0, 1, 2, 3, 4]


async def test_what_comes_while_a_commit_runs_waits_for_the_next_one() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    def commit(ops: Sequence[int]) -> None:
        batches.append(list(ops))
        gate.wait(10)

    committer: GroupCommitter[int] = GroupCommitter(commit, name="t")
    committer.start()
    done: list[int] = []
    committer.submit(1, lambda _: done.append(1))
    while not batches:
        await asyncio.sleep(0)

    def noted(n: int, _: StorageError | None) -> None:
        done.append(n)

    for n in (2, 3):
        committer.submit(n, partial(noted, n))
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == []
    assert committer.pending == 3
    gate.set()
    await committer.close()
    assert batches == [[1], [2, 3]]
    assert done == [1, 2, 3]
    assert (committer.commits, committer.committed, committer.pending) == (2, 3, 0)


async def test_what_the_last_answer_brings_about_is_committed_before_the_end() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    def commit(ops: Sequence[int]) -> None:
        gate.wait(10)
        batches.append(list(ops))

    committer: GroupCommitter[int] = GroupCommitter(commit, name="t")
    committer.start()
    done: list[int] = []

    def answered(_: StorageError | None) -> None:
        done.append(1)
        # Runs before whoever waits for the end: its wake-up is queued after the answers.
        asyncio.get_running_loop().call_soon(committer.submit, 2, lambda _: done.append(2))

    committer.submit(1, answered)
    closing = asyncio.create_task(committer.close())
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(10):
        await closing
    assert (batches, done) == ([[1], [2]], [1, 2])


async def test_an_operation_is_prepared_when_its_commit_begins_or_cannot() -> None:
    gate = threading.Event()
    came: list[int] = []
    begun: list[list[int]] = []

    def commit(ops: Sequence[list[int]]) -> None:
        begun.extend(ops)
        gate.wait(10)
        if [2, 3] in ops:
            raise StorageError("full")

    def prepare(op: list[int]) -> None:
        op += came
        came.clear()

    committer: GroupCommitter[list[int]] = GroupCommitter(commit, name="t", prepare=prepare)
    committer.start()
    ended: list[tuple[list[int], bool]] = []

    def submit() -> None:
        op: list[int] = []
        committer.submit(op, lambda error: ended.append((op, error is None)))

    came.append(1)
    submit()
    while not begun:
        await asyncio.sleep(0)
    submit()
    for n in (2, 3):  # while the first one runs
        came.append(n)
        await asyncio.sleep(0)
    gate.set()
    while len(ended) < 2:
        await asyncio.sleep(0)
    came.append(4)
    submit()
    await committer.close()
    assert ended == [([1], True), ([2, 3], False), ([4], False)]
    assert begun == [[1], [2, 3]]


async def test_after_a_failure_nothing_is_acknowledged() -> None:
    calls = 0

    def commit(_: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    told: list[StorageError] = []
    committer: GroupCommitter[int] = GroupCommitter(commit, name="store", on_failure=told.append)
    committer.start()
    results: list[StorageError | None] = []
    committer.submit(1, results.append)
    while not results:
        await asyncio.sleep(0)
    committer.submit(2, results.append)
    await committer.close()
    assert calls == 1
    assert len(told) == 1
    assert len(results) == 2
    assert all(isinstance(result, StorageError) for result in results)
    assert "No space left" in str(results[0])


async def test_a_failure_that_another_thread_saw_is_as_final() -> None:
    told: list[StorageError] = []
    committer: GroupCommitter[int] = GroupCommitter(lambda _: None, name="store", on_failure=told.append)
    committer.start()
    seen = StorageError("the disk is full")
    for _ in range(2):
        await asyncio.to_thread(committer.fail_soon, seen)
    results: list[StorageError | None] = []
    committer.submit(1, results.append)
    await committer.close()
    assert (committer.failure, told, results, committer.commits) == (seen, [seen], [seen], 0)


async def test_an_answer_that_fails_keeps_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    committer: GroupCommitter[int] = GroupCommitter(lambda _: None, name="test")
    committer.start()
    done: list[StorageError | None] = []

    def fails(_: StorageError | None) -> None:
        raise KeyError("no such client")

    committer.submit(1, fails)
    committer.submit(2, done.append)
    async with asyncio.timeout(15):
        await committer.close()
    assert done == [None]
    assert "no such client" in caplog.text


async def test_submitting_to_a_closed_committer_is_an_error() -> None:
    committer: GroupCommitter[int] = GroupCommitter(lambda ops: None, name="t")
    committer.start()
    await committer.close()
    with pytest.raises(StorageError, match="closing"):
        committer.submit(1, lambda _: None)


async def test_quick_commits_run_in_the_loop_and_slow_ones_in_the_thread() -> None:
    threads: list[str] = []
    seconds = iter([0.0, 0.0, 0.6, 0.0, 0.0])
    clock = 0.0

    def commit(_: Sequence[int]) -> None:
        nonlocal clock
        threads.append(threading.current_thread().name)
        clock += next(seconds)

    committer: GroupCommitter[int] = GroupCommitter(commit, name="t", inline_s=0.5, clock=lambda: clock)
    committer.start()
    done: list[int] = []
    for n in range(5):
        finished = asyncio.Event()

        def ended(_: StorageError | None, n: int = n, finished: asyncio.Event = finished) -> None:
            done.append(n)
            finished.set()

        committer.submit(n, ended)
        assert len(done) == n, "never before submit() returned"
        await finished.wait()
    await committer.close()
    loop, thread = threading.current_thread().name, "commit-t"
    # Nothing is known of the disk at first. The third stalls; two are needed until 0.6 s have faded below 0.5 s.
    assert threads == [thread, loop, loop, thread, thread]
    assert (done, committer.inline, committer.commits) == ([0, 1, 2, 3, 4], 2, 5)


async def test_answers_come_in_order_where_the_next_commit_runs_in_the_loop() -> None:
    gate = threading.Event()
    threads: list[str] = []

    def commit(_: Sequence[int]) -> None:
        threads.append(threading.current_thread().name)
        gate.wait(10)

    committer: GroupCommitter[int] = GroupCommitter(commit, name="t", inline_s=0.5, clock=lambda: 0.0)
    committer.start()
    done: list[int] = []
    committer.submit(1, lambda _: done.append(1))
    while not threads:
        await asyncio.sleep(0)
    committer.submit(2, lambda _: done.append(2))
    gate.set()
    await committer.close()
    assert (done, threads) == ([1, 2], ["commit-t", threading.current_thread().name])


async def test_only_small_commits_run_in_the_loop() -> None:
    threads: list[str] = []
    committer: GroupCommitter[list[int]] = GroupCommitter(
        lambda _: threads.append(threading.current_thread().name),
        name="t", inline_s=0.5, clock=lambda: 0.0, prepare=lambda op: op.append(0), small=lambda op: len(op) < 3,
    )  # fmt: skip
    committer.start()
    for op in ([], [], [1, 2], []):
        finished = asyncio.get_running_loop().create_future()
        committer.submit(op, finished.set_result)
        await finished
    await committer.close()
    loop, thread = threading.current_thread().name, "commit-t"
    assert threads == [thread, loop, thread, loop]


async def test_a_failure_in_the_loop_is_as_final() -> None:
    def commit(ops: Sequence[int]) -> None:
        if 2 in ops:
            raise OSError("no space left on device")

    committer: GroupCommitter[int] = GroupCommitter(commit, name="t", inline_s=60.0)
    committer.start()
    told: list[StorageError | None] = []
    for n in range(4):
        committer.submit(n, told.append)
        while len(told) <= n:
            await asyncio.sleep(0)
    assert committer.inline == 2
    assert [error is None for error in told] == [True, True, False, False]
    assert committer.failure is told[2]
    await committer.close()


def without_space(times: int, batches: list[list[int]], error: Exception) -> Callable[[Sequence[int]], None]:
    """A commit that finds no disk space so many times."""

    def commit(ops: Sequence[int]) -> None:
        nonlocal times
        if times:
            times -= 1
            raise error
        batches.append(list(ops))

    return commit


def problem(committer: GroupCommitter[int]) -> StorageError | None:
    return committer.stalled


@pytest.mark.parametrize("inline_s", [0.0, 10.0])
@pytest.mark.parametrize("error", [OutOfSpaceError("full"), DiskFullError(errno.ENOSPC, "No space left", "/a/file")])
async def test_a_commit_without_disk_space_waits_and_continues_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, inline_s: float
) -> None:
    monkeypatch.setattr("penstock.runtime.io.committer._RETRY_S", 0.001)
    batches: list[list[int]] = []
    committer: GroupCommitter[int] = GroupCommitter(without_space(3, batches, error), name="t", inline_s=inline_s)
    committer.start()
    done: list[tuple[int, StorageError | None]] = []
    committer.submit(1, lambda failure: done.append((1, failure)))
    while committer.stalled is None:
        await asyncio.sleep(0)
    assert isinstance(committer.stalled, OutOfSpaceError)
    assert committer.failure is None
    if isinstance(error, DiskFullError):
        assert committer.stalled.path == "/a/file"
        assert committer.stalled.do == "free space on the file system: it continues by itself"
    committer.submit(2, lambda failure: done.append((2, failure)))
    assert done == []
    while len(done) < 2:
        await asyncio.sleep(0.001)
    assert done == [(1, None), (2, None)]
    assert batches == [[1], [2]]
    assert not problem(committer)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"], "once each"
    await committer.close()


async def test_a_commit_that_waits_for_disk_space_fails_at_the_end() -> None:
    batches: list[list[int]] = []
    failures: list[StorageError] = []
    committer: GroupCommitter[int] = GroupCommitter(
        without_space(100, batches, OutOfSpaceError("full")), name="t", on_failure=failures.append
    )
    committer.start()
    done: list[StorageError | None] = []
    committer.submit(1, done.append)
    while committer.stalled is None:
        await asyncio.sleep(0)
    committer.submit(2, done.append)
    await committer.close()
    assert not batches
    assert len(failures) == 1
    assert done == failures * 2
    assert not problem(committer)
