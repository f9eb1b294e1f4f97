"""The life cycle of sessions: create, resume, take over, persist, expire; and the wills of their clients.

Source: MQTT 5.0 sections 3.1, 3.14, 4.1.
"""

from __future__ import annotations

from penstock.mqtt.codec.packets import Connect, Publish, Will
from penstock.mqtt.codec.reasons import ReasonCode, reason_name
from penstock.mqtt.engine.model.access import UNKNOWN, Rights
from penstock.mqtt.engine.model.journal import PERSISTENCE_PROPERTY
from penstock.mqtt.engine.model.timers import after_s
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import NEVER, Session, SessionConnection
from penstock.mqtt.engine.sessions.session_journal import SessionJournal
from penstock.mqtt.engine.sessions.shared_delivery import share_out
from penstock.mqtt.engine.sessions.subscribing import FILTER_WORK, apply_rights, remove_ended
from penstock.mqtt.service import Inbound
from penstock.runtime.turns import TURN_SHARES

__all__ = ["SessionManager", "expiry_asked"]


def expiry_asked(packet: Connect) -> int:
    """Return the requested Session Expiry Interval in seconds; MQTT 3.1.1 sessions with Clean Session 0 never
    expire."""
    if packet.protocol_version != 5:
        return 0 if packet.clean_start else NEVER
    return packet.properties.session_expiry_interval or 0


class SessionManager:
    """Creates the sessions of a broker and ends them."""

    def __init__(self, broker: BrokerCore) -> None:
        self.broker = broker
        self._stats = broker.stats
        self._limits = broker.limits

    def refusal(self, packet: Connect, client_id: str, owner: str) -> tuple[int, str] | None:
        """Return the reason code and text for refusing a session to a CONNECT; None if it is accepted."""
        broker = self.broker
        if broker.journal.failure and self._wants_durable_answers(packet):
            return ReasonCode.SERVER_UNAVAILABLE, "the broker's disk failed"
        session = broker.sessions.get(client_id)
        if session is None and len(broker.sessions) >= self._limits.max_sessions:
            return ReasonCode.QUOTA_EXCEEDED, "too many sessions"
        if session is not None and session.owner != owner:
            return ReasonCode.NOT_AUTHORIZED, "the client identifier belongs to another principal"
        if broker.no_commits and (
            self._wants_durable_answers(packet) or (session is not None and session.is_awaited())
        ):
            return ReasonCode.QUOTA_EXCEEDED, broker.no_commits
        return None

    def resume_or_create(self, client_id: str, owner: str, now: int, *, clean_start: bool) -> tuple[Session, bool]:
        """Return the client's session, and whether it existed before. Ends another connection of the client."""
        sessions = self.broker.sessions
        session = sessions.get(client_id)
        if session is not None and session.connection is not None:  # [MQTT-3.1.4-3]
            session.connection.disconnect(ReasonCode.SESSION_TAKEN_OVER, now)
            session = sessions.get(client_id)
        if session is not None:
            if not clean_start:
                return session, True
            self._discard(session, now)
        session = sessions[client_id] = Session(self.broker, client_id, self._limits, self._stats)
        session.owner = owner
        return session, False

    def _wants_durable_answers(self, packet: Connect) -> bool:
        """Return whether the client's session is persistent and its acknowledgements wait for the disk."""
        if not min(expiry_asked(packet), self._limits.max_session_expiry_s):
            return False
        return self.broker.journal.durable_acknowledgements or PERSISTENCE_PROPERTY in packet.properties.user_properties

    def update_persistence(self, session: Session, packet: Connect) -> None:
        """Make the session persistent or not, as requested by this CONNECT."""
        journal = session.journal
        if not session.expiry_s:
            if journal is not None:
                session.delete_state()
                session.journal = session.waiting.journal = None
            return
        if journal is None:
            journal = SessionJournal(self.broker.journal, self.broker.journal.new_number(), awaited=False)
            session.journal = session.waiting.journal = journal
        journal.awaited |= self._wants_durable_answers(packet)
        session.save_state()

    def connection_ended(self, connection: SessionConnection, now: int) -> None:
        """Take the session of a closing or closed connection offline; without an expiry it ends.

        The will is published immediately or after its delay.
        """
        session = connection.session
        if session is None or session.connection is not connection:
            return
        session.connection = None
        for service in self.broker.services:
            service.disconnected(session.client_id)
        share_out(session, now)
        will = session.will
        if will is not None:
            delay_s = min(will.properties.will_delay_interval or 0, session.expiry_s)
            if delay_s and session.expiry_s:
                session.will_at = after_s(now, delay_s)
                self.broker.timers.arm(session, session.will_at)
            else:
                self._publish_will(session, now)
        if not session.expiry_s:
            self._discard(session, now)
            return
        if session.expiry_s != NEVER:
            session.ends_at = after_s(now, session.expiry_s)
            self.broker.timers.arm(session, session.ends_at)
        session.save_state()

    def session_due(self, session: Session, now: int) -> None:
        """Handle the will delay or the expiry of an offline session."""
        if session.connection is not None:
            return
        if now < self.broker.grace_until:
            self.broker.timers.arm(session, self.broker.grace_until)
            return
        if session.will_at and session.will_at <= now:
            self._publish_will(session, now)
        if session.ends_at and session.ends_at <= now:
            self._discard(session, now)
            return
        waiting = [at for at in (session.will_at, session.ends_at) if at]
        if waiting:  # the timer entry is from an earlier connection
            self.broker.timers.arm(session, min(waiting))
        session.save_state()

    def publish_wills(self, now: int) -> None:
        """Publish the wills of connected clients before a shutdown, while services still run.

        A will with a delay stays in its session, for the next start.
        """
        for session in list(self.broker.sessions.values()):
            will = session.will
            if session.connection is None or will is None:
                continue
            if not (session.expiry_s and will.properties.will_delay_interval):
                self._publish_will(session, now)

    def _discard(self, session: Session, now: int) -> None:
        """Delete a session with its subscriptions and messages; a delayed will is published [MQTT-4.1.0-2]."""
        if session.will is not None and session.connection is None:
            self._publish_will(session, now)
        broker = self.broker
        if FILTER_WORK * len(session.subscriptions) <= broker.max_turn_work:
            for subscription in session.subscriptions.values():
                broker.router.remove(subscription)
            session.subscriptions.clear()
        else:
            broker.router.forget_all()
            broker.ending.append(session)
            broker.wake()
        session.ending = True
        share_out(session, now)
        session.delete_state()
        session.clear()
        self.broker.timers.remove(session)
        self.broker.sessions.pop(session.client_id, None)

    def remove_subscriptions(self) -> None:
        """Remove subscriptions of ended sessions, within their common share of a turn."""
        broker = self.broker
        remove_ended(broker, broker.work + TURN_SHARES * broker.max_turn_work)
        if broker.ending:
            broker.wake()

    def _publish_will(self, session: Session, now: int) -> None:
        will = session.will
        session.will = None
        session.will_at = 0
        if will is None:
            return
        rights = session.rights
        if session.restored and self.broker.recall is not None:
            rights = self.broker.recall(session.owner, session.client_id)
            if rights is None:
                self._refuse_will(session, will, "the client has no permissions any more")
                return
        if rights is not None and not rights.may_publish(will.topic, will.qos, retain=will.retain):
            self._refuse_will(session, will, "the policies do not permit it any more")
            return
        properties = will.properties.copy()
        properties.will_delay_interval = None
        publish = Publish(will.topic, will.payload, will.qos, retain=will.retain, properties=properties)
        services, code, reason = self.broker.route(publish, session, now)
        if code >= 0x80:
            self.broker.report_will(
                session.client_id, will.topic, f"{reason_name(code)}: {reason}" if reason else reason_name(code)
            )
        for service in services:
            service.receive(
                Inbound(
                    publish,
                    session.client_id,
                    now + self.broker.wall_offset,
                    username=session.username,
                    principal=(UNKNOWN if session.restored else None) if rights is None else rights.principal,
                )
            )

    def _refuse_will(self, session: Session, will: Will, why: str) -> None:
        self._stats.refused_unauthorized += 1
        self.broker.report_will(session.client_id, will.topic, why)

    # Rights

    def policies_changed(self, now: int) -> None:
        """Authorize subscriptions and queued messages again, after the decisions of an Access changed.

        Those that are no longer allowed are removed.
        """
        self.broker.router.forget_all()
        for session in list(self.broker.sessions.values()):
            if session.rights is not None:
                session.rights.forget()
                apply_rights(self.broker, session, now)

    def set_rights(self, session: Session, rights: Rights, now: int) -> None:
        """Replace the rights of the session, and remove subscriptions and messages that they no longer permit."""
        session.rights = rights
        if session.subscriptions:
            self.broker.router.forget_all()
        apply_rights(self.broker, session, now)
