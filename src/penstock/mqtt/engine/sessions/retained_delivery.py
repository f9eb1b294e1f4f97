"""Retained messages on their way to new subscriptions of one session, as fast as its client takes them.

They do not wait in the session's queue, which would drop what exceeds it.

Source: MQTT 5.0 sections 3.3.1.3, 3.8.4.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.engine.routing.subscription import SessionSubscription
from penstock.mqtt.engine.sessions.message_queue import Delivery

if TYPE_CHECKING:
    from penstock.mqtt.engine.connections.connection import BrokerConnection
    from penstock.mqtt.engine.sessions.retained import Retained
    from penstock.mqtt.engine.sessions.session import Session

__all__ = ["RetainedDelivery"]


class RetainedDelivery:
    """Subscriptions whose retained messages are still to be sent, one after the other."""

    __slots__ = ("_found", "_retained", "_session", "_subscriptions")

    def __init__(self, session: Session, retained: Retained) -> None:
        self._session = session
        self._retained = retained
        self._subscriptions: dict[str, SessionSubscription] = {}
        self._found: deque[Message] | None = None
        """What is left of the first one's."""

    def add(self, subscription: SessionSubscription) -> None:
        """Send those of ``subscription``, from the start where they are on their way."""
        self.end(subscription.topic_filter)
        self._subscriptions[subscription.topic_filter] = subscription

    def end(self, topic_filter: str) -> None:
        """The subscription is replaced or gone."""
        if topic_filter in self._subscriptions:
            if next(iter(self._subscriptions)) == topic_filter:
                self._found = None
            del self._subscriptions[topic_filter]

    def send(self, connection: BrokerConnection, now: int) -> bool:
        """Go on, as far as the connection takes them; True when all were sent."""
        session, retained = self._session, self._retained
        while self._subscriptions:
            topic_filter, subscription = next(iter(self._subscriptions.items()))
            if self._found is None:
                self._found = deque(retained.match(topic_filter, now))
            found = self._found
            while found:
                message = found[0]
                qos = min(subscription.qos, message.qos)
                if not connection.writable or (qos and not session.window_open(connection)):
                    return False
                found.popleft()
                # One that was replaced while the replay paused reached the subscription as it came.
                topic = message.publish.topic
                if message.expired(now) or not retained.delivers(topic, message) or not session.may_receive(topic):
                    continue
                if qos:
                    session.start(Delivery(message, qos, 1, subscription.identifier, None, 0), connection, now)
                else:
                    connection.send_publish(message, 0, 0x31, subscription.identifier, now)
            self._found = None
            del self._subscriptions[topic_filter]
        return True
