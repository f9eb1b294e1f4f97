"""Persistent session state: records its changes in the journal.

A session has a :class:`SessionJournal` while its Session Expiry Interval is above 0 and the broker has storage.

Source: MQTT 5.0 section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.engine.model.journal import Journal, SessionRow, SubscriptionRow
from penstock.mqtt.engine.model.message import RELEASED, Delivery, Message

if TYPE_CHECKING:
    from penstock.mqtt.engine.routing.subscriptions import SessionSubscription

__all__ = ["PROCESSED", "ROUTED", "SessionJournal"]

ROUTED: Final = 1
"""State of a received QoS 2 message: delivered to subscribers, but not processed by services; no PUBREC was sent."""
PROCESSED: Final = 2
"""State of a received QoS 2 message: processed; PUBREC may be sent, and a repetition is acknowledged."""


class SessionJournal:
    """Records one session. ``awaited``: its acknowledgements wait for the commit of the changes they confirm."""

    __slots__ = ("awaited", "journal", "number")

    def __init__(self, journal: Journal, number: int, *, awaited: bool) -> None:
        self.journal = journal
        self.number = number
        self.awaited = awaited

    def save(self, row: SessionRow) -> None:
        """Record the session's own state."""
        self.journal.session(row)

    def delete(self, topic_filters: list[str], deliveries: list[Delivery], packet_ids: list[int]) -> None:
        """Remove the session with its subscriptions, deliveries and incoming QoS 2 identifiers."""
        journal = self.journal
        for topic_filter in topic_filters:
            journal.unsubscribed(self.number, topic_filter, awaited=False)
        for delivery in deliveries:
            self.done(delivery)
        for packet_id in packet_ids:
            journal.incoming_done(self.number, packet_id, awaited=False)
        journal.session_ended(self.number, awaited=self.awaited)

    def subscribed(self, subscription: SessionSubscription) -> None:
        """Record a new or replaced subscription."""
        row = SubscriptionRow(
            self.number,
            subscription.topic_filter,
            subscription.qos,
            subscription.no_local,
            subscription.retain_as_published,
            subscription.identifier,
        )
        self.journal.subscribed(row, awaited=self.awaited)

    def unsubscribed(self, topic_filter: str) -> None:
        """Delete a subscription."""
        self.journal.unsubscribed(self.number, topic_filter, awaited=self.awaited)

    def queue(self, message: Message, qos: int, retain: int, identifiers: bytes, share: str, packet_id: int) -> int:
        """Record a message, and return the number of its delivery. ``packet_id`` 0: it is queued."""
        return self.journal.queue(
            self.number, message, qos, retain, identifiers, packet_id, share, awaited=self.awaited
        )

    def sent(self, delivery: Delivery, packet_id: int) -> None:
        """Record that a queued message is sent."""
        # The client may send PUBREC immediately; after a crash the message must have the same identifier.
        awaited = self.awaited and delivery.qos == 2
        self.journal.sent(self.number, delivery.number, packet_id, awaited=awaited)

    def released(self, delivery: Delivery, packet_id: int) -> None:
        """Record a PUBREC."""
        self.journal.released(self.number, delivery.number, packet_id, delivery.message, awaited=self.awaited)

    def done(self, delivery: Delivery) -> None:
        """Delete a delivery that is complete, dropped, or taken over by another session."""
        number = delivery.number
        if number:
            self.journal.done(number, None if delivery.message is RELEASED else delivery.message)

    def incoming(self, packet_id: int, state: int) -> None:
        """Record a received QoS 2 message: :data:`ROUTED` or :data:`PROCESSED`."""
        self.journal.incoming(self.number, packet_id, state, awaited=self.awaited and state == PROCESSED)

    def incoming_done(self, packet_id: int) -> None:
        """Free the identifier of a received QoS 2 message."""
        self.journal.incoming_done(self.number, packet_id, awaited=self.awaited)
