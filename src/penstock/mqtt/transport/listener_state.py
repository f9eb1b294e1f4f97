"""State of a listener that its connections share."""

from __future__ import annotations

from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.connection_limits import Abortable, ConnectionLimiter, ConnectionLimitStats
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.tls import ServerTls
from penstock.mqtt.transport.tls_transport import TlsTransport

__all__ = ["ListenerState", "ListenerStats"]


class ListenerStats:
    """Counters of a listener since the start; ``connections`` and ``paused`` are current values."""

    __slots__ = ("accepted", "connections", "paused", "pauses", "refused", "tls_failures", "websocket_rejected")

    def __init__(self) -> None:
        self.accepted = 0
        self.refused = 0
        """Connections refused because of a limit, of this listener or of all."""
        self.tls_failures = 0
        """Failed TLS handshakes."""
        self.websocket_rejected = 0
        """Refused WebSocket handshakes."""
        self.pauses = 0
        """Number of times that the listener stopped accepting connections because no file descriptor was free."""
        self.paused = 0
        """1 while the listener does not accept connections."""
        self.connections = 0


class ListenerState:
    """Current settings, certificates, limits and counters of a listener, which its connections refer to."""

    def __init__(self, settings: ListenerSettings, broker_limits: BrokerLimits) -> None:
        self._broker_limits = broker_limits
        self.stats = ListenerStats()
        self.connection_limit_stats = ConnectionLimitStats()
        self.connection_limiter: ConnectionLimiter[Abortable] = ConnectionLimiter(
            settings.limits, self.connection_limit_stats, max_connections=settings.max_connections
        )
        self.settings = settings
        self.tls = self.read_tls(settings)
        self.handshakes: dict[TlsTransport, int] = {}
        """TLS handshakes in progress or failed, with their deadline (ms), oldest first."""

    @staticmethod
    def read_tls(settings: ListenerSettings) -> ServerTls | None:
        """Read the certificate files; None without TLS.

        Raises:
            ConfigError: a file cannot be used.
        """
        if settings.tls is None or not settings.transport.encrypted:
            return None
        return ServerTls(settings.tls, protocol="http/1.1" if settings.transport.websocket else "mqtt")

    def apply(self, settings: ListenerSettings, tls: ServerTls | None) -> None:
        """Use these settings for new connections. Address and transport are not changed."""
        self.settings = settings
        self.tls = tls
        self.connection_limiter.limits = settings.limits
        self.connection_limiter.max_connections = settings.max_connections

    @property
    def name(self) -> str:
        """The name in logs and metrics."""
        return self.settings.name

    @property
    def max_connect_size(self) -> int:
        """Maximum bytes buffered for a client before its CONNECT is accepted."""
        return self._broker_limits.max_connect_size

    @property
    def max_packet_size(self) -> int:
        """Maximum packet size of a client whose CONNECT was accepted."""
        return self._broker_limits.max_packet_size
