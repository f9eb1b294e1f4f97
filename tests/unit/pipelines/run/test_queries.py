from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import DataLossError
from penstock.pipelines.run.queries import (
    BatchCounts,
    RunningQuery,
    check_nothing_dropped,
    is_small,
    ledger_entry,
)
from penstock.pipelines.spec.pipeline import plan
from tests.unit.pipelines.files import FILE, parse


def running(*dropped: int, windowed: bool = False) -> RunningQuery:
    """A query whose batches have left out so many records each."""
    built = SimpleNamespace(name="rows", plan=SimpleNamespace(windowed=windowed, join=None))
    progress = [SimpleNamespace(stateOperators=[SimpleNamespace(numRowsDroppedByWatermark=count)]) for count in dropped]
    return RunningQuery(cast("Any", built), query=cast("Any", SimpleNamespace(recentProgress=progress)))


def test_records_that_a_dedupe_left_out_are_a_loss() -> None:
    with pytest.raises(DataLossError, match="sink 'rows': 5 records arrived longer than `within` before others"):
        check_nothing_dropped(running(2, 0, 3))


def test_late_events_of_windows_and_queries_that_do_not_run_are_none() -> None:
    check_nothing_dropped(running(0, 0))
    check_nothing_dropped(running(4, windowed=True))
    check_nothing_dropped(RunningQuery(running(4).built))


def test_a_batch_that_was_finished_ends_the_count_of_failures() -> None:
    found = running()
    found.failing_since, found.strange = 1.0, 3
    assert found.backoff.failed() < found.backoff.failed()
    found.progressed()
    fresh = running()
    assert (found.failing_since, found.strange) == (fresh.failing_since, 0)
    assert found.backoff.failed() == fresh.backoff.failed() == 0.25


@pytest.mark.parametrize(
    ("sink", "duplicates"),
    [("rows", 3), ("alarms", None), ("plain", 0)],
)
def test_records_without_a_row_are_duplicates_only_if_there_is_a_dedupe(sink: str, duplicates: int | None) -> None:
    pipeline = parse(FILE + "  - {name: plain, from: plausible, table: {path: lake/plain}}\n")
    found = next(each for each in plan(pipeline) if each.sink.name == sink)
    checkpoint = SimpleNamespace(
        late_watermark_ms=lambda _: 0, planned=lambda _: SimpleNamespace(watermark_ms=0), query_id=lambda: "q"
    )
    targets = SimpleNamespace(store=SimpleNamespace(token="1"), dead_letters=None, version=3)
    counts = BatchCounts(out=12, dead=2, filtered=1, exploded=8)
    span: tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]] = ({}, {})
    entry = ledger_entry(found, cast("Any", checkpoint), cast("Any", targets), 4, *span, 10, counts, out=12, checks={})
    # 10 records became 18 rows, of which 15 have an outcome.
    assert (entry.read, entry.exploded, entry.duplicates, entry.version) == (10, 8, duplicates, 3)


@pytest.mark.parametrize(
    ("read", "before", "small"),
    [
        (10_000, None, True),
        (10_001, None, False),
        (10_000, (50, 0), True),
        # An explode step made three rows of each record of the batch before.
        (3_333, (50, 100), True),
        (3_334, (50, 100), False),
        (10_000, (0, 0), True),
    ],
)
def test_a_batch_is_small_by_its_rows(read: int, before: tuple[int, int] | None, *, small: bool) -> None:
    last = None if before is None else SimpleNamespace(read=before[0], exploded=before[1])
    assert is_small(read, cast("Any", last)) is small
