"""The path of the store's changes to the disk, and the answers and notifications that wait for their commit.

The service carries out a request in memory and passes its changes to the writer. Every change that an answer waits for
belongs to a numbered commit of the :mod:`~penstock.runtime.io.commit_queue`, which takes all changes until it begins as
one list. An answer leaves after the commit of what it shows, and never before an earlier answer to the same client:
while one of them waits, those after it wait at least for the same commit.

With durability ``memory`` answers do not wait. Changes collect for a moment, so that a key that is set a thousand times
is written once; only a disk that does not keep up makes answers wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import StorageError
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue, CommitWaiter
from penstock.runtime.io.files import Durability
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import KeyPersistence, PersistenceMode
from penstock.statestore.service.delivery import ResponseSender
from penstock.statestore.service.storage import Storage

__all__ = ["ChangeWriter"]

_WRITE_BEHIND_S: Final = 1.0
"""Longest age of a change that is written behind; as long as those of MQTT sessions."""

_MAX_WRITE_BEHIND: Final = 50_000
"""Written-behind changes that may wait for the disk; beyond it answers wait too, so that a disk slower than the clients
slows them down instead of filling the memory."""

_INLINE_BYTES: Final = 64 << 10
"""Values of a commit in the loop; a larger one takes the disk longer than passing it to the thread."""

_NO_CLOCK: Final = Hlc(0, 0, "")


class _Commit:
    """One commit, filled until it begins."""

    __slots__ = ("behind", "changes", "clock", "floor", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.changes: list[Change] = []
        """In the order of their versions; the first ``behind`` of them were written behind."""
        self.behind = 0
        self.clock = _NO_CLOCK
        """The greatest version that was given when it began."""
        self.floor: Hlc | None = None
        """The log of changes is dropped up to this version."""


class ChangeWriter(CommitClient[_Commit]):
    """Commits changes, passed in the order of their versions. Call everything in the loop's thread.

    ``logs``: every change goes into the log of changes too; ``on_logged`` gets them after their commit. ``clock``
    returns the greatest version that was given. ``responses`` sends the answers that waited for a commit.
    """

    def __init__(
        self,
        storage: Storage,
        durability: Durability,
        persistence: KeyPersistence,
        *,
        logs: bool,
        clock: Callable[[], Hlc],
        on_logged: Callable[[Sequence[Change]], None],
        on_failure: Callable[[StorageError], None],
        responses: ResponseSender,
    ) -> None:
        self._storage = storage
        self._memory = durability is Durability.MEMORY
        self._selects = self._memory and persistence.mode is not PersistenceMode.ALL
        self._persistence = persistence
        self._on_disk: set[bytes] = set()
        self._logs = logs
        self._clock = clock
        self._on_logged = on_logged
        self._on_failure = on_failure
        self._responses = responses
        self.queue: CommitQueue[_Commit] = CommitQueue("statestore", self)
        self._next = _Commit(1)
        self._behind: dict[bytes | Hlc, Change] = {}
        """Changes to be written behind: by key, so that of many changes the last is written; by version those that
        are more than the state of their key: entries of the log, and floors of prefixes."""
        self._behind_running = 0
        self._stored_clock = _NO_CLOCK
        self._trim_to: Hlc | None = None
        self._last_change = 0
        """The last commit that a change waits for."""
        self._uncommitted: dict[bytes, int] = {}
        """The commit that a key has to wait for before it may be shown."""
        self._last_answer: dict[str, int] = {}
        """The commit that the last waiting answer to a client waits for."""
        self.waiting = 0
        """Answers that wait for a commit."""

    @property
    def failure(self) -> StorageError | None:
        """The reason if nothing can be written any more."""
        return self.queue.failure

    @property
    def stalled(self) -> StorageError | None:
        """The reason if answers wait for disk space."""
        return self.queue.stalled

    def start(self, recovered: Sequence[Record]) -> None:
        """Accept changes; ``recovered`` is what is on disk."""
        if self._selects:
            self._on_disk.update(record.key for record in recovered)
        self.queue.start()
        self._storage.when_failed(self.queue.fail_soon)

    async def close(self) -> None:
        """Commit what was submitted, call what waits for it, stop; nothing before :meth:`start`."""
        if not self.queue.is_started:
            return
        has_news = self._memory and (bool(self._behind) or self._clock() > self._stored_clock)
        if self.failure is None and (has_news or self._trim_to is not None):
            self.queue.request()
        await self.queue.close()

    # Changes

    def submit(self, changes: list[Change], *, asked: bool = False) -> int:
        """Take ``changes``; returns the commit that their answer waits for, 0 = none.

        ``asked``: the request asks for the keys that it sets to be stored.
        """
        queue = self.queue
        if queue.failure is not None:
            # Only keys that expire get here: they are gone for readers, and the next start removes them for good.
            return 0
        uncommitted = self._uncommitted
        if self._memory:
            if self._selects:
                changes = self._selected(changes, asked=asked)
            # While something waits, no later change may be shown before it.
            if not uncommitted and len(self._behind) + self._behind_running < _MAX_WRITE_BEHIND:
                self._write_behind(changes)
                return 0
        number = self._last_change = queue.request()
        self._next.changes.extend(changes)
        for change in changes:
            uncommitted[change.key] = number
        return number

    def waits_for(self, key: bytes) -> int:
        """The commit that ``key`` has to wait for; 0: it may be shown."""
        return self._uncommitted.get(key, 0) if self._uncommitted else 0

    def waits_for_any(self) -> int:
        """The last commit that any key waits for; 0: all may be shown."""
        return self._last_change if self._uncommitted else 0

    def note_lag(self, lag_ms: int) -> None:
        """Store how far the clock of the expiry instants is ahead of the wall clock, in a commit of its own."""
        self._storage.note_lag(lag_ms)
        if self.failure is None:
            self.queue.request()

    def trim(self, floor: Hlc) -> None:
        """Drop the log up to ``floor`` with the next commit."""
        self._trim_to = floor

    # What waits

    def answer_waits_for(self, client_id: str, number: int) -> int:
        """The commit that an answer to ``client_id`` waits for which itself needs ``number`` (0 = none)."""
        if self._last_answer and (last := self._last_answer.get(client_id, 0)) > number:
            return last
        return number

    def add_answer(self, number: int, client_id: str, answer: CommitWaiter) -> None:
        """Have ``answer`` wait for the commit ``number``, as :meth:`answer_waits_for` returned it.

        It calls :meth:`answer_leaves` first when the commit has ended.
        """
        self._last_answer[client_id] = number
        self.waiting += 1
        self.queue.wait(number, answer)

    def answer_leaves(self, number: int, client_id: str) -> None:
        """An answer that waited for the commit ``number`` is about to be sent."""
        self.waiting -= 1
        if self._last_answer.get(client_id, 0) == number:
            del self._last_answer[client_id]

    def add_notifications(self, number: int, notifications: CommitWaiter) -> None:
        """Have ``notifications`` wait for the commit ``number``; no answer waits behind them."""
        self.queue.wait(number, notifications)

    # Commits

    def begin_commit(self) -> _Commit:
        """Take the changes, those written behind first [CommitClient]."""
        commit, self._next = self._next, _Commit(self.queue.number)
        if self._behind:
            commit.behind = len(self._behind)
            self._behind_running += commit.behind
            # While a change waits in a commit none is written behind: these are the older ones.
            commit.changes = [*self._behind.values(), *commit.changes]
            self._behind.clear()
        commit.clock = self._clock()
        commit.floor, self._trim_to = self._trim_to, None
        return commit

    def is_small_commit(self, commit: _Commit) -> bool:
        """Whether its values are few bytes, and somebody waits for it [CommitClient]."""
        if self._memory:
            return False
        size = 0
        for change in commit.changes:
            if change.record is not None:
                size += len(change.record.value)
        return size <= _INLINE_BYTES and not self._storage.may_wait()

    def write_commit(self, commit: _Commit) -> None:
        """In one transaction [CommitClient]."""
        self._storage.commit(commit.changes, log=self._logs, clock=commit.clock, floor=commit.floor)

    def end_commit(self, commit: _Commit, failure: StorageError | None) -> None:
        """Show the values of the keys that wait for no later commit [CommitClient]."""
        self._responses.begin_answers()
        self._behind_running -= commit.behind
        if failure is not None:
            return  # the keys stay uncommitted for ever: the values in memory must never be shown
        self._stored_clock = commit.clock
        uncommitted = self._uncommitted
        if not self._next.changes and not self.queue.running:
            uncommitted.clear()
        else:
            for change in commit.changes:
                if uncommitted.get(change.key) == commit.number:
                    del uncommitted[change.key]
        if self._logs:
            self._on_logged(commit.changes)

    def commits_failed(self, failure: StorageError) -> None:
        """Pass it on [CommitClient]."""
        self._on_failure(failure)

    def send_answers(self) -> None:
        """Send the answers of a commit at once [CommitClient]."""
        self._responses.end_answers()

    # Written behind

    def _write_behind(self, changes: list[Change]) -> None:
        behind = self._behind
        for change in changes:
            if self._logs or change.floor is not None:
                behind.pop(change.key, None)
                behind[change.version] = change
            else:
                behind[change.key] = change
        self.queue.request_within(_WRITE_BEHIND_S)

    def _selected(self, changes: list[Change], *, asked: bool) -> list[Change]:
        """The changes that concern the disk; all of them where there is a log, marked where they are not to be kept."""
        persistence = self._persistence
        concerns: list[Change] = []
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
