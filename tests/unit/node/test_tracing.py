"""Traces of rules: a record continues the trace of its message, and the rule's span has the outcome of the append."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.node.config.node import RuleSection
from penstock.node.config.statestore import StateStoreSection
from penstock.node.config.tracing import TracingSection, needs_otel
from penstock.node.node import Node, ReadyNode
from penstock.node.rules import Identities, RuleService, TubeTarget
from penstock.node.tracing import TracedTarget
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.observability.tracing import TRACE_HEADERS, Tracing, TracingOptions
from penstock.spark.statestore.writes import FencedTarget, write_rows
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.writes import Write
from penstock.statestore.errors import StateStoreError
from penstock.statestore.hlc import Hlc
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record
from tests.otlp import OtlpReceiver, otlp_receiver
from tests.unit.node.test_capture_node import captured_records
from tests.unit.node.test_node import config
from tests.unit.node.test_rules import Broker, Later, Log

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ERROR = 2
SERVER = 2


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
        TracedTarget(TubeTarget(rule, log.append, lambda: (3, 1)), rule, tracing),
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
    target = TracedTarget(TubeTarget(rule, Log().append, lambda: (1, 1)), rule, tracing)
    with pytest.raises(LocalProtocolError):
        target.prepare(Record(b"42", headers=[("traceparent", PARENT)], msg_time="noon"))
    (span,) = receiver.wait(1)
    assert (span.status, span.message) == (ERROR, "tube: msg_time: got 'noon'")


def test_spans_of_records_that_wait_end_with_the_rule(receiver: OtlpReceiver, tracing: Tracing) -> None:
    log, broker, later = Log(), Broker(), Later()
    section = RuleSection(filter="plant/#", topic="water")
    target = TracedTarget(TubeTarget(section, log.append, lambda: (3, 1)), section, tracing)
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
        assert node.health.warnings() == []
    finally:
        await node.close()
    (span,) = receiver.wait(1)
    assert (span.attributes["messaging.destination.name"], span.parent_id) == ("water", "")
    assert span.attributes["messaging.message.id"].startswith("dev/")


async def traced_store(tmp_path: Path, receiver: OtlpReceiver, sample_ratio: float = 0.0) -> tuple[Node, ReadyNode]:
    """Start a node that traces and captures changes."""
    section = StateStoreSection(capture_topic="changes", extensions=["batch", "resume"], history_changes=100)
    node = Node(
        config(
            tmp_path,
            statestore=section,
            tracing=TracingSection(endpoint=receiver.url, sample_ratio=sample_ratio),
        )
    )
    return node, await node.start()


def store_client(ready: ReadyNode, name: str, traceparent: str = "", tracestate: str = "") -> StateStoreClient:
    given = {"traceparent": traceparent, "tracestate": tracestate}
    properties = {key: text for key, text in given.items() if text}
    return StateStoreClient.connect(f"mqtt://{ready.mqtt}", client_id=name, user_properties=properties)


async def captured_contexts(
    node: Node, ready: ReadyNode, count: int
) -> list[tuple[str | None, dict[str, str | bytes]]]:
    """Return the operations of the captured changes, with the headers of their traces."""
    async with asyncio.timeout(60):
        wanted = f'penstock_capture_captured_changes_total{{topic="changes"}} {count}.0'.encode()
        while wanted not in node.metrics.render():
            await asyncio.sleep(0.01)
    records = await asyncio.to_thread(captured_records, ready.tube_master)
    return [
        (record.msg_type, {name: value for name, value in record.headers if name in TRACE_HEADERS})
        for record in records
    ]


async def test_a_request_continues_its_trace_into_notifications_and_captured_changes(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    node, ready = await traced_store(tmp_path, receiver)
    try:
        async with (
            store_client(ready, "dev", PARENT, "a=1") as traced,
            store_client(ready, "other") as other,
            other.observe("k") as changes,
        ):
            version = (await traced.set("k", "v")).version
            assert await traced.get("k") is not None
            assert await traced.vdelete("k", "other value") == -1
            assert await traced.delete("k") == 1
            with pytest.raises(StateStoreError):
                await traced.set("k", "v", fencing_token=Hlc(wall_clock_ms() + 3_600_000, 0, "x"))
            await other.set("k", "untraced")
            seen = [await anext(changes) for _ in range(3)]
        found = await captured_contexts(node, ready, 3)
    finally:
        await node.close()
    spans = receiver.wait(5)
    assert [span.name for span in spans] == ["SET", "GET", "VDEL", "DEL", "SET"]
    assert {(span.trace_id, span.parent_id, span.kind) for span in spans} == {(TRACE, "b7ad6b7169203331", SERVER)}
    assert {span.attributes["messaging.client.id"] for span in spans} == {"dev"}
    first = spans[0]
    assert first.attributes == {
        "db.system.name": "aio-statestore",
        "db.operation.name": "SET",
        "messaging.client.id": "dev",
        "penstock.key": "k",
        "penstock.answer": "done",
        "penstock.version": str(version),
    }
    assert [span.attributes.get("penstock.answer") for span in spans[1:]] == [
        "value",
        "condition not met",
        "number of keys deleted or observations ended",
        None,
    ]
    assert (spans[4].status, spans[4].attributes["error.type"]) == (ERROR, "FENCE_TOO_FAR_AHEAD")
    contexts = [f"00-{TRACE}-{span.span_id}-01" for span in (first, spans[3])]
    assert [change.traceparent for change in seen] == [*contexts, None]
    assert found == [
        ("SET", {"traceparent": contexts[0], "tracestate": "a=1"}),
        ("DELETE", {"traceparent": contexts[1], "tracestate": "a=1"}),
        ("SET", {}),
    ]


async def test_an_unrecorded_trace_of_a_request_is_carried_and_a_malformed_one_is_ignored(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    node, ready = await traced_store(tmp_path, receiver)
    try:
        for text in (PARENT[:-1] + "0", "malformed", f"00-{'0' * 32}-b7ad6b7169203331-01"):
            async with store_client(ready, "dev", text) as client:
                await client.set("k", text)
        found = await captured_contexts(node, ready, 3)
        assert b"penstock_tracing_spans_total 0.0" in node.metrics.render()
    finally:
        await node.close()
    assert found == [("SET", {"traceparent": PARENT[:-1] + "0"}), ("SET", {}), ("SET", {})]


async def test_requests_without_a_context_begin_traces_by_the_ratio(tmp_path: Path, receiver: OtlpReceiver) -> None:
    node, ready = await traced_store(tmp_path, receiver, 1.0)
    try:
        async with store_client(ready, "dev") as client:
            assert await client.write_many([Write.set("a", b"1"), Write.set("b", b"2")]) == [True, True]
        found = await captured_contexts(node, ready, 2)
    finally:
        await node.close()
    (span,) = receiver.wait(1)
    assert (span.name, span.parent_id) == ("BATCH", "")
    assert found[0] == found[1]
    operation, headers = found[0]
    assert (operation, str(headers["traceparent"])[:-3]) == ("SET", f"00-{span.trace_id}-{span.span_id}")


async def test_the_tasks_of_a_sink_continue_the_trace_of_their_batch(tmp_path: Path, receiver: OtlpReceiver) -> None:
    node, ready = await traced_store(tmp_path, receiver)
    rows = pa.RecordBatch.from_pydict({"key": ["alarm"], "value": ["on"]})
    try:
        async with store_client(ready, "run") as client:
            token = (await client.set("lease", "r1")).version
        assert token is not None
        target = FencedTarget(f"mqtt://{ready.mqtt}", token, "lease", "r1", "writer", PARENT)
        assert await asyncio.to_thread(write_rows, target, [rows], 0) == 1
        found = await captured_contexts(node, ready, 2)
    finally:
        await node.close()
    spans = receiver.wait(2)
    assert [(span.name, span.trace_id, span.parent_id) for span in spans] == [
        (name, TRACE, "b7ad6b7169203331") for name in ("GET", "SET")
    ]
    assert found == [("SET", {}), ("SET", {"traceparent": f"00-{TRACE}-{spans[1].span_id}-01"})]


def test_a_missing_library_is_reported_with_its_extra() -> None:
    with pytest.raises(ConfigError) as raised, needs_otel("tracing"):
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
