"""Persistent state as data: the changes since the last commit, and the state that a start recovers.

The engine records each change of a persistent session (one with an expiry) and of the retained messages. The shell
takes the recorded changes with :meth:`Journal.cut`, commits them as one transaction and sets ``committed``; until then
connections hold acknowledgements of these changes. This module does no IO.

A change that is reverted before its commit is never written, for example a message that its receivers acknowledged
during the previous commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.mqtt.codec.packets import Will

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.mqtt.engine.model.message import Message

__all__ = [
    "PERSISTENCE_PROPERTY",
    "Batch",
    "DeliveryRow",
    "Journal",
    "MessageRow",
    "ProgressRow",
    "Recovered",
    "SessionRow",
    "Source",
    "Stage",
    "SubscriptionRow",
]

PERSISTENCE_PROPERTY: Final = ("aio-persistence", "true")
"""User property of CONNECT and of a retained PUBLISH: acknowledge after the commit, regardless of the configuration."""


class Stage:
    """Progress of a delivery with a packet identifier."""

    SENT: Final = 1
    """The PUBLISH was sent, or is about to be."""
    RELEASED: Final = 2
    """PUBREC was received: only PUBREL and PUBCOMP remain."""


class SessionRow(NamedTuple):
    """A session. ``ends_at`` and ``will_at`` are instants, 0 = none; both 0 while it is connected."""

    number: int
    client_id: str
    owner: str
    """Name of the principal that created it and may resume it; empty without access control."""
    username: str | None
    protocol_version: int
    expiry_s: int
    ends_at: int
    will: Will | None
    will_at: int
    awaited: bool
    """Whether its acknowledgements wait for the disk."""


class SubscriptionRow(NamedTuple):
    """A subscription of session ``session``; ``identifier`` is its encoded block, empty = none."""

    session: int
    topic_filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: bytes


class Source(NamedTuple):
    """Publisher of a retained message: the owner of its session and its client identifier."""

    owner: str
    client_id: str


class MessageRow(NamedTuple):
    """A stored message: topic and properties in wire form, with their lengths."""

    topic_wire: bytes
    properties_wire: bytes
    payload: bytes
    qos: int
    retain: bool
    accepted_at: int
    number: int = 0
    """Number of a message that is stored once for several deliveries; 0: stored with its delivery."""
    source: Source | None = None
    """Publisher of a retained message; None: the node itself, or a version that did not store it."""


class DeliveryRow(NamedTuple):
    """A message for one session. ``packet_id`` 0: not sent when it was recorded; ``share``: the shared subscription
    that chose the session, empty = none."""

    number: int
    session: int
    message: MessageRow
    qos: int
    retain: int
    identifiers: bytes
    packet_id: int
    share: str = ""


class ProgressRow(NamedTuple):
    """Progress of delivery ``number``; at :attr:`Stage.RELEASED` its message is no longer stored."""

    number: int
    session: int
    packet_id: int
    stage: int


class Recovered(NamedTuple):
    """State recovered at a start; instants are of the engine's clock, deliveries in their original order."""

    sessions: list[SessionRow]
    subscriptions: list[SubscriptionRow]
    deliveries: list[DeliveryRow]
    progress: list[ProgressRow]
    incoming: list[tuple[int, int, int]]
    """QoS 2 messages received without PUBREL: session, packet identifier, state."""
    retained: list[MessageRow]
    next_number: int
    """The first unused number: greater than every number in use."""
    quarantined: list[str]
    """Records with a wrong checksum, for the log."""


NOTHING: Final = Recovered([], [], [], [], [], [], 1, [])

_Delivery = tuple[int, int, int, int, bytes, int, str, "Message"]
"""Session, number of the shared message or 0, QoS, RETAIN, identifiers, packet identifier, share, message."""


class Batch:
    """The changes of one commit: table -> key -> new value, None for deleted. ``wall_offset``: wall clock - clock."""

    __slots__ = (
        "awaited",
        "deliveries",
        "incoming",
        "messages",
        "number",
        "progress",
        "retained",
        "sessions",
        "subscriptions",
        "wall_offset",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.awaited = False
        """True if an acknowledgement waits for the batch."""
        self.wall_offset = 0
        self.sessions: dict[int, SessionRow | None] = {}
        self.subscriptions: dict[tuple[int, str], SubscriptionRow | None] = {}
        self.messages: dict[int, Message | None] = {}
        self.deliveries: dict[int, _Delivery | None] = {}
        self.progress: dict[int, tuple[int, int, int] | None] = {}
        self.incoming: dict[tuple[int, int], int | None] = {}
        self.retained: dict[str, tuple[Message, Source | None] | None] = {}

    def __len__(self) -> int:
        return (
            len(self.sessions)
            + len(self.subscriptions)
            + len(self.messages)
            + len(self.deliveries)
            + len(self.progress)
            + len(self.incoming)
            + len(self.retained)
        )


class Journal:
    """Collects changes; ``durable_acknowledgements``: acknowledgements of all persistent sessions wait for the commit.

    Otherwise only those of clients that request it. While it is not ``enabled``, no session is persistent. ``wake`` is
    called for the first change since the last :meth:`cut`. Bounded by the limits of the sessions: one value per key.
    """

    __slots__ = (
        "_batch",
        "_numbers",
        "_progressed",
        "_woken",
        "answer_waits",
        "awaited_changes",
        "committed",
        "durable_acknowledgements",
        "enabled",
        "failure",
        "wake",
    )

    def __init__(
        self, *, enabled: bool = True, durable_acknowledgements: bool = True, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.enabled = enabled
        self.durable_acknowledgements = durable_acknowledgements
        self.wake = wake
        self.answer_waits: Callable[[], None] = lambda: None
        """Called for each answer to a request that waits for the next commit."""
        self.awaited_changes = 0
        """Number of changes that an acknowledgement waits for; compared before and after an operation."""
        self.committed = 0
        """Number of the last completed commit."""
        self.failure = ""
        """Reason of a storage failure, after which nothing becomes durable; empty without one."""
        self._batch = Batch(1)
        self._numbers = 1
        self._progressed: set[int] = set()
        """Deliveries whose progress is recorded, on the disk or in the batch."""
        self._woken = False

    # For the shell

    def start_at(self, number: int) -> None:
        """Assign numbers from ``number`` on; recovered state has lower ones."""
        self._numbers = max(self._numbers, number)

    def cut(self, wall_offset: int) -> Batch:
        """Return the recorded changes; later ones belong to the next commit."""
        batch = self._batch
        batch.wall_offset = wall_offset
        self._batch = Batch(batch.number + 1)
        self._woken = False
        return batch

    @property
    def number(self) -> int:
        """Number of the commit that changes recorded now belong to."""
        return self._batch.number

    @property
    def waiting(self) -> int:
        """Number of changes recorded since the last :meth:`cut`."""
        return len(self._batch)

    @property
    def urgent(self) -> bool:
        """Whether an acknowledgement waits for the next commit."""
        return self._batch.awaited

    # For the engine

    def commit_soon(self) -> int:
        """Request a commit of the changes recorded so far, and return its number."""
        batch = self._batch
        if not batch.awaited and not len(batch):
            return batch.number - 1
        self._changed(awaited=True)
        return batch.number

    def answer_after(self, number: int) -> None:
        """Report that the answer to a request of a client waits for commit ``number``."""
        if number == self._batch.number:
            self.answer_waits()

    def new_number(self) -> int:
        """Return an unused number for a session, message or delivery."""
        number = self._numbers
        self._numbers = number + 1
        return number

    def session(self, row: SessionRow) -> None:
        """Record a new or changed session."""
        self._batch.sessions[row.number] = row
        self._changed(awaited=row.awaited)

    def session_ended(self, session: int, *, awaited: bool) -> None:
        """Delete a session; its subscriptions and messages are deleted one by one."""
        self._batch.sessions[session] = None
        self._changed(awaited=awaited)

    def subscribed(self, row: SubscriptionRow, *, awaited: bool) -> None:
        """Record a new or replaced subscription."""
        self._batch.subscriptions[row.session, row.topic_filter] = row
        self._changed(awaited=awaited)

    def unsubscribed(self, session: int, topic_filter: str, *, awaited: bool) -> None:
        """Delete a subscription."""
        self._batch.subscriptions[session, topic_filter] = None
        self._changed(awaited=awaited)

    def queue(
        self,
        session: int,
        message: Message,
        qos: int,
        retain: int,
        identifiers: bytes,
        packet_id: int,
        share: str = "",
        *,
        awaited: bool,
    ) -> int:
        """Record a message for a session, and return the number of the delivery.

        ``packet_id``: the identifier that it is sent with, 0 if it is queued. A message for several sessions is stored
        once, any other with its delivery.
        """
        batch = self._batch
        number = self._numbers
        self._numbers = number + 1
        stored = message.stored
        if stored:
            if stored < 0:
                stored = message.stored = self.new_number()
                batch.messages[stored] = message
            message.receivers += 1
        batch.deliveries[number] = (session, stored, qos, retain, identifiers, packet_id, share, message)
        self._changed(awaited=awaited)
        return number

    def sent(self, session: int, number: int, packet_id: int, *, awaited: bool) -> None:
        """Record that a queued delivery is sent with ``packet_id``, which the client may refer to later at QoS 2."""
        self._progressed.add(number)
        self._batch.progress[number] = (session, packet_id, Stage.SENT)
        self._changed(awaited=awaited)

    def released(self, session: int, number: int, packet_id: int, message: Message, *, awaited: bool) -> None:
        """Record a PUBREC: the message itself is no longer needed."""
        self._drop_message(number, message)
        self._progressed.add(number)
        self._batch.progress[number] = (session, packet_id, Stage.RELEASED)
        self._changed(awaited=awaited)

    def done(self, number: int, message: Message | None) -> None:
        """Delete a delivery that is complete or dropped; ``message`` is None after :meth:`released`.

        No acknowledgement waits for the deletion: after a crash the delivery may be repeated, as the protocol allows.
        """
        if message is not None:
            self._drop_message(number, message)
        if number in self._progressed:
            self._progressed.remove(number)
            self._batch.progress[number] = None
        self._changed(awaited=False)

    def incoming(self, session: int, packet_id: int, state: int, *, awaited: bool) -> None:
        """Record a received QoS 2 message with ``packet_id``."""
        self._batch.incoming[session, packet_id] = state
        self._changed(awaited=awaited)

    def incoming_done(self, session: int, packet_id: int, *, awaited: bool) -> None:
        """Free ``packet_id`` after PUBREL or a refusal."""
        self._batch.incoming[session, packet_id] = None
        self._changed(awaited=awaited)

    def retained(self, topic: str, message: Message, source: Source | None = None) -> None:
        """Record a retained PUBLISH from ``source``: the message of ``topic``; an empty payload deletes it."""
        if not self.enabled:
            return
        self._batch.retained[topic] = (message, source) if message.payload else None
        awaited = self.durable_acknowledgements
        if not awaited and len(message.properties_wire) > 1:
            awaited = PERSISTENCE_PROPERTY in message.properties.user_properties
        self._changed(awaited=awaited)

    def retained_expired(self, topic: str) -> None:
        """Delete the retained message of ``topic`` without a request; no acknowledgement waits for it."""
        if self.enabled:
            self._batch.retained[topic] = None
            self._changed(awaited=False)

    def restored(self, number: int, *, progressed: bool) -> None:
        """Register recovered delivery ``number``."""
        if progressed:
            self._progressed.add(number)

    # Inside

    def _changed(self, *, awaited: bool) -> None:
        if awaited:
            self.awaited_changes += 1
            if not self._batch.awaited:
                self._batch.awaited = True
                self._woken = False  # write-behind changes may not be part of a commit yet
        if not self._woken:
            self._woken = True
            self.wake()

    def _drop_message(self, number: int, message: Message) -> None:
        batch = self._batch
        deliveries = batch.deliveries
        row = deliveries.get(number)
        if row is not None:
            del deliveries[number]  # it was not committed yet
        else:
            deliveries[number] = None
        if message.stored > 0:
            message.receivers -= 1
            if not message.receivers:
                stored = message.stored
                message.stored = -1
                if stored in batch.messages:
                    del batch.messages[stored]
                else:
                    batch.messages[stored] = None
