"""Plain integers rendered for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.runtime.durations import Durations
from penstock.runtime.observability.metrics import CONTENT_TYPE, MetricHelp, Metrics, counters_of


class Slotted:
    __slots__ = ("_hidden", "connections", "name", "packets")

    def __init__(self) -> None:
        self.packets, self.connections, self.name, self._hidden = 3, 2, "x", 9


@dataclass
class Plain:
    reads: int = 1
    ready: bool = True
    seconds: float = 0.5


def test_figures_of_every_shape_of_stats() -> None:
    assert counters_of({"a": 1, "b": "x"}) == {"a": 1}
    assert counters_of(Slotted()) == {"connections": 2, "packets": 3}
    assert counters_of(Plain()) == {"reads": 1, "seconds": 0.5}


def test_counters_and_gauges_are_rendered_at_each_scrape() -> None:
    stats = Slotted()
    metrics = Metrics()
    meanings = {
        "packets": MetricHelp("Packets received.", "counter"),
        "connections": MetricHelp("Clients connected now.", "gauge"),
    }
    metrics.add("mqtt", lambda: counters_of(stats), meanings)
    page = metrics.render().decode()
    assert "# HELP penstock_mqtt_packets_total Packets received.\n" in page
    assert "# HELP penstock_mqtt_connections Clients connected now.\n" in page
    assert "# TYPE penstock_mqtt_packets_total counter" in page
    assert "penstock_mqtt_packets_total 3.0" in page
    assert "# TYPE penstock_mqtt_connections gauge" in page
    stats.packets += 1
    assert "penstock_mqtt_packets_total 4.0" in metrics.render().decode()
    assert CONTENT_TYPE.startswith("text/plain")


def test_sources_with_labels_share_a_metric() -> None:
    metrics = Metrics()
    for rule in ("a", 'b"\n'):
        metrics.add(
            "rule", lambda: {"records": 1}, {"records": MetricHelp("Records.", "counter")}, labels={"rule": rule}
        )
    page = metrics.render().decode()
    assert page.count("# TYPE penstock_rule_records_total counter") == 1
    assert 'penstock_rule_records_total{rule="a"} 1.0' in page
    assert 'penstock_rule_records_total{rule="b\\"\\n"} 1.0' in page


def test_durations_are_a_histogram_whose_exemplars_only_openmetrics_has() -> None:
    fast, slow = Durations(), Durations()
    for seconds in (0.0001, 0.0003, 0.0004, 99.0):
        fast.observe(seconds)
    slow.observe_traced(0.3, "ab" * 16, lambda: 1_800_000_000.5)
    slow.observe_traced(0.4, "cd" * 16, lambda: 1_800_000_001.5)
    metrics = Metrics()
    meanings = {"duration_seconds": MetricHelp("Durations.", "histogram")}
    metrics.add_rows(
        "commit",
        lambda: [((part,), {"duration_seconds": each}) for part, each in (("fast", fast), ("slow", slow))],
        meanings,
        ("part",),
    )
    page = metrics.render().decode()
    assert "# TYPE penstock_commit_duration_seconds histogram" in page
    assert 'penstock_commit_duration_seconds_bucket{le="0.0001",part="fast"} 1.0\n' in page
    assert 'penstock_commit_duration_seconds_bucket{le="0.0005",part="fast"} 3.0\n' in page
    assert 'penstock_commit_duration_seconds_bucket{le="10.0",part="fast"} 3.0\n' in page
    assert 'penstock_commit_duration_seconds_bucket{le="+Inf",part="fast"} 4.0\n' in page
    assert 'penstock_commit_duration_seconds_count{part="fast"} 4.0\n' in page
    assert "trace_id" not in page

    assert metrics.render_accepted("text/plain")[0] == page.encode()
    text, content_type = metrics.render_accepted("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    (family,) = text_string_to_metric_families(text.decode())
    exemplars = [(sample.labels["le"], sample.exemplar) for sample in family.samples if sample.exemplar]
    assert [(bound, found.labels, found.value, float(found.timestamp or 0)) for bound, found in exemplars] == [
        ("0.5", {"trace_id": "cd" * 16}, 0.4, 1_800_000_001.5)
    ]
