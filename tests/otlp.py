"""A receiver of OTLP over HTTP for tests: keeps what it gets, and answers as it is told. Exporters of this process have
time for it, however busy the machine is."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.runtime.observability import otlp, telemetry
from tests.http_server import Handler, HttpThread

__all__ = ["OtlpReceiver", "ReceivedLine", "ReceivedMetric", "ReceivedSpan", "otlp_receiver"]


_CUMULATIVE = 2
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span of a request, with ids as hex digits; ``resource``: attributes of its process."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    status: int
    message: str
    took_ns: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[tuple[str, str]]
    resource: dict[str, Any]


@dataclass(frozen=True)
class ReceivedMetric:
    """A metric of a request: a cumulative, monotonic sum (``counter``), a gauge or a histogram; ``points``: value, of a
    histogram the sum, and attributes."""

    name: str
    unit: str
    help: str
    counter: bool
    points: list[tuple[float, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass(frozen=True)
class ReceivedLine:
    """A log line of a request, with ids as hex digits."""

    text: str
    severity: str
    severity_number: int
    trace_id: str
    span_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


class OtlpReceiver:
    """The receiver; ``status`` is its answer to requests."""

    def __init__(self) -> None:
        self.status = 200
        self.url = ""
        self.requests: list[str] = []
        self.headers: list[Message] = []
        self.metrics: list[dict[str, ReceivedMetric]] = []
        """The metrics of each request by name."""
        self.lines: list[ReceivedLine] = []
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()

    def wait(self, count: int) -> list[ReceivedSpan]:
        """Return all spans once there are ``count``."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, 60), self._spans
            return list(self._spans)

    def wait_for(self, met: Callable[[], bool]) -> None:
        """Return once ``met`` returns True; it is called after each request."""
        with self._changed:
            assert self._changed.wait_for(met, 60), self.requests

    def wait_requests(self, count: int) -> None:
        """Return once ``count`` requests were answered, with any status."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, 60), self.requests

    def add(self, path: str, body: bytes) -> None:
        """Keep what a request contains."""
        with self._changed:
            self.requests.append(path)
            if self.status == 200:
                if path == "/v1/metrics":
                    self.metrics.append(_metrics(ExportMetricsServiceRequest.FromString(body)))
                elif path == "/v1/logs":
                    self.lines += _lines(ExportLogsServiceRequest.FromString(body))
                else:
                    self._spans += _spans(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            status=span.status.code,
            message=span.status.message,
            took_ns=span.end_time_unix_nano - span.start_time_unix_nano,
            attributes=_attributes(span.attributes),
            events=[event.name for event in span.events],
            links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            resource=_attributes(resource.resource.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _metrics(request: ExportMetricsServiceRequest) -> dict[str, ReceivedMetric]:
    found: dict[str, ReceivedMetric] = {}
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = str(metric.WhichOneof("data"))
                counter = kind == "sum"
                data: Any = getattr(metric, kind)
                assert not counter or (data.is_monotonic and data.aggregation_temporality == _CUMULATIVE)
                for point in data.data_points if kind == "histogram" else ():
                    assert point.count == sum(point.bucket_counts)
                    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
                found[metric.name] = ReceivedMetric(
                    metric.name,
                    metric.unit,
                    metric.description,
                    counter,
                    [
                        (
                            point.sum if kind == "histogram" else getattr(point, point.WhichOneof("value")),
                            _attributes(point.attributes),
                        )
                        for point in data.data_points
                    ],
                    _attributes(resource.resource.attributes),
                )
    return found


def _lines(request: ExportLogsServiceRequest) -> list[ReceivedLine]:
    return [
        ReceivedLine(
            _value(line.body),
            line.severity_text,
            line.severity_number,
            line.trace_id.hex(),
            line.span_id.hex(),
            _attributes(line.attributes),
            _attributes(resource.resource.attributes),
        )
        for resource in request.resource_logs
        for scope in resource.scope_logs
        for line in scope.log_records
    ]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Run a receiver on a free port of loopback during the block."""
    receiver = OtlpReceiver()
    arguments = otlp.Exports.arguments

    class _Handler(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            receiver.headers.append(self.headers)
            receiver.add(self.path, body)

    # server_close waits for the threads of connections: the client has closed them before.
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = False
    with HttpThread(server) as thread, pytest.MonkeyPatch.context() as patch:
        receiver.url = f"http://{thread.address}"
        patch.setenv("no_proxy", "127.0.0.1")  # the exporter uses the proxies of the environment
        patch.setattr(otlp.Exports, "arguments", lambda exports: arguments(exports) | {"timeout": _PATIENCE_S})
        for module in (otlp, telemetry):
            patch.setattr(module, "CLOSE_S", _PATIENCE_S)
        yield receiver
