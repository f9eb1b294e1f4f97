"""Traces of rules: a record continues the trace of its message, and the rule's span has the outcome of the append."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.node.config.node import RuleSection
from penstock.node.config.tracing import TracingSection, needs_tracing
from penstock.node.node import Node
from penstock.node.rules import Identities, RuleService, TubeTarget
from penstock.node.tracing import TracedTarget
from penstock.runtime.observability.tracing import Tracing, TracingOptions
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record
from tests.otlp import OtlpReceiver, otlp_receiver
from tests.unit.node.test_node import config
from tests.unit.node.test_rules import Broker, Later, Log

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ERROR = 2


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as found:
        yield found


@pytest.fixture
def tracing(receiver: OtlpReceiver) -> Iterator[Tracing]:
    found = Tracing(TracingOptions(endpoint=receiver.url, sample_ratio=0.0), attributes={})
    yield found
    found.close()


def rule_of(log: Log, tracing: Tracing, later: Later | None = None) -> RuleService:
    rule = RuleSection(filter="plant/#", topic="water")
    return RuleService(
        rule,
        TracedTarget(TubeTarget(rule, log.append, (0, 1, 2)), rule, tracing),
        identities=Identities("r1"),
        later=later or (lambda _delay, callback: callback()),
    )


def publish(topic: str = "plant/7/flow", /, **properties: str) -> Publish:
    found = Properties()
    found.user_properties.extend(properties.items())
    return Publish(topic, b"42", 1, properties=found)


def test_a_record_continues_the_trace_of_its_message(receiver: OtlpReceiver, tracing: Tracing) -> None:
    log, broker = Log(), Broker()
    rule_of(log, tracing).receive(broker.inbound(publish(line="3", traceparent=PARENT, tracestate="a=1")))
    log.waiting.pop()(object())
    assert broker.settled == [(0, "")]
    (span,) = receiver.wait(1)
    assert (span.name, span.trace_id, span.parent_id) == ("send water", TRACE, "b7ad6b7169203331")
    assert span.attributes == {
        "messaging.system": "tubemq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "water",
        "messaging.message.id": "dev/r1-1",
        "messaging.message.body.size": 2,
        "penstock.rule": "water",
        "penstock.mqtt.topic": "plant/7/flow",
    }
    assert log.records[0][2].headers == [
        ("line", "3"),
        ("traceparent", f"00-{TRACE}-{span.span_id}-01"),
        ("tracestate", "a=1"),
    ]


def test_long_topics_and_ids_are_cut_off_in_attributes(receiver: OtlpReceiver, tracing: Tracing) -> None:
    log, broker = Log(), Broker()
    topic, name = "plant/" + "t" * 5_000, "i" * 5_000
    rule_of(log, tracing).receive(broker.inbound(publish(topic, id=name, traceparent=PARENT)))
    log.waiting.pop()(object())
    (span,) = receiver.wait(1)
    assert span.attributes["penstock.mqtt.topic"] == topic[:1024]
    assert span.attributes["messaging.message.id"] == name[:1024]
    assert (log.records[0][2].topic, log.records[0][2].id) == (topic, name)


def test_the_context_of_a_trace_that_is_not_recorded_is_copied(tracing: Tracing) -> None:
    log, broker = Log(), Broker()
    rule = rule_of(log, tracing)
    for text in (PARENT[:-1] + "0", "malformed"):
        rule.receive(broker.inbound(publish(traceparent=text)))
        assert log.records[-1][2].headers == [("traceparent", text)]
        log.waiting.pop()(object())
    assert len(broker.settled) == 2
    assert tracing.stats.spans == 0


def test_a_span_has_temporary_and_permanent_errors_of_the_log(receiver: OtlpReceiver, tracing: Tracing) -> None:
    log, broker, later = Log(), Broker(), Later()
    rule = rule_of(log, tracing, later)
    rule.receive(broker.inbound(publish(traceparent=PARENT)))
    log.waiting.pop()(RefusedError("tube: overflow", code=ErrCode.SERVER_RECEIVE_OVERFLOW))
    assert tracing.stats.spans_exported == 0
    later.run()
    log.waiting.pop()(object())
    log.raises = UnavailableError("tube: the disk failed", applied=True)
    rule.receive(broker.inbound(publish(traceparent=PARENT)))
    later.run()
    retried, failed = receiver.wait(2)
    assert (retried.events, retried.status) == (["rejected temporarily"], 0)
    assert (failed.events, failed.status, failed.message) == ([], ERROR, "tube: the disk failed")
    assert failed.attributes["error.type"] == "UnavailableError"


def test_a_record_that_cannot_be_stored_ends_its_span(receiver: OtlpReceiver, tracing: Tracing) -> None:
    rule = RuleSection(filter="plant/#", topic="water")
    target = TracedTarget(TubeTarget(rule, Log().append, (0,)), rule, tracing)
    with pytest.raises(LocalProtocolError):
        target.prepare(Record(b"42", headers=[("traceparent", PARENT)], msg_time="noon"))
    (span,) = receiver.wait(1)
    assert (span.status, span.message) == (ERROR, "tube: msg_time: got 'noon'")


def test_spans_of_records_that_wait_end_with_the_rule(receiver: OtlpReceiver, tracing: Tracing) -> None:
    log, broker, later = Log(), Broker(), Later()
    section = RuleSection(filter="plant/#", topic="water")
    target = TracedTarget(TubeTarget(section, log.append, (0, 1, 2)), section, tracing)
    rule = RuleService(section, target, identities=Identities("r1"), later=later)
    rule.receive(broker.inbound(publish(traceparent=PARENT)))
    rule.receive(broker.inbound(publish(traceparent=PARENT)))
    log.waiting.pop(0)(RefusedError("tube: overflow", code=ErrCode.SERVER_RECEIVE_OVERFLOW))
    rule.close()
    target.close()
    log.waiting.pop()(object())  # the answer comes after the end of the node
    spans = receiver.wait(2)
    message = "the node shut down before the log acknowledged the record"
    assert [(span.status, span.message) for span in spans] == 2 * [(ERROR, message)]
    assert sorted(span.events for span in spans) == [[], ["rejected temporarily"]]
    target.close()
    assert tracing.stats.spans == 2


async def test_a_node_exports_spans_and_shows_a_failed_export(tmp_path: Path, receiver: OtlpReceiver) -> None:
    node = Node(
        config(
            tmp_path,
            rules=[RuleSection(filter="plant/#", topic="water")],
            tracing=TracingSection(endpoint=receiver.url, sample_ratio=1.0),
        )
    )
    ready = await node.start()
    try:
        async with MqttClient(f"mqtt://{ready.mqtt}", client_id="dev") as client:
            await client.publish("plant/7/flow", b"42", qos=1)
        assert node.warnings() == []
    finally:
        await node.close()
    (span,) = receiver.wait(1)
    assert (span.attributes["messaging.destination.name"], span.parent_id) == ("water", "")
    assert span.attributes["messaging.message.id"].startswith("dev/")


def test_a_missing_library_is_reported_with_its_extra() -> None:
    with pytest.raises(ConfigError) as raised, needs_tracing():
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")
    assert "[otel]" in str(raised.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((url, "expected a URL of a receiver of OTLP over HTTP") for url in ("127.0.0.1:4318", "grpc://h:4317")),
        *(
            (url, "expected a URL of a receiver of OTLP over HTTP")
            for url in ("http://", "http:///v1/traces", "http://h?a")
        ),
        ("http://h:99999", "Port out of range"),
        ("https://ada:hush@h:4318", "without credentials"),
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TracingSection(endpoint=url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:4318", "https://collector.example/otlp", "http://[::1]:4318/"])
def test_an_endpoint_is_a_url(url: str) -> None:
    assert TracingSection(endpoint=url).endpoint == url
