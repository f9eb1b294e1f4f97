"""Group commit: effects that need the disk wait for one write and one fsync that cover them all.

While a commit runs in its thread, the loop collects what comes next; when it returns, the next commit starts with all
of that and the replies of the finished one go out. So the batch adapts by itself: no timer, no delay, and a disk that
stalls does not stop the loop.

Where commits are quick, handing one to the thread and back costs as much as a small commit itself. With ``inline_s`` an
owner has those that are expected to take less than that run in the loop, once a turn. The expectation is the longest
commit of late, which fades by a tenth with each one after it: a disk that stalled once is not waited for in the loop
again until it has been quick for a while. With ``small`` the owner says which commits are of the kind that may be.

A commit that finds no space on the disk waits: the same batch is tried again every second until it succeeds, and all
that comes meanwhile waits behind it. That is safe because nothing was synced: what a write left behind is written anew.

After a commit failed nothing is acknowledged any more (a failed fsync may have dropped the dirty pages, so a later
success would prove nothing): every waiting and every later operation is told so, and the process must be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.files import DiskFullError

__all__ = ["GroupCommitter"]

_log = logging.getLogger("penstock.runtime")

_FADES: Final = 0.9
_RETRY_S: Final = 1.0
"""Delay before a commit that found no disk space is retried."""

Op = TypeVar("Op")
Done = Callable[[StorageError | None], None]


class GroupCommitter(Generic[Op]):
    """Runs ``commit(ops)`` in one thread of its own, batch after batch, in the order of submission.

    ``commit`` gets the operations in order and returns once all of them are as durable as its owner promises; it is
    never run twice at a time. Bound: the caller's. Every operation belongs to a request whose peer waits for the
    answer, so the receive maximum and the in-flight limits of the protocols bound ``pending``, which is a metric.

    ``prepare(op)`` runs in the loop when the commit of ``op`` begins (or cannot, after a failure): an owner that
    submits one operation ahead puts into it then all that has come meanwhile. ``small(op)``, asked after it: whether
    ``op`` may be committed in the loop, if the disk is quick.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Op]], None],
        *,
        name: str,
        on_failure: Callable[[StorageError], None] | None = None,
        prepare: Callable[[Op], None] | None = None,
        inline_s: float = 0.0,
        small: Callable[[Op], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.inline = 0
        """Commits that ran in the loop."""
        self._inline_s = inline_s
        self._expected_s = inline_s
        self._small = small
        self._last_small = True
        self._clock = clock
        self.failure: StorageError | None = None
        self.stalled: StorageError | None = None
        """Reason why the running commit waits for disk space; None if it does not."""
        self._retry: asyncio.TimerHandle | None = None
        self._gives_up = False
        self.started = 0
        """Batches whose commit has begun: an operation submitted since then is not part of one yet."""
        self.commits = 0
        self.committed = 0
        self._commit = commit
        self._on_failure = on_failure
        self._prepare = prepare
        self._waiting: list[tuple[Op, Done]] = []
        self._running: list[tuple[Op, Done]] = []
        self._scheduled = False
        self._closing = False
        self._batches: queue.SimpleQueue[list[tuple[Op, Done]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: asyncio.Event | None = None

    @property
    def pending(self) -> int:
        """Operations submitted whose ``done`` has not been called."""
        return len(self._waiting) + len(self._running)

    def start(self) -> None:
        """Start the thread. Call once, in the loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name=f"commit-{self.name}", daemon=True)
        self._thread.start()

    def submit(self, op: Op, done: Done) -> None:
        """Queue ``op``; ``done(None)`` runs in the loop after its commit, ``done(error)`` if it can never be durable.

        Call in the loop's thread. ``done`` is never called before ``submit`` returns, and the calls come in the order
        of submission.
        """
        assert self._loop is not None, "start() comes first"
        if self._closing:
            raise StorageError(f"{self.name}: no more commits, the store is closing")
        self._waiting.append((op, done))
        self._idle_clear()
        self._schedule()

    def fail_soon(self, failure: StorageError) -> None:
        """From any thread: something else showed that nothing can be committed any more; as after a failed commit."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(self._fail, failure)

    def give_up(self) -> None:
        """From now on a commit without disk space fails, also the one that waits: the owner is about to end."""
        self._gives_up = True
        if self._retry is not None and self.stalled is not None:
            self._retry.cancel()
            self._retry = None
            self._finish(self.stalled)

    async def close(self) -> None:
        """Commit what was submitted, call its ``done``, then stop the thread. It waits for no disk space."""
        if self._thread is None or self._idle is None:
            return
        self.give_up()
        # Between the last answer and this task's turn somebody may have submitted once more.
        while self.pending:
            await self._idle.wait()
        self._closing = True
        self._batches.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._thread = None

    def _schedule(self) -> None:
        """At the end of this loop turn, so that everything one turn brought shares a commit."""
        if not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._kick)

    def _idle_clear(self) -> None:
        assert self._idle is not None
        self._idle.clear()

    def _kick(self) -> None:
        """At the end of a turn: the next commit begins, unless one runs, which has it begin at its end."""
        self._scheduled = False
        if not self._begin():
            return
        if self.failure is not None:
            self._finish(self.failure)
        elif self._last_small and self._quick:
            self.inline += 1
            self._finish(*self._carry_out(self._running))
        else:
            self._batches.put(self._running)

    @property
    def _quick(self) -> bool:
        return self._expected_s < self._inline_s

    def _begin(self) -> bool:
        """Make what waits the running batch; whether there is one now that was not before."""
        if self._running or not self._waiting:
            return False
        self._running, self._waiting = self._waiting, []
        if self._prepare is not None:
            for op, _ in self._running:
                self._prepare(op)
        self._last_small = all(self._small(op) for op, _ in self._running)
        self.started += 1
        return True

    def _work(self) -> None:
        assert self._loop is not None
        while (batch := self._batches.get()) is not None:
            self._loop.call_soon_threadsafe(self._finish, *self._carry_out(batch))

    def _carry_out(self, batch: list[tuple[Op, Done]]) -> tuple[StorageError | None, float]:
        """Commit ``batch``: why it failed, and how many seconds it took."""
        failure: StorageError | None = None
        started = self._clock()
        try:
            self._commit([op for op, _ in batch])
        except StorageError as error:
            failure = error
        except DiskFullError as error:
            failure = OutOfSpaceError(
                f"{self.name}: a commit waits for disk space",
                path=str(error.filename or ""),
                why=f"{error.filename}: {error.strerror}",
                do="free space on the file system: it continues by itself",
            )
            failure.__cause__ = error
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the batch is not known to be durable
            # The file is part of the reason alone: clients get the first line.
            file = getattr(error, "filename", None)
            failure = StorageError(
                f"{self.name}: commit failed: {error.strerror if isinstance(error, OSError) else repr(error)}",
                path=str(file or ""),
                why=(f"{file}: " if file else "")
                + "the operating system refused a write or an fsync; what reached the disk is unknown",
                do="look at the disk (space, health), then restart: recovery keeps what is whole",
            )
            failure.__cause__ = error
        return failure, self._clock() - started

    def _fail(self, failure: StorageError) -> None:
        if self.failure is None:
            self.failure = failure
            if self._on_failure is not None:
                self._on_failure(failure)

    def _stall(self, failure: StorageError) -> None:
        """Try the running batch again later, in the thread."""
        if self.stalled is None:
            _log.error("%s", failure)
        self.stalled = failure
        assert self._loop is not None
        self._retry = self._loop.call_later(_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._batches.put(self._running)

    def _finish(self, failure: StorageError | None, seconds: float = 0.0) -> None:
        self._expected_s = max(seconds, self._expected_s * _FADES)
        if isinstance(failure, OutOfSpaceError) and not self._gives_up:
            self._stall(failure)
            return
        if self.stalled is not None and failure is None:
            _log.warning("%s: there is disk space again, commits continue", self.name)
        self.stalled = None
        batch, self._running = self._running, []
        if failure is None:
            self.commits += 1
            self.committed += len(batch)
        else:
            self._fail(failure)
        # The next commit starts before the replies are built: the disk never waits for Python. One that will run in the
        # loop comes after them.
        if self.failure is None and not (self._last_small and self._quick) and self._begin():
            self._batches.put(self._running)
        for _, done in batch:
            try:
                done(failure)
            except Exception:  # noqa: BLE001 - one answer must not keep the others, and the end of the store, waiting
                _log.exception("%s: internal error after a commit", self.name)
        if self._waiting and not self._running:
            self._schedule()
        elif not self._running and self._idle is not None:
            self._idle.set()
