"""Plain integers rendered for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

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
        "packets": MetricHelp("Packets received.", gauge=False),
        "connections": MetricHelp("Clients connected now.", gauge=True),
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
            "rule", lambda: {"records": 1}, {"records": MetricHelp("Records.", gauge=False)}, labels={"rule": rule}
        )
    page = metrics.render().decode()
    assert page.count("# TYPE penstock_rule_records_total counter") == 1
    assert 'penstock_rule_records_total{rule="a"} 1.0' in page
    assert 'penstock_rule_records_total{rule="b\\"\\n"} 1.0' in page
