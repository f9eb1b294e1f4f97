"""What a broker knows of queries whose batches are stored once: their runs, what is staged, what is committed.

A query is written by one run at a time; a newer one fences the older. Its tasks stage rows attempt by attempt; a
transaction names the attempts of a batch that won. It is prepared where it spans several brokers, then published, and
the number of the batch is remembered: from then on that batch is committed, whatever is staged for it again.

A query's state is a note on disk (`Query.note`) that is durable before anything that depends on it is answered or done.
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
"""What the names of the notes begin with."""
_STALE_KEPT = 32
_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Bounds of what is staged on one broker.

    ``max_bytes`` and ``max_attempts`` of all queries together; beyond, rows are refused (419). What is not committed
    goes after ``keep_ms``. A query that does nothing for ``forget_ms`` is forgotten, with the number of its last batch;
    so is the one that is silent for longest when there are more than ``max_queries``.
    """

    max_bytes: int = 4 << 30
    max_attempts: int = 20_000
    max_queries: int = 100_000
    keep_ms: int = _DAY_MS
    forget_ms: int = 30 * _DAY_MS


class Attempt:
    """Rows that one attempt of a task staged here."""

    __slots__ = ("batch", "changed_ms", "file", "name", "run", "task")

    def __init__(self, name: str, task: int, batch: int, run: str, file: StagedFile, changed_ms: int) -> None:
        self.name = name
        self.task = task
        self.batch = batch
        self.run = run
        self.file = file
        self.changed_ms = changed_ms


class Decision(NamedTuple):
    """A transaction: the winners of a batch in the order in which they are published, each with its rows.

    ``number`` numbers the messages it stores, so that none is stored twice after a crash; 0 while it is only prepared.
    """

    transaction: str
    batch: int
    winners: tuple[tuple[str, int], ...]
    participants: tuple[str, ...]
    number: int = 0

    @property
    def publishing(self) -> bool:
        """Whether it is decided, and being carried out."""
        return self.number > 0


class Query:
    """One query. ``stale``: runs that were replaced; ``committed``: the last batch published, -1 for none."""

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
        """All that must outlive a restart, but for the rows."""
        state = {
            "query": self.name, "run": self.run, "epoch": self.epoch, "once": self.once, "changed": self.changed_ms,
            "stale": self.stale, "committed": self.committed, "decision": self.decision,
        }  # fmt: skip
        return json.dumps(state, separators=(",", ":")).encode()

    @classmethod
    def from_note(cls, note: bytes) -> Query:
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
        """Whether ``run`` is the query's, or newer."""
        return run == self.run or (run not in self.stale and (not epoch or epoch >= self.epoch))

    def decided(self, batch: int) -> bool:
        """Whether ``batch`` is committed, or will be without anything more."""
        decision = self.decision
        return batch <= self.committed or (decision is not None and decision.publishing and batch <= decision.batch)

    @property
    def held(self) -> frozenset[str]:
        """Attempts that a transaction needs."""
        return frozenset(() if self.decision is None else (name for name, _ in self.decision.winners))


class StagedRow(NamedTuple):
    """One attempt, for people. ``state``: staged, prepared or publishing."""

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
    """All queries of a broker. ``notes``: what changed and has to be made durable, for the shell (None: removed)."""

    def __init__(self, files: StagingStore, limits: StagingLimits) -> None:
        self.files = files
        self.limits = limits
        self.queries: dict[str, Query] = {}
        self.bytes = 0
        self.attempts = 0
        self.expired = 0
        """Attempts that went because nobody committed them for too long."""
        self.notes: dict[str, bytes | None] = {}

    def restore(self, notes: Mapping[str, bytes], left: Iterable[LeftoverFile]) -> list[str]:
        """Take over what an earlier process left; in words, what is missing of decided transactions.

        Files of no known query, of runs that were replaced and of batches that are committed are removed.
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
                    yield f"query {query.name}: {rows - there} of {rows} staged rows of attempt {name} are gone"

    def _count(self, query: Query, attempt: Attempt) -> None:
        query.attempts[attempt.name] = attempt
        self.bytes += attempt.file.size
        self.attempts += 1

    # Queries and runs.

    def enter(self, name: str, run: str, epoch: int, now_ms: int, *, once: bool) -> Query | None:
        """The query, whose run is ``run`` from now on; None: it is older than the query's."""
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
        """The query's state has to be noted."""
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
        """A new attempt of the query's run."""
        about = {"query": query.name, "run": query.run, "batch": batch, "task": task, "attempt": name,
                 "created": now_ms}  # fmt: skip
        file = self.files.add(json.dumps(about, separators=(",", ":")).encode())
        attempt = Attempt(name, task, batch, query.run, file, now_ms)
        self._count(query, attempt)
        return attempt

    def append(self, attempt: Attempt, body: bytes, rows: int, now_ms: int) -> None:
        """More rows of an attempt."""
        before = attempt.file.size
        attempt.file.append(body, rows)
        self.bytes += attempt.file.size - before
        attempt.changed_ms = now_ms

    def drop(self, query: Query, names: Iterable[str]) -> int:
        """Remove attempts; how many there were."""
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
        """Why these winners of the query's run cannot be published, if so."""
        for name, rows in winners:
            attempt = query.attempts.get(name)
            if attempt is None or attempt.run != query.run or attempt.batch != batch:
                return f"attempt {name} of batch {batch} is not staged here (any more)"
            if attempt.file.durable_rows != rows:
                return f"attempt {name} has {attempt.file.durable_rows} rows staged here, not {rows}"
        return None

    def decide(self, query: Query, decision: Decision, now_ms: int) -> None:
        """Prepare, or begin to publish."""
        query.decision = decision
        self.changed(query, now_ms)

    def finish(self, query: Query, now_ms: int) -> None:
        """The decision of ``query`` is carried out: nothing of its batch, or of one before, is needed any more."""
        assert query.decision is not None
        query.committed = query.decision.batch
        query.decision = None
        self.drop(query, [name for name, attempt in query.attempts.items() if attempt.batch <= query.committed])
        self.changed(query, now_ms)

    def undo(self, query: Query, now_ms: int) -> None:
        """Let a prepared transaction go, with what was staged for it."""
        held = query.held
        query.decision = None
        self.drop(query, held)
        self.changed(query, now_ms)

    # Time and people.

    def tick(self, now_ms: int) -> None:
        """Let go what nobody committed for too long, and queries that were silent for too long."""
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
        """What is staged, by query, batch and task."""
        for _, query in sorted(self.queries.items()):
            held = query.held
            state = "publishing" if query.decision is not None and query.decision.publishing else "prepared"
            for item in sorted(query.attempts.values(), key=lambda item: (item.batch, item.task, item.name)):
                yield StagedRow(
                    query.name, item.run, item.batch, item.task, item.name, item.file.rows, item.file.size,
                    state if item.name in held else "staged", max(now_ms - item.changed_ms, 0),
                )  # fmt: skip


OVERDUE_MS = 120_000
"""A driver that lives decides within seconds, a query that starts again within its restart."""


class OverdueTransaction(NamedTuple):
    """A transaction that has been prepared for too long."""

    query: str
    batch: int
    participants: tuple[str, ...]
    since_ms: int


class InDoubtWatch:
    """Looks from time to time; nothing is kept of it over a restart."""

    def __init__(self) -> None:
        self.late: list[OverdueTransaction] = []
        """Those that were too old at the last look."""
        self._seen: dict[tuple[str, str], int] = {}

    def look(self, queries: Iterable[Query], now_ms: int) -> list[OverdueTransaction]:
        """Those that became too old since the last look."""
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
