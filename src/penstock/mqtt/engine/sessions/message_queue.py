"""Queue of one session: bounded, with an overflow policy.

Messages of QoS 1 and 2 are queued in the order of their arrival [MQTT-4.6.0-5]. QoS 0 has a queue of its own, whose
messages are dropped first.

Notifications of the state store are not dropped by the policy, because an observer would keep an old value. In a full
queue they are merged: for each topic the newest notification and the newest deletion remain, in their order, so that
versions increase, even across the keys of a prefix. If that does not free enough room, the session ends the client's
connection and its observations.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.model.message import Delivery, Message, Notification
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.sessions.session_journal import SessionJournal

__all__ = ["MessageQueue", "QueueTotals"]

URGENT_SHARE: Final = 2
"""Factor of the queue limits for messages with high priority."""

MERGE_SHARE: Final = 4
"""Notifications are merged again when a fourth of the queue is new: the merge visits the whole queue, so this bounds
its cost per message."""

_EMPTY: Final[deque[Delivery]] = deque(maxlen=0)
"""Shared empty queue of sessions that never queued a message: a deque uses 760 bytes."""


class QueueTotals:
    """Messages and bytes in the queues of all sessions of a broker."""

    __slots__ = ("bytes", "messages")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0


class MessageQueue:
    """The two queues of one session. ``bytes``: total :attr:`Message.size` of both."""

    __slots__ = (
        "_limits",
        "_stats",
        "_totals",
        "_unmerged",
        "backlog",
        "bytes",
        "journal",
        "merged",
        "qos0",
        "reliable",
    )

    def __init__(self, limits: BrokerLimits, stats: BrokerStats, totals: QueueTotals) -> None:
        self._limits = limits
        self._stats = stats
        self._totals = totals
        self.journal: SessionJournal | None = None
        """Records dropped messages of a persistent session."""
        self.reliable = _EMPTY
        """QoS 1 and 2 messages; modified only by the methods, which update the sizes."""
        self.qos0 = _EMPTY
        self.backlog = False
        """Whether QoS 1 or 2 messages wait."""
        self.bytes = 0
        self.merged = 0
        """Notifications that :meth:`add` merged; the session reports them and sets it to 0."""
        self._unmerged = 0
        """Notifications added since the last merge."""

    def __len__(self) -> int:
        return len(self.reliable) + len(self.qos0)

    def has_room(self, message: Message) -> bool:
        """Return whether a QoS 1 or 2 message would be queued without dropping another."""
        # A single message is never larger than the queue, see `add`.
        share = URGENT_SHARE if message.urgent and message.size <= self._limits.max_queued_bytes else 1
        return len(self) < share * self._limits.max_queued_messages and self._fits(message.size, share)

    def overflow_reason(self, message: Message) -> str:
        """Return why :meth:`has_room` is False: what is full, and what to do. It does not name the subscriber."""
        limits = self._limits
        if message.size > limits.max_queued_bytes:
            return (
                "the message is larger than the queue of a subscriber: publish smaller ones, or raise max_queued_bytes"
            )
        if not self._fits_totals(message.size):
            return (
                "the queues of all subscribers together are full: publish again later, "
                "or raise max_total_queued_messages or max_total_queued_bytes"
            )
        return (
            "the queue of a subscriber is full: publish again later, or raise max_queued_messages or max_queued_bytes"
        )

    def room(self) -> tuple[int, int]:
        """Return the number of messages and of bytes that fit into the queue."""
        limits, totals = self._limits, self._totals
        return (
            min(limits.max_queued_messages - len(self), limits.max_total_queued_messages - totals.messages),
            min(limits.max_queued_bytes - self.bytes, limits.max_total_queued_bytes - totals.bytes),
        )

    def _fits(self, size: int, share: int = 1) -> bool:
        return self.bytes + size <= share * self._limits.max_queued_bytes and self._fits_totals(size)

    def _fits_totals(self, size: int) -> bool:
        limits, totals = self._limits, self._totals
        return (
            totals.bytes + size <= limits.max_total_queued_bytes and totals.messages < limits.max_total_queued_messages
        )

    def add(self, delivery: Delivery) -> bool:
        """Queue ``delivery``, and drop others by the overflow policy; return False if it is not queued.

        Superseded notifications are dropped first, other notifications never. Urgent messages may exceed the session's
        limits up to twice.
        """
        limits = self._limits
        size = delivery.message.size
        drops_oldest = limits.queue_overflow is QueueOverflowPolicy.DROP_OLDEST
        share = URGENT_SHARE if delivery.message.urgent and delivery.qos and not drops_oldest else 1
        if size > limits.max_queued_bytes:
            self._stats.dropped_queue_full += 1
            return False
        while len(self) >= share * limits.max_queued_messages or not self._fits(size, share):
            if self._merge(delivery):
                continue
            self._stats.dropped_queue_full += 1
            oldest = self.qos0 or self.reliable
            if not drops_oldest and not (delivery.qos and self.qos0):
                return False
            if not oldest or (oldest is self.reliable and not delivery.qos):
                return False  # other sessions reached the common limit, or QoS 0 cannot replace QoS 1 and 2
            if type(oldest[0].message) is Notification:
                return False
            dropped = oldest.popleft()
            self.backlog = len(self.reliable) > 0
            self._forget(dropped)
            if self.journal is not None:
                self.journal.done(dropped)
        if delivery.qos:
            if self.reliable is _EMPTY:
                self.reliable = deque()
            self.reliable.append(delivery)
            self.backlog = True
            if type(delivery.message) is Notification:
                self._unmerged += 1
        else:
            if self.qos0 is _EMPTY:
                self.qos0 = deque()
            self.qos0.append(delivery)
        self.bytes += size
        totals = self._totals
        totals.bytes += size
        totals.messages += 1
        return True

    def _merge(self, delivery: Delivery) -> bool:
        """Drop notifications that a later one supersedes, ``delivery`` included; return whether there were any."""
        if not self._unmerged or self._unmerged * MERGE_SHARE < len(self.reliable):
            return False
        self._unmerged = 0
        reported: set[bytes] = set()
        """Topics with a later notification in the queue."""
        deleted: set[bytes] = set()
        """Topics with a later deletion in the queue."""
        stays: deque[Delivery] = deque()
        dropped = 0
        for position, each in enumerate((delivery, *reversed(self.reliable))):
            message = each.message
            if type(message) is Notification:
                topic = message.topic_wire
                if topic in (deleted if message.deletes else reported):
                    dropped += 1
                    self._forget(each)
                    if self.journal is not None:
                        self.journal.done(each)
                    continue
                reported.add(topic)
                if message.deletes:
                    deleted.add(topic)
            if position:
                stays.appendleft(each)
        self.reliable = stays
        self.backlog = len(stays) > 0
        self.merged += dropped
        self._stats.notifications_merged += dropped
        return dropped > 0

    def pop(self) -> Delivery:
        """Remove and return the oldest QoS 1 or 2 message of a queue that is not empty."""
        delivery = self.reliable.popleft()
        self.backlog = len(self.reliable) > 0
        self._forget(delivery)
        return delivery

    def pop_qos0(self) -> Delivery:
        """Remove and return the oldest QoS 0 message of a queue that is not empty."""
        delivery = self.qos0.popleft()
        self._forget(delivery)
        return delivery

    def remove(self, unwanted: list[Delivery]) -> None:
        """Remove the deliveries with the same message and shared subscription as one of ``unwanted``."""
        gone = {(delivery.message, delivery.share) for delivery in unwanted}
        for line in (self.reliable, self.qos0):
            remaining = [delivery for delivery in line if (delivery.message, delivery.share) not in gone]
            if len(remaining) < len(line):
                for delivery in line:
                    if (delivery.message, delivery.share) in gone:
                        self._forget(delivery)
                line.clear()
                line.extend(remaining)
        self.backlog = len(self.reliable) > 0

    def clear(self) -> None:
        """Remove all messages."""
        self._totals.bytes -= self.bytes
        self._totals.messages -= len(self)
        self.bytes = self._unmerged = 0
        self.reliable.clear()
        self.backlog = False
        self.qos0.clear()

    def _forget(self, delivery: Delivery) -> None:
        size = delivery.message.size
        self.bytes -= size
        self._totals.bytes -= size
        self._totals.messages -= 1
