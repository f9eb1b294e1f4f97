"""Who asks, and the answer to it, in no dialect yet."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import final

from mypy_extensions import mypyc_attr

from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import OK, encode_error, encode_integer
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc

__all__ = ["Answer", "AnswerKind", "Context", "encode_answers", "time_left"]


class AnswerKind(Enum):
    """What a request came to."""

    OK = "done"
    NOT_MET = "condition not met"
    VALUE = "value"
    MISSING = "no such key"
    COUNT = "number of keys deleted or observations ended"
    PAYLOAD = "what the command defines, encoded"
    ERROR = "error"


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Answer:
    """The answer to one command, in no dialect yet.

    ``version`` is the one that the change or the value has; ``previous`` the version of a deleted value; None where
    there is none to tell, and always for a missing key: the Go SDK takes a version for "exists". ``missed`` are the
    changes to send after the answer, for an observation that resumes; else None.
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
    """The sender of a request, and what the request says of time and fences.

    ``timestamp`` and ``fencing_token`` are the texts as they arrived, None where absent and empty where repeated;
    ``time`` and ``token`` their values once the engine has read them. ``fence_prefix`` is the prefix that the request
    fences. ``principal`` is the sender in the terms of the policies; ``owner`` the principal that the keys which it
    creates count for, "" = an anonymous one.
    """

    __slots__ = (
        "client_id",
        "dialect",
        "fence_prefix",
        "fencing_token",
        "owner",
        "principal",
        "time",
        "timestamp",
        "token",
        "username",
    )

    def __init__(
        self,
        client_id: str,
        dialect: Dialect,
        timestamp: bytes | None = None,
        fencing_token: bytes | None = None,
        username: str | None = None,
        principal: object = None,
        fence_prefix: bytes | None = None,
    ) -> None:
        self.client_id = client_id
        self.dialect = dialect
        self.timestamp = timestamp
        self.fencing_token = fencing_token
        self.username = username
        self.principal = principal
        self.owner = ""
        self.fence_prefix = fence_prefix
        self.time: Hlc | None = None
        self.token: Hlc | None = None


def encode_answers(answers: Sequence[Answer]) -> bytes:
    """The answers to the commands of a BATCH as an array, each as the command alone has it in the SDK form."""
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
    """Milliseconds until a key expires; -1: it does not, -2: there is none."""
    if record is None:
        return Answer(AnswerKind.PAYLOAD, value=encode_integer(-2))
    left = record.expires_at - steady_ms if record.expires_at else -1
    return Answer(AnswerKind.PAYLOAD, value=encode_integer(left), version=record.version)
