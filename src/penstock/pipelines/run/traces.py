"""Traces of a run: a span for each finished batch, with links to the traces of its records.

A batch has records of many traces, so its span has no parent but links, as OpenTelemetry's conventions for messaging
describe. The contexts are in the headers ``traceparent`` of the records. A thread reads the first records of the batch
once more for them, so that neither the batch nor the run waits. Requests with which a batch writes to the state store
are children of its span, whose ids are therefore chosen when the batch begins to write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from opentelemetry.trace import SpanContext, SpanKind, format_span_id, format_trace_id, get_current_span

from penstock.errors import PenstockError
from penstock.pipelines.run.queries import FinishedBatch
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.runtime.observability.tracing import Tracing, TracingOptions, context_of, new_context

__all__ = ["BatchTraces", "ReadHeaders"]

_log = logging.getLogger("penstock.tracing")

ReadHeaders = Callable[[str, Offsets, Offsets, str, int], list[str]]
"""Returns the values of a header of the first records of a batch: sink, start, end, header, records per partition."""

MAX_LINKS: Final = 32
MAX_RECORDS: Final = 1_000
"""Records of each partition whose headers are read: the rest of a larger batch has no links."""
_MAX_WAITING: Final = 100
"""Batches that wait for their links; further ones are recorded without."""
_CLOSE_S: Final = 10.0


class _Batch(NamedTuple):
    finished: FinishedBatch
    end_ns: int


class BatchTraces:
    """Recorder of the spans of one run, which ``attributes`` identify; close it."""

    def __init__(self, endpoint: str, attributes: Mapping[str, str], headers: ReadHeaders) -> None:
        self._tracing = Tracing(TracingOptions(endpoint=endpoint), attributes={})
        self._attributes = attributes
        self._headers = headers
        self._waiting: queue.Queue[_Batch | None] = queue.Queue(_MAX_WAITING)
        self._closed = threading.Event()
        self._contexts: dict[tuple[str, int], SpanContext] = {}
        """Contexts of unfinished batches that write to the state store."""
        self._thread = threading.Thread(target=self._work, name="penstock-traces", daemon=True)
        self._thread.start()

    def traceparent(self, sink: str, batch: int) -> str:
        """Return the context of the span that ``finished`` will record for the batch, also if the batch is repeated."""
        context = self._contexts.setdefault((sink, batch), new_context())
        return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-01"

    def finished(self, batch: FinishedBatch) -> None:
        """Record the span of a batch that has just finished."""
        item = _Batch(batch, time.time_ns())
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._record(item, [])

    def close(self) -> None:
        """Record and send the waiting spans, for a few seconds at most."""
        until = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
        self._thread.join(max(0.0, until - time.monotonic()))
        self._closed.set()  # a thread that still reads ends after it
        self._tracing.close()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closed.is_set():
            self._record(item, self._links(item))

    def _links(self, item: _Batch) -> list[SpanContext]:
        entry = item.finished.entry
        if not entry.read:
            return []
        try:
            values = self._headers(entry.sink, entry.start, entry.end, "traceparent", MAX_RECORDS)
        except PenstockError as error:
            _log.info("sink %s: batch %s has no links to traces: %s", entry.sink, entry.batch, error.line())
            return []
        except Exception:  # noqa: BLE001 - it would end the thread, and with it all later spans
            _log.exception("sink %s: batch %s has no links to traces", entry.sink, entry.batch)
            return []
        found: list[SpanContext] = []
        for value in dict.fromkeys(values):
            context = get_current_span(context_of([("traceparent", value)])).get_span_context()
            if context.is_valid and context.trace_flags.sampled:
                found.append(context)
        return found[:MAX_LINKS]

    def _record(self, item: _Batch, links: list[SpanContext]) -> None:
        entry = item.finished.entry
        counts = {"out": entry.out, "dead": entry.dead, "filtered": entry.filtered, "late": entry.late}
        attributes: dict[str, str | int] = {
            **self._attributes,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": entry.read,
            "penstock.sink": entry.sink,
            "penstock.batch": entry.batch,
            **{f"penstock.records.{name}": count for name, count in counts.items()},
        }
        took_s = item.finished.took_s
        context = self._contexts.pop((entry.sink, entry.batch), None) or new_context()
        self._tracing.add(
            f"process {entry.sink}",
            SpanKind.CONSUMER,
            attributes,
            end_ns=item.end_ns,
            took_s=took_s,
            context=context,
            links=links,
        )
