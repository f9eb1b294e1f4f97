"""Counters of the parts, rendered for Prometheus.

The parts count in plain integers, which costs an add on the packet path; a scrape reads them. Nothing here runs unless
somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CONTENT_TYPE", "Figure", "Figures", "Metrics", "figures"]

CONTENT_TYPE: str = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class Figure:
    """Description of a metric for its HELP line, and its type: gauge or counter."""

    text: str
    gauge: bool


Figures = Mapping[str, int | float]
Read = Callable[[], Figures]


def figures(stats: object) -> dict[str, int | float]:
    """The numbers of a stats object: a mapping, or the public numeric attributes of a slotted or plain object."""
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
    """All figures of a process, by source. ``collect`` reads them at each scrape."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, Read, Mapping[str, Figure], Mapping[str, str]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(
        self, prefix: str, read: Read, meanings: Mapping[str, Figure], *, labels: Mapping[str, str] | None = None
    ) -> None:
        """Show each figure that ``read`` gives as ``penstock_<prefix>_<name>``, a counter with ``_total``.

        ``meanings`` has each of their names. Sources with the same prefix and different ``labels`` share their metrics.
        """
        self._sources.append((prefix, read, meanings, dict(labels or {})))

    def collect(self) -> Iterator[Metric]:
        """The figures as they are now, one family a name."""
        families: dict[str, Metric] = {}
        for prefix, read, meanings, labels in self._sources:
            for name, value in read().items():
                full = f"penstock_{prefix}_{name}"
                family = families.get(full)
                if family is None:
                    meaning = meanings[name]
                    kind = GaugeMetricFamily if meaning.gauge else CounterMetricFamily
                    family = families[full] = kind(full, meaning.text, labels=list(labels))
                assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
                family.add_metric(list(labels.values()), value)
        yield from families.values()

    def render(self) -> bytes:
        """The page of a scrape, as ``CONTENT_TYPE``."""
        return generate_latest(self._registry)
