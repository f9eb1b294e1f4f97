"""What tasks staged on a broker, for its administration: shown, and let go."""

from __future__ import annotations

from typing import Any

from penstock.tube.admin.broker_desk import Desk
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.engine.transactions.staging import Query, Staging

__all__ = ["remove", "rows"]


def rows(desk: Desk, params: Params) -> list[dict[str, Any]]:
    """Attempts, and transactions that are prepared or being published although nothing of them is staged here."""
    staging = _staging(desk)
    wanted = set(params.items("queryName"))
    found: list[dict[str, Any]] = [
        {
            "queryName": row.query,
            "run": row.run,
            "batchId": row.batch,
            "taskId": row.task,
            "attempt": row.attempt,
            "rows": row.rows,
            "bytes": row.bytes,
            "state": row.state,
            "ageMs": row.age_ms,
        }
        for row in staging.rows(desk.now_ms)
        if not wanted or row.query in wanted
    ]
    shown = {(row["queryName"], row["attempt"]) for row in found}
    for query in staging.queries.values():
        decision = query.decision
        if decision is None or (wanted and query.name not in wanted):
            continue
        if not any((query.name, name) in shown for name, _ in decision.winners):
            found.append(_decided(query, desk.now_ms))
    return found


def _decided(query: Query, now_ms: int) -> dict[str, Any]:
    assert query.decision is not None
    return {
        "queryName": query.name,
        "run": query.run,
        "batchId": query.decision.batch,
        "taskId": None,
        "attempt": None,
        "rows": 0,
        "bytes": 0,
        "state": "publishing" if query.decision.publishing else "prepared",
        "ageMs": max(now_ms - query.changed_ms, 0),
    }


def remove(desk: Desk, params: Params) -> list[dict[str, Any]]:
    """Let go what a query staged and nobody committed; with ``force`` also what is prepared."""
    staging = _staging(desk)
    name = params.required("queryName")
    query = staging.queries.get(name)
    if query is None:
        return []
    decision, before = query.decision, len(query.attempts)
    if decision is not None and not decision.publishing:
        if not params.flag("force", default=False):
            raise BadParameter(
                f"batch {decision.batch} of query {name} is prepared: other brokers may have published their part; "
                "settle it, or let it go with force=true"
            )
        staging.undo(query, desk.now_ms)
    held = query.held
    staging.drop(query, [attempt for attempt in query.attempts if attempt not in held])
    return [{"queryName": name, "attempts": before - len(query.attempts)}]


def _staging(desk: Desk) -> Staging:
    staging = desk.engine.transactions.staging
    if staging is None:
        raise BadParameter("this broker stages nothing")
    return staging
