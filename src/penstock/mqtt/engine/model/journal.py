"""What of the sessions must outlive the process, as data: the changes since the last commit, and what a start found.

The engine records each change of a session that is kept (one with an expiry) and of the retained messages. The shell
takes all that was recorded with :meth:`Journal.cut`, commits it as one transaction and says so; until then the
connections hold back whatever promises it. Nothing here touches a disk, and a session that is not kept never gets here.

What was recorded and taken back before it was cut leaves no trace: a message that its receivers acknowledged while the
disk was busy with the commit before is never written.
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
"""User property of CONNECT and of a retained PUBLISH: wait for the disk also where nothing else does."""


class Stage:
    """How far a delivery has come whose packet identifier the client may know."""

    SENT: Final = 1
    """The PUBLISH was sent, or is about to be."""
    RELEASED: Final = 2
    """PUBREC came: the message is the client's, PUBREL is owed to it."""


class SessionRow(NamedTuple):
    """A session. ``ends_at`` and ``will_at`` are instants, 0 = none; both 0 while it is connected."""

    number: int
    client_id: str
    owner: str
    """Who made it, and alone may resume it; empty where nobody is asked for a name."""
    username: str | None
    protocol_version: int
    expiry_s: int
    ends_at: int
    will: Will | None
    will_at: int
    promised: bool
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
    """Who published a retained message: the owner of the session and its client identifier."""

    owner: str
    client_id: str


class MessageRow(NamedTuple):
    """A message as it lies on the disk: topic and properties in wire form, with their lengths."""

    topic_wire: bytes
    properties_wire: bytes
    payload: bytes
    qos: int
    retain: bool
    accepted_at: int
    number: int = 0
    """Under which it is stored for several deliveries, 0 = with the one it came with."""
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
    """How far delivery ``number`` is; at :attr:`Stage.RELEASED` there is no message any more."""

    number: int
    session: int
    packet_id: int
    stage: int


class Recovered(NamedTuple):
    """What a start found; instants are those of the engine's clock. Deliveries are in the order of their making."""

    sessions: list[SessionRow]
    subscriptions: list[SubscriptionRow]
    deliveries: list[DeliveryRow]
    progress: list[ProgressRow]
    incoming: list[tuple[int, int, int]]
    """QoS 2 messages taken over and not released: session, packet identifier, what is known of it."""
    retained: list[MessageRow]
    next_number: int
    """Above every number in use."""
    quarantined: list[str]
    """Records that did not pass their checksum, for the log."""


NOTHING: Final = Recovered([], [], [], [], [], [], 1, [])

_Delivery = tuple[int, int, int, int, bytes, int, str, "Message"]
"""Session, number of the shared message or 0, QoS, RETAIN, identifiers, packet identifier, share, message."""


class Batch:
    """The changes of one commit: table -> key -> what it is now, None = gone. ``wall_offset``: wall clock - clock."""

    __slots__ = (
        "deliveries",
        "incoming",
        "messages",
        "number",
        "progress",
        "promised",
        "retained",
        "sessions",
        "subscriptions",
        "wall_offset",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.promised = False
        """Whether somebody waits for it."""
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
    """Collects changes; ``promise_all``: every kept session's acknowledgements wait (else only those that ask for it).

    One that is not ``enabled`` keeps nothing: the broker makes no session that would record here. ``wake`` is called
    for the first change since the last :meth:`cut`. Bound: the limits of the sessions, since each key is held once.
    """

    __slots__ = (
        "_batch",
        "_numbers",
        "_progressed",
        "_woken",
        "committed",
        "enabled",
        "failure",
        "promise_all",
        "promises",
        "wake",
    )

    def __init__(
        self, *, enabled: bool = True, promise_all: bool = True, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.enabled = enabled
        self.promise_all = promise_all
        self.wake = wake
        self.promises = 0
        """Changes that an acknowledgement waits for; compared before and after something was done."""
        self.committed = 0
        """The last commit that is done."""
        self.failure = ""
        """Why nothing can be promised any more; empty while it can."""
        self._batch = Batch(1)
        self._numbers = 1
        self._progressed: set[int] = set()
        """Deliveries whose progress is recorded, on the disk or in the batch."""
        self._woken = False

    # For the shell

    def start_at(self, number: int) -> None:
        """Use numbers from ``number`` on: what a start found keeps its own."""
        self._numbers = max(self._numbers, number)

    def cut(self, wall_offset: int) -> Batch:
        """Take what was recorded; what comes next belongs to the next commit."""
        batch = self._batch
        batch.wall_offset = wall_offset
        self._batch = Batch(batch.number + 1)
        self._woken = False
        return batch

    @property
    def number(self) -> int:
        """The commit that what is recorded now belongs to."""
        return self._batch.number

    @property
    def waiting(self) -> int:
        """How many changes were recorded since the last :meth:`cut`."""
        return len(self._batch)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for the next commit."""
        return self._batch.promised

    # For the engine

    def hurry(self) -> int:
        """The commit that all that was recorded until now belongs to; it does not wait to be written behind."""
        batch = self._batch
        if not batch.promised and not len(batch):
            return batch.number - 1
        self._changed(promised=True)
        return batch.number

    def new_number(self) -> int:
        """A number that no session, message or delivery has."""
        number = self._numbers
        self._numbers = number + 1
        return number

    def session(self, row: SessionRow) -> None:
        """A session was made or changed."""
        self._batch.sessions[row.number] = row
        self._changed(promised=row.promised)

    def session_ended(self, session: int, *, promised: bool) -> None:
        """A session is gone; its subscriptions and messages are taken back one by one."""
        self._batch.sessions[session] = None
        self._changed(promised=promised)

    def subscribed(self, row: SubscriptionRow, *, promised: bool) -> None:
        """A subscription was made or replaced."""
        self._batch.subscriptions[row.session, row.topic_filter] = row
        self._changed(promised=promised)

    def unsubscribed(self, session: int, topic_filter: str, *, promised: bool) -> None:
        """A subscription ended."""
        self._batch.subscriptions[session, topic_filter] = None
        self._changed(promised=promised)

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
        promised: bool,
    ) -> int:
        """A message is for a session from now on; the number of the delivery.

        ``packet_id``: with which it is sent at once, 0 where it waits. A message that says so is stored once for all
        its receivers, any other with its delivery.
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
        self._changed(promised=promised)
        return number

    def sent(self, session: int, number: int, packet_id: int, *, promised: bool) -> None:
        """A delivery that waited leaves with ``packet_id``. Promised at QoS 2: the client will know it by that."""
        self._progressed.add(number)
        self._batch.progress[number] = (session, packet_id, Stage.SENT)
        self._changed(promised=promised)

    def released(self, session: int, number: int, packet_id: int, message: Message, *, promised: bool) -> None:
        """PUBREC came: from here on only PUBREL is owed."""
        self._drop_message(number, message)
        self._progressed.add(number)
        self._batch.progress[number] = (session, packet_id, Stage.RELEASED)
        self._changed(promised=promised)

    def done(self, number: int, message: Message | None) -> None:
        """A delivery is over, or was dropped; ``message`` is None after :meth:`released`.

        Nobody waits for it: what is done twice after a crash is what the protocol lets happen.
        """
        if message is not None:
            self._drop_message(number, message)
        if number in self._progressed:
            self._progressed.remove(number)
            self._batch.progress[number] = None
        self._changed(promised=False)

    def incoming(self, session: int, packet_id: int, state: int, *, promised: bool) -> None:
        """A QoS 2 message with ``packet_id`` was taken over."""
        self._batch.incoming[session, packet_id] = state
        self._changed(promised=promised)

    def incoming_done(self, session: int, packet_id: int, *, promised: bool) -> None:
        """PUBREL came, or the message was refused: ``packet_id`` is free."""
        self._batch.incoming[session, packet_id] = None
        self._changed(promised=promised)

    def retained(self, topic: str, message: Message | None, source: Source | None = None) -> None:
        """The retained message of ``topic`` is ``message`` of ``source`` now, or there is none."""
        if not self.enabled:
            return
        self._batch.retained[topic] = None if message is None else (message, source)
        promised = self.promise_all
        if not promised and message is not None and (properties := message.publish.optional_properties) is not None:
            promised = PERSISTENCE_PROPERTY in properties.user_properties
        self._changed(promised=promised)

    def restored(self, number: int, *, progressed: bool) -> None:
        """Delivery ``number`` was found on start."""
        if progressed:
            self._progressed.add(number)

    # Inside

    def _changed(self, *, promised: bool) -> None:
        if promised:
            self.promises += 1
            if not self._batch.promised:
                self._batch.promised = True
                self._woken = False  # what only waits to be written behind may not be on its way yet
        if not self._woken:
            self._woken = True
            self.wake()

    def _drop_message(self, number: int, message: Message) -> None:
        batch = self._batch
        deliveries = batch.deliveries
        row = deliveries.get(number)
        if row is not None:
            del deliveries[number]  # it never came to the disk
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
