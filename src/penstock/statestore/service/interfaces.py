"""What the service needs of others and tells them: policies, change capture, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import StorageError
from penstock.statestore.codec.commands import Access
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc

__all__ = ["Capture", "LogPage", "LogTail", "Policy", "ReadLog", "Stats"]


class Stats:
    """Counters since the start, read by the metrics page."""

    __slots__ = (
        "notifications",
        "quarantined",
        "recovered",
        "refused",
        "repeated",
        "requests",
        "responses",
        "unanswered",
        "unanswered_other_client",
        "unanswered_shared",
        "undelivered",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.responses = 0
        """Answers put into the session of the client that asked."""
        self.unanswered = 0
        """Answers that nobody could get: the client does not subscribe to its response topic, or that is no topic."""
        self.unanswered_other_client = 0
        """Those of them whose response topic only other clients subscribe to."""
        self.unanswered_shared = 0
        """Those of them whose response topic only shared subscriptions match."""
        self.refused = 0
        """Requests that broke the rules of the transport and were not executed."""
        self.repeated = 0
        """Writes that came again after a connection was lost, and were not carried out again."""
        self.notifications = 0
        self.undelivered = 0
        """Notifications whose observer has no session any more."""
        self.recovered = 0
        self.quarantined = 0


class Policy(Protocol):
    """What the node's policies say of the clients of the store; every method is called on the packet path."""

    @property
    def requests_observed(self) -> bool:
        """Whether any client may observe the requests of others; asked again when policies change."""
        ...

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        """Whether the client may do this to the key; of several flags all must be granted."""
        ...

    def may_answer_on(self, context: Context, topic: str) -> bool:
        """Whether the client may subscribe to the response topic that it names."""
        ...

    def owner(self, context: Context) -> str:
        """The principal that the keys which the client creates count for, "" = anonymous; asked once a connection."""
        ...

    def may_hurry(self, context: Context) -> bool:
        """Whether a ``$high_priority`` of the client counts."""
        ...


class LogTail(NamedTuple):
    """Of the log of changes what comes after a version: how many, and the version of the last (or that version)."""

    length: int
    newest: Hlc


class LogPage(NamedTuple):
    """Some of the log of changes, in order: all up to the version ``through``, but those that are ``damaged``.

    ``complete``: there were no more when it was read.
    """

    changes: Sequence[Change]
    through: Hlc
    complete: bool
    damaged: Sequence[str] = ()


class ReadLog(Protocol):
    """Reads the log of changes after ``version`` in a thread; ``done`` gets the page, or why there is none."""

    def __call__(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None: ...


class Capture(Protocol):
    """Takes every change of the store, in order and once the log on disk has it."""

    @property
    def last(self) -> Hlc:
        """The version of the last change that was captured before the start."""
        ...

    def rewind(self, version: Hlc) -> None:
        """Before :meth:`resume`: ``last`` is a version that the store does not have any more; begin after this one."""
        ...

    def resume(self, tail: LogTail, read: ReadLog, trim: Callable[[Hlc], None]) -> None:
        """What the log had after ``last`` on start, and how to read it, now and later.

        ``trim(version)`` tells the store what is no longer needed.
        """
        ...

    def take(self, changes: Sequence[Change]) -> None:
        """More changes. They are in the log, so it may forget them and read them there."""
        ...
