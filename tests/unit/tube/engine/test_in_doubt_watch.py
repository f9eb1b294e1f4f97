"""Transactions that nobody decides are told once, and are shown until somebody does."""

from __future__ import annotations

from penstock.tube.engine.transactions.staging import (
    OVERDUE_MS,
    Decision,
    InDoubtWatch,
    OverdueTransaction,
    Query,
)

PLACES = ("1:a:8123", "2:b:8123")


def prepared(name: str, transaction: str, batch: int, number: int = 0) -> Query:
    query = Query(name, "run", 0, 0, once=True)
    query.decision = Decision(transaction, batch, (), PLACES, number)
    return query


def test_an_overdue_transaction_is_reported_once() -> None:
    watch = InDoubtWatch()
    queries = [
        prepared("stuck", "t1", 7),
        prepared("published", "t2", 3, number=9),
        Query("idle", "r", 0, 0, once=True),
    ]
    assert watch.check(queries, 1000) == []
    assert watch.check(queries, OVERDUE_MS) == []
    late = OverdueTransaction("stuck", 7, PLACES, 1000)
    assert watch.check(queries, OVERDUE_MS + 1000) == [late]
    assert watch.check(queries, OVERDUE_MS + 61_000) == []
    assert watch.late == [late], "it is still so"
    assert watch.check(queries[1:], OVERDUE_MS + 121_000) == []
    assert watch.late == []


def test_the_next_batch_of_a_query_has_its_own_time() -> None:
    watch = InDoubtWatch()
    watch.check([prepared("busy", "t1", 1)], 0)
    assert watch.check([prepared("busy", "t2", 2)], OVERDUE_MS) == []
    assert watch.check([prepared("busy", "t2", 2)], 2 * OVERDUE_MS) == [
        OverdueTransaction("busy", 2, PLACES, OVERDUE_MS)
    ]
