"""Spans of rules: a rule continues the trace of a message, and its record carries the context of the rule's span.

A span begins when the rule has received the message and ends when the log has acknowledged the record, or with an error
when the node shuts down before. If the trace is not recorded, the user properties ``traceparent`` and ``tracestate``
become headers unchanged, as without tracing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from opentelemetry.trace import Span, SpanKind, StatusCode

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.node.config.node import RuleSection
from penstock.node.rules import Done, RuleTarget
from penstock.runtime.observability.tracing import Tracing, context_of, with_context
from penstock.tube.record import Record

__all__ = ["TracedTarget"]

_LONGEST: Final = 1024
"""Characters of a topic or id in an attribute. Publishers choose them, and thousands of spans wait in memory."""


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
            "messaging.system": "tubemq" if rule.to is None else "kafka",
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
            done(result)

        try:
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


def _end_failed(span: Span, error: PenstockError) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR, error.what)
    span.end()
