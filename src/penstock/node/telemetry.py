"""Metrics and log lines of a node over OTLP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from prometheus_client.metrics_core import Metric as Family

from penstock.errors import PenstockError
from penstock.node.config.tracing import TelemetrySection
from penstock.runtime.observability.otlp import OtlpOptions
from penstock.runtime.observability.telemetry import LogExport, MetricExport, TelemetryStats

__all__ = ["NodeTelemetry"]

_log = logging.getLogger("penstock.telemetry")

_READ_S: Final = 5.0
"""Seconds that the thread of the export waits for the event loop, which reads the metrics."""


class NodeTelemetry:
    """The exports of a node. Log lines are exported from now on, metrics after :meth:`start`.

    ``read`` returns the current metrics; it is called in the event loop of the caller, because the parts of a node
    count without locks.
    """

    def __init__(self, section: TelemetrySection, read: Callable[[], Coroutine[Any, Any, Sequence[Family]]]) -> None:
        self.stats = TelemetryStats()
        self._section = section
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._options = OtlpOptions(endpoint=section.endpoint, timeout_s=section.timeout_s, ca=section.ca)
        self._attributes = {"host.name": socket.gethostname()}
        self._logs = LogExport(self._options, self.stats, attributes=self._attributes) if section.logs else None
        self._metrics: MetricExport | None = None

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last export of metrics or of log lines; None after a success of both."""
        exports = [export for export in (self._metrics, self._logs) if export is not None]
        return next((export.failure for export in exports if export.failure is not None), None)

    def start(self) -> None:
        """Start the export of metrics."""
        if self._section.metrics:
            self._metrics = MetricExport(
                self._options,
                self.stats,
                self._section.metrics_interval_s,
                self._collect,
                attributes=self._attributes,
            )

    async def close(self) -> None:
        """Send the metrics once more, for a few seconds at most."""
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)

    async def close_logs(self) -> None:
        """Send the waiting log lines, for a few seconds at most."""
        if self._logs is not None:
            await asyncio.to_thread(self._logs.close)

    def _collect(self) -> Sequence[Family] | None:
        """Read the metrics in the event loop; called in the thread of the export."""
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            return reading.result(_READ_S)
        except TimeoutError:
            reading.cancel()
            _log.warning("metrics are not exported: the event loop was busy for %g s", _READ_S)
            return None
