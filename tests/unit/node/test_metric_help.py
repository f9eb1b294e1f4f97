"""Every figure that a node shows has its meaning, and every meaning a figure."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.node.cluster.membership import ClusterMembership
from penstock.node.config.bridges import BridgeEntry
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig, RuleSection
from penstock.node.config.statestore import StateStoreSection
from penstock.node.config.tracing import TelemetrySection, TracingSection
from penstock.node.metric_help import METRICS
from penstock.node.node import Node
from penstock.runtime.observability.metrics import Metrics
from tests.ports import free_port
from tests.unit.node.test_node import config

ONLY_WITH_TLS = {"certificate_expires_timestamp_seconds", "revocation_lists_expire_timestamp_seconds"}


async def test_metrics_of_a_node_with_all_parts_match_the_table(tmp_path: Path) -> None:
    bridge = BridgeEntry.model_validate({"name": "away", "url": "mqtt://127.0.0.1:1", "topics": [{"filter": "x"}]})
    node = Node(
        config(
            tmp_path,
            rules=[RuleSection(filter="plant/#", topic="water")],
            statestore=StateStoreSection(capture_topic="changes"),
            bridges=[bridge],
            tracing=TracingSection(endpoint=f"http://127.0.0.1:{free_port()}"),
            telemetry=TelemetrySection(endpoint=f"http://127.0.0.1:{free_port()}"),
        )
    )
    await node.start()
    try:
        shown = {family.name: (family.documentation, family.type) for family in node.metrics.collect()}
    finally:
        await node.close()
    # The Prometheus library takes `_total` off a counter's name and puts it on again when it writes the page.
    assert shown == {
        f"penstock_{prefix}_{figure.name or name}": (figure.text, figure.type)
        for prefix, table in METRICS.items()
        for name, figure in table.items()
        if name not in ONLY_WITH_TLS and prefix not in {"cluster", "etcd"}  # see test_metrics_of_a_member_of_a_cluster
    }


async def test_metrics_of_a_member_of_a_cluster(tmp_path: Path) -> None:
    section = ClusterSection(name="edge", node="n1", etcd=[f"127.0.0.1:{free_port()}"])
    member = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=section), lambda _: None)
    values = member.metric_values()
    metrics = Metrics()
    member.add_metrics(metrics)
    (etcd,) = [family for family in metrics.collect() if family.name == "penstock_etcd_up"]
    await member.close()
    assert [(sample.labels, sample.value) for sample in etcd.samples] == [({"endpoint": section.etcd[0]}, 1)]
    assert set(values) == set(METRICS["cluster"])
    assert values["active"] == values["ready_standbys"] == 0
    assert math.isnan(values["lag_commits"]), "it does not follow yet"


def test_meanings_are_sentences_that_say_more_than_the_name() -> None:
    for prefix, table in METRICS.items():
        for name, figure in table.items():
            assert figure.text[0].isupper() or figure.text[0] == "1", (prefix, name)
            assert figure.text.endswith("."), (prefix, name)
            assert figure.text.lower().rstrip(".") != name.replace("_", " ")
