"""Whether a recorded concurrent history of one key could have happened one operation at a time.

Every operation has the instant it was asked and the instant it was answered. The history is linearizable if there is an
order that respects those instants (what was answered before another was asked comes first) and in which a plain
sequential store gives the same answers. The search is Wing and Gong's, with Lowe's memory of states already tried.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Operation", "explains", "step"]


class Operation(NamedTuple):
    """One request and its answer: ``words`` without the key, ``answer`` the payload's first line, ``version`` or None.

    ``asked`` and ``answered`` are instants of one clock.
    """

    asked: float
    answered: float
    words: tuple[bytes, ...]
    answer: bytes
    version: tuple[int, int] | None = None


State = tuple[bytes, tuple[int, int]] | None
"""What the key holds: value and version; None: there is no such key."""


def step(state: State, operation: Operation) -> tuple[bool, State]:
    """Whether the answer is what a sequential store in ``state`` gives, and its state afterwards."""
    match operation.words:
        case (b"GET",):
            found = b"$-1" if state is None else b"$" + state[0]
            same_version = operation.version == (None if state is None else state[1])
            return operation.answer == found and same_version, state
        case (b"SET", value, *condition):
            applies = not condition or state is None or (condition == [b"NEX"] and state[0] == value)
            if not applies:
                return operation.answer == b":-1" and state is not None and operation.version == state[1], state
            version = operation.version
            newer = version is not None and (state is None or version > state[1])
            return operation.answer == b"+OK" and newer, (value, version or (0, 0))
        case (b"DEL",):
            return operation.answer == (b":0" if state is None else b":1"), None
        case (b"VDEL", value):
            if state is None:
                return operation.answer == b":0", None
            if state[0] != value:
                return operation.answer == b":-1", state
            return operation.answer == b":1", None
    raise AssertionError(operation)


def explains(history: list[Operation]) -> bool:
    """Whether some sequential order explains ``history``."""
    history = sorted(history, key=lambda operation: operation.asked)
    everything = (1 << len(history)) - 1
    tried: set[tuple[int, State]] = set()
    open_: list[tuple[int, State]] = [(0, None)]
    while open_:
        done, state = open_.pop()
        if done == everything:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        # Whatever comes next must have been asked before the first answer of those not done yet.
        first_answer = min(op.answered for n, op in enumerate(history) if not done >> n & 1)
        for n, operation in enumerate(history):
            if operation.asked > first_answer:
                break
            if not done >> n & 1:
                fits, after = step(state, operation)
                if fits:
                    open_.append((done | 1 << n, after))
    return False
