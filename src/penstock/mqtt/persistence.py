"""Commits what the engine's journal collects: one commit at a time, each with everything since the one before.

While a commit runs in its thread the journal goes on collecting, so a message that its receivers acknowledged meanwhile
is never written, and a slow disk makes the batches larger instead of the line longer. What nobody waits for is written
behind, a little later: that a message was acknowledged by its receiver, and in durability ``memory`` everything but
what asked for the disk.

With durability ``flushed`` a commit is a few writes into the page cache, less work than handing it to a thread and
back: small ones are done in the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from penstock.errors import OutOfSpaceError, StorageError
from penstock.mqtt.engine.journal import Batch, Journal, Recovered
from penstock.mqtt.storage.store import SessionStore
from penstock.runtime.io.committer import GroupCommitter
from penstock.runtime.io.files import Durability

__all__ = ["WRITE_BEHIND_S", "Persistence"]

logger = logging.getLogger("penstock.mqtt")

WRITE_BEHIND_S: Final = {Durability.DURABLE: 0.05, Durability.FLUSHED: 0.05, Durability.MEMORY: 1.0}
"""How old a change may become in memory that nobody waits for. In the first two these are the ends of deliveries: a
crash that forgets one lets a QoS 1 message come again, and a QoS 2 one not."""
_INLINE_CHANGES: Final = 16
"""Changes that are committed in the loop where no fsync is asked for. With more the thread wins: what comes while it
works shares a commit, and much of it takes itself back."""
_WRITE_BEHIND_CHANGES: Final = 50_000
"""How many of them there may be before they are written earlier: one transaction must stay short."""


class Persistence:
    """Sessions and retained messages in the directory ``path``; ``journal`` is what the broker engine records into.

    ``await open()``, hand the journal to the engine, then :meth:`start`. Call everything in the loop's thread.
    """

    def __init__(self, path: Path, durability: Durability = Durability.DURABLE) -> None:
        self.durability = durability
        self.journal = Journal(promise_all=durability is not Durability.MEMORY)
        self._store = SessionStore(path, durability)
        self._committer: GroupCommitter[Batch] = GroupCommitter(self._commit, name="mqtt", on_failure=self._failed)
        self._committed: Callable[[], None] = lambda: None
        self._on_failure: Callable[[StorageError], None] = lambda _error: None
        self._wall_offset: Callable[[], int] = lambda: 0
        self._committing = False
        self._inline_commits = 0
        self._inline_failure: StorageError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.changes = 0
        """Changes committed since the start."""
        self.recovered = 0
        self.quarantined = 0

    @property
    def failure(self) -> StorageError | None:
        """Why nothing can be promised any more; None while it can."""
        return self._inline_failure or self._committer.failure

    @property
    def stalled(self) -> StorageError | None:
        """Why acknowledgements wait for disk space; None while they do not."""
        return self._committer.stalled

    def figures(self) -> dict[str, int]:
        """For the metrics: counters since the start, and what is there now."""
        return {
            "commits": self._committer.commits + self._inline_commits,
            "changes": self.changes,
            "recovered_sessions": self.recovered,
            "quarantined": self.quarantined,
            "waiting": self.journal.waiting,
            "stored_bytes": self._store.stored_bytes,
            "failed": int(self.failure is not None),
        }

    async def open(self, wall_offset: Callable[[], int]) -> Recovered:
        """Load what is stored. ``wall_offset``: wall clock minus the engine's clock, now, in ms.

        Raises:
            StorageError: the directory cannot be opened; a damaged value alone does not stop it.
        """
        self._loop = asyncio.get_running_loop()
        self._wall_offset = wall_offset
        recovered = await asyncio.to_thread(self._store.open, wall_offset())
        self.journal.start_at(recovered.next_number)
        self.recovered = len(recovered.sessions)
        self.quarantined = len(recovered.quarantined)
        for name in recovered.quarantined:
            logger.error("quarantined path=%s record=%s: checksum does not match", self._store.path, name)
        return recovered

    def start(self, *, committed: Callable[[], None], failed: Callable[[StorageError], None]) -> None:
        """Accept commits; ``committed`` is called after each, ``failed`` once, when one cannot be done."""
        self._committed = committed
        self._on_failure = failed
        self._committer.start()
        self._store.when_failed(self._committer.fail_soon)

    def submit(self) -> None:
        """Start a commit of what was recorded, unless one runs (its end starts the next) or it may wait.

        Called at the end of a loop turn.
        """
        if self._committing or self._loop is None:
            return
        journal = self.journal
        if self.failure is not None:
            journal.cut(0)
            return
        if not journal.urgent:
            waiting = journal.waiting
            if not waiting:
                return
            if waiting < _WRITE_BEHIND_CHANGES:
                if self._timer is None:
                    self._timer = self._loop.call_later(WRITE_BEHIND_S[self.durability], self._write_behind)
                return
        self._cut()

    def reusable_bytes(self) -> int:
        """Bytes that can be stored without growing the file; from any thread."""
        return self._store.reusable_bytes()

    async def drain(self) -> None:
        """Commit all that was recorded, at the end; returns when it is done or has failed.

        It does not wait for disk space.
        """
        self._committer.give_up()
        while True:
            await self._idle.wait()
            if self.failure is not None or not (self.journal.waiting or self.journal.urgent):
                return
            self._cut()

    async def close(self) -> None:
        """Commit what was recorded and close the files; may be called twice."""
        if self._loop is None:
            return
        await self.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._committer.close()
        self._loop = None
        await asyncio.to_thread(self._store.close)

    def _write_behind(self) -> None:
        self._timer = None
        if not self._committing and self.journal.waiting:
            self._cut()

    def _cut(self) -> None:
        batch = self.journal.cut(self._wall_offset())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not batch:
            # All of it was taken back: there is nothing that could be lost.
            self.journal.committed = batch.number
            self._committed()
            return
        if self.durability is Durability.FLUSHED and len(batch) <= _INLINE_CHANGES:
            self._commit_inline(batch)
            return
        self._submit(batch)

    def _submit(self, batch: Batch) -> None:
        self._committing = True
        self._idle.clear()
        self._committer.submit(batch, partial(self._done, batch))

    def _commit_inline(self, batch: Batch) -> None:
        try:
            self._store.commit(batch)
        except OutOfSpaceError:
            self._submit(batch)  # which tries again
            return
        except StorageError as error:
            self._inline_failure = error
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the batch is not known to be written
            self._inline_failure = StorageError(f"mqtt sessions: commit failed: {error!r}", do="restart the node")
            self._inline_failure.__cause__ = error
        if self._inline_failure is not None:
            self._failed(self._inline_failure)
            return
        self._inline_commits += 1
        self.changes += len(batch)
        self.journal.committed = batch.number
        self._committed()

    def _commit(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._store.commit(batch)

    def _done(self, batch: Batch, failure: StorageError | None) -> None:
        self._committing = False
        self._idle.set()
        if failure is None:
            self.changes += len(batch)
            self.journal.committed = batch.number
            self._committed()
            self.submit()

    def _failed(self, failure: StorageError) -> None:
        logger.critical("nothing is acknowledged for kept sessions any more path=%s: %s", self._store.path, failure)
        self.journal.failure = failure.what
        self._on_failure(failure)
