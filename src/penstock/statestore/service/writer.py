"""Write the store's changes to disk, and release the answers and notifications that wait for their commit.

The service executes a request in memory and passes its changes to the writer. Every change that an answer waits for
belongs to a numbered commit of the :mod:`~penstock.runtime.io.commit_queue`, which collects changes until it starts. An
answer is sent after the commit of the changes that it shows, and never before an earlier answer to the same client: if
an answer waits, later ones wait for the same commit or a later one.

With durability ``memory`` answers do not wait. Changes are collected for a short time, so that a key that is set a
thousand times is written once; answers wait only if the disk is too slow.
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
"""Maximum age of a write-behind change, as for MQTT sessions."""

_MAX_WRITE_BEHIND: Final = 50_000
"""Maximum number of write-behind changes that wait for the disk; then answers wait, too, so that a slow disk slows down
clients instead of filling the memory."""

_INLINE_BYTES: Final = 64 << 10
"""Maximum bytes of values for a commit in the loop; for larger commits the thread switch is cheaper than the write."""

_ALONE_COMMITS: Final = 8
"""Number of commits, each with answers to the same client only, after which its next commit does not wait for the end
of the loop turn."""

_NO_CLOCK: Final = Hlc(0, 0, "")


class _Commit:
    """One commit, to which changes are added until it starts."""

    __slots__ = ("behind", "changes", "clock", "floor", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.changes: list[Change] = []
        """Changes in the order of their versions; the first ``behind`` of them are write-behind changes."""
        self.behind = 0
        self.clock = _NO_CLOCK
        """The greatest assigned version when it started."""
        self.floor: Hlc | None = None
        """Version up to which the log of changes is dropped."""


class ChangeWriter(CommitClient[_Commit]):
    """Commits changes, passed in the order of their versions. Not thread-safe: use it in the loop's thread.

    ``logs``: changes are also written to the log of changes; ``on_logged`` receives them after their commit. ``clock``
    returns the greatest assigned version. ``responses`` sends the answers that waited for a commit.
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
        """Write-behind changes: by key if only the last one of a key must be written; by version if all must be:
        entries of the log, and floors of prefixes."""
        self._behind_running = 0
        self._stored_clock = _NO_CLOCK
        self._trim_to: Hlc | None = None
        self._last_change = 0
        """The last commit with a change."""
        self._uncommitted: dict[bytes, int] = {}
        """Uncommitted keys, and the commit after which their values may be sent."""
        self._last_answer: dict[str, int] = {}
        """The commit for which the last answer to each client waits, by client identifier."""
        self._only_client = ""
        """The client to which the last commit with answers to one client had answers."""
        self._alone_commits = 0
        """Number of commits since the last one with answers to another client."""
        self._on_read_end: Callable[[], None] = self._read_ended
        self.waiting = 0
        """Number of answers that wait for a commit."""

    @property
    def failure(self) -> StorageError | None:
        """The error of a failed commit, after which nothing is written."""
        return self.queue.failure

    @property
    def stalled(self) -> StorageError | None:
        """The reason if answers wait for disk space."""
        return self.queue.stalled

    def start(self, recovered: Sequence[Record]) -> None:
        """Start to accept changes; ``recovered`` are the stored records."""
        if self._selects:
            self._on_disk.update(record.key for record in recovered)
        self.queue.start()
        self._storage.when_failed(self.queue.fail_soon)

    async def close(self) -> None:
        """Commit submitted changes, send their answers, and stop. Does nothing before :meth:`start`."""
        if not self.queue.is_started:
            return
        has_news = self._memory and (bool(self._behind) or self._clock() > self._stored_clock)
        if self.failure is None and (has_news or self._trim_to is not None):
            self.queue.request()
        await self.queue.close()

    # Changes

    def submit(self, changes: list[Change], *, asked: bool = False) -> int:
        """Submit ``changes``; return the commit for which their answer waits, 0 = none.

        ``asked``: the request requires that its keys are stored.
        """
        queue = self.queue
        if queue.failure is not None:
            # Only expiries reach this point: the keys are invisible to readers, and the next start removes them from
            # disk.
            return 0
        uncommitted = self._uncommitted
        if self._memory:
            if self._selects:
                changes = self._selected(changes, asked=asked)
            # While a change waits, no later change may become visible before it.
            if not uncommitted and len(self._behind) + self._behind_running < _MAX_WRITE_BEHIND:
                self._write_behind(changes)
                return 0
        number = self._last_change = queue.request()
        self._next.changes.extend(changes)
        for change in changes:
            uncommitted[change.key] = number
        return number

    def waits_for(self, key: bytes) -> int:
        """Return the commit for which an answer with ``key`` waits; 0: none."""
        return self._uncommitted.get(key, 0) if self._uncommitted else 0

    def waits_for_any(self) -> int:
        """Return the last commit for which an answer with any key waits; 0: none."""
        return self._last_change if self._uncommitted else 0

    def note_lag(self, lag_ms: int) -> None:
        """Store the lead of the clock of expiry times over the wall clock, in a separate commit."""
        self._storage.note_lag(lag_ms)
        if self.failure is None:
            self.queue.request()

    def trim(self, floor: Hlc) -> None:
        """Drop the log up to ``floor`` with the next commit."""
        self._trim_to = floor

    # Waiting answers

    def answer_waits_for(self, client_id: str, number: int) -> int:
        """Return the commit for which an answer to ``client_id`` waits if it needs ``number`` (0 = none)."""
        if self._last_answer and (last := self._last_answer.get(client_id, 0)) > number:
            return last
        return number

    def add_answer(self, number: int, client_id: str, answer: CommitWaiter) -> None:
        """Add ``answer`` to the commit ``number`` that :meth:`answer_waits_for` returned.

        After the commit, the answer must call :meth:`answer_leaves` first.
        """
        self._last_answer[client_id] = number
        self.waiting += 1
        self.queue.wait(number, answer)

    def answer_leaves(self, number: int, client_id: str) -> None:
        """Count an answer that waited for the commit ``number`` as sent."""
        self.waiting -= 1
        if self._last_answer.get(client_id, 0) == number:
            del self._last_answer[client_id]

    def add_notifications(self, number: int, notifications: CommitWaiter) -> None:
        """Add ``notifications`` to the commit ``number``; answers need not wait for them."""
        self.queue.wait_also(number, notifications)

    # Commits

    def begins_commit(self) -> bool:
        """Return True if the commit begins at the end of the read that is being handled [CommitClient].

        A client that was the only one to wait for the last commits will wait for this one, too. To begin at the end of
        its read saves a callback of the event loop and a second write: answers are sent like those of other reads.
        """
        outlet = self._responses.outlet
        return self._alone_commits >= _ALONE_COMMITS and outlet is not None and outlet.at_read_end(self._on_read_end)

    def _read_ended(self) -> None:
        if len(self._last_answer) == 1 and self._only_client in self._last_answer:
            self.queue.begin()
        else:
            self.queue.begin_at_turn_end()

    def begin_commit(self) -> _Commit:
        """Take the changes of a commit, write-behind changes first [CommitClient]."""
        answers = self._last_answer
        if len(answers) == 1 and self._only_client in answers:
            self._alone_commits += 1
        elif answers:
            self._alone_commits = 0
            for self._only_client in answers:
                break
        commit, self._next = self._next, _Commit(self.queue.number)
        if self._behind:
            commit.behind = len(self._behind)
            self._behind_running += commit.behind
            # While a commit waits, no change is added to the write-behind changes, so these are older.
            commit.changes = [*self._behind.values(), *commit.changes]
            self._behind.clear()
        commit.clock = self._clock()
        commit.floor, self._trim_to = self._trim_to, None
        return commit

    def is_small_commit(self, commit: _Commit) -> bool:
        """Return True if its values are small and a client waits for it [CommitClient]."""
        if self._memory:
            return False
        size = 0
        for change in commit.changes:
            if change.record is not None:
                size += len(change.record.value)
        return size <= _INLINE_BYTES and not self._storage.may_wait()

    def write_commit(self, commit: _Commit) -> None:
        """Write the changes in one transaction [CommitClient]."""
        self._storage.commit(commit.changes, log=self._logs, clock=commit.clock, floor=commit.floor)

    def end_commit(self, commit: _Commit, failure: StorageError | None) -> None:
        """Make the values of keys visible unless they wait for a later commit [CommitClient]."""
        self._responses.begin_answers()
        self._behind_running -= commit.behind
        if failure is not None:
            return  # the keys stay uncommitted, since their values in memory must not be sent
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
        """Report the failure [CommitClient]."""
        self._on_failure(failure)

    def send_answers(self) -> None:
        """Send the answers of a commit together [CommitClient]."""
        self._responses.end_answers()

    # Write-behind

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
        """Return the changes to store; if there is a log, all of them, with a mark on keys that are not stored."""
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
                # If the new value is not stored, an older one must not reappear after a restart.
                self._on_disk.discard(key)
                concerns.append(change)
            elif self._logs or change.floor is not None:
                concerns.append(change)
        return concerns
