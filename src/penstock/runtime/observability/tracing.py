"""Traces: spans with the context of W3C Trace Context, exported over OTLP/HTTP by OpenTelemetry's SDK.

The module needs the extra `otel`, and is imported only if tracing is configured. Ended spans wait in a queue of 2,048
spans for a thread that sends them, so a receiver that does not answer delays nothing: spans beyond the queue are
dropped and counted. A failure is logged once, until a request has succeeded again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TRACES_HEADERS
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers
from opentelemetry.util.types import AttributeValue

import penstock
from penstock.errors import ConfigError, PenstockError, UnavailableError

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
_PATH: Final = "/v1/traces"
_CLOSE_S: Final = 3.0
"""Seconds after which ``close`` sends no more requests."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_IDS: Final = RandomIdGenerator()
_SCOPE: Final = InstrumentationScope("penstock", penstock.__version__)
_NOISY: Final = (
    # They log each failure and each dropped span; `_Exporter` reports a series of failures once.
    "opentelemetry.exporter.otlp",
    "opentelemetry.sdk._shared_internal",
    # They log each malformed `tracestate`, which clients send.
    "opentelemetry.trace.span",
    "opentelemetry.trace.propagation.tracecontext",
    # It logs the credentials of a malformed variable; `_check_headers` reports it without them.
    "opentelemetry.util.re",
)

Headers = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """Receiver of spans, and sampling.

    ``endpoint``: base URL of the receiver; ``sample_ratio``: share of the traces without a parent that are recorded;
    ``timeout_s``: longest duration of an export with its retries; ``ca``: authorities of the receiver's certificate.
    """

    endpoint: str
    sample_ratio: float = 1.0
    timeout_s: float = 3.0
    ca: Path | None = None


class TracingStats:
    """Counters of spans since the start: recorded, and what became of them."""

    __slots__ = ("spans", "spans_exported", "spans_failed")

    def __init__(self) -> None:
        self.spans = 0
        self.spans_exported = 0
        self.spans_failed = 0


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
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _check_headers()
        self.stats = TracingStats()
        self._ratio = options.sample_ratio
        self._exporter = _Exporter(options, self.stats)
        resource = Resource.create(
            {
                SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "penstock",
                "service.version": penstock.__version__,
                **attributes,
            }
        )
        sampler = ParentBased(TraceIdRatioBased(options.sample_ratio))
        # Closed by `close`, not at the exit of Python; the global provider remains that of the application.
        try:
            self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
            self._processor = BatchSpanProcessor(self._exporter, schedule_delay_millis=1000)
            self._provider.add_span_processor(self._processor)
        except ValueError as error:
            raise ConfigError(
                "tracing: a variable of OpenTelemetry has no valid value",
                option="tracing",
                why=str(error),
                do="correct or remove the variables OTEL_SPAN_… and OTEL_BSP_…",
            ) from error
        self._tracer = self._provider.get_tracer(_SCOPE.name, _SCOPE.version)

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last export; None after a success."""
        return self._exporter.failure

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
        self._exporter.stop_at = time.monotonic() + _CLOSE_S
        self._provider.shutdown()


def _check_headers() -> None:
    """Check the variables with headers of requests. Raises ConfigError, without their values: they are secrets."""
    for name in (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TRACES_HEADERS):
        for number, pair in enumerate(os.environ.get(name, "").split(","), start=1):
            if not pair.strip():
                continue
            read = parse_env_headers(pair, liberal=True)
            if not read or any(not value.isprintable() for value in read.values()):
                raise ConfigError(
                    f"tracing: part {number} of {name} is no header",
                    option="tracing",
                    why="expected NAME=VALUE pairs with commas between them, and special characters as %XX",
                    do=f"correct the variable: {name}='authorization=Bearer%20TOKEN'",
                )


class _Session(requests.Session):
    """The HTTP session of the exporter; ``problem`` is the reason why its last request failed."""

    problem = ""

    def request(self, *args: Any, **fields: Any) -> requests.Response:
        if isinstance(self.verify, str):  # otherwise the variable REQUESTS_CA_BUNDLE would replace it
            fields["verify"] = self.verify
        try:
            response = super().request(*args, **fields)
        except Exception as error:
            self.problem = _innermost(error)
            raise
        self.problem = "" if response.ok else f"the receiver answered {response.status_code} {response.reason}"
        return response


def _innermost(error: BaseException) -> str:
    """Return the message of the first cause: those of requests and urllib3 contain the names of their objects."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


class _Exporter(SpanExporter):
    """The exporter of OpenTelemetry with counters, one warning for a series of failures, and a deadline."""

    def __init__(self, options: TracingOptions, stats: TracingStats) -> None:
        self.failure: UnavailableError | None = None
        self.stop_at: float | None = None
        self._stats = stats
        self._session = _Session()
        base = options.endpoint.rstrip("/")
        self._endpoint = base if base.endswith(_PATH) else base + _PATH
        self._exporter = OTLPSpanExporter(
            self._endpoint,
            certificate_file=None if options.ca is None else str(options.ca),
            timeout=options.timeout_s,
            compression=Compression.Gzip,
            session=self._session,
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; called in the thread of the span processor [SpanExporter]."""
        late = self.stop_at is not None and time.monotonic() >= self.stop_at
        result = SpanExportResult.FAILURE if late else self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._stats.spans_exported += len(spans)
            if self.failure is not None:
                self.failure = None
                _log.info("spans are exported again", extra={"fields": {"endpoint": self._endpoint}})
            return result
        self._stats.spans_failed += len(spans)
        if not late:
            self._report()
        return result

    def _report(self) -> None:
        first = self.failure is None
        self.failure = UnavailableError(
            f"spans cannot be sent to {self._endpoint}",
            applied=None,
            why=self._session.problem or "the spans could not be encoded",
            do="check that a receiver of OTLP over HTTP listens there (port 4318 by default; 4317 is gRPC)",
        )
        if first:
            # Complete without fields: a pipeline's command shows the message only.
            _log.warning("spans cannot be sent to %s and are dropped (%s)", self._endpoint, self.failure.why)

    def shutdown(self) -> None:
        """Close the connections [SpanExporter]."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: it buffers nothing [SpanExporter]."""
        return self._exporter.force_flush(timeout_millis)
