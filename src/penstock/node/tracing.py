"""Spans of rules and of requests to the state store, which continue the traces of their senders.

The span of a rule begins when the rule has received the message and ends when the log has acknowledged the record, or
with an error when the node shuts down before; the record carries its context. If the trace is not recorded, the user
properties ``traceparent`` and ``tracestate`` become headers unchanged, as without tracing.

The span of a request begins when it has been executed in memory and ends when its answer is sent, which is after the
commit of its changes. The changes carry its context into notifications and change capture; if the trace is not
recorded, that of the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, use_span

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.node.config.node import RuleSection
from penstock.node.rules import Done, RuleTarget
from penstock.runtime.observability.tracing import Tracing, context_of, headers_of, with_context
from penstock.statestore.binding import StoreRequest
from penstock.statestore.codec.commands import Command
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.requests import Answer
from penstock.tube.record import Record

__all__ = ["NodeTraces", "RequestSpans", "TracedTarget"]

_LONGEST: Final = 1024
"""Characters of a topic, id or key in an attribute. Publishers choose them, and thousands of spans wait in memory."""


class _Traced(NamedTuple):
    """An encoded record with its span."""

    prepared: object
    span: Span | None


class TracedTarget:
    """The target of ``rule`` with a span for each record whose trace is recorded."""

    def __init__(self, target: RuleTarget, rule: RuleSection, tracing: Tracing) -> None:
        self._target = target
        self._tracing = tracing
        self._span_name = f"send {rule.target}"
        self._attributes = {
            "messaging.system": "tubemq" if rule.to is None or rule.to.kafka is None else "kafka",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": rule.target,
            "penstock.rule": rule.label,
        }
        self._open: set[Span] = set()
        """Spans of records that the log has not acknowledged."""

    @property
    def name(self) -> str:
        """Name of the system [RuleTarget]."""
        return self._target.name

    def prepare(self, record: Record) -> _Traced:
        """Start the span and encode the record with its context [RuleTarget]."""
        span = self._tracing.start(
            self._span_name, context_of(record.headers), SpanKind.PRODUCER, self._attributes_of(record)
        )
        if span is None:
            return _Traced(self._target.prepare(record), None)
        record.headers = with_context(record.headers, span)
        try:
            prepared = self._target.prepare(record)
        except LocalProtocolError as error:
            _end_failed(span, error)
            raise
        self._open.add(span)
        return _Traced(prepared, span)

    def append(self, prepared: _Traced, done: Done) -> None:
        """Append the record; its acknowledgement or final error ends the span [RuleTarget]."""
        span = prepared.span
        if span is None:
            self._target.append(prepared.prepared, done)
            return

        def finished(result: object) -> None:
            if isinstance(result, PenstockError):
                self._rejected(span, result)
            elif span in self._open:
                self._open.remove(span)
                span.end()
            with _current(span):
                done(result)

        try:
            with _current(span):
                self._target.append(prepared.prepared, finished)
        except PenstockError as error:
            self._rejected(span, error)
            raise

    def retries(self, error: PenstockError) -> bool:
        """Return the decision of the target [RuleTarget]."""
        return self._target.retries(error)

    def close(self) -> None:
        """End the spans of records that the log has not acknowledged. Call it after the rule's ``close``."""
        unfinished, self._open = self._open, set()
        for span in unfinished:
            _end_failed(span, UnavailableError("the node shut down before the log acknowledged the record"))

    def _attributes_of(self, record: Record) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {**self._attributes, "messaging.message.body.size": len(record.value)}
        if record.topic is not None:
            attributes["penstock.mqtt.topic"] = record.topic[:_LONGEST]
        if record.id is not None:
            attributes["messaging.message.id"] = record.id[:_LONGEST]
        return attributes

    def _rejected(self, span: Span, error: PenstockError) -> None:
        if span not in self._open:  # ended by `close`
            return
        if self.retries(error):
            span.add_event("rejected temporarily", {"exception.message": error.what})
        else:
            self._open.remove(span)
            _end_failed(span, error)


class NodeTraces:
    """The spans of a node: the targets of its rules, and ``requests`` of its state store."""

    def __init__(self, tracing: Tracing) -> None:
        self.requests = RequestSpans(tracing)
        self._tracing = tracing
        self._targets: list[TracedTarget] = []

    def traced(self, target: RuleTarget, rule: RuleSection) -> TracedTarget:
        """Return the target of ``rule`` with spans."""
        self._targets.append(TracedTarget(target, rule, self._tracing))
        return self._targets[-1]

    async def close(self) -> None:
        """End the spans of records that the log has not acknowledged, and send the waiting ones. Call it after the
        rules' ``close``."""
        for target in self._targets:
            target.close()
        await asyncio.to_thread(self._tracing.close)  # it waits for the receiver


class RequestSpans:
    """Recorder of the spans of requests to the state store [RequestTracer]."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def executed(self, ask: StoreRequest, command: Command, changes: Sequence[Change]) -> None:
        """Start the span of a request, and set the context of its changes [RequestTracer]."""
        given = ask.user_property(b"traceparent") is not None and ask.properties is not None
        if not given and not self._tracing.begins_traces:
            return
        parent = context_of(ask.properties.user_properties() if given and ask.properties is not None else ())
        verb = command.verb.value
        attributes: dict[str, str | int] = {
            "db.system.name": "aio-statestore",
            "db.operation.name": verb,
            "messaging.client.id": ask.client_id[:_LONGEST],
            "penstock.key": command.key[:_LONGEST].decode(errors="backslashreplace"),
        }
        span = self._tracing.start(verb, parent, SpanKind.SERVER, attributes)
        ask.span = span
        found = span or get_current_span(parent)
        if not changes or not found.get_span_context().is_valid:
            return
        trace = headers_of(found)
        for change in changes:
            if change.writer:  # not the expiry of a key that the request has found
                change.trace = trace

    def answered(self, ask: StoreRequest, answer: Answer) -> None:
        """End the span of a request [RequestTracer]."""
        span = ask.span
        if not isinstance(span, Span):
            return
        if answer.error is not None:
            span.set_attribute("error.type", answer.error.name)
            span.set_status(StatusCode.ERROR, answer.error.value)
        else:
            span.set_attribute("penstock.answer", answer.kind.value)
            if answer.version is not None:
                span.set_attribute("penstock.version", str(answer.version))
        span.end()


def _current(span: Span) -> AbstractContextManager[Span]:
    """Return a block whose log lines have the ids of ``span``."""
    return use_span(span, record_exception=False, set_status_on_exception=False)


def _end_failed(span: Span, error: PenstockError) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR, error.what)
    span.end()
