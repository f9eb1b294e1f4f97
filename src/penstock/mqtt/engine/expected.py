"""Messages of a form that a taker expects: what lets them pass to it was looked at once.

Of each one the fixed bytes are compared, then the taker gets the rest. What is not of the form, or may not pass any
more, is decoded and goes where every message goes: :mod:`penstock.mqtt.engine.receiving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.mqtt.codec.shapes import Form
    from penstock.mqtt.engine.access import Rights
    from penstock.mqtt.engine.connection import BrokerConnection
    from penstock.mqtt.engine.routes import Route
    from penstock.mqtt.engine.session import Session

__all__ = ["Expected"]


class Expected:
    """One form of one connection. Its messages go to the taker alone as long as ``_route`` and ``_rights`` stand."""

    __slots__ = ("_cut", "_fixed", "_rights", "_route", "_size", "_take", "_topic", "form")

    def __init__(self, form: Form) -> None:
        self.form = form
        self._cut = form.cut
        self._fixed = form.fixed
        self._size = form.size
        self._take = form.take
        self._topic = form.topic
        self._route: Route | None = None
        self._rights: Rights | None = None

    def take(self, connection: BrokerConnection, session: Session, data: bytes, position: int, now: int) -> int:
        """Hand the message at ``position`` to the taker; where it ends, or 0, before anything was done with it.

        Raises:
            RemoteProtocolError: more messages are open than allowed.
        """
        end = position + self._size
        if end > len(data):
            return 0
        parts = self._cut(data, position)
        packet_id: int = parts[1]
        if not packet_id or parts[::2] != self._fixed:
            return 0
        broker = connection.broker
        route = broker.router.routes.get(self._topic)
        if (route is not self._route or route is None or session.rights is not self._rights) and not self._passes(
            connection, session
        ):
            return 0
        rate = connection.rate
        if rate is not None and rate.ready_at(now) > now:
            return 0
        if (connection.pending or connection.open_qos2) and packet_id not in connection.open_qos2:
            connection.check_open()
        if not connection.dirty:  # what this read causes leaves in one write
            connection.dirty = True
            broker.outbound.reading = connection
        if not self._take(parts, connection, now):
            return 0
        if rate is not None:
            rate.take(now)
        stats = connection.stats
        stats.packets_received += 1
        stats.publishes_received += 1
        return end

    def _passes(self, connection: BrokerConnection, session: Session) -> bool:
        """Whether the messages may go to the taker alone now, which holds until route or rights change."""
        route, rights = connection.broker.router.route(self._topic), session.rights
        if not route.for_one or (rights is not None and not rights.may_publish(self._topic, 1, retain=False)):
            return False
        self._route, self._rights = route, rights
        return True
