"""Outcome of a transaction over several brokers, from the states of its participants.

A transaction is committed when every participant has prepared it, whatever happens to its driver: the next run of the
query finds it prepared everywhere and continues. While one participant has not prepared it, nothing was published, and
a newer run aborts it. The newer run begins at every participant first, so that the older run can prepare nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["InDoubtTransaction", "ParticipantState", "in_doubt", "should_commit", "transaction_id"]


class ParticipantState(NamedTuple):
    """State of a query at one broker. ``committed``: -1 none; ``transaction``: blank none."""

    committed: int = -1
    transaction: str = ""
    batch: int = -1
    publishing: bool = False
    participants: tuple[str, ...] = ()


class InDoubtTransaction(NamedTuple):
    """A transaction that some brokers have. ``participants``: all its brokers; empty: only the one that has it."""

    transaction: str
    batch: int
    participants: tuple[str, ...]
    holders: tuple[int, ...]


def in_doubt(states: Mapping[int, ParticipantState]) -> list[InDoubtTransaction]:
    """Every transaction that the brokers have, oldest batch first."""
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
    """Whether ``item`` must be committed (otherwise aborted), from the states of all participants."""
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
    """Id of a transaction from its content: the same winners of the same run have the same id."""
    text = f"{run}\n{batch}\n" + "\n".join(f"{task} {attempt} {rows}" for task, attempt, rows in sorted(winners))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
