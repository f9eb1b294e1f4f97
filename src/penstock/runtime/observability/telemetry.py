"""Metrics and logs over OTLP/HTTP, by the exporters of OpenTelemetry's SDK in threads of their own.

The metrics are those of :class:`~penstock.runtime.observability.metrics.Metrics`, with the names of the Prometheus
endpoint: a thread asks for them at an interval and sends them. Log lines wait in a queue of 2,048 lines, and are
dropped beyond it. A receiver that does not answer delays nothing.

The module needs the extra `otel`, and is imported only if the export is configured.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import AttributeValue
from prometheus_client.metrics_core import Metric as Family

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.observability.otlp import CLOSE_S, Exports, OtlpOptions, check_headers, resource_of

__all__ = ["LogExport", "MetricExport", "TelemetryStats"]

_log = logging.getLogger("penstock.telemetry")

_LOGGED: Final = "penstock"
"""The logger whose lines are exported, with those below it. Libraries are excluded: an exporter would log its own
requests."""
_SCOPE: Final = InstrumentationScope("penstock", penstock.__version__)
_UNITS: Final = {"bytes": "By", "seconds": "s"}
"""OpenTelemetry's units (UCUM) of the units at the end of metric names."""
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
)


class TelemetryStats:
    """Counters since the start."""

    __slots__ = ("log_lines", "log_lines_exported", "log_lines_failed", "metric_exports", "metric_exports_failed")

    def __init__(self) -> None:
        self.metric_exports = 0
        self.metric_exports_failed = 0
        self.log_lines = 0
        self.log_lines_exported = 0
        self.log_lines_failed = 0


class MetricExport:
    """Sends metrics every ``interval_s`` seconds and at the end. ``collect`` is called in the thread of the export, and
    returns the current metrics, or None if they cannot be read now."""

    def __init__(
        self,
        options: OtlpOptions,
        stats: TelemetryStats,
        interval_s: float,
        collect: Callable[[], Sequence[Family] | None],
        *,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Start the thread of the export.

        Raises:
            ConfigError: a variable of OpenTelemetry has no valid value.
        """
        check_headers("telemetry", "metrics")
        self._exports = Exports(options, "metrics", "metrics", _log)
        self._exporter = OTLPMetricExporter(**self._exports.arguments())
        self._stats = stats
        self._interval_s = interval_s
        self._collect = collect
        self._resource = resource_of(attributes)
        self._start_ns = time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="penstock-metric-export", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last export; None after a success."""
        return self._exports.failure

    def close(self) -> None:
        """Send the metrics once more, for a few seconds at most. It blocks; call it once, not in the event loop."""
        self._exports.stop_soon()
        self._ended.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # it ends the pauses of the last export

    def _work(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            families = self._collect()
        except Exception:  # noqa: BLE001 - it would end the thread, and with it all later exports
            _log.exception("metrics cannot be read")
            families = None
        if families is not None and self._exports.send(lambda: self._send(families)):
            self._stats.metric_exports += 1
        else:
            self._stats.metric_exports_failed += 1

    def _send(self, families: Sequence[Family]) -> bool:
        now_ns = time.time_ns()
        metrics = [metric for family in families for metric in _metrics(family, self._start_ns, now_ns)]
        data = MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])
        return self._exporter.export(data) is MetricExportResult.SUCCESS


def _metrics(family: Family, start_ns: int, now_ns: int) -> list[Metric]:
    """Return the metrics of a family of the registry: one for each name of its samples, or a histogram."""
    unit = _UNITS.get(family.name.rpartition("_")[2], "1")
    if family.type == "histogram":
        histogram = Histogram(_histogram_points(family, start_ns, now_ns), AggregationTemporality.CUMULATIVE)
        return [Metric(family.name, family.documentation, unit, histogram)]
    points: dict[str, list[NumberDataPoint]] = {}
    for sample in family.samples:
        points.setdefault(sample.name, []).append(NumberDataPoint(sample.labels, start_ns, now_ns, sample.value))
    return [
        Metric(
            name,
            family.documentation,
            unit,
            Sum(found, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            if family.type == "counter"
            else Gauge(found),
        )
        for name, found in points.items()
    ]


def _histogram_points(family: Family, start_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Return a point for each set of labels, whose samples follow each other: the buckets by their bounds, with the
    durations up to each of them, then the count and the sum."""
    points: list[HistogramDataPoint] = []
    bounds: list[float] = []
    counts: list[int] = []
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value) - sum(counts))
        elif sample.name.endswith("_sum"):
            points.append(
                HistogramDataPoint(
                    sample.labels, start_ns, now_ns, sum(counts), sample.value, counts, bounds[:-1],
                    min=math.nan, max=math.nan,
                )
            )  # fmt: skip
            bounds, counts = [], []
    return points


class LogExport(logging.Handler):
    """Sends the log lines of penstock, with the trace and span during which they were written."""

    def __init__(
        self, options: OtlpOptions, stats: TelemetryStats, *, attributes: Mapping[str, AttributeValue]
    ) -> None:
        """Start the thread of the export.

        Raises:
            ConfigError: a variable of OpenTelemetry has no valid value.
        """
        super().__init__()
        check_headers("telemetry", "logs")
        self._stats = stats
        self._exports = Exports(options, "logs", "log lines", _log)
        self._provider = LoggerProvider(resource_of(attributes), shutdown_on_exit=False)
        try:
            processor = BatchLogRecordProcessor(_LogExporter(self._exports, stats), schedule_delay_millis=1000)
        except ValueError as error:
            raise ConfigError(
                "telemetry: a variable of OpenTelemetry has no valid value",
                option="telemetry",
                why=str(error),
                hint="correct or remove the variables OTEL_BLRP_…",
            ) from error
        self._provider.add_log_record_processor(processor)
        self._logger = self._provider.get_logger(_SCOPE.name, _SCOPE.version)
        logging.getLogger(_LOGGED).addHandler(self)

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last export; None after a success."""
        return self._exports.failure

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a log line [logging.Handler]."""
        try:
            fields = getattr(record, "fields", None)
            attributes: dict[str, AttributeValue] = {"penstock.part": record.name.removeprefix(f"{_LOGGED}.")}
            if isinstance(fields, dict):
                attributes |= {
                    str(name): value if isinstance(value, str | bool | int | float) else str(value)
                    for name, value in fields.items()
                }
            exception = record.exc_info[1] if record.exc_info else None
            self._logger.emit(
                timestamp=int(record.created * 1e9),
                severity_number=next((number for level, number in _SEVERITIES if record.levelno >= level), None)
                or SeverityNumber.DEBUG,
                severity_text=record.levelname.lower(),
                body=record.getMessage(),
                attributes=attributes,
                exception=exception,
            )
            self._stats.log_lines += 1
        except Exception:  # noqa: BLE001 - as every handler of logging: a line must not fail its caller
            self.handleError(record)

    def close(self) -> None:
        """Send the waiting lines, for a few seconds at most. It blocks, and is idempotent [logging.Handler]."""
        if self in (logger := logging.getLogger(_LOGGED)).handlers:
            logger.removeHandler(self)
            self._exports.stop_soon()
            self._provider.shutdown()
        super().close()


class _LogExporter(LogRecordExporter):
    """The exporter of log lines with counters."""

    def __init__(self, exports: Exports, stats: TelemetryStats) -> None:
        self._exports = exports
        self._stats = stats
        self._exporter = OTLPLogExporter(**exports.arguments())

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Send log lines; called in the thread of the processor [LogRecordExporter]."""
        if self._exports.send(lambda: self._exporter.export(batch) is LogRecordExportResult.SUCCESS):
            self._stats.log_lines_exported += len(batch)
            return LogRecordExportResult.SUCCESS
        self._stats.log_lines_failed += len(batch)
        return LogRecordExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the connections [LogRecordExporter]."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 10_000) -> bool:
        """Return True: it buffers nothing [LogRecordExporter]."""
        return self._exporter.force_flush(timeout_millis)
