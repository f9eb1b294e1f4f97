"""Responses and notifications of the state store, each sent to its client only.

If the policies permit observing requests, other subscribers get copies of requests and responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mypy_extensions import i64

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import OTHERS_TOPIC, SHARED_TOPIC, Inbound, Outlet
from penstock.runtime.io.clock import monotonic_ms
from penstock.runtime.observability.logs import LogLimiter
from penstock.statestore.binding import notification, response, topic_fits
from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.engine.record import Change
from penstock.statestore.service.interfaces import StoreStats

__all__ = ["ResponseSender"]

_log = logging.getLogger("penstock.statestore")


class ResponseSender:
    """Sends responses and notifications. ``outlet``: None while stopped; ``requests_observed``: send copies, too.

    ``clock``: ms of the clock on which requests expire.
    """

    __slots__ = (
        "_clock",
        "_stats",
        "_unanswered_log",
        "committed_ms",
        "outlet",
        "requests_observed",
    )

    def __init__(self, stats: StoreStats, clock: Callable[[], int]) -> None:
        self._stats = stats
        self._clock = clock
        self.committed_ms = 0
        """Time of the answers of the current commit; 0: no commit is sending answers."""
        self._unanswered_log = LogLimiter()
        self.outlet: Outlet | None = None
        self.requests_observed = False

    def now(self) -> int:
        """The clock on which requests expire, in ms."""
        return self._clock()

    def begin_answers(self) -> None:
        """Start to send the answers of a commit; the clock is read once for all of them."""
        self.committed_ms = self.now()
        if self.outlet is not None:
            self.outlet.collect()

    def end_answers(self) -> None:
        """Send the answers of a commit."""
        self.committed_ms = 0
        if self.outlet is not None:
            self.outlet.send_collected()

    def copy_request(self, client_id: str, request: Publish) -> None:
        """Send a copy of a request to permitted subscribers."""
        if self.outlet is not None:
            self.outlet.copy_to_subscribers(client_id, request)

    def answer_rejected(self, request: Inbound, message: Publish) -> None:
        """Send the response to a rejected request."""
        expiry_s = message.properties.message_expiry_interval or 0
        self.answer(request, message.topic, message.payload, message.properties_wire, expiry_s)

    def answer(self, request: Inbound, topic: str, payload: bytes, properties_wire: bytes, expiry_s: i64) -> None:
        """Send a response to the client of ``request``, also for its subscriptions with No Local.

        Arguments as of :meth:`Outlet.respond`. The request is acknowledged before the response is sent: with 0x10 and a
        reason if no subscription of the client matches.
        """
        outlet = self.outlet
        if outlet is None:
            request.settle()
            return
        client_id = request.client_id
        try:
            heard = outlet.respond(client_id, topic, payload, properties_wire, expiry_s, request)
        except LocalProtocolError as error:
            request.settle()
            self._stats.unanswered += 1
            _log.warning("no answer on topic=%r: %s", topic, error)
            return
        if heard:
            self._stats.responses += 1
        else:
            request.settle(ReasonCode.NO_MATCHING_SUBSCRIBERS, self.unanswered(client_id, topic))
        if self.requests_observed:
            copy = response(topic, payload, properties_wire)
            copy.replace_properties(copy.properties)  # access the properties, so that the copy expires as well
            outlet.copy_to_subscribers(client_id, copy)

    def unanswered(self, client_id: str, topic: str) -> str:
        """Count and log a response without receiver; return the reason."""
        stats = self._stats
        stats.unanswered += 1
        why = "" if self.outlet is None else self.outlet.undelivered_reason(client_id, topic)
        stats.unanswered_shared += why == SHARED_TOPIC
        stats.unanswered_other_client += why == OTHERS_TOPIC
        if total := self._unanswered_log.admit(monotonic_ms()):
            _log.warning(
                "responses without receiver count=%d last client=%r topic=%r: %s", total, client_id, topic, why
            )
        return why

    def notify(self, client_id: str, dialect: Dialect, change: Change) -> None:
        """Send a notification to an observer."""
        if self.outlet is None or not topic_fits(client_id, change.key):
            self._stats.undelivered += 1
            return
        self._stats.notifications += 1
        message = notification(change, client_id, dialect)
        if not self.outlet.deliver(client_id, message, deletes=change.record is None):
            self._stats.undelivered += 1
        if self.requests_observed:
            self.outlet.copy_to_subscribers(client_id, message)
