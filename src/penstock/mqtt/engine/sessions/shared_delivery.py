"""Shared subscriptions when members connect and disconnect: other members take over undelivered messages.

Queued messages and unacknowledged QoS 1 messages move to another member. A QoS 2 message that was sent stays in its
session [MQTT-4.8.2-4], [MQTT-4.8.2-5]. Shared subscriptions do not guarantee an order.

A message moves only to a member with room for it; otherwise it stays until there is room or its session ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.mqtt.engine.model.message import Delivery, Message
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, SharedGroup
from penstock.mqtt.engine.sessions.session import Session

__all__ = ["deliver_shared", "leave_group", "share_out", "take_over"]


def deliver_shared(member: SessionSubscription, group: SharedGroup, message: Message, now: int) -> None:
    """Deliver a message to the chosen member of the group."""
    qos = min(member.qos, message.qos)  # [MQTT-4.8.2-3]
    retain = 1 if message.retain and member.retain_as_published else 0
    member.session.deliver(message, qos, retain, member.identifier, now, group.topic_filter)


def share_out(session: Session, now: int) -> None:
    """Move undelivered messages of a disconnected session to connected members; of an ending session to any member.

    Messages that it would have taken over later go to others as well.
    """
    if session.inflight.count or session.waiting.reliable:
        inflight = [d for d in session.deliveries() if d.share and d.qos == 1]
        waiting = [d for d in session.waiting.reliable if d.share]
        if inflight or waiting:
            _move_deliveries(session, inflight + waiting, now, online_only=not session.ending)
    if session.deferred_groups:
        take_over(session.take_deferred(), now)


def take_over(groups: Iterable[SharedGroup], now: int) -> None:
    """Move messages that are queued for disconnected members to members with room for them.

    A session is visited once, even if it is a member of several groups, because a visit iterates over all its messages.
    """
    sessions: dict[Session, None] = {}
    for group in groups:
        for member in group.members.values():
            session = _session(member)
            if session.connection is None:
                sessions[session] = None
    for session in sessions:
        share_out(session, now)


def leave_group(session: Session, group: SharedGroup, now: int) -> None:
    """Move queued messages of a session that unsubscribed to other members."""
    if group.members:
        _move_deliveries(
            session, [d for d in session.waiting.reliable if d.share == group.topic_filter], now, online_only=False
        )


def _move_deliveries(session: Session, deliveries: Iterable[Delivery], now: int, *, online_only: bool) -> None:
    moved: list[Delivery] = []
    takers: list[tuple[SessionSubscription, SharedGroup]] = []
    allowed: dict[tuple[SharedGroup, str], list[SessionSubscription]] = {}
    room = _QueueRoom()
    for delivery in deliveries:
        message = delivery.message
        group = session.shared_group(delivery.share)
        if group is None or message.expired(now):
            continue
        topic = message.topic
        members = allowed.get((group, topic))
        if members is None:
            members = [member for member in group.members.values() if member.session.may_receive(topic)]
            allowed[group, topic] = members
        taker = group.choose(message, members, without=session)
        if taker is None or (online_only and not taker.session.is_connected()):
            continue
        if not room.reserve(taker, message.size):
            if not session.ending:
                _session(taker).defer(group)
                continue
            # It cannot stay: a full queue would drop it, so it goes to another member, also a disconnected one.
            taker = room.reserve_any(members, message.size) or taker
        moved.append(delivery)
        takers.append((taker, group))
    if moved:
        session.withdraw(moved)
        for delivery, (taker, group) in zip(moved, takers, strict=True):
            deliver_shared(taker, group, delivery.message, now)


def _session(subscription: SessionSubscription) -> Session:
    session = subscription.session
    assert isinstance(session, Session)  # sessions are the only subscribers of a broker
    return session


class _QueueRoom:
    """Remaining room in the queues of sessions."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: dict[Session, tuple[int, int]] = {}

    def reserve(self, member: SessionSubscription, size: int) -> bool:
        """Reserve room for a message of ``size`` bytes; return False if it does not fit."""
        session = _session(member)
        messages, bytes_ = self._left.get(session) or session.waiting.room()
        if session.ending or messages < 1 or bytes_ < size:
            return False
        self._left[session] = messages - 1, bytes_ - size
        return True

    def reserve_any(self, members: list[SessionSubscription], size: int) -> SessionSubscription | None:
        """Reserve room for a message at one of ``members``; return None if none has room."""
        for member in members:
            if self.reserve(member, size):
                return member
        return None
