from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import DataLossError
from penstock.pipelines.run.queries import RunningQuery, check_nothing_dropped


def running(*dropped: int, windowed: bool = False) -> RunningQuery:
    """A query whose batches have left out so many records each."""
    built = SimpleNamespace(name="rows", plan=SimpleNamespace(windowed=windowed))
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
