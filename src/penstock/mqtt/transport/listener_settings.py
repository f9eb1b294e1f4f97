"""Settings of a listener."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.mqtt.engine.model.access import Access
from penstock.mqtt.transport.tls import TlsFiles

__all__ = ["ConnectionLimits", "ListenerSettings", "PublishLimits", "Transport"]


class Transport(StrEnum):
    """The protocol below MQTT."""

    TCP = "tcp"
    TLS = "tls"
    WS = "ws"
    WSS = "wss"

    @property
    def encrypted(self) -> bool:
        """Whether it uses TLS, which requires a certificate."""
        return self in (Transport.TLS, Transport.WSS)

    @property
    def websocket(self) -> bool:
        """Whether it uses WebSocket, which has a path."""
        return self in (Transport.WS, Transport.WSS)


@dataclass(slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of network connections, of one listener or of all. 0: no limit."""

    max_connections_per_address: int = 0
    """Maximum connections from one address (IPv6: from one /64); beyond it CONNECT is refused with 0x97."""
    max_unauthenticated: int = 2_000
    """Maximum connections without an accepted CONNECT; beyond it the oldest of the address with the most is
    closed."""
    connect_rate_per_address: int = 0
    """Maximum connections per second from one address; beyond it 0x9F. 0: no limit."""
    connect_burst_per_address: int = 0
    """Maximum burst of connections after a pause; 0: the number for one second."""


@dataclass(slots=True, kw_only=True)
class PublishLimits:
    """Limits of the messages of each client of one listener, in place of those of the broker."""

    max_publish_rate: int = 0
    """Maximum messages per second from each client of this listener; beyond it ``mqtt.limits.rate_limit_action``
    applies. 0: ``mqtt.limits.max_publish_rate`` applies."""
    max_publish_burst: int = 0
    """Maximum burst of messages after a pause, with ``max_publish_rate`` of this listener; 0: the number for one
    second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """Settings of a listener. ``origins`` and ``path`` apply to WebSocket, ``tls`` to TLS.

    ``max_connections`` 0: no separate limit. ``access`` None: any client may connect and do everything.
    """

    name: str = "mqtt"
    host: str = "127.0.0.1"
    port: int = 1883
    transport: Transport = Transport.TCP
    tls: TlsFiles | None = None
    path: str = "/mqtt"
    origins: frozenset[str] = frozenset()
    advertised_host: str = ""
    access: Access | None = None
    max_connections: int = 0
    limits: ConnectionLimits = field(default_factory=lambda: ConnectionLimits(max_unauthenticated=0))
    publish_limits: PublishLimits = field(default_factory=PublishLimits)
