"""What the service needs of others and tells them: policies, change capture, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.statestore.codec.commands import Access
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc

__all__ = ["Capture", "Policy", "Stats"]


class Stats:
    """Counters since the start, read by the metrics page."""

    __slots__ = (
        "notifications",
        "quarantined",
        "recovered",
        "refused",
        "requests",
        "responses",
        "unanswered",
        "undelivered",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.responses = 0
        """Answers put into the session of the client that asked."""
        self.unanswered = 0
        """Answers that nobody could get: the client does not subscribe to its response topic, or that is no topic."""
        self.refused = 0
        """Requests that broke the rules of the transport and were not executed."""
        self.notifications = 0
        self.undelivered = 0
        """Notifications whose observer has no session any more."""
        self.recovered = 0
        self.quarantined = 0


class Policy(Protocol):
    """What the node's policies say of the clients of the store; every method is called on the packet path."""

    @property
    def overheard(self) -> bool:
        """Whether anybody may read what the store and others say to each other; asked again where policies change."""
        ...

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        """Whether the client may do this to the key; of several flags all must be granted."""
        ...

    def may_answer_on(self, context: Context, topic: str) -> bool:
        """Whether the client may publish to the response topic that it names: the store does so on its word."""
        ...

    def may_hurry(self, context: Context) -> bool:
        """Whether a ``$high_priority`` of the client counts."""
        ...


class Capture(Protocol):
    """Takes every change of the store, in order and once the log on disk has it."""

    def resume(self, changes: Sequence[Change], trim: Callable[[Hlc], None]) -> None:
        """The log as it was found on start; ``trim(version)`` tells the store what is no longer needed."""
        ...

    def take(self, changes: Sequence[Change]) -> None:
        """More changes."""
        ...
