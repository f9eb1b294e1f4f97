"""Metrics of a run for Prometheus, served by the driver on an address of its own."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.errors import ConfigError
from penstock.pipelines.running.progress import COUNTERS, MEANINGS, SinkProgress, figures
from penstock.runtime.metrics import CONTENT_TYPE

__all__ = ["render", "serve"]

Read = Callable[[], Mapping[str, SinkProgress]]

PATHS = frozenset({"/", "/metrics"})


class _Collector:
    def __init__(self, pipeline: str, read: Read) -> None:
        self._pipeline = pipeline
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sink, progress in self._read().items():
            for name, value in figures(progress).items():
                full = f"penstock_pipeline_{name}"
                if full not in families:
                    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                    families[full] = kind(full, MEANINGS[name], labels=["pipeline", "sink"])
                families[full].add_metric([self._pipeline, sink], value)
        yield from families.values()


def render(pipeline: str, read: Read) -> bytes:
    """The page of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(pipeline, read))
    return generate_latest(registry)


@contextmanager
def serve(address: tuple[str, int] | None, pipeline: str, read: Read) -> Iterator[str | None]:
    """Serve ``/metrics`` at ``address`` inside the block; gives ``HOST:PORT`` as bound, or None without an address.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if address is None:
        yield None
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in PATHS:
                self.send_error(404)
                return
            page = render(pipeline, read)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """A scrape every few seconds is no news."""

    host, port = address
    try:
        server = http.server.ThreadingHTTPServer(address, Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {host}:{port}: {error.strerror}",
            option="metrics",
            do="choose a free port, or port 0 for any",
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="penstock-metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
