"""What the store says to its clients: answers and notifications, each to the one whom it concerns.

Where the policies let somebody overhear that, those who may get what they subscribe to of it, requests included.
"""

from __future__ import annotations

import logging

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.service import Outlet
from penstock.statestore.binding import notification, topic_fits
from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.engine.record import Change
from penstock.statestore.service.ports import Stats

__all__ = ["Voice"]

_log = logging.getLogger("penstock.statestore")


class Voice:
    """One store's way to its clients. ``outlet``: None while it does not serve; ``overheard``: somebody may be."""

    __slots__ = ("_stats", "outlet", "overheard")

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.outlet: Outlet | None = None
        self.overheard = False

    def hear(self, client_id: str, request: Publish) -> None:
        """A request came in that may be overheard."""
        if self.outlet is not None:
            self.outlet.overhear(client_id, request)

    def answer(self, client_id: str, message: Publish | None) -> None:
        """Answer the requester on its response topic, as the store: No Local must not keep it from the client."""
        if message is None or self.outlet is None:
            return
        try:
            heard = self.outlet.respond(client_id, message)
        except LocalProtocolError as error:
            self._stats.unanswered += 1
            _log.warning("no answer on topic=%r: %s", message.topic, error)
            return
        if heard:
            self._stats.responses += 1
        else:
            self._stats.unanswered += 1
        if self.overheard:
            self.outlet.overhear(client_id, message)

    def tell(self, client_id: str, dialect: Dialect, change: Change) -> None:
        """Notify one observer."""
        if self.outlet is None or not topic_fits(client_id, change.key):
            self._stats.undelivered += 1
            return
        self._stats.notifications += 1
        message = notification(change, client_id, dialect)
        if not self.outlet.deliver(client_id, message):
            self._stats.undelivered += 1
        if self.overheard:
            self.outlet.overhear(client_id, message)
