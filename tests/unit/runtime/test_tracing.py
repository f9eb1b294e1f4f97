"""Traces: the context of W3C Trace Context in headers, the export of spans, failures and shutdown."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, get_current_span

from penstock.errors import ConfigError
from penstock.runtime.observability.tracing import (
    Headers,
    Tracing,
    TracingOptions,
    context_of,
    new_context,
    with_context,
)
from tests.otlp import otlp_receiver
from tests.ports import free_port

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


def start(endpoint: str, ratio: float = 0.0, timeout_s: float = 1.0) -> Tracing:
    options = TracingOptions(endpoint=endpoint, sample_ratio=ratio, timeout_s=timeout_s)
    return Tracing(options, attributes={"host.name": "edge"})


def send(tracing: Tracing, parent: Context | None = None) -> None:
    span = tracing.start("send water", Context() if parent is None else parent, SpanKind.PRODUCER, {})
    assert span is not None
    span.end()


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "")],
        [("traceparent", "00-x-y-01")],
        [("traceparent", f"00-{'0' * 32}-b7ad6b7169203331-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", f"ff-{TRACE}-b7ad6b7169203331-01")],
        [("traceparent", PARENT.upper())],
        [("traceparent", PARENT + "-more")],
        [("traceparent", PARENT), ("traceparent", PARENT)],
        [("traceparent", PARENT.encode())],
        [("tracestate", "a=1")],
        [("Traceparent", PARENT)],
    ],
)
def test_a_malformed_or_ambiguous_context_is_ignored(headers: Headers) -> None:
    assert not get_current_span(context_of(headers)).get_span_context().is_valid


def test_the_context_of_headers_is_replaced_by_that_of_the_span() -> None:
    with otlp_receiver() as receiver:
        tracing = start(receiver.url)
        headers: Headers = [
            ("line", "3"),
            ("traceparent", PARENT),
            ("tracestate", "a=1"),
            ("tracestate", "b=2"),
            ("x", b"\xff"),
        ]
        span = tracing.start("send water", context_of(headers), SpanKind.PRODUCER, {"penstock.rule": "water"})
        assert span is not None
        sent = with_context(headers, span)
        span.end()
        tracing.close()
        (found,) = receiver.wait(1)
    assert sent == [
        ("line", "3"),
        ("x", b"\xff"),
        ("traceparent", f"00-{TRACE}-{found.span_id}-01"),
        ("tracestate", "a=1,b=2"),
    ]
    assert (found.trace_id, found.parent_id) == (TRACE, "b7ad6b7169203331")
    assert found.attributes == {"penstock.rule": "water"}
    assert (found.resource["service.name"], found.resource["host.name"]) == ("penstock", "edge")
    assert receiver.requests == ["/v1/traces"]
    assert (tracing.stats.spans, tracing.stats.spans_exported, tracing.stats.spans_failed) == (1, 1, 0)
    ((names, values),) = tracing.stats.duration_rows()
    assert (names, sum(values["duration_seconds"].counts)) == (("send water",), 1)
    (example,) = values["duration_seconds"].traced.values()
    assert (example.trace_id, example.seconds) == (TRACE, found.took_ns / 1e9)


@pytest.mark.parametrize(
    ("ratio", "parent", "recorded"),
    [(0.0, "", False), (0.0, PARENT, True), (0.0, UNSAMPLED, False), (1.0, "", True), (1.0, UNSAMPLED, False)],
)
def test_the_sender_decides_about_its_traces_and_the_ratio_about_others(
    ratio: float, parent: str, recorded: bool
) -> None:
    tracing = start(f"http://127.0.0.1:{free_port()}", ratio)
    try:
        span = tracing.start("send water", context_of([("traceparent", parent)]), SpanKind.PRODUCER, {})
        assert (span is not None) is recorded
        assert tracing.stats.spans == int(recorded)
    finally:
        tracing.close()


def test_a_span_of_the_past_has_its_duration_and_links() -> None:
    linked = get_current_span(context_of([("traceparent", PARENT)])).get_span_context()
    with otlp_receiver() as receiver:
        tracing = start(receiver.url + "/", 1.0)
        tracing.add(
            "process lake",
            SpanKind.CONSUMER,
            {"penstock.batch": 7},
            end_ns=9_000_000_000,
            took_s=2.5,
            context=new_context(),
            links=[linked],
        )
        tracing.close()
        (found,) = receiver.wait(1)
    assert (found.took_ns, found.attributes, found.parent_id) == (2_500_000_000, {"penstock.batch": 7}, "")
    assert found.links == [(TRACE, "b7ad6b7169203331")]


def test_a_series_of_failures_is_one_warning_until_a_request_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.tracing")
    with otlp_receiver() as receiver:
        receiver.status = 404
        tracing = start(receiver.url, 1.0)
        for count in (1, 2):
            send(tracing)
            receiver.wait_requests(count)
            _await(lambda: tracing.stats.spans_failed == count)
        failure = tracing.failure
        assert failure is not None
        assert failure.why == "the receiver answered 404 Not Found"
        receiver.status = 200
        send(tracing)
        receiver.wait(1)
        _await(lambda: tracing.failure is None)
        tracing.close()
    assert [record.message for record in caplog.records] == [
        f"spans cannot be sent to {receiver.url}/v1/traces and are dropped (the receiver answered 404 Not Found)",
        "spans are exported again",
    ]


def test_a_receiver_that_does_not_listen_is_named_with_the_cause() -> None:
    tracing = start(f"http://127.0.0.1:{free_port()}", 1.0)
    send(tracing)
    tracing.close()
    assert tracing.failure is not None
    assert "Connection refused" in str(tracing.failure.why)
    assert (tracing.stats.spans_exported, tracing.stats.spans_failed) == (0, 1)


def test_the_file_of_authorities_is_used_and_its_error_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other.pem").write_text("")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "other.pem"))
    missing = tmp_path / "missing.pem"
    endpoint = f"https://127.0.0.1:{free_port()}"
    tracing = Tracing(TracingOptions(endpoint=endpoint, sample_ratio=1.0, timeout_s=1.0, ca=missing), attributes={})
    send(tracing)
    tracing.close()
    assert tracing.failure is not None
    assert str(missing) in str(tracing.failure.why)
    assert tracing.stats.spans_failed == 1


@pytest.mark.parametrize(
    "tracestate", ["no pair", ",".join(f"k{number}=1" for number in range(33)), "k=" + "v" * 9_000]
)
def test_a_malformed_tracestate_of_a_client_is_not_logged(tracestate: str, caplog: pytest.LogCaptureFixture) -> None:
    start(f"http://127.0.0.1:{free_port()}").close()
    context = get_current_span(context_of([("traceparent", PARENT), ("tracestate", tracestate)])).get_span_context()
    assert (context.is_valid, len(context.trace_state)) == (True, 0)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=1,authorization: Bearer hush", "part 2 of OTEL_EXPORTER_OTLP_HEADERS"),
        (
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
            "authorization=hush%0ahush",
            "part 1 of OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        ),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "max_queue_size must be a positive integer"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "some", "must be a non-negative integer but got some"),
    ],
)
def test_a_variable_without_a_valid_value_is_refused_without_its_secret(
    variable: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=error) as raised:
        start(f"http://127.0.0.1:{free_port()}")
    assert "hush" not in f"{raised.value}{caplog.text}"


def test_headers_of_the_environment_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer hush, x-tenant=a%2Cb,")
    with otlp_receiver() as receiver:
        tracing = start(receiver.url, 1.0)
        send(tracing)
        tracing.close()
        receiver.wait(1)
    assert (receiver.headers[0]["authorization"], receiver.headers[0]["x-tenant"]) == ("Bearer hush", "a,b")


def test_a_receiver_that_never_answers_blocks_neither_spans_nor_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = start(f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0, timeout_s=0.2)
        for _ in range(5_000):  # more than the queue holds
            send(tracing)
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 30
    assert tracing.stats.spans == 5_000
    assert tracing.stats.spans_exported == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
