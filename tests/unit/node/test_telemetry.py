"""Metrics and log lines of a node over OTLP: the metrics of ``/metrics``, lines with trace ids, a failing receiver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.node.config.node import RuleSection
from penstock.node.config.tracing import TelemetrySection
from penstock.node.node import Node
from penstock.node.rules import Identities, RuleService, TubeTarget
from penstock.node.telemetry import NodeTelemetry
from penstock.node.tracing import TracedTarget
from penstock.runtime.observability.otlp import OtlpOptions
from penstock.runtime.observability.telemetry import LogExport, TelemetryStats
from penstock.runtime.observability.tracing import Tracing, TracingOptions
from tests.otlp import OtlpReceiver, ReceivedLine, otlp_receiver
from tests.unit.node.test_node import config
from tests.unit.node.test_rules import Broker, Later, Log
from tests.unit.node.test_tracing import PARENT, TRACE, publish

WARNING = 13


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as found:
        yield found


async def test_metrics_have_the_names_units_and_values_of_the_prometheus_endpoint(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    section = TelemetrySection(endpoint=receiver.url, metrics_interval_s=3600)
    node = Node(config(tmp_path, telemetry=section, rules=[RuleSection(filter="plant/#", topic="water")]))
    ready = await node.start()
    try:
        async with MqttClient(f"mqtt://{ready.mqtt}", client_id="dev") as client:
            await client.publish("plant/7/flow", b"42", qos=1)
        assert node.health.warnings() == []
        page = node.metrics.render().decode()
    finally:
        await node.close()
    (sent,) = receiver.metrics  # the last export, at the end
    names = {
        family.name: {family.name} if family.type == "histogram" else {sample.name for sample in family.samples}
        for family in text_string_to_metric_families(page)
    }
    assert set(sent) == set().union(*names.values())
    for family in text_string_to_metric_families(page):
        for name in names[family.name]:
            assert (sent[name].help, sent[name].counter) == (family.documentation, family.type == "counter"), name
    records = sent["penstock_rule_received_total"]
    assert records.points == [(1, {"filter": "plant/#", "topic": "water"})]
    assert records.resource["service.name"] == "penstock"
    commits = sent["penstock_commit_duration_seconds"]
    assert {attributes["part"] for _, attributes in commits.points} == {"statestore", "mqtt", "master", "tube"}
    assert max(seconds for seconds, _ in commits.points) > 0
    assert commits.unit == "s"
    assert sent["penstock_statestore_bytes"].unit == "By"
    assert sent["penstock_node_start_time_seconds"].unit == "s"
    assert sent["penstock_mqtt_connections_opened_total"].unit == "1"


async def test_log_lines_have_their_fields_severity_and_the_ids_of_their_span(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier tests may have changed the level, and their threads may write lines now."""
    caplog.set_level(logging.WARNING, "penstock")
    stats = TelemetryStats()
    export = LogExport(OtlpOptions(endpoint=receiver.url, timeout_s=30), stats, attributes={"host.name": "edge"})
    tracing = Tracing(TracingOptions(endpoint=receiver.url, timeout_s=30), attributes={})

    def lines() -> list[ReceivedLine]:
        return [line for line in receiver.lines if line.attributes["penstock.part"] in {"rules", "node"}]

    try:
        rule = RuleSection(filter="plant/#", topic="water")
        log = Log()
        service = RuleService(
            rule,
            TracedTarget(TubeTarget(rule, log.append, lambda: (1, 1)), rule, tracing),
            identities=Identities("r1"),
            later=Later(),
        )
        service.receive(Broker().inbound(publish(traceparent=PARENT)))
        log.waiting.pop()(UnavailableError("tube: the disk failed", applied=True))
        service.close()
        try:
            raise ValueError("unexpected")
        except ValueError:
            logging.getLogger("penstock.node").exception("it failed")
        # Not by the end of the export, which sends for a few seconds only.
        await asyncio.to_thread(receiver.wait_for, lambda: len(lines()) >= 2)
        (span,) = await asyncio.to_thread(receiver.wait, 1)
    finally:
        await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(export.close)
    rejected, failed = lines()
    assert "the disk failed" in rejected.text
    assert (rejected.severity, rejected.severity_number) == ("warning", WARNING)
    assert (rejected.trace_id, rejected.span_id) == (TRACE, span.span_id)
    assert rejected.attributes == {"penstock.part": "rules", "rule": "water", "topic": "plant/7/flow"}
    assert rejected.resource["host.name"] == "edge"
    assert (failed.text, failed.severity, failed.trace_id) == ("it failed", "error", "")
    assert (failed.attributes["exception.type"], failed.attributes["exception.message"]) == ("ValueError", "unexpected")
    exported = len(receiver.lines)
    assert (stats.log_lines, stats.log_lines_exported, stats.log_lines_failed) == (exported, exported, 0)
    logging.getLogger("penstock.node").warning("after the end")
    assert stats.log_lines == exported


async def test_a_receiver_that_fails_is_counted_and_reported_once(
    tmp_path: Path, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 404
    node = Node(config(tmp_path, telemetry=TelemetrySection(endpoint=receiver.url, metrics_interval_s=1)))
    await node.start()
    try:
        await asyncio.to_thread(receiver.wait_for, lambda: receiver.requests.count("/v1/metrics") >= 2)
        assert b"penstock_telemetry_failed_metric_exports_total" in node.metrics.render()
        assert any("cannot be sent" in text for text in node.health.warnings())
        receiver.status = 200
        await asyncio.to_thread(receiver.wait_for, lambda: len(receiver.metrics) >= 1)
    finally:
        await node.close()
    for items in ("metrics", "log lines"):
        assert sum(f"{items} cannot be sent" in record.getMessage() for record in caplog.records) <= 1
    assert sum("metrics cannot be sent" in record.getMessage() for record in caplog.records) == 1
    assert receiver.metrics[0]["penstock_telemetry_failed_metric_exports_total"].points[0][0] >= 1


async def test_metrics_are_not_read_while_the_event_loop_is_busy(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.telemetry._READ_S", 0.01)

    async def read() -> list[Metric]:
        await asyncio.sleep(60)
        return []

    section = TelemetrySection(endpoint=receiver.url, logs=False)
    telemetry = NodeTelemetry(section, read)
    telemetry.start()
    await telemetry.close()
    assert receiver.requests == []
    assert telemetry.stats.metric_exports_failed == 1


def test_a_section_that_exports_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="remove the section"):
        TelemetrySection(endpoint="http://127.0.0.1:4318", metrics=False, logs=False)
