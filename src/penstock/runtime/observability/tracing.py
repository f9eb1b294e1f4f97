"""Traces: spans with the context of W3C Trace Context, exported over OTLP/HTTP by OpenTelemetry's SDK.

The module needs the extra `otel`, and is imported only if tracing is configured. Ended spans wait in a queue of 2,048
spans for a thread that sends them, so a receiver that does not answer delays nothing: spans beyond the queue are
dropped and counted. A failure is logged once, until a request has succeeded again (`otlp`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.durations import Durations
from penstock.runtime.observability.otlp import Exports, OtlpOptions, check_headers, resource_of

__all__ = [
    "TRACE_HEADERS",
    "Headers",
    "Tracing",
    "TracingOptions",
    "TracingStats",
    "context_of",
    "headers_of",
    "new_context",
    "with_context",
]

_log = logging.getLogger("penstock.tracing")

TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})
"""Names of the headers, and of the user properties of MQTT, that carry the context of a trace."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_IDS: Final = RandomIdGenerator()
_SCOPE: Final = InstrumentationScope("penstock", penstock.__version__)

Headers = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions(OtlpOptions):
    """Receiver of spans; ``sample_ratio``: share of the traces without a parent that are recorded."""

    sample_ratio: float = 1.0


class TracingStats:
    """Counters of spans since the start: recorded, and what became of them."""

    __slots__ = ("_durations", "spans", "spans_exported", "spans_failed")

    def __init__(self) -> None:
        self.spans = 0
        self.spans_exported = 0
        self.spans_failed = 0
        self._durations: dict[str, Durations] = {}

    def ended(self, span: ReadableSpan) -> None:
        """Count the duration of a recorded span, by its name: those of a node are the verbs of the state store and the
        rules."""
        context = span.context
        if context is not None and span.start_time is not None and span.end_time is not None:
            durations = self._durations.setdefault(span.name, Durations())
            durations.observe_traced((span.end_time - span.start_time) / 1e9, format_trace_id(context.trace_id))

    def duration_rows(self) -> list[tuple[Sequence[str], Mapping[str, Durations]]]:
        """Return the histograms of durations for the metrics, by name of the span."""
        return [((name,), {"duration_seconds": durations}) for name, durations in list(self._durations.items())]


def context_of(headers: Headers) -> Context:
    """Return the context that ``headers`` carry: without a parent if it is absent, malformed or ambiguous."""
    carrier: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if name in TRACE_HEADERS and isinstance(value, str):
            carrier[name].append(value)
    if len(carrier["traceparent"]) != 1:  # with two of them, none is valid
        return Context()
    # Several tracestate headers are one list, in their order.
    joined = {"traceparent": carrier["traceparent"][0], "tracestate": ",".join(carrier["tracestate"])}
    return _PROPAGATOR.extract(joined, Context())


def headers_of(span: Span) -> list[tuple[str, str]]:
    """Return the headers that carry the context of ``span``: first ``traceparent``, then perhaps ``tracestate``."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return list(carrier.items())


def with_context(headers: Headers, span: Span) -> list[tuple[str, str | bytes]]:
    """Return ``headers`` with the context of ``span`` instead of the one that they carry."""
    return [*((name, value) for name, value in headers if name not in TRACE_HEADERS), *headers_of(span)]


def new_context() -> SpanContext:
    """Return the context of a span that begins a trace, for :meth:`Tracing.add`."""
    return SpanContext(
        _IDS.generate_trace_id(), _IDS.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


class Tracing:
    """Recorder of spans of one process, for the OpenTelemetry service ``penstock`` (``OTEL_SERVICE_NAME``)."""

    def __init__(self, options: TracingOptions, *, attributes: Mapping[str, AttributeValue]) -> None:
        """Start the thread of the export. ``attributes``: further attributes of the resource.

        Raises:
            ConfigError: a variable of OpenTelemetry has no valid value.
        """
        check_headers("tracing", "traces")
        self.stats = TracingStats()
        self._ratio = options.sample_ratio
        self._exports = Exports(options, "traces", "spans", _log)
        resource = resource_of(attributes)
        sampler = ParentBased(TraceIdRatioBased(options.sample_ratio))
        # Closed by `close`, not at the exit of Python; the global provider remains that of the application.
        try:
            self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
            self._processor = BatchSpanProcessor(_Exporter(self._exports, self.stats), schedule_delay_millis=1000)
            self._provider.add_span_processor(_Measurement(self.stats))
            self._provider.add_span_processor(self._processor)
        except ValueError as error:
            raise ConfigError(
                "tracing: a variable of OpenTelemetry has no valid value",
                option="tracing",
                why=str(error),
                hint="correct or remove the variables OTEL_SPAN_… and OTEL_BSP_…",
            ) from error
        self._tracer = self._provider.get_tracer(_SCOPE.name, _SCOPE.version)

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last export; None after a success."""
        return self._exports.failure

    @property
    def begins_traces(self) -> bool:
        """True if traces without a parent may be recorded."""
        return self._ratio > 0

    def start(
        self, name: str, parent: Context, kind: SpanKind, attributes: Mapping[str, AttributeValue]
    ) -> Span | None:
        """Start a span below ``parent``, which the caller ends; None if its trace is not recorded."""
        if not self._ratio and not get_current_span(parent).get_span_context().is_valid:
            return None
        span = self._tracer.start_span(name, parent, kind, attributes)
        if not span.is_recording():
            return None
        self.stats.spans += 1
        return span

    def add(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        *,
        end_ns: int,
        took_s: float,
        context: SpanContext,
        links: Sequence[SpanContext] = (),
    ) -> None:
        """Record a span without a parent that took ``took_s`` seconds until ``end_ns``, in ns since 1970.

        ``context``: that of :func:`new_context`, which other processes may know already.
        """
        self.stats.spans += 1
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                resource=self._provider.resource,
                attributes=attributes,
                links=[Link(each) for each in links],
                kind=kind,
                start_time=end_ns - int(took_s * 1e9),
                end_time=end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send the waiting spans, for a few seconds at most. It blocks; call it once."""
        self._exports.stop_soon()
        self._provider.shutdown()


class _Measurement(SpanProcessor):
    """Counts durations of recorded spans."""

    def __init__(self, stats: TracingStats) -> None:
        self._stats = stats

    def on_end(self, span: ReadableSpan) -> None:
        """Called in the thread that ends the span [SpanProcessor]."""
        self._stats.ended(span)


class _Exporter(SpanExporter):
    """The exporter of OpenTelemetry with counters."""

    def __init__(self, exports: Exports, stats: TracingStats) -> None:
        self._exports = exports
        self._stats = stats
        self._exporter = OTLPSpanExporter(**exports.arguments())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; called in the thread of the span processor [SpanExporter]."""
        if self._exports.send(lambda: self._exporter.export(spans) is SpanExportResult.SUCCESS):
            self._stats.spans_exported += len(spans)
            return SpanExportResult.SUCCESS
        self._stats.spans_failed += len(spans)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the connections [SpanExporter]."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: it buffers nothing [SpanExporter]."""
        return self._exporter.force_flush(timeout_millis)
