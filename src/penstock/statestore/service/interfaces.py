"""Interfaces of the state store service: authorization, change capture, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import StorageError
from penstock.statestore.binding import StoreRequest
from penstock.statestore.codec.commands import COMMANDS, Access, Command
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.requests import Answer, Context
from penstock.statestore.hlc import Hlc

__all__ = ["Capture", "LogPage", "LogTail", "ReadLog", "RequestTracer", "StoreAuthorizer", "StoreStats"]


class StoreStats:
    """Counters since the start, for the metrics."""

    __slots__ = (
        "denied",
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
        """Responses delivered to the requesting client's session."""
        self.unanswered = 0
        """Responses without receiver: the client does not subscribe to its response topic, or the topic is invalid."""
        self.unanswered_other_client = 0
        """Unanswered: only other clients subscribe to the response topic."""
        self.unanswered_shared = 0
        """Unanswered: only shared subscriptions match the response topic."""
        self.refused = 0
        """Requests that violate the transport's rules and were not executed."""
        self.denied = {verb: 0 for verb, spec in COMMANDS.items() if not spec.authorizes_each_key}
        """Commands, also of a BATCH, that the policies do not permit, by verb."""
        self.repeated = 0
        """Writes repeated after a lost connection, which were not executed again."""
        self.notifications = 0
        self.undelivered = 0
        """Notifications whose observer has no session."""
        self.recovered = 0
        self.quarantined = 0


class StoreAuthorizer(Protocol):
    """Permissions of clients by the node's policies. All methods are called on the request path."""

    @property
    def requests_observed(self) -> bool:
        """Return True if any client may observe the requests of others; called again after a change of policies."""
        ...

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        """Return True if the client has all permissions in ``access`` for the key."""
        ...

    def denied(self, context: Context, access: Access, key: bytes) -> None:
        """Record that a command was refused, which needs ``access`` for the key."""
        ...

    def may_answer_on(self, context: Context, topic: str) -> bool:
        """Return True if the client may subscribe to the response topic of its request."""
        ...

    def owner(self, context: Context) -> str:
        """Return the principal whose quota includes the keys created by the client; "": anonymous. Called once per
        connection."""
        ...

    def has_high_priority(self, context: Context) -> bool:
        """Return True if the client is permitted to use ``$high_priority``."""
        ...


class RequestTracer(Protocol):
    """Recorder of the spans of requests. All methods are called on the request path."""

    def executed(self, ask: StoreRequest, command: Command, changes: Sequence[Change]) -> None:
        """Start the span of a request that was executed in memory, and set ``trace`` of its changes."""
        ...

    def answered(self, ask: StoreRequest, answer: Answer) -> None:
        """End the span of a request whose answer has been sent."""
        ...


class LogTail(NamedTuple):
    """The changes of the log after a version: their number, and the version of the last one (or that version)."""

    length: int
    newest: Hlc


class LogPage(NamedTuple):
    """Changes of the log in order, up to the version ``through``, without ``damaged`` ones.

    ``complete``: the log had no further changes.
    """

    changes: Sequence[Change]
    through: Hlc
    complete: bool
    damaged: Sequence[str] = ()


class ReadLog(Protocol):
    """Read a page of the log after ``version`` in a thread; ``done`` gets the page or the error."""

    def __call__(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None: ...


class Capture(Protocol):
    """Receiver of all changes of the store, in order, each after the log on disk contains it."""

    @property
    def last(self) -> Hlc:
        """The last captured version before the start."""
        ...

    def rewind(self, version: Hlc) -> None:
        """Continue after ``version``, because the store no longer has ``last``; called before :meth:`resume`."""
        ...

    def resume(self, tail: LogTail, read: ReadLog, trim: Callable[[Hlc], None]) -> None:
        """Start with the log's changes after ``last``; ``read`` reads them, now and later.

        ``trim(version)``: the capture no longer needs the log up to this version.
        """
        ...

    def append(self, changes: Sequence[Change]) -> None:
        """Receive changes. They are in the log, so it may drop them and read them from there."""
        ...
