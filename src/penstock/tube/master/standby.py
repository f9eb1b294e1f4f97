"""The master of a standby node: it refuses every request, so that clients and brokers try the next master."""

from __future__ import annotations

import ssl

from penstock.runtime.io.clock import steady_clock
from penstock.tube.engine.limits import DEFAULT_LIMITS, TubeLimits
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.rpc import AnsweringProtocol, Listeners, OpenConnections

__all__ = ["StandbyMaster"]


class StandbyMaster:
    """A master that answers every request with a StandbyException. Call :meth:`start`, later :meth:`close`."""

    def __init__(self, limits: TubeLimits = DEFAULT_LIMITS) -> None:
        self._connections = OpenConnections("standby master", limits)
        self._clock = steady_clock()
        self._engine = MasterEngine((), self._clock(), active=False)
        self._listeners = Listeners(lambda: AnsweringProtocol(self._engine.answer, self._connections, self._clock))

    async def start(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, tls_port: int = 0
    ) -> tuple[str, int]:
        """Listen, with ``tls`` also on ``tls_port``; returns the plain address. Raises OSError: one is in use."""
        bound = await self._listeners.start(host, port, tls, tls_port)
        self._engine.address = f"{bound[0]}:{bound[1]}"
        return bound

    async def close(self) -> None:
        """Stop listening, and close the connections."""
        self._listeners.stop()
        await self._connections.close()
        await self._listeners.closed()
