"""Subscriptions of a session: subscribe, unsubscribe, remove subscriptions without permission.

Source: MQTT 5.0 sections 3.8 to 3.11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.packets import Subscribe, Subscription
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import SHARE_PREFIX, filter_problem
from penstock.mqtt.engine.model.client_events import SUBSCRIBE_DENIED
from penstock.mqtt.engine.model.message import identifier_block
from penstock.mqtt.engine.model.sys_topics import SYS_PREFIX
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription
from penstock.mqtt.engine.sessions.core import BrokerCore
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.engine.sessions.shared_delivery import leave_group, take_over

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "FILTER_WORK",
    "NO_END",
    "apply_rights",
    "as_bridge",
    "remove_ended",
    "subscribe",
    "subscribed",
    "unsubscribe",
]

FILTER_WORK: Final = 8
"""Units of work for a topic filter of SUBSCRIBE or UNSUBSCRIBE, and for a subscription of a session that ends: each
takes as long as eight messages without a subscriber, with its packet and its answer."""
NO_END: Final = 1 << 60
"""A limit of work that is never reached: everything is handled at once."""


def subscribe(broker: BrokerCore, session: Session, packet: Subscribe, codes: list[int], end: i64, now: int) -> bool:
    """Add subscriptions until the work of the broker is ``end``, at least one; return whether all are added.

    A reason code for each is appended to ``codes``, which the caller passes again for the rest. Retained messages are
    sent after the SUBACK.
    """
    identifier = identifier_block(packet.properties.subscription_identifiers)
    subscriptions = packet.subscriptions
    while len(codes) < len(subscriptions):
        codes.append(_subscribe(broker, session, subscriptions[len(codes)], identifier, now))
        broker.work += FILTER_WORK
        if broker.work >= end:
            break
    return len(codes) == len(subscriptions)


def as_bridge(packet: Subscribe) -> None:
    """Add the options that a bridge needs but MQTT 3.1.1 does not have: No Local and Retain As Published.

    Mosquitto and EMQX do the same for clients that set the bridge bit. Otherwise messages of a topic that is bridged in
    both directions would circulate endlessly, and retained messages would lose their flag.
    """
    for wanted in packet.subscriptions:
        wanted.no_local = not wanted.topic_filter.startswith(SHARE_PREFIX)  # [MQTT-3.8.3-4]
        wanted.retain_as_published = True


def subscribed(session: Session, packet: Subscribe, now: int) -> None:
    """Send retained and shared messages of new subscriptions, after the SUBACK."""
    granted = [session.subscriptions.get(wanted.topic_filter) for wanted in packet.subscriptions]
    take_over([each.group for each in granted if each is not None and each.group is not None], now)
    if session.retained_delivery is not None:
        session.send_waiting(now)


def _subscribe(broker: BrokerCore, session: Session, wanted: Subscription, identifier: bytes, now: int) -> int:
    topic_filter = wanted.topic_filter
    limits = broker.limits
    if (
        topic_filter.count("/") >= limits.max_topic_levels
        or len(topic_filter.encode(errors="replace")) > limits.max_topic_bytes
        or filter_problem(topic_filter) is not None
    ):
        return ReasonCode.TOPIC_FILTER_INVALID
    if session.rights is not None and not session.rights.may_subscribe(topic_filter, wanted.qos):
        broker.stats.refused_unauthorized += 1
        session.count_events(SUBSCRIBE_DENIED, 1, topic_filter)
        return limits.subscription_denied_code
    new = topic_filter not in session.subscriptions
    if new and (len(session.subscriptions) >= limits.max_subscriptions or not _has_room(broker)):
        broker.stats.refused_subscriptions += 1
        return ReasonCode.QUOTA_EXCEEDED
    if broker.no_commits and session.is_awaited():
        return ReasonCode.QUOTA_EXCEEDED
    subscription = SessionSubscription(session, wanted, wanted.qos, identifier)
    session.subscriptions[topic_filter] = subscription
    if topic_filter.startswith(SYS_PREFIX):
        broker.sys_topics.renew(now)
    broker.router.add(subscription)
    if session.journal is not None:
        session.journal.subscribed(subscription)
    wants_retained = wanted.retain_handling == 0 or (wanted.retain_handling == 1 and new)  # [MQTT-3.3.1-9 to -11]
    if wants_retained and subscription.group is None:  # not for shared subscriptions
        session.send_retained(subscription)
    return wanted.qos


def _has_room(broker: BrokerCore) -> bool:
    """Return whether the broker may get another subscription; those of ended sessions make room for it.

    Those that a later session of their client has replaced make none, so this can remove many at once, but each only
    once.
    """
    most = broker.limits.max_total_subscriptions
    while broker.ending and len(broker.router) >= most:
        _remove_ended(broker)
    return len(broker.router) < most


def remove_ended(broker: BrokerCore, end: i64) -> None:
    """Remove subscriptions of ended sessions until the work of the broker is ``end``."""
    while broker.ending and broker.work < end:
        _remove_ended(broker)


def _remove_ended(broker: BrokerCore) -> None:
    """Remove a subscription of the session that ended first."""
    subscriptions = broker.ending[0].subscriptions
    _, subscription = subscriptions.popitem()
    broker.router.remove(subscription)
    broker.work += FILTER_WORK
    if not subscriptions:
        broker.ending.popleft()


def unsubscribe(
    broker: BrokerCore, session: Session, topic_filters: list[str], codes: list[int], end: i64, now: int
) -> bool:
    """Remove subscriptions until the work of the broker is ``end``, at least one; see :func:`subscribe`."""
    while len(codes) < len(topic_filters):
        subscription = session.subscriptions.get(topic_filters[len(codes)])
        if subscription is None:
            codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED)
        else:
            _end_subscription(broker, session, subscription, now)
            codes.append(0)
        broker.work += FILTER_WORK
        if broker.work >= end:
            break
    return len(codes) == len(topic_filters)


def _end_subscription(broker: BrokerCore, session: Session, subscription: SessionSubscription, now: int) -> None:
    del session.subscriptions[subscription.topic_filter]
    broker.router.remove(subscription)
    if session.journal is not None:
        session.journal.unsubscribed(subscription.topic_filter)
    if session.retained_delivery is not None:
        session.retained_delivery.cancel(subscription.topic_filter)  # [MQTT-3.10.4-2]
    group = subscription.group
    if group is not None:
        leave_group(session, group, now)


def apply_rights(broker: BrokerCore, session: Session, now: int) -> None:
    """Remove subscriptions and queued messages that the session's rights no longer permit."""
    rights = session.rights
    if rights is None:
        return
    for subscription in list(session.subscriptions.values()):
        if not rights.may_subscribe(subscription.topic_filter, subscription.qos):
            _end_subscription(broker, session, subscription, now)
    waiting = session.waiting
    unwanted = [d for d in (*waiting.reliable, *waiting.qos0) if not rights.may_receive(d.message.topic)]
    if unwanted:
        waiting.remove(unwanted)
        if session.journal is not None:
            for delivery in unwanted:
                session.journal.done(delivery)
        broker.stats.dropped_unauthorized += len(unwanted)
