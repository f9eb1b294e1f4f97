"""Sessions from CONNECT to their end: made, resumed, taken over, kept, expired; and the wills of their clients.

Source: MQTT 5.0 sections 3.1, 3.14, 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.mqtt.codec.packets import ConnAck, Connect, Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.connack import capabilities, expiry_asked, will_problem
from penstock.mqtt.engine.model.access import UNKNOWN, Granted, Rights
from penstock.mqtt.engine.model.journal import PERSISTENCE_PROPERTY
from penstock.mqtt.engine.sessions.session import NEVER, Session
from penstock.mqtt.engine.sessions.session_journal import SessionJournal
from penstock.mqtt.engine.sessions.shared_delivery import share_out, take_over
from penstock.mqtt.engine.sessions.subscribing import check_again
from penstock.mqtt.service import Inbound

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker
    from penstock.mqtt.engine.connections.connection import BrokerConnection
    from penstock.mqtt.engine.connections.handshake import Handshake

__all__ = ["SessionManager"]


class SessionManager:
    """What makes the sessions of a broker, and what ends them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stats = broker.stats
        self._limits = broker.limits

    def connect(
        self, connection: BrokerConnection, handshake: Handshake, granted: Granted | None, keep_alive_s: int, now: int
    ) -> None:
        """Make a session of a CONNECT that was let pass, or refuse it after all [MQTT 5.0 section 3.1.4]."""
        packet = handshake.packet
        client_id = handshake.credentials.client_id
        rights = connection.rights_of(granted)
        owner = "" if granted is None else granted.principal.name
        refusal = self._refusal(packet, client_id, owner, rights)
        if refusal is not None:
            self._stats.refused_unauthorized += refusal[0] == ReasonCode.NOT_AUTHORIZED
            self._broker.report(connection, *refusal)
            connection.refuse(*refusal)
            return
        journal = self._broker.journal
        promises = journal.promises
        session, present = self._session(client_id, owner, now, clean_start=packet.clean_start)
        session.expiry_s = min(expiry_asked(packet), self._limits.max_session_expiry_s)
        session.username = packet.username
        session.ends_at = session.will_at = 0
        session.will = packet.will  # a will that was still waiting is cancelled [MQTT-3.1.3-9]
        if rights is not None:
            self.set_rights(session, rights, now)
        session.restored = False
        session.connection = connection
        connection.session = session
        connection.resumed = present
        if journal.enabled:
            self._keep(session, packet)
            if journal.promises != promises:
                connection.gate = journal.number
        answer = capabilities(self._limits, handshake, session, keep_alive_s, granted)
        if not connection.send(ConnAck(present, 0, answer)):
            # The client's Maximum Packet Size leaves no way to say what it must know, so nothing else may be said.
            session.will = None
            connection.close()
            self.connection_ended(connection, now)
            return
        session.resume(now)
        for subscription in session.subscriptions.values():
            if subscription.group is not None:
                take_over(subscription.group, now)

    def _refusal(self, packet: Connect, client_id: str, owner: str, rights: Rights | None) -> tuple[int, str] | None:
        """Why there can be no session for that CONNECT."""
        broker = self._broker
        will = packet.will
        if will is not None:
            problem = will_problem(will, rights, broker.router.route(will.topic).refusal)
            if problem is not None:
                return problem
        if broker.journal.failure and self._wants_promises(packet):
            return ReasonCode.SERVER_UNAVAILABLE, "the broker's disk failed"
        session = broker.sessions.get(client_id)
        if session is None and len(broker.sessions) >= self._limits.max_sessions:
            return ReasonCode.QUOTA_EXCEEDED, "too many sessions"
        if session is not None and session.owner != owner:
            return ReasonCode.NOT_AUTHORIZED, "the client identifier belongs to another principal"
        return None

    def _session(self, client_id: str, owner: str, now: int, *, clean_start: bool) -> tuple[Session, bool]:
        """The client's session, and whether it was there before; another connection of the client ends."""
        sessions = self._broker.sessions
        session = sessions.get(client_id)
        if session is not None and session.connection is not None:  # [MQTT-3.1.4-3]
            session.connection.disconnect(ReasonCode.SESSION_TAKEN_OVER, now)
            session = sessions.get(client_id)
        if session is not None:
            if not clean_start:
                return session, True
            self._discard(session, now)
        session = sessions[client_id] = Session(self._broker, client_id, self._limits, self._stats)
        session.owner = owner
        return session, False

    def _wants_promises(self, packet: Connect) -> bool:
        """Whether the client's session is kept and its acknowledgements wait for the disk."""
        if not min(expiry_asked(packet), self._limits.max_session_expiry_s):
            return False
        return self._broker.journal.promise_all or PERSISTENCE_PROPERTY in packet.properties.user_properties

    def _keep(self, session: Session, packet: Connect) -> None:
        """Have the session outlive the process, or not any more, as this CONNECT says."""
        kept = session.kept
        if not session.expiry_s:
            if kept is not None:
                kept.forget(session)
                session.kept = session.waiting.kept = None
            return
        if kept is None:
            kept = SessionJournal(self._broker.journal, self._broker.journal.new_number(), promised=False)
            session.kept = session.waiting.kept = kept
        kept.promised |= self._wants_promises(packet)
        kept.save(session)

    def connection_ended(self, connection: BrokerConnection, now: int) -> None:
        """A connection is closing or gone: its session goes offline, its will gets ready, or all of it ends."""
        session = connection.session
        if session is None or session.connection is not connection:
            return
        session.connection = None
        for service in self._broker.services:
            service.disconnected(session.client_id)
        share_out(session, now)
        will = session.will
        if will is not None:
            delay_s = min(will.properties.will_delay_interval or 0, session.expiry_s)
            if delay_s and session.expiry_s:
                session.will_at = now + delay_s * 1000
                self._broker.timers.arm(session, session.will_at)
            else:
                self._publish_will(session, now)
        if not session.expiry_s:
            self._discard(session, now)
            return
        if session.expiry_s != NEVER:
            session.ends_at = now + session.expiry_s * 1000
            self._broker.timers.arm(session, session.ends_at)
        if session.kept is not None:
            session.kept.save(session)

    def session_due(self, session: Session, now: int) -> None:
        """Will delay or expiry of an offline session has come."""
        if session.connection is not None:
            return
        if now < self._broker.grace_until:
            self._broker.timers.arm(session, self._broker.grace_until)
            return
        if session.will is not None and session.will_at and session.will_at <= now:
            self._publish_will(session, now)
        if session.ends_at and session.ends_at <= now:
            self._discard(session, now)
            return
        waiting = [at for at in (session.will_at, session.ends_at) if at]
        if waiting:  # the entry was of an earlier connection
            self._broker.timers.arm(session, min(waiting))
        if session.kept is not None:
            session.kept.save(session)

    def publish_wills(self, now: int) -> None:
        """The broker ends: publish the wills of connected clients that are not to wait, while services still run.

        A will with a delay stays with its session, for the next start.
        """
        for session in list(self._broker.sessions.values()):
            will = session.will
            if session.connection is None or will is None:
                continue
            if not (session.expiry_s and will.properties.will_delay_interval):
                self._publish_will(session, now)

    def _discard(self, session: Session, now: int) -> None:
        """End a session: its subscriptions, its messages; a will that was waiting goes out now [MQTT-4.1.0-2]."""
        if session.will is not None and session.connection is None:
            self._publish_will(session, now)
        for subscription in session.subscriptions.values():
            self._broker.router.remove(subscription)
        session.ending = True
        share_out(session, now)
        if session.kept is not None:
            session.kept.forget(session)
        session.subscriptions.clear()
        session.clear()
        self._broker.timers.remove(session)
        self._broker.sessions.pop(session.client_id, None)

    def _publish_will(self, session: Session, now: int) -> None:
        will = session.will
        session.will = None
        session.will_at = 0
        if will is None:
            return
        rights = session.rights
        if session.restored and self._broker.recall is not None:
            rights = self._broker.recall(session.owner, session.client_id)
            if rights is None:
                self._stats.refused_unauthorized += 1
                return
        if rights is not None and not rights.may_publish(will.topic, will.qos, retain=will.retain):
            self._stats.refused_unauthorized += 1
            return
        properties = will.properties.copy()
        properties.will_delay_interval = None
        publish = Publish(will.topic, will.payload, will.qos, retain=will.retain, properties=properties)
        services, _ = self._broker.route(publish, session, now)
        for service in services:
            service.receive(
                Inbound(
                    publish,
                    session.client_id,
                    now + self._broker.wall_offset,
                    username=session.username,
                    principal=(UNKNOWN if session.restored else None) if rights is None else rights.principal,
                )
            )

    # Rights

    def policies_changed(self, now: int) -> None:
        """Who decides about access decides otherwise from now on: ask again, also for what waits.

        Subscriptions and waiting messages that are not allowed any more go; a client that may not connect any more is
        the Access's to :meth:`disconnect`.
        """
        self._broker.router.forget_all()
        for session in list(self._broker.sessions.values()):
            if session.rights is not None:
                session.rights.forget()
                check_again(self._broker, session, now)

    def set_rights(self, session: Session, rights: Rights, now: int) -> None:
        """The client of the session has other rights now, be it as somebody else or as who it was."""
        session.rights = rights
        if session.subscriptions:
            self._broker.router.forget_all()
        check_again(self._broker, session, now)
