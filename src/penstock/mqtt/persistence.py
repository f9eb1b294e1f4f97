"""Sessions and retained messages on disk: commits the changes that the engine's journal collects.

While a commit runs in its thread the journal continues to collect, so a message that its receivers acknowledge
meanwhile is never written. Changes that no acknowledgement waits for are written later (write-behind): the ends of
deliveries, and with durability ``memory`` all changes except those of sessions and messages that require the disk.

With durability ``flushed`` a small commit is a few writes into the page cache and runs in the loop.
:mod:`penstock.runtime.io.commit_queue` decides when commits run, and handles failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.errors import StorageError
from penstock.mqtt.engine.model.journal import Batch, Journal, Recovered
from penstock.mqtt.storage import SessionStore
from penstock.runtime.io.commit_log import CommitLog
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue
from penstock.runtime.io.files import Durability
from penstock.runtime.io.wal import LoggedEnvironment

__all__ = ["WRITE_BEHIND_S", "Persistence"]

logger = logging.getLogger("penstock.mqtt")

WRITE_BEHIND_S: Final = {Durability.DURABLE: 0.05, Durability.FLUSHED: 0.05, Durability.MEMORY: 1.0}
"""Maximum age of a write-behind change in seconds. With durability ``durable`` and ``flushed`` these are ends of
deliveries: after a crash that loses one, a QoS 1 message is sent again, and a QoS 2 message is not."""
_INLINE_CHANGES: Final = 16
"""Maximum number of changes for a commit in the loop, without fsync. A larger commit runs in the thread: later changes
share a commit, and many of them are reverted before it."""
_WRITE_BEHIND_CHANGES: Final = 50_000
"""Maximum number of write-behind changes before a commit starts, so that transactions stay short."""
_ROUNDING_MS: Final = 2
"""Each of two offsets between clocks is the difference of two times that were rounded down."""


class Persistence(CommitClient[Batch]):
    """Sessions and retained messages in the directory ``path``; the broker engine records changes in ``journal``.

    ``log``: the log of the commits; default: files in ``path``.
    ``await open()``, pass the journal to the engine, then :meth:`start`. Call everything in the loop's thread.
    """

    def __init__(
        self, path: Path, durability: Durability = Durability.DURABLE, *, log: CommitLog | None = None
    ) -> None:
        self.durability = durability
        self.journal = Journal(durable_acknowledgements=durability is not Durability.MEMORY)
        self._store = SessionStore(path, durability, log=log)
        self._queue: CommitQueue[Batch] = CommitQueue("mqtt", self)
        self._on_committed: Callable[[], None] = lambda: None
        self._on_failure: Callable[[StorageError], None] = lambda _error: None
        self._wall_offset: Callable[[], int] = lambda: 0
        self._is_open = False
        self.commits = 0
        """Commits since the start that wrote something."""
        self.changes = 0
        """Changes committed since the start."""
        self.recovered = 0
        self.quarantined = 0

    @property
    def failure(self) -> StorageError | None:
        """The error of a failed commit, after which nothing is committed; None before."""
        return self._queue.failure

    @property
    def stalled(self) -> StorageError | None:
        """The reason if acknowledgements wait for disk space."""
        return self._queue.stalled

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._store.environment

    @property
    def queue(self) -> CommitQueue[Batch]:
        """The commit queue, for backups."""
        return self._queue

    @property
    def commit_s(self) -> float:
        """Longest duration of the last commits, in seconds."""
        return self._queue.longest_s

    def metric_values(self) -> dict[str, int]:
        """Values of the metrics: counters since the start, and current sizes."""
        return {
            "commits": self.commits,
            "changes": self.changes,
            "recovered_sessions": self.recovered,
            "quarantined": self.quarantined,
            "waiting": self.journal.waiting,
            "stored_bytes": self._store.stored_bytes,
            "failed": int(self.failure is not None),
        }

    async def open(self, wall_offset: Callable[[], int]) -> Recovered:
        """Load the stored state. ``wall_offset``: current wall clock minus the engine's clock, in ms.

        Raises:
            StorageError: the directory cannot be opened; a damaged value alone does not stop it.
        """
        self._is_open = True
        self._wall_offset = wall_offset
        # Offsets are differences of rounded times: with this one and that of the commit, no deadline comes early.
        recovered = await asyncio.to_thread(self._store.open, wall_offset() - _ROUNDING_MS)
        self.journal.start_at(recovered.next_number)
        self.recovered = len(recovered.sessions)
        self.quarantined = len(recovered.quarantined)
        for name in recovered.quarantined:
            logger.error("quarantined path=%s record=%s: checksum does not match", self._store.path, name)
        return recovered

    def start(self, *, committed: Callable[[], None], failed: Callable[[StorageError], None]) -> None:
        """Accept commits; ``committed`` is called after each, ``failed`` once, after the first failure."""
        self._on_committed = committed
        self._on_failure = failed
        self._queue.start()
        self.journal.answer_waits = self._queue.count_answer
        self._store.when_failed(self._queue.fail_soon)

    def submit(self) -> None:
        """Commit the recorded changes: soon if an acknowledgement waits for them, otherwise within the write-behind
        time.

        Called at the end of a loop turn.
        """
        journal = self.journal
        if journal.urgent:
            self._queue.request()
        elif waiting := journal.waiting:
            if waiting < _WRITE_BEHIND_CHANGES:
                self._queue.request_within(WRITE_BEHIND_S[self.durability])
            else:
                self._queue.request()

    def reusable_bytes(self) -> int:
        """Bytes that can be stored without growing the file; from any thread."""
        return self._store.reusable_bytes()

    async def drain(self) -> None:
        """Commit all recorded changes before a shutdown; returns after success or failure.

        It does not wait for disk space.
        """
        if not self._queue.is_started:
            return
        await self._queue.drain()
        while self.failure is None and (self.journal.waiting or self.journal.urgent):
            self._queue.request()
            await self._queue.drain()

    async def close(self) -> None:
        """Commit the recorded changes and close the files; may be called twice."""
        if not self._is_open:
            return
        await self.drain()
        await self._queue.close()
        self._is_open = False
        await asyncio.to_thread(self._store.close)

    def begin_commit(self) -> Batch:
        """Take the changes of the journal [CommitClient]."""
        return self.journal.cut(self._wall_offset())

    def write_commit(self, batch: Batch) -> None:
        """In one transaction [CommitClient]."""
        self._store.commit(batch)

    def is_small_commit(self, batch: Batch) -> bool:
        """Whether the commit only writes a little to the page cache [CommitClient]."""
        # A batch is empty if all its changes were reverted.
        return len(batch) <= (_INLINE_CHANGES if self.durability is Durability.FLUSHED else 0)

    def end_commit(self, batch: Batch, failure: StorageError | None) -> None:
        """Have the broker send the output that waited for the commit [CommitClient]."""
        if failure is None:
            self.commits += bool(batch)
            self.changes += len(batch)
            self.journal.committed = batch.number
            self._on_committed()

    def commits_failed(self, failure: StorageError) -> None:
        """Stop acknowledgements for persistent sessions [CommitClient]."""
        logger.critical("no more acknowledgements for persistent sessions path=%s: %s", self._store.path, failure)
        self.journal.failure = failure.what
        self._on_failure(failure)
