"""The commit queue: makes changes durable in groups, for MQTT sessions, the state store and TubeMQ.

A client of the queue changes its state in memory, in the event loop. Messages that confirm a change (an
acknowledgement, an answer, a notification) wait until it is committed. Commits are numbered from 1, run one at a time,
and end in the order of their numbers. A change belongs to the next commit to begin, whose number is ``number``:

    changes ──▶ request() ──▶ begin_commit()   ──▶ write_commit()    ──▶ end_commit(), then the waiters
    in the loop               in the loop:         in the loop or        in the loop
                              takes all changes    in a thread

Grouping needs no timer. A requested commit begins at the end of the loop turn, or when the running commit has ended,
and ``begin_commit`` takes all changes made until then; or earlier in the turn if
the client expects no more changes. So a slow disk makes commits larger, not the queue longer, and
at most two commits are unfinished: one is running, the other collects changes. ``request_within`` is for changes
without waiters (write-behind): their commit begins some time later, or with the next requested one.

Gathering, for a log in etcd (``gathers``). A commit there takes as long as many changes, and costs the members
processor time. Clients that wait for each answer would form two groups, of which one has its changes in the running
commit while the other one waits. So after the answers of a commit have left, the next one begins when as many requests
have come as answers were sent, but at most half the duration of a commit later. If less than half of them come, the
clients do not wait for answers, and the next commits begin without a wait. A client that is alone never waits.

Inline or in the thread. Passing a commit to the thread and back costs as much as a small commit on a fast disk. So a
commit runs in the loop if its client declares the batch small and the disk has been fast: the maximum duration of the
last commits, halved with each later commit, is less than ``inline_s``. A disk that stalls blocks the loop once; a disk
that is slow for longer is waited for in the thread. The first commit runs in the thread, because the speed of the disk
is not known yet.

No space. If the disk is full, or a file cannot be opened for lack of a descriptor, the commit remains the running one:
none of it was synced, so ``write_commit`` gets the same batch again every second, in the thread, until it succeeds, and
the next commit waits for it. At shutdown :meth:`CommitQueue.give_up` turns this into a failure.

Failure. **After a commit has failed, nothing is acknowledged any more.** The kernel reports a failed fsync once, and
may have dropped the dirty pages: a second fsync would succeed and prove nothing, and a change that builds on a lost one
must not be acknowledged either. So the first failure is final for the life of the process. That commit and every later
one end with this failure, nothing more is written, and the node has to be restarted; the start recovers the data on the
disk. The same holds for a failure that another thread reports (:meth:`CommitQueue.fail_soon`) and for any exception in
``write_commit``.

The order at the end of a commit matters. ``end_commit`` comes before the waiters: a request that a waiter causes must
see the commit as done. The next commit begins before both if it runs in the thread (the disk does not wait for Python),
and after both if it runs in the loop (answers do not wait for the disk) or gathers. An exception in a waiter does not
delay other waiters.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from mypy_extensions import mypyc_attr

from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, ShortageError, StorageError
from penstock.runtime.durations import Durations
from penstock.runtime.io.descriptors import WAIT_HINT
from penstock.runtime.io.files import DiskFullError, NoDescriptorError

__all__ = ["INLINE_S", "CommitClient", "CommitQueue", "CommitWaiter"]

_log = logging.getLogger("penstock.runtime")

INLINE_S: Final = 0.002
"""Expected duration below which a small commit runs in the loop; passing it to the thread costs about a third of it."""
_EXPECTED_FADE: Final = 0.5
"""With a longer memory fewer of the slow commits, which come in groups, stop the loop, but the thread gets mostly fast
commits (decision 34)."""
_LONGEST_FADE: Final = 0.9
_GATHER_SHARE: Final = 0.5
"""Maximum wait for further requests, as a share of the expected duration of a commit."""
_GATHER_MOST_S: Final = 0.01
"""Maximum wait in seconds; a log that stalls is no reason to wait longer."""
_GATHER_PAUSE: Final = 8
"""Number of commits that do not wait after one whose wait was useless."""
_RETRY_S = 1.0
"""Delay before a commit that waits for disk space or a file descriptor is retried. Not Final: tests shorten it in the
compiled form too."""

Batch = TypeVar("Batch")


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitWaiter(ABC):
    """An object that is notified after a commit, to send or report something."""

    __slots__ = ()

    @abstractmethod
    def commit_ended(self, failure: StorageError | None) -> None:
        """Called in the loop, once. ``failure``: the changes may not be durable and will not be retried."""


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitClient(Generic[Batch]):
    """The client of a commit queue. It is a base class instead of a set of functions so that compiled code calls its
    methods directly."""

    def begins_commit(self) -> bool:
        """Whether the client itself calls :meth:`CommitQueue.begin` in this turn, for a commit that is now requested.

        False: the commit begins at the end of the turn. Not called while a commit is running.
        """
        return False

    def begin_commit(self) -> Batch:
        """Take the changes for a commit. Also called when the commit cannot be written, after a failure."""
        raise NotImplementedError

    def is_small_commit(self, _batch: Batch) -> bool:
        """Whether ``batch`` may be committed in the loop if the disk is fast."""
        return False

    def write_commit(self, batch: Batch) -> None:
        """Make ``batch`` as durable as the client promises; any exception is a failure."""
        raise NotImplementedError

    def end_commit(self, batch: Batch, failure: StorageError | None) -> None:
        """Called after ``write_commit``, before the waiters, with the failure if there is one."""

    def commits_failed(self, failure: StorageError) -> None:
        """Called once, with the first failure."""

    def send_answers(self) -> None:
        """Called after the waiters of a commit: send the answers that they collected."""


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitQueue(Generic[Batch]):
    """Commits the changes of one client. Everything but ``write_commit`` and :meth:`fail_soon` runs in the loop's
    thread.

    The queue itself has no limit: every waiter belongs to a request whose peer waits for the answer, so the limits of
    the protocols on requests in flight bound it.

    ``name`` is the name of the thread, also used in errors.
    """

    def __init__(self, name: str, client: CommitClient[Batch]) -> None:
        self.name = name
        self.number = 1
        """Number of the commit that will contain the current changes."""
        self.ended = 0
        """Number of the last commit that has ended, even if it failed."""
        self.commits = 0
        """Number of successful commits."""
        self.inline_commits = 0
        """Number of commits that ran in the loop."""
        self.failure: StorageError | None = None
        """The error if no further commit is possible."""
        self.stalled: StorageError | None = None
        """The error if the running commit waits for disk space or a file descriptor."""
        self.inline_s = INLINE_S
        """Small commits run in the loop if they are expected to take less than this many seconds."""
        self.expected_s = INLINE_S
        """Expected duration of the next commit in seconds: that of the last ones, halved with each later commit."""
        self.longest_s = 0.0
        """Maximum duration of the last commits in seconds, reduced by a tenth with each later commit."""
        self.gathers = False
        """Whether a commit waits for the requests of clients that have just got answers."""
        self.gather_s = _GATHER_MOST_S
        """Maximum wait in seconds."""
        self.durations = Durations()
        """Of the successful commits."""
        self.clock: Callable[[], float] = time.monotonic
        self._last_failure: StorageError | None = None
        """Error of the commit that ended last."""
        self._client = client
        self._requested = False
        self._last_is_small = False
        """Whether the commit that began last may run in the loop."""
        self._waiters: list[CommitWaiter] = []
        self._running_waiters: list[CommitWaiter] = []
        self._answers = 0
        """Number of answers to clients that wait for the next commit; ``_running_answers``: for the running one."""
        self._running_answers = 0
        self._answering = False
        """Whether the answers of a commit are being sent, before the next one gathers."""
        self._gather_until = 0
        """Number of answers with which the next commit begins; 0: it does not wait for them."""
        self._gather_least = 0
        """Number of answers with which its wait was useful."""
        self._gather_pause = 0
        """Number of next commits that do not wait."""
        self._gather_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._stalled_batch: Batch | None = None
        self._gives_up = False
        self._closed = False
        self._paused_after = 0
        """The last commit that may begin; 0: commits are not paused."""
        self._quiet: asyncio.Future[None] | None = None
        """Of a pause that waits for the end of that commit."""
        self._jobs: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_turn_end: Callable[[], None] = self.begin
        """Bound once, because each access would create a new object."""
        self._idle: asyncio.Event | None = None
        """Set when nothing runs; created by a drain that waits."""

    @property
    def is_started(self) -> bool:
        """Whether commits can be requested."""
        return self._worker is not None

    @property
    def running(self) -> bool:
        """Whether a commit has begun and not ended."""
        return self.ended + 1 < self.number

    def start(self) -> None:
        """Start the thread. Call once, in the loop that will request commits."""
        self._loop = asyncio.get_running_loop()
        self._worker = threading.Thread(target=self._work, name=f"commit-{self.name}", daemon=True)
        self._worker.start()

    # Requests

    def request(self) -> int:
        """Begin the next commit in this turn or at the end of the running commit; returns its number.

        ``end`` and waiters are never called before this returns.
        """
        if not self._requested:
            assert self._loop is not None, "call start() first"
            self._requested = True
            if not (self.running or self._gather_until or self._answering or self._client.begins_commit()):
                self.begin_at_turn_end()
        return self.number

    def begin_at_turn_end(self) -> None:
        """Begin the requested commit at the end of the turn."""
        assert self._loop is not None, "call start() first"
        self._loop.call_soon(self._on_turn_end)

    def request_within(self, seconds: float) -> None:
        """Begin the next commit within ``seconds``; the first of several such requests determines the time."""
        if self._timer is None and not self._requested:
            assert self._loop is not None, "call start() first"
            self._timer = self._loop.call_later(seconds, self.request)

    def wait(self, number: int, waiter: CommitWaiter) -> None:
        """Call ``waiter``, an answer to a client, when the commit ``number``, as :meth:`request` returned it, has
        ended."""
        if number >= self.number:
            self._waiters.append(waiter)
            self.count_answer()
        else:
            self.wait_also(number, waiter)

    def wait_also(self, number: int, waiter: CommitWaiter) -> None:
        """:meth:`wait` for a waiter to which no client reacts with the next request."""
        if number >= self.number:
            self._waiters.append(waiter)
        elif number > self.ended:
            self._running_waiters.append(waiter)
        else:
            assert self._loop is not None, "call start() first"
            self._loop.call_soon(waiter.commit_ended, self._last_failure)

    def count_answer(self) -> None:
        """Count an answer to a client that waits for the next commit; :meth:`wait` does this for its waiter."""
        self._answers += 1
        if self._answers == self._gather_until:
            self._stop_gathering()
            self.begin_at_turn_end()  # it also gets the other requests of this turn

    # Failures and shutdown

    def fail_soon(self, failure: StorageError) -> None:
        """Stop all commits with ``failure``, which another part detected; from any thread."""
        assert self._loop is not None, "call start() first"
        self._loop.call_soon_threadsafe(self._fail, failure)

    def give_up(self) -> None:
        """From now on let commits fail that lack disk space, including a waiting one: the node is about to stop."""
        self._gives_up = True
        if self._retry is not None and self.stalled is not None:
            self._retry.cancel()
            batch = self._stalled_batch
            assert batch is not None
            self._end_commit(batch, self.stalled, 0.0)

    async def pause(self) -> None:
        """Commit all changes so far, also those of later requests; return when no commit runs. Later changes wait.

        It waits for disk space like the commits. Call :meth:`resume` in any case.
        """
        number = self._paused_after = self.request()
        if self.ended < number:
            assert self._loop is not None
            quiet = self._quiet = self._loop.create_future()
            await quiet

    def resume(self) -> None:
        """Continue after :meth:`pause`; may be called twice."""
        if not self._paused_after:
            return
        self._paused_after = 0
        if self._requested and not self.running:
            assert self._loop is not None
            self._loop.call_soon(self._on_turn_end)

    async def drain(self) -> None:
        """Run all requested commits, including delayed ones; return when they have ended. Does not wait for disk
        space."""
        self.resume()
        self.give_up()
        while True:
            if self._timer is not None:
                self.request()
            # A waiter may request another commit before this task runs again.
            if not (self._requested or self.running):
                return
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Drain, then stop the thread. Later requests end with an error."""
        if self._worker is None:
            return
        await self.drain()
        self._closed = True
        self._jobs.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._worker.join)
        self._worker = None

    # A commit

    def begin(self) -> None:
        """Begin the requested commit now. No effect if none is requested, or another one is running."""
        if not self._requested or self.running or not self._may_begin():
            return
        batch = self._begin()
        if self.failure is not None:
            self._end_commit(batch, self.failure, 0.0)
        elif self._closed:
            self._end_commit(batch, StorageError(f"{self.name}: no more commits, the store is closing"), 0.0)
        elif self._last_is_small and self._is_fast():
            self.inline_commits += 1
            failure, seconds = self._write(batch)
            self._end_commit(batch, failure, seconds)
        else:
            self._jobs.put(batch)

    def _begin_pause(self) -> None:
        quiet, self._quiet = self._quiet, None
        if quiet is not None and not quiet.done():
            quiet.set_result(None)

    def _may_begin(self) -> bool:
        return not self._paused_after or self.number <= self._paused_after

    def _begin(self) -> Batch:
        """Begin the commit that has collected changes."""
        self._requested = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stop_gathering()
        self.number += 1
        self._running_waiters, self._waiters = self._waiters, []
        self._running_answers, self._answers = self._answers, 0
        batch = self._client.begin_commit()
        self._last_is_small = self._client.is_small_commit(batch)
        return batch

    def _gather(self, answered: int) -> bool:
        """Let the next commit wait for the clients to which ``answered`` answers were sent; False: it does not."""
        expected = self._answers + answered
        if not answered or expected == 1 or self.failure is not None or self._paused_after:
            return False
        if self._gather_pause:
            self._gather_pause -= 1
            return False
        assert self._loop is not None
        self._gather_until = expected
        self._gather_least = self._answers + (answered + 1) // 2
        wait_s = min(self.expected_s * _GATHER_SHARE, self.gather_s)
        self._gather_timer = self._loop.call_later(wait_s, self._end_gathering)
        return True

    def _end_gathering(self) -> None:
        """Begin the commit with the requests that came in time."""
        if self._answers < self._gather_least:
            self._gather_pause = _GATHER_PAUSE
        self._stop_gathering()
        self.begin()

    def _stop_gathering(self) -> None:
        self._gather_until = 0
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None

    def _is_fast(self) -> bool:
        """True if the next commit is expected to be too short to be worth passing to the thread."""
        return self.expected_s < self.inline_s

    def _work(self) -> None:
        """The thread."""
        assert self._loop is not None
        while (batch := self._jobs.get()) is not None:
            failure, seconds = self._write(batch)
            self._loop.call_soon_threadsafe(self._end_commit, batch, failure, seconds)

    def _write(self, batch: Batch) -> tuple[StorageError | None, float]:
        """Commit ``batch``; returns the failure, if any, and the duration in seconds."""
        failure: StorageError | None = None
        started = self.clock()
        try:
            self._client.write_commit(batch)
        except StorageError as storage_error:
            failure = storage_error
        except (DiskFullError, NoDescriptorError) as lack:
            failure = _wait_reason(self.name, lack)
            failure.__cause__ = lack
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the batch is not known to be durable
            # Only ``why`` has the file: clients get the first line.
            file = getattr(error, "filename", None)
            failure = StorageError(
                f"{self.name}: commit failed: {error.strerror if isinstance(error, OSError) else repr(error)}",
                path=str(file or ""),
                why=(f"{file}: " if file else "")
                + "the operating system refused a write or an fsync; what reached the disk is unknown",
                hint="check the disk (space, health), then restart: recovery keeps complete records",
            )
            failure.__cause__ = error
        return failure, self.clock() - started

    def _fail(self, failure: StorageError) -> None:
        if self.failure is None:
            self.failure = failure
            self._client.commits_failed(failure)

    def _stall(self, batch: Batch, failure: StorageError) -> None:
        """Write the running batch again later, in the thread."""
        if self.stalled is None:
            _log.error("%s", failure)
        self.stalled = failure
        self._stalled_batch = batch
        assert self._loop is not None
        self._retry = self._loop.call_later(_RETRY_S, self._try_again, batch)

    def _try_again(self, batch: Batch) -> None:
        self._retry = None
        self._jobs.put(batch)

    def _end_commit(self, batch: Batch, failure: StorageError | None, seconds: float) -> None:
        """Handle the result of the running commit: success, failure, or a wait for disk space."""
        self.expected_s = max(seconds, self.expected_s * _EXPECTED_FADE)
        self.longest_s = max(seconds, self.longest_s * _LONGEST_FADE)
        if failure is None:
            if self.stalled is not None:
                _log.warning("%s: commits continue", self.name)
            self.commits += 1
            self.durations.observe(seconds)
        elif isinstance(failure, ShortageError) and not self._gives_up:
            self._stall(batch, failure)
            return
        elif not self._closed:
            self._fail(failure)
        self._retry = self._stalled_batch = self.stalled = None
        self._last_failure = failure
        self.ended += 1
        waiters, self._running_waiters = self._running_waiters, []
        requested = self._requested
        in_thread = not (self._closed or (self._last_is_small and self._is_fast()))
        answered, self._running_answers = self._running_answers, 0
        self._answering = self.gathers and in_thread
        if requested and self.failure is None and in_thread and self._may_begin() and not self.gathers:
            requested = False
            self._jobs.put(self._begin())
        try:
            self._client.end_commit(batch, failure)
        except Exception:  # noqa: BLE001 - the waiters, and the end of the store, must not wait forever
            _log.exception("%s: internal error after a commit", self.name)
        for waiter in waiters:
            try:
                waiter.commit_ended(failure)
            except Exception:  # noqa: BLE001 - nor may one answer keep the others waiting
                _log.exception("%s: internal error after a commit", self.name)
        try:
            self._client.send_answers()
        except Exception:  # noqa: BLE001 - nor may the next commit wait forever
            _log.exception("%s: internal error after a commit", self.name)
        gathers = False
        if self._answering:
            self._answering = False
            requested = self._requested
            gathers = self._gather(answered)
        if requested:
            if not gathers:
                self.begin_at_turn_end()
        elif self._idle is not None and not (self._requested or self.running):
            self._idle.set()
            self._idle = None
        if self._quiet is not None and self.ended >= self._paused_after:
            self._begin_pause()


def _wait_reason(name: str, lack: OSError) -> ShortageError:
    """Return the error of a commit that waits because of ``lack``."""
    path, why = str(lack.filename or ""), f"{lack.filename}: {lack.strerror}"
    if isinstance(lack, NoDescriptorError):
        return OutOfDescriptorsError(
            f"{name}: a commit waits for a file descriptor", path=path, why=why, hint=WAIT_HINT
        )
    hint = "free space on the file system: it continues by itself"
    return OutOfSpaceError(f"{name}: a commit waits for disk space", path=path, why=why, hint=hint)
