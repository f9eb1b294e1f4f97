"""Where changes go: the disk, the log of changes, or nowhere, and what waits for which commit.

Every change that an answer waits for is part of a numbered commit, with all that come before it begins; commits finish
in order. With durability ``memory`` nothing waits: changes collect for a moment, so that a key set a thousand times is
written once, and only a disk that does not keep up makes answers wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from penstock.errors import StorageError
from penstock.runtime.io.committer import GroupCommitter
from penstock.runtime.io.files import Durability
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import Persistence, PersistenceMode
from penstock.statestore.service.storage import Storage

__all__ = ["ChangeWriter", "Committed"]

Committed = Callable[[int, StorageError | None], None]
"""Called once a numbered commit ended, in order: its number, and why it failed."""

_BEHIND_S: Final = 1.0
"""How long written-behind changes collect; as long as those of MQTT sessions."""

_INLINE_S: Final = 0.002
"""Commits that take less run in the loop: the hand-over to a thread and back would cost as much as a third of them. A
disk that stalls stops the loop once, for as long as it stalls; see decision 0034."""

_MAX_WRITE_BEHIND: Final = 50_000
"""Written-behind changes that may wait for the disk; beyond it answers wait too, so that a disk slower than the clients
slows them down instead of filling the memory."""


class ChangeWriter:
    """Takes changes in the order of their versions; call everything in the loop's thread.

    ``logs``: every change goes into the log of changes too. ``clock`` tells the greatest version given.
    """

    def __init__(
        self,
        storage: Storage,
        durability: Durability,
        persistence: Persistence,
        *,
        logs: bool,
        clock: Callable[[], Hlc],
        on_committed: Committed,
        on_logged: Callable[[Sequence[Change]], None],
        on_failure: Callable[[StorageError], None],
    ) -> None:
        self._storage = storage
        self._memory = durability is Durability.MEMORY
        self._selects = self._memory and persistence.mode is not PersistenceMode.ALL
        self._persistence = persistence
        self._on_disk: set[bytes] = set()
        self._logs = logs
        self._clock = clock
        self._on_committed = on_committed
        self._on_logged = on_logged
        self._on_failure = on_failure
        self.committer: GroupCommitter[Sequence[Change]] = GroupCommitter(
            self._commit,
            name="statestore",
            on_failure=on_failure,
            inline_s=0.0 if self._memory else _INLINE_S,
            small=lambda _: not storage.may_wait(),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._behind: dict[bytes | Hlc, Change] = {}
        """What is to be written behind: by key, so that of many changes the last is written; by version what counts
        beside its key, for the log or as the floor of a prefix."""
        self._behind_running = 0
        self._batch: list[Change] = []
        """The changes of the last commit that something waits for; more may come while it has not begun."""
        self._batch_of = -1
        self._timer: asyncio.TimerHandle | None = None
        self._stored_clock = Hlc(0, 0, "")
        self._trim_to: Hlc | None = None
        self.submitted = 0
        """The number of the last commit that something waits for."""
        self.uncommitted: dict[bytes, int] = {}
        """The number of the commit that a key has to wait for, where it may not be shown yet."""

    @property
    def failure(self) -> StorageError | None:
        """Why nothing can be written any more."""
        return self.committer.failure

    @property
    def stalled(self) -> StorageError | None:
        """Why answers wait for disk space; None while they do not."""
        return self.committer.stalled

    def start(self, recovered: Sequence[Record]) -> None:
        """Start the committer's thread; ``recovered`` is what is on disk."""
        self._loop = asyncio.get_running_loop()
        if self._selects:
            self._on_disk.update(record.key for record in recovered)
        self.committer.start()
        self._storage.when_failed(self.committer.fail_soon)

    async def close(self) -> None:
        """Commit what was submitted, call what waits for it, stop; nothing before :meth:`start`."""
        if self._loop is None:
            return
        self._flush()
        if self._trim_to is not None and self.failure is None:
            self.committer.submit((), _ignore)
        await self.committer.close()

    def waits_for(self, key: bytes) -> int:
        """The number of the commit that ``key`` has to wait for; 0: it may be shown."""
        return self.uncommitted.get(key, 0)

    def waits_for_any(self) -> int:
        """The number of the last commit that any key waits for; 0: all may be shown."""
        return self.submitted if self.uncommitted else 0

    def submit(self, changes: Sequence[Change], *, asked: bool = False) -> int:
        """Take ``changes``; the number of the commit that their answer waits for, 0 = none.

        ``asked``: the request wants the keys that it set kept.
        """
        committer = self.committer
        if committer.failure is not None:
            # Only keys that expire get here: they are gone for readers, and the next start removes them for good.
            return 0
        if self._memory:
            if self._selects:
                changes = self._selected(changes, asked=asked)
            # Once something waits, this change may not be told before it.
            if not self.uncommitted and len(self._behind) + self._behind_running < _MAX_WRITE_BEHIND:
                self._write_behind(changes)
                return 0
            if self._behind:
                self._flush()
        if self._batch_of != committer.started:
            self.submitted += 1
            batch = self._batch = []
            self._batch_of = committer.started
            committer.submit(batch, partial(self._done, self.submitted, batch))
        number = self.submitted
        self._batch += changes
        for change in changes:
            self.uncommitted[change.key] = number
        return number

    def note_lag(self, lag_ms: int) -> None:
        """Store how far the clock of the expiry instants is ahead of the wall clock, in a commit of its own."""
        self._storage.note_lag(lag_ms)
        if self.failure is None:
            self.committer.submit((), _ignore)

    def trim(self, floor: Hlc) -> None:
        """Drop the log up to ``floor`` with the next commit."""
        self._trim_to = floor

    def _selected(self, changes: Sequence[Change], *, asked: bool) -> Sequence[Change]:
        """What of it concerns the disk; all of it where there is a log, with what is not to be kept marked."""
        persistence, concerns = self._persistence, []
        custom = persistence.mode is PersistenceMode.CUSTOM
        for change in changes:
            key = change.key
            if change.record is not None and custom and (asked or key in persistence.keys):
                self._on_disk.add(key)
                concerns.append(change)
                continue
            change.kept = False
            if key in self._on_disk:
                # A value that is not kept must not let an older one come back after a restart.
                self._on_disk.discard(key)
                concerns.append(change)
            elif self._logs or change.floor is not None:
                concerns.append(change)
        return concerns

    def _write_behind(self, changes: Sequence[Change]) -> None:
        behind = self._behind
        for change in changes:
            if self._logs or change.floor is not None:
                behind.pop(change.key, None)
                behind[change.version] = change
            else:
                behind[change.key] = change
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(_BEHIND_S, self._flush)

    def _flush(self) -> None:
        """Hand what collected to the committer; nobody waits, a failure is told through ``on_failure``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._memory or self.failure is not None:
            return
        if self._behind or self._clock() > self._stored_clock:
            changes = list(self._behind.values())
            self._behind.clear()
            self._behind_running += len(changes)
            self.committer.submit(changes, partial(self._behind_done, changes))

    def _behind_done(self, changes: Sequence[Change], failure: StorageError | None) -> None:
        self._behind_running -= len(changes)
        if failure is None and self._logs:
            self._on_logged(changes)

    def _commit(self, batch: Sequence[Sequence[Change]]) -> None:
        """One transaction for ``batch``; runs in the committer's thread."""
        clock = self._clock()
        floor, self._trim_to = self._trim_to, None
        changes = [change for changes in batch for change in changes]
        self._storage.commit(changes, log=self._logs, clock=clock, floor=floor)
        self._stored_clock = clock

    def _done(self, number: int, changes: Sequence[Change], failure: StorageError | None) -> None:
        if failure is None:
            for change in changes:
                if self.uncommitted.get(change.key) == number:
                    del self.uncommitted[change.key]
        # After a failure the keys stay uncommitted for ever: the value in memory must never be shown.
        self._on_committed(number, failure)
        if failure is None and self._logs:
            self._on_logged(changes)


def _ignore(_: StorageError | None) -> None:
    """Nobody waits for the commit; a failure is reported through ``on_failure``."""
