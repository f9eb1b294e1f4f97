"""Metrics of a run for Prometheus, served by the driver on an address of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.pipelines.running.progress import COUNTERS, MEANINGS, SinkProgress, figures
from penstock.runtime.metrics import CONTENT_TYPE
from penstock.runtime.scrape import page_at

__all__ = ["render", "serve"]

Read = Callable[[], Mapping[str, SinkProgress]]


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
    with page_at(address, lambda: render(pipeline, read), CONTENT_TYPE) as bound:
        yield bound
