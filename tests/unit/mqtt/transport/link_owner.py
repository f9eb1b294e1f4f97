"""A server for links that are tested alone."""

from __future__ import annotations

from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.connection_limits import ConnectionLimiter, ConnectionLimitStats
from penstock.mqtt.transport.link import ServerLink, ServerLinkOwner
from penstock.mqtt.transport.listener_settings import ConnectionLimits

__all__ = ["LinkOwner"]


class LinkOwner(ServerLinkOwner):
    """Opens a connection of a broker for each link."""

    def __init__(self) -> None:
        super().__init__(BrokerLimits(), ConnectionLimiter(ConnectionLimits(), ConnectionLimitStats()))
        self.broker = Broker(new_client_id=lambda: "c")

    def opened(self, link: ServerLink) -> BrokerConnection | None:
        return self.broker.open(link.name, 0)

    def lost(self, link: ServerLink) -> None:
        assert link.connection is not None
