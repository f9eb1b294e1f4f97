"""Requests and answers, independent of the dialect: sender, timestamp, fencing token, and result of the command.

A fence of the protocol belongs to one key and is deleted with it, so a writer that lost its lock can still create a
key. A prefix fence (extension) is a minimum for the fencing tokens of all keys with a prefix, including missing and
deleted keys: it is durable, and can only be raised.

Source: state store protocol, "Versioning and hybrid logical clocks", "Fencing Token Algorithm".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, final

from mypy_extensions import mypyc_attr

from penstock.statestore.codec.commands import Command, Extension, Verb
from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import OK, encode_error, encode_integer
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc, parse_position, parse_wire

__all__ = [
    "MAX_PREFIXES",
    "MAX_PREFIX_BYTES",
    "Answer",
    "AnswerKind",
    "Context",
    "Fences",
    "encode_answers",
    "fence_error",
    "fence_prefix",
    "read_preconditions",
    "time_left",
]


class AnswerKind(Enum):
    """Outcome of a request."""

    OK = "done"
    NOT_MET = "condition not met"
    VALUE = "value"
    MISSING = "no such key"
    COUNT = "number of keys deleted or observations ended"
    PAYLOAD = "an encoded response that the command defines"
    ERROR = "error"


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Answer:
    """The answer to one command, independent of the dialect.

    ``version`` is the version of the change or value; ``previous`` the version of a deleted value. Both are None if
    there is none, and always for a missing key, since for the Go SDK a version means that the key exists. ``missed``
    are the changes to send after the answer, for a resumed observation; None for other commands.
    """

    __slots__ = ("count", "error", "kind", "missed", "previous", "value", "version")

    def __init__(
        self,
        kind: AnswerKind,
        *,
        version: Hlc | None = None,
        previous: Hlc | None = None,
        value: bytes = b"",
        count: int = 0,
        error: StoreError | None = None,
        missed: list[Change] | None = None,
    ) -> None:
        self.kind = kind
        self.version = version
        self.previous = previous
        self.value = value
        self.count = count
        self.error = error
        self.missed = missed

    def __repr__(self) -> str:
        told = self.error or (self.count if self.kind is AnswerKind.COUNT else "")
        return f"<Answer {self.kind.name} {told} {self.version or ''}>"


@mypyc_attr(acyclic=True)
class Context:
    """The sender of a request, its timestamp and fencing token.

    ``timestamp`` and ``fencing_token`` are the received texts: None if absent, empty if repeated. The engine parses
    them into ``time_ms`` and ``time_counter``, wall clock and counter of the timestamp (-1 and 0: no timestamp), and
    ``token``. ``fence_prefix`` is the prefix that the request fences. ``principal`` is the sender for policies; keys
    that the request creates count for the principal ``owner``; "" = an anonymous client.
    """

    owner: str = ""
    time_ms: int = -1
    time_counter: int = 0
    token: Hlc | None = None

    def __init__(
        self,
        client_id: str,
        dialect: Dialect,
        timestamp: bytes | None = None,
        fencing_token: bytes | None = None,
        principal: object = None,
        fence_prefix: bytes | None = None,
    ) -> None:
        self.client_id = client_id
        self.dialect = dialect
        self.timestamp = timestamp
        self.fencing_token = fencing_token
        self.principal = principal
        self.fence_prefix = fence_prefix


def encode_answers(answers: Sequence[Answer]) -> bytes:
    """Encode the answers to the commands of a BATCH as an array, each as for a single command in the SDK dialect."""
    parts = [b"*%d\r\n" % len(answers)]
    for answer in answers:
        if answer.kind is AnswerKind.OK:
            parts.append(OK)
        elif answer.error is not None:
            parts.append(encode_error(answer.error))
        else:
            parts.append(encode_integer(answer.count if answer.kind is AnswerKind.COUNT else -1))
    return b"".join(parts)


def time_left(record: Record | None, steady_ms: int) -> Answer:
    """Return the milliseconds until a key expires; -1: it does not expire, -2: it does not exist."""
    if record is None:
        return Answer(AnswerKind.PAYLOAD, value=encode_integer(-2))
    left = record.expires_at - steady_ms if record.expires_at else -1
    return Answer(AnswerKind.PAYLOAD, value=encode_integer(left), version=record.version)


MAX_PREFIXES: Final = 10_000
"""Maximum number of floors. They are never removed, so a client that adds floors in a loop gets the quota error."""

MAX_PREFIX_BYTES: Final = 4096


class Fences:
    """The floors by prefix."""

    def __init__(self) -> None:
        self.floors: dict[bytes, Hlc] = {}
        self._lengths: list[int] = []

    def restore(self, floors: Iterable[tuple[bytes, Hlc]]) -> None:
        """Load the stored floors."""
        self.floors.update(floors)
        self._lengths = sorted({len(prefix) for prefix in self.floors})

    def floor_of(self, key: bytes) -> Hlc | None:
        """Return the greatest floor of all prefixes of ``key``; None without a floor."""
        greatest: Hlc | None = None
        for length in self._lengths:
            if length > len(key):
                break
            floor = self.floors.get(key[:length])
            if floor is not None and (greatest is None or floor > greatest):
                greatest = floor
        return greatest

    def has_room_for(self, prefix: bytes) -> bool:
        """Return True if a floor for ``prefix`` exists or can be added."""
        return prefix in self.floors or len(self.floors) < MAX_PREFIXES

    def lift(self, prefix: bytes, token: Hlc) -> bool:
        """Raise the floor of ``prefix`` to ``token``; returns False if the floor is not lower than ``token``."""
        floor = self.floors.get(prefix)
        if floor is not None and floor >= token:
            return False
        self.floors[prefix] = token
        if floor is None:
            self._lengths = sorted({*self._lengths, len(prefix)})
        return True


def fence_prefix(command: Command, context: Context, extensions: Extension) -> bytes | StoreError | None:
    """Return the prefix whose floor a SET raises (extension).

    Other commands that write are refused with a prefix: if they ignored it, the prefix would not be protected. Commands
    that read ignore it, like the token.
    """
    prefix = context.fence_prefix
    if prefix is None or not command.spec.checks_fence:
        return None
    if command.verb is not Verb.SET or not extensions & Extension.PREFIX_FENCE:
        return StoreError.SYNTAX
    if not 0 < len(prefix) <= MAX_PREFIX_BYTES or context.fencing_token is None:
        return StoreError.FENCE_PREFIX
    return prefix


def read_preconditions(command: Command, context: Context, now_ms: int) -> StoreError | None:
    """Parse the timestamp and the token into ``context``; return the first error in them.

    The clock is not advanced before this check: a client with a fast clock must not advance it.
    """
    spec = command.spec
    if context.timestamp is not None:
        context.time_ms, context.time_counter = parse_position(context.timestamp)
        if context.time_ms < 0:
            return StoreError.TIMESTAMP_MALFORMED
        if context.time_ms - now_ms > MAX_DRIFT_MS:
            return StoreError.TIMESTAMP_TOO_FAR_AHEAD
    elif spec.needs_timestamp:
        return StoreError.TIMESTAMP_MISSING
    if spec.checks_fence and context.fencing_token is not None:
        token = parse_wire(context.fencing_token)
        if token is None:
            return StoreError.TIMESTAMP_MALFORMED
        if token.is_too_far_ahead(now_ms):
            return StoreError.FENCE_TOO_FAR_AHEAD
        context.token = token
    return None


def fence_error(
    key: bytes, record: Record | None, token: Hlc | None, fences: Fences, prefix: bytes | None
) -> StoreError | None:
    """Return an error if the fence of ``key``, or a floor of a prefix, rejects ``token``; otherwise None."""
    fence = record.fence if record is not None else None
    if fences.floors:
        floor = fences.floor_of(key)
        if prefix is not None and (lifted := fences.floors.get(prefix)) is not None:
            floor = lifted if floor is None else max(floor, lifted)
        if floor is not None and (fence is None or floor > fence):
            fence = floor
    if fence is None:
        return None
    if token is None:
        return StoreError.FENCE_REQUIRED
    return StoreError.FENCE_LOWER if token.is_before(fence) else None
