"""Traces of a run: spans of batches with links to the traces of their records."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.errors import UnavailableError
from penstock.pipelines.ledger.ledger import LedgerEntry
from penstock.pipelines.run import traces
from penstock.pipelines.run.queries import FinishedBatch
from penstock.pipelines.run.traces import MAX_LINKS, BatchTraces
from penstock.pipelines.state_dir.checkpoint import Offsets
from tests.otlp import OtlpReceiver, otlp_receiver

RUN = {"penstock.pipeline": "water", "penstock.run": "r1"}


def parent(number: int, flags: str = "01") -> str:
    return f"00-{number:032x}-{number:016x}-{flags}"


def batch(number: int = 7, read: int = 10) -> FinishedBatch:
    entry = LedgerEntry(
        sink="lake",
        batch=number,
        start={"source": {"1:0": 0}},
        end={"source": {"1:0": 280}},
        read=read,
        out=8,
        dead=1,
        filtered=1,
        duplicates=0,
        late=0,
        late_watermark_ms=0,
        watermark_ms=0,
        fencing_token="",
    )
    return FinishedBatch(entry, 1.5)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as found:
        yield found


class Headers:
    """Headers of the records of every batch, or an error."""

    def __init__(self, *values: str, error: Exception | None = None) -> None:
        self.values = values
        self.error = error
        self.asked: list[tuple[str, Offsets, Offsets, str]] = []
        self.proceed = threading.Event()
        self.proceed.set()
        self.reading = threading.Event()

    def __call__(self, sink: str, start: Offsets, end: Offsets, name: str, _max_records: int) -> list[str]:
        self.asked.append((sink, start, end, name))
        self.reading.set()
        assert self.proceed.wait(60)
        if self.error is not None:
            raise self.error
        return list(self.values)


def test_a_batch_has_a_span_with_links_to_the_traces_of_its_records(receiver: OtlpReceiver) -> None:
    headers = Headers(parent(1), parent(2), parent(1), parent(3, "00"), "malformed")
    found = BatchTraces(receiver.url, RUN, headers)
    found.finished(batch())
    (span,) = receiver.wait(1)
    found.close()
    assert (span.name, span.parent_id, span.took_ns) == ("process lake", "", 1_500_000_000)
    assert span.links == [(f"{number:032x}", f"{number:016x}") for number in (1, 2)]
    assert span.attributes == RUN | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": 10,
        "penstock.sink": "lake",
        "penstock.batch": 7,
        "penstock.records.out": 8,
        "penstock.records.dead": 1,
        "penstock.records.filtered": 1,
        "penstock.records.late": 0,
    }
    assert headers.asked == [("lake", {"source": {"1:0": 0}}, {"source": {"1:0": 280}}, "traceparent")]


def test_the_span_of_a_batch_has_the_context_that_its_writes_carried(receiver: OtlpReceiver) -> None:
    found = BatchTraces(receiver.url, RUN, Headers())
    first = found.traceparent("lake", 7)
    assert found.traceparent("lake", 7) == first  # an attempt to repeat the batch
    second = found.traceparent("lake", 8)
    for number in (7, 8, 9):
        found.finished(batch(number))
    spans = receiver.wait(3)
    found.close()
    assert [f"00-{span.trace_id}-{span.span_id}-01" for span in spans[:2]] == [first, second]
    assert len({span.trace_id for span in spans}) == 3


def test_links_are_bounded_and_an_empty_batch_reads_nothing(receiver: OtlpReceiver) -> None:
    headers = Headers(*(parent(number) for number in range(1, 100)))
    found = BatchTraces(receiver.url, RUN, headers)
    found.finished(batch(1, read=0))
    found.finished(batch(2))
    spans = receiver.wait(2)
    found.close()
    assert {span.attributes["penstock.batch"]: len(span.links) for span in spans} == {1: 0, 2: MAX_LINKS}
    assert len(headers.asked) == 1


@pytest.mark.parametrize("error", [UnavailableError("tube: no answer", applied=None), ValueError("unexpected")])
def test_headers_that_cannot_be_read_cost_the_links_only(receiver: OtlpReceiver, error: Exception) -> None:
    found = BatchTraces(receiver.url, RUN, Headers(error=error))
    for number in (1, 2):
        found.finished(batch(number))
    spans = receiver.wait(2)
    found.close()
    assert [span.links for span in spans] == [[], []]


def test_batches_that_come_faster_than_their_headers_have_no_links(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_MAX_WAITING", 1)
    headers = Headers(parent(1))
    headers.proceed.clear()
    found = BatchTraces(receiver.url, RUN, headers)
    found.finished(batch(1))
    assert headers.reading.wait(60)
    for number in (2, 3):  # one waits, the next one does not fit
        found.finished(batch(number))
    (span,) = receiver.wait(1)
    assert (span.attributes["penstock.batch"], span.links) == (3, [])
    headers.proceed.set()
    assert [len(span.links) for span in receiver.wait(3)[1:]] == [1, 1]
    found.close()


def test_the_end_of_a_run_records_the_batches_that_wait(receiver: OtlpReceiver) -> None:
    found = BatchTraces(receiver.url, RUN, Headers(parent(1)))
    for number in (1, 2, 3):
        found.finished(batch(number))
    found.close()
    assert [len(span.links) for span in receiver.wait(3)] == [1, 1, 1]


def test_a_reader_that_hangs_does_not_keep_the_run_from_ending(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_CLOSE_S", 0.05)
    headers = Headers()
    headers.proceed.clear()
    monkeypatch.setattr(traces, "_MAX_WAITING", 1)
    found = BatchTraces(receiver.url, RUN, headers)
    found.finished(batch())
    assert headers.reading.wait(60)
    found.finished(batch())  # the queue is full
    found.close()
    assert receiver.requests == []
    headers.proceed.set()
    found._thread.join(60)
    assert not found._thread.is_alive()
