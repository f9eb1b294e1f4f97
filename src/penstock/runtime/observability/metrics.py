"""Prometheus metrics: collect the counters of all parts, render them, and serve them from a thread.

The parts count in plain integers, which costs one addition on the packet path; they are read at a scrape only.
"""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

from penstock.errors import ConfigError
from penstock.runtime.durations import BOUNDS_S, Durations

__all__ = ["CONTENT_TYPE", "MetricHelp", "MetricValues", "Metrics", "counters_of", "serve_page"]

CONTENT_TYPE: str = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class MetricHelp:
    """Description of a metric for its HELP line, and its type."""

    text: str
    type: Literal["counter", "gauge", "histogram"]
    name: str = ""
    """Name of the metric, if it differs from the name of the value."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the names of its series in Prometheus."""
        return {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[self.type]


MetricValues = Mapping[str, int | float] | Mapping[str, Durations]
"""Numbers, or the durations of histograms."""
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Read = Callable[[], MetricValues]
ReadRows = Callable[[], Iterable[tuple[Sequence[str], MetricValues]]]
"""Values of the labels of each object, and its metrics."""


def counters_of(stats: object) -> dict[str, int | float]:
    """Numbers of ``stats``: of a mapping, or the public numeric attributes of an object."""
    if isinstance(stats, Mapping):
        pairs: Iterable[tuple[object, object]] = stats.items()
    else:
        names = [name for kind in type(stats).__mro__ for name in _slots(kind)] or list(vars(stats))
        pairs = ((name, getattr(stats, name)) for name in names)
    return {
        str(name): value
        for name, value in pairs
        if isinstance(value, int | float) and not isinstance(value, bool) and not str(name).startswith("_")
    }


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__") or kind.__dict__.get("__mypyc_attrs__", ())  # a compiled class has these
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Metrics:
    """All metrics of a process, by source. A scrape reads the sources."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, Read, Mapping[str, MetricHelp], Mapping[str, str]]] = []
        self._tables: list[tuple[str, ReadRows, Mapping[str, MetricHelp], Sequence[str]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(
        self, prefix: str, read: Read, meanings: Mapping[str, MetricHelp], *, labels: Mapping[str, str] | None = None
    ) -> None:
        """Export each value that ``read`` returns as ``penstock_<prefix>_<name>``, counters with ``_total``.

        ``meanings`` has an entry for each value. Sources with the same prefix and different ``labels`` share metrics.
        """
        self._sources.append((prefix, read, meanings, dict(labels or {})))

    def add_rows(self, prefix: str, read: ReadRows, meanings: Mapping[str, MetricHelp], labels: Sequence[str]) -> None:
        """Export the values of objects that come and go. ``read`` returns for each object the values of ``labels``, and
        a value for each entry of ``meanings``; it limits the number of objects."""
        self._tables.append((prefix, read, meanings, labels))

    def collect(self) -> Iterator[Metric]:
        """The current metrics, one family per name [prometheus_client Collector]."""
        families: dict[str, _Family] = {}
        for prefix, read, meanings, labels in self._sources:
            for name, value in read().items():
                meaning = meanings[name]
                full = f"penstock_{prefix}_{meaning.name or name}"
                family = families.get(full)
                if family is None:
                    family = families[full] = _family(full, meaning, list(labels))
                _add(family, list(labels.values()), value)
        yield from families.values()
        for prefix, read_rows, meanings, names in self._tables:
            rows = list(read_rows())
            for name, meaning in meanings.items():
                table = _family(f"penstock_{prefix}_{meaning.name or name}", meaning, list(names))
                for label_values, values in rows:
                    _add(table, list(label_values), values[name])
                yield table

    def render(self) -> bytes:
        """The response to a scrape, of the type ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def render_accepted(self, accept: str) -> tuple[bytes, str]:
        """The response to a scrape with the header ``Accept``, and its type: OpenMetrics, the only format with
        exemplars, if the client accepts it."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _family(name: str, meaning: MetricHelp, labels: Sequence[str]) -> _Family:
    if meaning.type == "histogram":
        return HistogramMetricFamily(name, meaning.text, labels=labels)
    kind = GaugeMetricFamily if meaning.type == "gauge" else CounterMetricFamily
    return kind(name, meaning.text, labels=labels)


def _add(family: _Family, labels: Sequence[str], value: float | Durations) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Durations)
        family.add_metric(labels, list(_buckets(value)), value.sum_s)
    else:
        assert not isinstance(value, Durations)
        family.add_metric(labels, value)


def _buckets(durations: Durations) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Bound, durations up to it, and the last traced one above the previous bound."""
    count = 0
    for position, (bound, found) in enumerate(zip((*map(str, BOUNDS_S), "+Inf"), durations.counts, strict=True)):
        count += found
        traced = durations.traced.get(position)
        if traced is None:
            yield bound, count
        else:
            yield bound, count, Exemplar({"trace_id": traced.trace_id}, traced.seconds, traced.ended)


_log = logging.getLogger("penstock.metrics")

CLIENT_S = 10.0
"""Timeout of an idle client in seconds; each client occupies a thread."""
PATHS = frozenset({"/", "/metrics"})


class _MetricsServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - given by the server
        """Log at debug level: by default the server prints a traceback for each client that disconnects early."""
        _log.debug("a scrape of %s failed", client_address, exc_info=True)


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


@contextmanager
def serve_page(address: tuple[str, int], page: Callable[[], bytes], content_type: str) -> Iterator[str]:
    """Serve ``page`` as ``/metrics`` at ``address`` during the block; yields the bound ``HOST:PORT``.

    Raises:
        ConfigError: the server cannot listen on the address.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in PATHS:
                self.send_error(404)
                return
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no access log: scrapes are frequent."""

    host, port = address
    shown = f"[{host}]" if ":" in host else host
    try:
        server = (_MetricsServer6 if ":" in host else _MetricsServer)(address, Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {shown}:{port}: {error.strerror}",
            option="metrics",
            hint="choose a free port, or port 0 for any",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="penstock-metrics", daemon=True)
    thread.start()
    try:
        yield f"{shown}:{server.server_address[1]}"
    finally:
        # Linux ends the wait for a client at once; elsewhere it takes up to half a second.
        with suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()
        thread.join()
