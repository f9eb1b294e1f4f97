"""State of exactly-once queries at a broker: their runs, staged rows and committed batches.

A query is written by one run at a time; a newer run fences the older. Its tasks stage rows per attempt; a transaction
names the winning attempts of a batch. It is first prepared if it spans several brokers; then it is published, and the
number of the batch is stored. From then on the batch is committed, even if rows are staged for it again.

The state of a query is a note on disk (`Query.note`), which is durable before any response or change that depends on
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.tube.engine.interfaces import LeftoverFile, StagedFile, StagingStore

__all__ = [
    "NOTES",
    "OVERDUE_MS",
    "Attempt",
    "Decision",
    "InDoubtWatch",
    "OverdueTransaction",
    "Query",
    "StagedRow",
    "Staging",
    "StagingLimits",
]

NOTES = "staging/"
"""Prefix of the names of the notes."""
_STALE_KEPT = 32
_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Limits of staged rows on one broker.

    ``max_bytes`` and ``max_attempts`` apply to all queries together; beyond them rows are rejected (419). Uncommitted
    rows are removed after ``keep_ms``. The state of a query that is idle for ``forget_ms`` is removed, with the number
    of its last batch; so is the state of the query idle for longest if there are more than ``max_queries``.
    """

    max_bytes: int = 4 << 30
    max_attempts: int = 20_000
    max_queries: int = 100_000
    keep_ms: int = _DAY_MS
    forget_ms: int = 30 * _DAY_MS


class Attempt:
    """Rows that one attempt of a task staged."""

    __slots__ = ("batch", "changed_ms", "file", "name", "run", "task")

    def __init__(self, name: str, task: int, batch: int, run: str, file: StagedFile, changed_ms: int) -> None:
        self.name = name
        self.task = task
        self.batch = batch
        self.run = run
        self.file = file
        self.changed_ms = changed_ms


class Decision(NamedTuple):
    """A transaction: the winners of a batch in the order of publication, each with its number of rows.

    ``number`` identifies the messages that it stores, so that none is stored twice after a crash; 0 while it is only
    prepared.
    """

    transaction: str
    batch: int
    winners: tuple[tuple[str, int], ...]
    participants: tuple[str, ...]
    number: int = 0

    @property
    def publishing(self) -> bool:
        """True if the transaction is decided and being applied."""
        return self.number > 0


class Query:
    """One query. ``stale``: replaced runs; ``committed``: the last published batch, -1 for none."""

    __slots__ = ("attempts", "changed_ms", "committed", "decision", "epoch", "name", "once", "run", "stale")

    def __init__(self, name: str, run: str, epoch: int, now_ms: int, *, once: bool) -> None:
        self.name = name
        self.run = run
        self.epoch = epoch
        self.once = once
        self.changed_ms = now_ms
        self.stale: list[str] = []
        self.committed = -1
        self.decision: Decision | None = None
        self.attempts: dict[str, Attempt] = {}

    def note(self) -> bytes:
        """Encode the state that must survive a restart, without the rows."""
        state = {
            "query": self.name, "run": self.run, "epoch": self.epoch, "once": self.once, "changed": self.changed_ms,
            "stale": self.stale, "committed": self.committed, "decision": self.decision,
        }  # fmt: skip
        return json.dumps(state, separators=(",", ":")).encode()

    @classmethod
    def from_note(cls, note: bytes) -> Query:
        """Decode the result of :meth:`note`."""
        state = json.loads(note)
        query = cls(state["query"], state["run"], state["epoch"], state["changed"], once=state["once"])
        query.stale = state["stale"]
        query.committed = state["committed"]
        if state["decision"] is not None:
            transaction, batch, winners, participants, number = state["decision"]
            named = tuple((str(name), int(rows)) for name, rows in winners)
            query.decision = Decision(transaction, batch, named, tuple(participants), number)
        return query

    def takes(self, run: str, epoch: int) -> bool:
        """Return True if ``run`` is the query's run, or a newer one."""
        return run == self.run or (run not in self.stale and (not epoch or epoch >= self.epoch))

    def decided(self, batch: int) -> bool:
        """Return True if ``batch`` is committed or being published."""
        decision = self.decision
        return batch <= self.committed or (decision is not None and decision.publishing and batch <= decision.batch)

    @property
    def held(self) -> frozenset[str]:
        """Return the attempts that a transaction needs."""
        return frozenset(() if self.decision is None else (name for name, _ in self.decision.winners))


class StagedRow(NamedTuple):
    """One attempt, for display. ``state``: staged, prepared or publishing."""

    query: str
    run: str
    batch: int
    task: int
    attempt: str
    rows: int
    bytes: int
    state: str
    age_ms: int


class Staging:
    """All queries of a broker. ``notes``: changed notes for the shell to store (None: removed)."""

    def __init__(self, files: StagingStore, limits: StagingLimits) -> None:
        self.files = files
        self.limits = limits
        self.queries: dict[str, Query] = {}
        self.bytes = 0
        self.attempts = 0
        self.expired = 0
        """Number of attempts that were removed because they were not committed in time."""
        self.notes: dict[str, bytes | None] = {}

    def restore(self, notes: Mapping[str, bytes], left: Iterable[LeftoverFile]) -> list[str]:
        """Restore the state of an earlier process; returns messages about missing rows of decided transactions.

        Files of unknown queries, of replaced runs and of committed batches are removed.
        """
        for name, note in notes.items():
            if name.startswith(NOTES):
                query = Query.from_note(note)
                self.queries[query.name] = query
        for item in left:
            about = json.loads(item.about)
            known = self.queries.get(about["query"])
            attempt = Attempt(
                about["attempt"], about["task"], about["batch"], about["run"], item.file, about["created"]
            )
            wanted = known is not None and (
                attempt.name in known.held or (attempt.run == known.run and not known.decided(attempt.batch))
            )
            if known is None or not wanted:
                item.file.remove()
            else:
                self._count(known, attempt)
        return list(self._missing())

    def _missing(self) -> Iterator[str]:
        for query in self.queries.values():
            for name, rows in query.decision.winners if query.decision is not None else ():
                found = query.attempts.get(name)
                there = 0 if found is None else found.file.rows
                if there < rows:
                    yield f"query {query.name}: {rows - there} of {rows} staged rows of attempt {name} are lost"

    def _count(self, query: Query, attempt: Attempt) -> None:
        query.attempts[attempt.name] = attempt
        self.bytes += attempt.file.size
        self.attempts += 1

    # Queries and runs.

    def enter(self, name: str, run: str, epoch: int, now_ms: int, *, once: bool) -> Query | None:
        """Set the query's run to ``run`` and return the query; None if ``run`` is older than the query's run."""
        query = self.queries.get(name)
        if query is None:
            if len(self.queries) >= self.limits.max_queries:
                self._forget_oldest()
            query = self.queries[name] = Query(name, run, max(epoch, 1), now_ms, once=once)
            self.changed(query, now_ms)
        elif not query.takes(run, epoch):
            return None
        elif run != query.run:
            query.stale = [*query.stale, query.run][-_STALE_KEPT:]
            query.run = run
            query.epoch = epoch or query.epoch + 1
            held = query.held
            self.drop(query, [attempt for attempt in query.attempts if attempt not in held])
            self.changed(query, now_ms)
        return query

    def changed(self, query: Query, now_ms: int) -> None:
        """Mark the query's state as changed, to be stored."""
        query.changed_ms = now_ms
        self.notes[NOTES + query.name] = query.note()

    def _forget_oldest(self) -> None:
        idle = [query for query in self.queries.values() if not query.attempts and query.decision is None]
        for query in sorted(idle, key=lambda query: query.changed_ms)[: max(1, len(idle) // 10)]:
            self._forget(query)

    def _forget(self, query: Query) -> None:
        del self.queries[query.name]
        self.notes[NOTES + query.name] = None

    # Attempts.

    def add(self, query: Query, name: str, task: int, batch: int, now_ms: int) -> Attempt:
        """Create an attempt of the query's run."""
        about = {"query": query.name, "run": query.run, "batch": batch, "task": task, "attempt": name,
                 "created": now_ms}  # fmt: skip
        file = self.files.add(json.dumps(about, separators=(",", ":")).encode())
        attempt = Attempt(name, task, batch, query.run, file, now_ms)
        self._count(query, attempt)
        return attempt

    def append(self, attempt: Attempt, body: bytes, rows: int, now_ms: int) -> None:
        """Append rows of an attempt."""
        before = attempt.file.size
        attempt.file.append(body, rows)
        self.bytes += attempt.file.size - before
        attempt.changed_ms = now_ms

    def drop(self, query: Query, names: Iterable[str]) -> int:
        """Remove attempts; returns the number of removed ones."""
        count = 0
        for name in names:
            attempt = query.attempts.pop(name, None)
            if attempt is not None:
                attempt.file.remove()
                self.bytes -= attempt.file.size
                self.attempts -= 1
                count += 1
        return count

    # Transactions.

    def missing(self, query: Query, batch: int, winners: Iterable[tuple[str, int]]) -> str | None:
        """Return the reason why these winners of the query's run cannot be published, if any."""
        for name, rows in winners:
            attempt = query.attempts.get(name)
            if attempt is None or attempt.run != query.run or attempt.batch != batch:
                return f"attempt {name} of batch {batch} is not staged on this broker"
            if attempt.file.durable_rows != rows:
                return f"attempt {name} has {attempt.file.durable_rows} rows staged on this broker, not {rows}"
        return None

    def decide(self, query: Query, decision: Decision, now_ms: int) -> None:
        """Prepare a transaction, or begin to publish it."""
        query.decision = decision
        self.changed(query, now_ms)

    def finish(self, query: Query, now_ms: int) -> None:
        """End the decision of ``query``: its batch is committed, and its attempts and earlier ones are removed."""
        assert query.decision is not None
        query.committed = query.decision.batch
        query.decision = None
        self.drop(query, [name for name, attempt in query.attempts.items() if attempt.batch <= query.committed])
        self.changed(query, now_ms)

    def undo(self, query: Query, now_ms: int) -> None:
        """Abort a prepared transaction and remove its staged rows."""
        held = query.held
        query.decision = None
        self.drop(query, held)
        self.changed(query, now_ms)

    # Time and display.

    def tick(self, now_ms: int) -> None:
        """Remove attempts that were not committed in time, and idle queries."""
        limits = self.limits
        for query in list(self.queries.values()):
            held = query.held
            late = [
                attempt.name
                for attempt in query.attempts.values()
                if attempt.name not in held and attempt.changed_ms <= now_ms - limits.keep_ms
            ]
            self.expired += self.drop(query, late)
            keep = limits.keep_ms if query.once else limits.forget_ms
            if query.decision is None and not query.attempts and query.changed_ms <= now_ms - keep:
                self._forget(query)

    def rows(self, now_ms: int) -> Iterator[StagedRow]:
        """Staged attempts by query, batch and task."""
        for _, query in sorted(self.queries.items()):
            held = query.held
            state = "publishing" if query.decision is not None and query.decision.publishing else "prepared"
            for item in sorted(query.attempts.values(), key=lambda item: (item.batch, item.task, item.name)):
                yield StagedRow(
                    query.name, item.run, item.batch, item.task, item.name, item.file.rows, item.file.size,
                    state if item.name in held else "staged", max(now_ms - item.changed_ms, 0),
                )  # fmt: skip


OVERDUE_MS = 120_000
"""Time after which a prepared transaction is overdue: a running driver decides within seconds, a restarted query during
its start."""


class OverdueTransaction(NamedTuple):
    """A transaction that has been prepared for too long."""

    query: str
    batch: int
    participants: tuple[str, ...]
    since_ms: int


class InDoubtWatch:
    """Detects transactions that stay prepared; its state does not survive a restart.

    A batch that spans several brokers is prepared at all of them and then decided by its driver, or by the next run of
    its query. If that run never starts, or a broker never returns, the rows remain and the query is blocked until an
    operator acts.
    """

    def __init__(self) -> None:
        self.late: list[OverdueTransaction] = []
        """Overdue transactions at the last check."""
        self._seen: dict[tuple[str, str], int] = {}

    def check(self, queries: Iterable[Query], now_ms: int) -> list[OverdueTransaction]:
        """Return the transactions that became overdue since the last check."""
        known, self._seen = self._seen, {}
        before = {(item.query, item.since_ms) for item in self.late}
        self.late = []
        for query in queries:
            decision = query.decision
            if decision is None or decision.publishing:
                continue
            name = (query.name, decision.transaction)
            since = self._seen[name] = known.get(name, now_ms)
            if since <= now_ms - OVERDUE_MS:
                self.late.append(OverdueTransaction(query.name, decision.batch, decision.participants, since))
        return [item for item in self.late if (item.query, item.since_ms) not in before]
