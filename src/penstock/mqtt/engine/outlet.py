"""Implements the interface of the broker for services: publish, respond, deliver, disconnect; reads the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from mypy_extensions import i64

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.service import Inbound, Outlet

__all__ = ["BrokerOutlet"]


@final
class BrokerOutlet(Outlet):
    """The outlet of a broker. ``now``: ms of the clock on which its deadlines run; ``write``: writes the output."""

    __slots__ = ("_broker", "_collecting_since", "_now", "_write")

    def __init__(self, broker: Broker, now: Callable[[], int], write: Callable[[], None]) -> None:
        self._broker = broker
        self._now = now
        self._write = write
        self._collecting_since = 0
        """Time at which collecting output began, in ms; 0 if no output is being collected."""

    def publish(self, message: Publish) -> None:
        """Route a message of the node itself: to subscribers, retained, and to rules. No Local does not apply.

        Raises:
            LocalProtocolError: the topic or the properties cannot be sent.
        """
        self._broker.publish(message, self._now())

    def respond(
        self,
        client_id: str,
        topic: str,
        payload: bytes,
        properties_wire: bytes,
        expiry_s: i64,
        request: Inbound | None = None,
    ) -> bool:
        """Send a message of the node to the client's matching subscriptions; False without any [Outlet].

        Raises:
            LocalProtocolError: the topic cannot be sent.
        """
        broker = self._broker
        now: i64
        if broker.outbound.reading is not None:
            now = broker.reading_since
        else:
            now = self._collecting_since or self._now()
        return broker.respond(client_id, topic, payload, properties_wire, expiry_s, now, request)

    def undelivered_reason(self, client_id: str, topic: str) -> str:
        """Return the reason why :meth:`respond` did not reach the client."""
        return self._broker.undelivered_reason(client_id, topic)

    def deliver(self, client_id: str, message: Publish, *, deletes: bool = False) -> bool:
        """Deliver a notification to the client's session, exactly once, subscribed or not [Outlet.deliver].

        False if the session does not exist. An offline session queues it (QoS 1).
        """
        return self._broker.deliver(client_id, message, self._now(), deletes=deletes)

    def copy_to_subscribers(self, client_id: str, message: Publish) -> None:
        """Copy a message between a service and the client to subscribers that may observe it."""
        self._broker.copy_to_subscribers(client_id, message, self._now())

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """End the client's network connection, if it has one, with DISCONNECT."""
        self._broker.disconnect(client_id, reason_code, self._now(), reason_string)

    def at_read_end(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` at the end of the read that is being handled; False if there is none [Outlet]."""
        return self._broker.outbound.at_read_end(callback)

    def collect(self) -> None:
        """Collect output for :meth:`send_collected`, instead of requesting a flush in the next turn [Outlet].

        While input is handled, the end of the read sends the output of its connection.
        """
        if self._broker.outbound.reading is not None:
            self._broker.reading_since = self._now()  # the commit took time
            return
        self._broker.outbound.collects = True
        self._collecting_since = self._now()

    def send_collected(self) -> None:
        """Write the output of all connections [Outlet]."""
        outbound = self._broker.outbound
        if not outbound.collects:
            return
        outbound.collects = False
        self._collecting_since = 0
        if outbound.has_output:
            self._write()
