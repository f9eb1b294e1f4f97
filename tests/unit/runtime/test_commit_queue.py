"""The commit queue: order, grouping, and that nothing is acknowledged after a failure."""

from __future__ import annotations

import asyncio
import errno
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, ShortageError, StorageError
from penstock.runtime.io import commit_queue
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue, CommitWaiter
from penstock.runtime.io.files import DiskFullError, NoDescriptorError

Done = Callable[[StorageError | None], None]


class Told(CommitWaiter):
    """Calls a function when its commit has ended."""

    def __init__(self, done: Done) -> None:
        self._done = done

    def commit_ended(self, failure: StorageError | None) -> None:
        self._done(failure)


class Numbers(CommitClient[list[int]]):
    """A client whose changes are numbers; a batch is a list of them."""

    def __init__(
        self,
        commit: Callable[[list[int]], object],
        *,
        name: str = "t",
        on_failure: Callable[[StorageError], None] | None = None,
        is_small: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.taken: list[list[int]] = []
        self._changes: list[int] = []
        self._commit = commit
        self._on_failure = on_failure
        self._is_small = is_small
        self.queue: CommitQueue[list[int]] = CommitQueue(name, self)
        self.queue.start()

    def begin_commit(self) -> list[int]:
        taken, self._changes = self._changes, []
        self.taken.append(taken)
        return taken

    def is_small_commit(self, batch: list[int]) -> bool:
        return self._is_small is not None and self._is_small(batch)

    def write_commit(self, batch: list[int]) -> None:
        self._commit(batch)

    def commits_failed(self, failure: StorageError) -> None:
        if self._on_failure is not None:
            self._on_failure(failure)

    def change(self, number: int) -> None:
        self._changes.append(number)

    def submit(self, number: int, done: Done) -> None:
        self.change(number)
        self.queue.wait(self.queue.request(), Told(done))


def fast(client: Numbers, inline_s: float) -> Numbers:
    """Commits of less than ``inline_s`` are fast; nothing is known of the disk at first."""
    client.queue.inline_s = client.queue.expected_s = inline_s
    client.queue.clock = lambda: 0.0
    return client


async def test_operations_of_one_loop_turn_share_a_commit() -> None:
    batches: list[list[int]] = []
    client = Numbers(lambda ops: batches.append(list(ops)))
    done: list[int] = []

    def noted(n: int, error: StorageError | None) -> None:
        assert error is None
        done.append(n)

    for n in range(5):
        client.submit(n, partial(noted, n))
    assert done == []
    await client.queue.close()
    assert batches == [[0, 1, 2, 3, 4]]
    assert done == [0, 1, 2, 3, 4]


async def test_operations_during_a_commit_wait_for_the_next_one() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    def commit(ops: Sequence[int]) -> None:
        batches.append(list(ops))
        gate.wait(60)

    client = Numbers(commit)
    done: list[int] = []
    client.submit(1, lambda _: done.append(1))
    while not batches:
        await asyncio.sleep(0)

    def noted(n: int, _: StorageError | None) -> None:
        done.append(n)

    for n in (2, 3):
        client.submit(n, partial(noted, n))
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == []
    assert (client.queue.running, client.queue.number) == (True, 2)
    gate.set()
    await client.queue.close()
    assert batches == [[1], [2, 3]]
    assert done == [1, 2, 3]
    assert (client.queue.commits, client.queue.ended, client.queue.running) == (2, 2, False)


async def test_operations_of_the_last_callback_are_committed_before_close() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    def commit(ops: Sequence[int]) -> None:
        gate.wait(60)
        batches.append(list(ops))

    client = Numbers(commit)
    done: list[int] = []

    def answered(_: StorageError | None) -> None:
        done.append(1)
        # Runs before whoever waits for the end: its wake-up is queued after the answers.
        asyncio.get_running_loop().call_soon(client.submit, 2, lambda _: done.append(2))

    client.submit(1, answered)
    closing = asyncio.create_task(client.queue.close())
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(60):
        await closing
    assert (batches, done) == ([[1], [2]], [1, 2])


async def test_a_commit_takes_all_changes_when_it_begins_or_cannot() -> None:
    gate = threading.Event()
    begun: list[list[int]] = []

    def commit(batch: list[int]) -> None:
        begun.append(batch)
        gate.wait(60)
        if batch == [2, 3]:
            raise StorageError("full")

    client = Numbers(commit)
    ended: list[tuple[str, bool]] = []

    def submit(number: int, name: str) -> None:
        client.submit(number, lambda error: ended.append((name, error is None)))

    submit(1, "first")
    while not begun:
        await asyncio.sleep(0)
    submit(2, "second")
    await asyncio.sleep(0)
    client.change(3)  # while the first one runs
    gate.set()
    while len(ended) < 2:
        await asyncio.sleep(0)
    submit(4, "third")
    await client.queue.close()
    assert ended == [("first", True), ("second", False), ("third", False)]
    assert begun == [[1], [2, 3]]
    assert client.taken == [[1], [2, 3], [4]], "the last one without a write"


async def test_write_behind_waits_for_its_time_or_the_next_request() -> None:
    batches: list[list[int]] = []
    client = Numbers(batches.append)
    client.change(1)
    client.queue.request_within(3600.0)
    await asyncio.sleep(0)
    assert batches == []
    ended = asyncio.get_running_loop().create_future()
    client.submit(2, ended.set_result)
    await ended
    assert batches == [[1, 2]]
    client.change(3)
    client.queue.request_within(0.001)
    client.queue.request_within(3600.0)  # the first one counts
    async with asyncio.timeout(60):
        while len(batches) < 2:
            await asyncio.sleep(0.001)
    client.change(4)
    client.queue.request_within(3600.0)
    await client.queue.close()
    assert batches == [[1, 2], [3], [4]], "the end of the queue does not wait for it"


async def test_a_client_may_begin_a_commit_before_the_end_of_the_turn() -> None:
    class Early(Numbers):
        begins = True

        def begins_commit(self) -> bool:
            return self.begins

    batches: list[list[int]] = []
    client = Early(batches.append, is_small=lambda _: True)
    fast(client, 1.0)
    client.queue.expected_s = 0.0
    ended: list[StorageError | None] = []
    client.submit(1, ended.append)
    await asyncio.sleep(0)
    assert batches == [], "the client has not begun it"
    client.submit(2, ended.append)
    client.queue.begin()
    assert batches == [[1, 2]]
    assert ended == [None, None]
    client.queue.begin()
    assert batches == [[1, 2]], "no commit is requested"
    client.submit(3, ended.append)
    client.queue.begin_at_turn_end()
    client.submit(4, ended.append)
    await asyncio.sleep(0)
    assert batches == [[1, 2], [3, 4]]
    Early.begins = False
    client.submit(5, ended.append)
    await client.queue.close()
    assert batches == [[1, 2], [3, 4], [5]]
    assert ended == [None] * 5


async def test_a_waiter_that_comes_too_late_is_called_too() -> None:
    gate = threading.Event()
    client = Numbers(lambda _: gate.wait(60))
    order: list[str] = []
    client.submit(1, lambda _: order.append("first"))
    while not client.queue.running:
        await asyncio.sleep(0)
    client.queue.wait(1, Told(lambda _: order.append("of the running commit")))
    gate.set()
    await client.queue.drain()
    client.queue.wait(1, Told(lambda error: order.append(f"late {error}")))
    assert order == ["first", "of the running commit"], "never before wait() returned"
    await client.queue.close()
    await asyncio.sleep(0)
    assert order == ["first", "of the running commit", "late None"]


async def test_after_a_failure_nothing_is_acknowledged() -> None:
    calls = 0

    def commit(_: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    told: list[StorageError] = []
    client = Numbers(commit, name="store", on_failure=told.append)
    results: list[StorageError | None] = []
    client.submit(1, results.append)
    while not results:
        await asyncio.sleep(0)
    client.submit(2, results.append)
    await client.queue.close()
    assert calls == 1
    assert len(told) == 1
    assert len(results) == 2
    assert all(isinstance(result, StorageError) for result in results)
    assert "No space left" in str(results[0])


async def test_a_failure_that_another_thread_saw_is_as_final() -> None:
    told: list[StorageError] = []
    client = Numbers(lambda _: None, name="store", on_failure=told.append)
    seen = StorageError("the disk is full")
    for _ in range(2):
        await asyncio.to_thread(client.queue.fail_soon, seen)
    results: list[StorageError | None] = []
    client.submit(1, results.append)
    await client.queue.close()
    assert (client.queue.failure, told, results, client.queue.commits) == (seen, [seen], [seen], 0)


async def test_an_answer_that_fails_keeps_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    client = Numbers(lambda _: None, name="test")
    done: list[StorageError | None] = []

    def fails(_: StorageError | None) -> None:
        raise KeyError("no such client")

    client.submit(1, fails)
    client.submit(2, done.append)
    async with asyncio.timeout(60):
        await client.queue.close()
    assert done == [None]
    assert "no such client" in caplog.text


async def test_a_commit_after_the_end_is_an_error_and_no_failure() -> None:
    batches: list[list[int]] = []
    client = Numbers(batches.append)
    await client.queue.close()
    ended: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
    client.submit(1, ended.set_result)
    assert "closing" in str(await ended)
    late: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
    client.queue.wait(1, Told(late.set_result))
    assert await late is ended.result()
    assert (batches, client.queue.failure) == ([], None)


async def test_fast_commits_run_in_the_loop_and_slow_ones_in_the_thread() -> None:
    threads: list[str] = []
    seconds = iter([0.0, 0.0, 1.2, 0.0, 0.0, 0.0])
    clock = 0.0

    def commit(_: Sequence[int]) -> None:
        nonlocal clock
        threads.append(threading.current_thread().name)
        clock += next(seconds)

    client = fast(Numbers(commit, is_small=lambda _: True), 0.5)
    client.queue.clock = lambda: clock
    done: list[int] = []
    for n in range(6):
        finished = asyncio.Event()

        def ended(_: StorageError | None, n: int = n, finished: asyncio.Event = finished) -> None:
            done.append(n)
            finished.set()

        client.submit(n, ended)
        assert len(done) == n, "never before submit() returned"
        await finished.wait()
    await client.queue.close()
    loop, thread = threading.current_thread().name, "commit-t"
    # Nothing is known of the disk at first. The third stalls for 1.2 s; halved twice, it is below 0.5 s.
    assert threads == [thread, loop, loop, thread, thread, loop]
    assert (done, client.queue.inline_commits, client.queue.commits) == ([0, 1, 2, 3, 4, 5], 3, 6)
    assert client.queue.longest_s == pytest.approx(1.2 * 0.9**3)
    durations = client.queue.durations
    assert (durations.counts[0], sum(durations.counts)) == (5, 6)
    assert durations.sum_s == pytest.approx(1.2)


class Clients:
    """``count`` clients of ``client`` with one request in flight, each of which sends the next one with its answer;
    ``silent`` of them do not. Their commits end one by one, in :meth:`commit`."""

    def __init__(self, count: int, silent: int = 0, client: type[Numbers] = Numbers) -> None:
        self.batches: list[list[int]] = []
        self.client = client(self._write)
        self.client.queue.gathers = True
        self._silent = silent
        self._gates: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._began = 0
        for number in range(count // 2):
            self._send(number)
        self.rest = range(count // 2, count)

    def _write(self, batch: list[int]) -> None:
        self.batches.append(sorted(batch))
        self._gates.get(timeout=10)

    def _send(self, number: int) -> None:
        self.client.submit(number, partial(self._answered, number))

    def _answered(self, number: int, failure: StorageError | None) -> None:
        assert failure is None
        if number >= self._silent:
            asyncio.get_running_loop().call_later(0.001, self._send, number)

    async def began(self) -> list[int]:
        """The changes of the next commit to begin."""
        async with asyncio.timeout(10):
            while len(self.batches) == self._began:
                await asyncio.sleep(0)
        self._began += 1
        return self.batches[-1]

    async def commit(self) -> list[int]:
        """End the running commit; return the changes of the next one."""
        self._gates.put(None)
        return await self.began()

    async def close(self) -> None:
        """End all commits."""
        for _ in range(10):
            self._gates.put(None)
        self._silent = 100
        await self.client.queue.close()


class Acknowledging(Numbers):
    """Answers in ``end_commit`` and requests the next commit there, as the MQTT broker does."""

    def __init__(self, commit: Callable[[list[int]], object]) -> None:
        super().__init__(commit)
        self._waiting: dict[int, Done] = {}

    def submit(self, number: int, done: Done) -> None:
        self.change(number)
        self._waiting[number] = done
        self.queue.count_answer()
        if not self.queue.running:
            self.queue.request()

    def end_commit(self, batch: list[int], failure: StorageError | None) -> None:
        if self._changes:
            self.queue.request()
        for number in batch:
            self._waiting.pop(number)(failure)


@pytest.mark.parametrize("client", [Numbers, Acknowledging])
async def test_a_commit_gathers_the_requests_of_clients_that_have_just_got_answers(client: type[Numbers]) -> None:
    clients = Clients(6, client=client)
    queue = clients.client.queue
    queue.clock = iter(range(0, 1000, 20)).__next__  # each commit takes 20 s
    queue.gather_s = 10.0
    assert await clients.began() == [0, 1, 2]
    for number in clients.rest:
        clients._send(number)
    for _ in range(3):
        assert await clients.commit() == [0, 1, 2, 3, 4, 5]
    queue.wait_also(queue.request(), Told(lambda _: None))  # a notification: nobody answers it
    assert await clients.commit() == [0, 1, 2, 3, 4, 5]
    await clients.close()


async def test_a_commit_does_not_wait_for_clients_that_do_not_send() -> None:
    clients = Clients(6, silent=3)
    queue = clients.client.queue
    assert await clients.began() == [0, 1, 2]
    for number in clients.rest:
        clients._send(number)
    assert await clients.commit() == [3, 4, 5], "after 10 ms at most"
    assert queue._gather_pause == commit_queue._GATHER_PAUSE
    clients._send(0)
    await clients.commit()
    assert queue._gather_timer is None, "the next ones do not wait at all"
    assert queue._gather_pause == commit_queue._GATHER_PAUSE - 1
    await clients.close()


def is_gathering(queue: CommitQueue[list[int]]) -> bool:
    return queue._gather_timer is not None


@pytest.mark.parametrize("what", ["one request", "write-behind", "pause", "drain", "close", "failure"])
async def test_what_comes_while_a_commit_gathers_is_committed(what: str) -> None:
    """Also if fewer requests come than answers were sent, or none that has an answer."""
    client = Numbers(lambda _: None)
    queue = client.queue
    queue.gathers = True
    ended: list[StorageError | None] = []
    for number in (1, 2):
        client.submit(number, ended.append)
    async with asyncio.timeout(60):
        while not is_gathering(queue):
            await asyncio.sleep(0)
        client.change(3)
        match what:
            case "one request":
                client.submit(4, ended.append)
            case "write-behind":
                queue.request_within(0)
            case "pause":
                await queue.pause()
                client.submit(5, ended.append)
                for _ in range(5):
                    await asyncio.sleep(0)
                assert client.taken == [[1, 2], [3]]
                queue.resume()
            case "drain":
                queue.request()
                await queue.drain()
            case "close":
                client.submit(4, ended.append)
                await queue.close()
            case "failure":
                queue.fail_soon(StorageError("full"))
                client.submit(4, ended.append)
        wanted = {"write-behind": 2, "drain": 2}.get(what, 3)
        while len(client.taken) < 2 or len(ended) < wanted:
            await asyncio.sleep(0)
    assert client.taken[1][0] == 3
    assert [failure is None for failure in ended] == [True, True, what != "failure"][:wanted]
    assert not is_gathering(queue)
    await queue.close()


async def test_no_request_after_answers_ends_nothing_and_delays_nothing() -> None:
    client = Numbers(lambda _: None)
    queue = client.queue
    queue.gathers = True
    ended: list[StorageError | None] = []
    for number in (1, 2):
        client.submit(number, ended.append)
    async with asyncio.timeout(60):
        while not is_gathering(queue):
            await asyncio.sleep(0)
        await queue.drain()
        while is_gathering(queue):
            await asyncio.sleep(0.001)
        assert client.taken == [[1, 2]]
        client.submit(3, ended.append)
        await asyncio.sleep(0)
        assert client.taken == [[1, 2], [3]]
        await queue.close()
    assert ended == [None] * 3


async def test_a_pause_does_not_gather() -> None:
    clients = Clients(2)
    assert await clients.began() == [0]
    clients._send(1)
    paused = asyncio.create_task(clients.client.queue.pause())
    await asyncio.sleep(0)
    assert await clients.commit() == [1]
    clients._gates.put(None)
    await paused
    assert clients.client.queue._gather_timer is None
    clients.client.queue.resume()
    await clients.close()


async def test_answers_come_in_order_where_the_next_commit_runs_in_the_loop() -> None:
    gate = threading.Event()
    threads: list[str] = []

    def commit(_: Sequence[int]) -> None:
        threads.append(threading.current_thread().name)
        gate.wait(60)

    client = fast(Numbers(commit, is_small=lambda _: True), 0.5)
    done: list[int] = []
    client.submit(1, lambda _: done.append(1))
    while not threads:
        await asyncio.sleep(0)
    client.submit(2, lambda _: done.append(2))
    gate.set()
    await client.queue.close()
    assert (done, threads) == ([1, 2], ["commit-t", threading.current_thread().name])


@pytest.mark.parametrize("inline_s", [0.0, 10.0])
async def test_answers_of_a_commit_are_sent_together_after_it(inline_s: float) -> None:
    """Also where one fails: what the others collected is sent, and the next commit is not kept waiting."""
    happened: list[str] = []

    class Client(CommitClient[str]):
        def begin_commit(self) -> str:
            happened.append("begin")
            return "batch"

        def is_small_commit(self, _batch: str) -> bool:
            return True

        def write_commit(self, _batch: str) -> None:
            happened.append("write")

        def end_commit(self, _batch: str, _failure: StorageError | None) -> None:
            happened.append("end")

        def send_answers(self) -> None:
            happened.append("sent")
            raise RuntimeError("a defect")

    queue: CommitQueue[str] = CommitQueue("t", Client())
    queue.inline_s, queue.expected_s = inline_s, inline_s / 2
    queue.start()
    for _ in range(2):
        finished = asyncio.get_running_loop().create_future()
        number = queue.request()
        queue.wait(number, Told(lambda _: happened.append("answer")))
        queue.wait(number, Told(finished.set_result))
        await finished
    await queue.close()
    assert happened == ["begin", "write", "end", "answer", "sent"] * 2


async def test_only_small_commits_run_in_the_loop() -> None:
    threads: list[str] = []
    client = Numbers(lambda _: threads.append(threading.current_thread().name), is_small=lambda batch: len(batch) < 3)
    fast(client, 0.5)
    for more in (0, 0, 2, 0):
        finished = asyncio.get_running_loop().create_future()
        for number in range(more):
            client.change(number)
        client.submit(0, finished.set_result)
        await finished
    await client.queue.close()
    loop, thread = threading.current_thread().name, "commit-t"
    assert threads == [thread, loop, thread, loop]


async def test_a_failure_in_the_loop_is_as_final() -> None:
    def commit(ops: Sequence[int]) -> None:
        if 2 in ops:
            raise OSError("no space left on device")

    client = fast(Numbers(commit, is_small=lambda _: True), 60.0)
    told: list[StorageError | None] = []
    for n in range(4):
        client.submit(n, told.append)
        while len(told) <= n:
            await asyncio.sleep(0)
    assert client.queue.inline_commits == 2
    assert [error is None for error in told] == [True, True, False, False]
    assert client.queue.failure is told[2]
    await client.queue.close()


def without_space(times: int, batches: list[list[int]], error: Exception) -> Callable[[Sequence[int]], None]:
    """A commit that finds no disk space so many times."""

    def commit(ops: Sequence[int]) -> None:
        nonlocal times
        if times:
            times -= 1
            raise error
        batches.append(list(ops))

    return commit


def problem(client: Numbers) -> StorageError | None:
    return client.queue.stalled


@pytest.mark.parametrize("inline_s", [0.0, 10.0])
@pytest.mark.parametrize(
    "error",
    [
        OutOfSpaceError("full"),
        DiskFullError(errno.ENOSPC, "No space left", "/a/file"),
        NoDescriptorError(errno.EMFILE, "Too many open files", "/a/file"),
    ],
)
async def test_a_commit_without_disk_space_or_descriptor_waits_and_continues_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, inline_s: float
) -> None:
    monkeypatch.setitem(vars(commit_queue), "_RETRY_S", 0.001)
    batches: list[list[int]] = []
    client = fast(Numbers(without_space(3, batches, error), is_small=lambda _: True), inline_s)
    done: list[tuple[int, StorageError | None]] = []
    client.submit(1, lambda failure: done.append((1, failure)))
    while client.queue.stalled is None:
        await asyncio.sleep(0)
    assert isinstance(client.queue.stalled, ShortageError)
    assert client.queue.failure is None
    if isinstance(error, DiskFullError):
        assert isinstance(client.queue.stalled, OutOfSpaceError)
        assert client.queue.stalled.path == "/a/file"
        assert client.queue.stalled.hint == "free space on the file system: it continues by itself"
    if isinstance(error, NoDescriptorError):
        assert isinstance(client.queue.stalled, OutOfDescriptorsError)
        assert client.queue.stalled.what == "t: a commit waits for a file descriptor"
        assert client.queue.stalled.why == "/a/file: Too many open files"
    client.submit(2, lambda failure: done.append((2, failure)))
    assert done == []
    while len(done) < 2:
        await asyncio.sleep(0.001)
    assert done == [(1, None), (2, None)]
    assert batches == [[1], [2]]
    assert not problem(client)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"], "once each"
    await client.queue.close()


async def test_a_commit_that_waits_for_disk_space_fails_at_the_end() -> None:
    batches: list[list[int]] = []
    failures: list[StorageError] = []
    client = Numbers(without_space(100, batches, OutOfSpaceError("full")), on_failure=failures.append)
    done: list[StorageError | None] = []
    client.submit(1, done.append)
    while client.queue.stalled is None:
        await asyncio.sleep(0)
    client.submit(2, done.append)
    await client.queue.close()
    assert not batches
    assert len(failures) == 1
    assert done == failures * 2
    assert not problem(client)


async def test_a_pause_commits_what_was_changed_and_holds_later_changes() -> None:
    numbers = Numbers(lambda _: None)
    numbers.change(1)
    await numbers.queue.pause()
    assert numbers.taken == [[1]]
    assert not numbers.queue.running
    numbers.change(2)
    numbers.queue.request_within(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert numbers.taken == [[1]]
    ended = asyncio.get_running_loop().create_future()
    numbers.queue.wait(numbers.queue.number, Told(ended.set_result))
    numbers.queue.resume()
    numbers.queue.resume()
    assert await ended is None
    assert numbers.taken == [[1], [2]]
    await numbers.queue.close()


async def test_a_pause_waits_for_the_running_commit_and_begins_one_more() -> None:
    release = threading.Event()
    numbers = Numbers(lambda batch: release.wait(30) if batch == [1] else None)
    numbers.change(1)
    numbers.queue.request()
    await asyncio.sleep(0)
    assert numbers.queue.running
    numbers.change(2)
    paused = asyncio.create_task(numbers.queue.pause())
    await asyncio.sleep(0)
    assert not paused.done()
    release.set()
    await paused
    assert numbers.taken == [[1], [2]]
    numbers.change(3)
    numbers.queue.request()
    # A shutdown does not wait for the end of a pause.
    await numbers.queue.close()
    assert numbers.taken == [[1], [2], [3]]


async def test_a_pause_that_is_given_up_leaves_the_queue_working() -> None:
    release = threading.Event()
    numbers = Numbers(lambda _: release.wait(30))
    numbers.change(1)
    numbers.queue.request()
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await numbers.queue.pause()
    numbers.queue.resume()
    release.set()
    numbers.change(2)
    numbers.queue.request()
    await numbers.queue.close()
    assert [number for batch in numbers.taken for number in batch] == [1, 2]
