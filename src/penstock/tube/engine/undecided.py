"""Transactions that are prepared on a broker and that nobody decides: an operator has to know of them.

A batch that spans several brokers is prepared at all of them and then decided by its driver, or by the next run of its
query. Where that run never comes, or one of the brokers never comes back, the rows stay and the query is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.tube.engine.staging import Query

__all__ = ["LATE_MS", "Late", "UndecidedWatch"]

LATE_MS = 120_000
"""A driver that lives decides within seconds, a query that starts again within its restart."""


class Late(NamedTuple):
    """A transaction that has been prepared for too long."""

    query: str
    batch: int
    participants: tuple[str, ...]
    since_ms: int


class UndecidedWatch:
    """Looks from time to time; nothing is kept of it over a restart."""

    def __init__(self) -> None:
        self.late: list[Late] = []
        """Those that were too old at the last look."""
        self._seen: dict[tuple[str, str], int] = {}

    def look(self, queries: Iterable[Query], now_ms: int) -> list[Late]:
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
            if since <= now_ms - LATE_MS:
                self.late.append(Late(query.name, decision.batch, decision.participants, since))
        return [item for item in self.late if (item.query, item.since_ms) not in before]
