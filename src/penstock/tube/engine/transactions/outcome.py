"""How a transaction that spans several brokers ends, from what its participants know.

It is committed when every participant has prepared it, and from then on whatever happens to whoever drives it: the next
run of the query finds it prepared everywhere and goes on. While one has not prepared it, nobody can have published
anything, and a newer run lets it go: it begins at every participant first, so that the older run prepares nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["InDoubtTransaction", "ParticipantState", "in_doubt", "should_commit", "transaction_id"]


class ParticipantState(NamedTuple):
    """What one broker answered about a query. ``committed``: -1 none; ``transaction``: blank none."""

    committed: int = -1
    transaction: str = ""
    batch: int = -1
    publishing: bool = False
    participants: tuple[str, ...] = ()


class InDoubtTransaction(NamedTuple):
    """A transaction that some brokers hold. ``participants``: all its brokers; empty: only the one that has it."""

    transaction: str
    batch: int
    participants: tuple[str, ...]
    holders: tuple[int, ...]


def in_doubt(states: Mapping[int, ParticipantState]) -> list[InDoubtTransaction]:
    """Every transaction that the brokers hold, oldest batch first."""
    found: dict[str, InDoubtTransaction] = {}
    for broker, state in states.items():
        if state.transaction:
            before = found.get(state.transaction)
            holders = (broker,) if before is None else (*before.holders, broker)
            found[state.transaction] = InDoubtTransaction(state.transaction, state.batch, state.participants, holders)
    return sorted(found.values(), key=lambda item: item.batch)


def should_commit(
    item: InDoubtTransaction, participants: Iterable[int], states: Mapping[int, ParticipantState]
) -> bool:
    """Whether ``item`` is to be committed (else let go), once every participant told what it knows."""
    everywhere = True
    for broker in participants:
        state = states[broker]
        if state.committed >= item.batch:
            return True
        if state.transaction != item.transaction:
            everywhere = False
        elif state.publishing:
            return True
    return everywhere


def transaction_id(run: str, batch: int, winners: Iterable[tuple[int, str, int]]) -> str:
    """Names a transaction by what it publishes: the same winners of the same run have the same id."""
    text = f"{run}\n{batch}\n" + "\n".join(f"{task} {attempt} {rows}" for task, attempt, rows in sorted(winners))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
