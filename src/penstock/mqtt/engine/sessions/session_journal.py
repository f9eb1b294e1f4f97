"""A session that is kept: its changes go to the journal, and what promises them waits for their commit.

A session has a :class:`SessionJournal` while it would outlive its connection (an expiry above 0) and the broker has
storage. All others have none and cost nothing here.

Source: MQTT 5.0 section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.engine.model.journal import Journal, SessionRow, SubscriptionRow
from penstock.mqtt.engine.sessions.message_queue import RELEASED

if TYPE_CHECKING:
    from penstock.mqtt.engine.connections.packet_writer import PacketWriter
    from penstock.mqtt.engine.model.message import Message
    from penstock.mqtt.engine.routing.shared_groups import SharedGroup
    from penstock.mqtt.engine.routing.subscription import SessionSubscription
    from penstock.mqtt.engine.sessions.message_queue import Delivery
    from penstock.mqtt.engine.sessions.session import Session

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

    def hold_back(self, connection: PacketWriter) -> None:
        """What leaves on ``connection`` from here on rests on what was recorded so far, and waits for its commit."""
        if self.promised:
            connection.gate = self.journal.hurry()

    def save(self, session: Session) -> None:
        """Its own state has changed: who has it, until when, its will."""
        connection = session.connection
        row = SessionRow(
            self.number,
            session.client_id,
            session.owner,
            session.username,
            5 if connection is None else connection.version,
            session.expiry_s,
            session.ends_at,
            session.will,
            session.will_at,
            self.promised,
        )
        self.journal.session(row)

    def forget(self, session: Session) -> None:
        """The session ends, or is not to outlive its connection any more: take back all of it."""
        journal = self.journal
        for topic_filter in session.subscriptions:
            journal.unsubscribed(self.number, topic_filter, promised=False)
        for delivery in (*session.inflight.values(), *session.waiting.reliable):
            self.done(delivery)
        for packet_id in (*session.incoming, *session.routed):
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
