"""Whether a recorded concurrent history of a store could have happened one operation at a time.

Every operation has the instant it was asked and the instant it was answered. The history is linearizable if there is an
order that respects those instants (what was answered before another was asked comes first) and in which a plain
sequential store gives the same answers. The search is Wing and Gong's, with Lowe's memory of states already tried.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Held", "Operation", "State", "explains", "step"]

Version = tuple[int, int]


class Operation(NamedTuple):
    """One request and its answer: ``words`` verb first, ``answer`` the payload, ``version`` the answer's or None.

    ``asked`` and ``answered`` are instants of one clock. ``token`` is the fencing token, ``prefix`` what it fences.
    """

    asked: float
    answered: float
    words: tuple[bytes, ...]
    answer: bytes
    version: Version | None = None
    token: int | None = None
    prefix: bytes | None = None


class Held(NamedTuple):
    """What a key holds."""

    value: bytes
    version: Version
    fence: int | None = None


class State(NamedTuple):
    """A sequential store: what each key holds, and the floor of each prefix; both sorted."""

    keys: tuple[tuple[bytes, Held], ...] = ()
    floors: tuple[tuple[bytes, int], ...] = ()


def step(state: State, operation: Operation) -> tuple[bool, State]:
    """Whether the answer is what a sequential store in ``state`` gives, and its state afterwards."""
    held = dict(state.keys)
    verb, *arguments = operation.words
    if verb == b"MGET":
        return _read_many(state, held, arguments, operation), state
    if verb == b"SCAN":
        names = sorted(held)
        page = b"*1\r\n*%d\r\n" % len(names) + b"".join(_bulk(name) for name in names)
        return operation.answer == page, state
    if verb == b"BATCH":
        return _write_many(state, arguments, operation)
    key, *rest = arguments
    found = held.get(key)
    if verb == b"GET":
        expected = (b"$-1\r\n", None) if found is None else (_bulk(found.value), found.version)
        return (operation.answer, operation.version) == expected, state
    floors = dict(state.floors)
    refusal = _fence_error(found, floors, key, operation)
    if refusal is not None:
        return operation.answer == refusal, state
    if verb == b"SET":
        value, *condition = rest
        if condition and found is not None and (condition == [b"NX"] or found.value != value):
            return operation.answer == b":-1\r\n" and operation.version == found.version, state
        version = operation.version
        if (
            operation.answer != b"+OK\r\n"
            or version is None
            or any(version <= other.version for other in held.values())
        ):
            return False, state
        fences = [fence for fence in (found.fence if found else None, operation.token) if fence is not None]
        held[key] = Held(value, version, max(fences, default=None))
        if operation.prefix is not None and operation.token is not None:
            floors[operation.prefix] = max(floors.get(operation.prefix, 0), operation.token)
        return True, State(tuple(sorted(held.items())), tuple(sorted(floors.items())))
    if found is None:
        return operation.answer == b":0\r\n", state
    if verb == b"VDEL" and found.value != rest[0]:
        return operation.answer == b":-1\r\n", state
    del held[key]
    return operation.answer == b":1\r\n", State(tuple(sorted(held.items())), state.floors)


def explains(history: list[Operation]) -> bool:
    """Whether some sequential order explains ``history``."""
    history = sorted(history, key=lambda operation: operation.asked)
    everything = (1 << len(history)) - 1
    tried: set[tuple[int, State]] = set()
    open_: list[tuple[int, State]] = [(0, State())]
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


def _read_many(state: State, held: dict[bytes, Held], keys: list[bytes], operation: Operation) -> bool:
    """All keys at one version, which no key exceeds."""
    expected = b"*%d\r\n" % (2 * len(keys))
    for key in keys:
        found = held.get(key)
        if found is None:
            expected += b"$-1\r\n$-1\r\n"
        else:
            expected += _bulk(found.value) + _bulk(b"%d:%d:StateStore" % found.version)
    newest = max((entry.version for _, entry in state.keys), default=(0, 0))
    return operation.answer == expected and operation.version is not None and operation.version >= newest


def _write_many(state: State, arguments: list[bytes], operation: Operation) -> tuple[bool, State]:
    """One write after the other with nothing in between: the versions lead up to the answer's, each by one."""
    head, *answers, _ = operation.answer.split(b"\r\n")
    versions = _leading_up_to(operation.version, sum(answer in (b"+OK", b":1") for answer in answers))
    for answer in answers:
        size = int(arguments[0])
        words, arguments = tuple(arguments[1 : 1 + size]), arguments[1 + size :]
        found = dict(state.keys).get(words[1])
        version = found.version if found is not None else None
        if answer in (b"+OK", b":1"):
            version = versions.pop()
        fits, state = step(state, operation._replace(words=words, answer=answer + b"\r\n", version=version))
        if not fits:
            return False, state
    return head == b"*%d" % len(answers) and not arguments, state


def _leading_up_to(last: Version | None, count: int) -> list[Version | None]:
    """The last ``count`` versions up to ``last``, the newest first: what one request changed in one millisecond."""
    found: list[Version | None] = []
    for _ in range(count):
        found.append(last)
        if last is not None:
            last = (last[0], last[1] - 1) if last[1] > 1 else (last[0] - 1, 1)
    return found


def _fence_error(found: Held | None, floors: dict[bytes, int], key: bytes, operation: Operation) -> bytes | None:
    protecting = [floor for prefix, floor in floors.items() if key.startswith(prefix)]
    protecting += [found.fence] if found is not None and found.fence is not None else []
    protecting += [floors[operation.prefix]] if operation.prefix in floors else []
    if not protecting:
        return None
    if operation.token is None:
        return b"-ERR a fencing token is required for this request\r\n"
    if operation.token < max(protecting):
        return b"-ERR the request fencing token is a lower version than the fencing token protecting the resource\r\n"
    return None


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)
