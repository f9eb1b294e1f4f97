"""Recovery: restores sessions, offline, and retained messages at a start.

A session that was connected when the process ended counts as disconnected at the start, since its client could not
reconnect before. The broker's next tick handles expired sessions and wills, after all services were added.
"""

from __future__ import annotations

from penstock.mqtt.codec.packets import Subscription
from penstock.mqtt.engine.model.journal import DeliveryRow, MessageRow, ProgressRow, Recovered, SessionRow, Stage
from penstock.mqtt.engine.model.message import RELEASED, Delivery, Message
from penstock.mqtt.engine.model.timers import after_s
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import LARGE, NEVER, Session
from penstock.mqtt.engine.sessions.session_journal import ROUTED, SessionJournal

__all__ = ["restore"]


def restore(broker: BrokerCore, found: Recovered, now: int) -> None:
    """Restore ``found``, whose instants are of the broker's clock, before the first connection.

    Call :meth:`Timers.tick` after adding the services that wills may be addressed to.
    """
    sessions = {row.number: _session(broker, row, now) for row in found.sessions}
    for row in found.subscriptions:
        session = sessions[row.session]
        wanted = Subscription(row.topic_filter, row.qos, row.no_local, row.retain_as_published)
        subscription = SessionSubscription(session, wanted, row.qos, row.identifier)
        session.subscriptions[row.topic_filter] = subscription
        broker.router.add(subscription)
    _DeliveryRecovery(broker, sessions, now).restore(found)
    for number, packet_id, state in found.incoming:
        session = sessions[number]
        if state != ROUTED:
            session.incoming[packet_id] = None
        else:
            session.mark_routed(packet_id)
    _retained(broker, found.retained, now)


def _session(broker: BrokerCore, row: SessionRow, now: int) -> Session:
    session = Session(broker, row.client_id, broker.limits, broker.stats)
    session.restored = True
    session.owner = row.owner
    session.username = row.username
    session.expiry_s = row.expiry_s
    session.journal = session.waiting.journal = SessionJournal(broker.journal, row.number, awaited=row.awaited)
    session.will = row.will
    session.will_at, session.ends_at = row.will_at, row.ends_at
    if row.will is not None and not session.will_at:
        delay_s = min(row.will.properties.will_delay_interval or 0, row.expiry_s)
        session.will_at = after_s(now, delay_s)
    if not session.ends_at and row.expiry_s != NEVER:
        session.ends_at = after_s(now, row.expiry_s)
    broker.sessions[row.client_id] = session
    waiting = [at for at in (session.will_at, session.ends_at) if at]
    if waiting:
        broker.timers.arm(session, min(waiting))
    return session


class _DeliveryRecovery:
    """Restores the deliveries of the sessions."""

    def __init__(self, broker: BrokerCore, sessions: dict[int, Session], now: int) -> None:
        self._broker = broker
        self._sessions = sessions
        self._now = now
        self._shared: dict[int, Message] = {}

    def restore(self, found: Recovered) -> None:
        """Restore the deliveries of ``found``."""
        progress = {row.number: row for row in found.progress}
        with_message = {row.number for row in found.deliveries}
        # By number: the order in which they were sent and must be sent again [MQTT-4.6.0-1].
        rows: list[DeliveryRow | ProgressRow] = [
            *found.deliveries,
            *(row for row in found.progress if row.number not in with_message),
        ]
        rows.sort(key=lambda row: row.number)
        for row in rows:
            session = self._sessions[row.session]
            self._broker.journal.restored(row.number, progressed=row.number in progress)
            if isinstance(row, ProgressRow):
                self._released(session, row)
            else:
                known = progress.get(row.number)
                self._delivery(session, row, row.packet_id if known is None else known.packet_id)

    def _released(self, session: Session, row: ProgressRow) -> None:
        delivery = Delivery(RELEASED, 2, 0, b"", "", row.number)
        if row.stage == Stage.RELEASED:
            session.inflight.restore(row.packet_id, delivery)
        elif session.journal is not None:  # its message is damaged and in quarantine
            session.journal.done(delivery)

    def _delivery(self, session: Session, row: DeliveryRow, packet_id: int) -> None:
        message = self._message(row.message)
        subscription = session.subscriptions.get(row.share) if row.share else None
        share = row.share if subscription is not None else ""
        delivery = Delivery(message, row.qos, row.retain, row.identifiers, share, row.number)
        if packet_id:
            session.inflight.restore(packet_id, delivery)
            if len(message.payload) >= LARGE:
                session.inflight.bytes += len(message.payload)
            return
        dropped = message.expired(self._now)
        if dropped:
            self._broker.stats.dropped_expired += 1
        if (dropped or not session.waiting.add(delivery)) and session.journal is not None:
            session.journal.done(delivery)

    def _message(self, row: MessageRow) -> Message:
        if not row.number:
            return _message(row)
        message = self._shared.get(row.number)
        if message is None:
            message = self._shared[row.number] = _message(row)
            message.stored = row.number
        message.receivers += 1
        return message


def _message(row: MessageRow) -> Message:
    topic = row.topic_wire[2:].decode()
    message = Message(
        topic, row.topic_wire, row.payload, row.properties_wire, row.qos, row.accepted_at, retain=row.retain
    )
    if len(row.properties_wire) > 1 and (interval := message.properties.message_expiry_interval) is not None:
        message.expires_at = max(row.accepted_at + interval * 1000, 1)  # before the clock's zero; 0 means never
    return message


def _retained(broker: BrokerCore, rows: list[MessageRow], now: int) -> None:
    for row in rows:
        message = _message(row)
        if message.expired(now):
            broker.journal.retained_expired(message.topic)
        else:
            broker.retained.restore(message.topic, message, row.source)
