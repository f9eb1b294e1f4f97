"""Persistent session state: records its changes in the journal.

A session has a :class:`SessionJournal` while its Session Expiry Interval is above 0 and the broker has storage.

Source: MQTT 5.0 section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.engine.model.journal import Journal, SessionRow, SubscriptionRow
from penstock.mqtt.engine.sessions.session_delivery import RELEASED, Delivery

if TYPE_CHECKING:
    from penstock.mqtt.engine.model.message import Message
    from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, SharedGroup

__all__ = ["ROUTED", "TAKEN", "SessionJournal"]

ROUTED: Final = 1
"""State of a QoS 2 message of the client: subscribers have it, services do not yet, and no PUBREC was sent."""
TAKEN: Final = 2
"""All have it: PUBREC may be sent, and a repeat is answered."""


class SessionJournal:
    """Records one session. ``promised``: its acknowledgements wait for the commit of what they promise."""

    __slots__ = ("journal", "number", "promised")

    def __init__(self, journal: Journal, number: int, *, promised: bool) -> None:
        self.journal = journal
        self.number = number
        self.promised = promised

    def save(self, row: SessionRow) -> None:
        """Record the session's own state."""
        self.journal.session(row)

    def delete(self, topic_filters: list[str], deliveries: list[Delivery], packet_ids: list[int]) -> None:
        """Remove the session with its subscriptions, deliveries and incoming QoS 2 identifiers."""
        journal = self.journal
        for topic_filter in topic_filters:
            journal.unsubscribed(self.number, topic_filter, promised=False)
        for delivery in deliveries:
            self.done(delivery)
        for packet_id in packet_ids:
            journal.incoming_done(self.number, packet_id, promised=False)
        journal.session_ended(self.number, promised=self.promised)

    def subscribed(self, subscription: SessionSubscription) -> None:
        """A subscription was made or replaced."""
        row = SubscriptionRow(
            self.number,
            subscription.topic_filter,
            subscription.qos,
            subscription.no_local,
            subscription.retain_as_published,
            subscription.identifier,
        )
        self.journal.subscribed(row, promised=self.promised)

    def unsubscribed(self, topic_filter: str) -> None:
        """A subscription ended."""
        self.journal.unsubscribed(self.number, topic_filter, promised=self.promised)

    def queue(
        self, message: Message, qos: int, retain: int, identifiers: bytes, group: SharedGroup | None, packet_id: int
    ) -> int:
        """A message is for the session; the number that its delivery carries. ``packet_id`` 0: it waits."""
        share = "" if group is None else group.topic_filter
        return self.journal.queue(
            self.number, message, qos, retain, identifiers, packet_id, share, promised=self.promised
        )

    def sent(self, delivery: Delivery, packet_id: int) -> None:
        """A message that waited leaves."""
        # The client may answer a QoS 2 message at once; after a crash it must find the same identifier.
        promised = self.promised and delivery.qos == 2
        self.journal.sent(self.number, delivery.number, packet_id, promised=promised)

    def released(self, delivery: Delivery, packet_id: int) -> None:
        """PUBREC came: PUBREL alone is owed."""
        self.journal.released(self.number, delivery.number, packet_id, delivery.message, promised=self.promised)

    def done(self, delivery: Delivery) -> None:
        """A delivery is over, dropped, or another session's."""
        number = delivery.number
        if number:
            self.journal.done(number, None if delivery.message is RELEASED else delivery.message)

    def incoming(self, packet_id: int, state: int) -> None:
        """A QoS 2 message of the client: :data:`ROUTED` or :data:`TAKEN`."""
        self.journal.incoming(self.number, packet_id, state, promised=self.promised and state == TAKEN)

    def incoming_done(self, packet_id: int) -> None:
        """The identifier is free."""
        self.journal.incoming_done(self.number, packet_id, promised=self.promised)
