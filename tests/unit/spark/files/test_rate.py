from __future__ import annotations

import json

import pytest

from penstock.spark.local_sources import RateReader, RateStreamReader, due, rate_rows

OPTIONS = {"startms": "1000", "rowspersecond": "4"}


@pytest.mark.parametrize(("now_ms", "rows"), [(999, 0), (1000, 0), (1249, 0), (1250, 1), (3000, 8)])
def test_rows_come_due_with_the_clock(now_ms: int, rows: int) -> None:
    assert due(OPTIONS, now_ms * 1_000_000) == rows


def test_a_row_is_always_the_same() -> None:
    found = rate_rows(1, 3, OPTIONS).to_pylist()
    assert [json.loads(row["value"]) for row in found] == [
        {"value": 1, "timestamp": "1970-01-01T00:00:01.250Z"},
        {"value": 2, "timestamp": "1970-01-01T00:00:01.500Z"},
    ]
    assert [row["offset"] for row in found] == [1, 2]
    batch = RateReader(OPTIONS | {"start": "1", "end": "3"})
    assert [row for task in batch.partitions() for b in batch.read(task) for row in b.to_pylist()] == found


def test_so_many_at_once_and_no_more() -> None:
    reader = RateStreamReader(OPTIONS | {"rows": "250000"})
    assert reader.latestOffset(reader.initialOffset()) == {"rate": {"0": 250_000}}
    assert len(reader.partitions({"rate": {"0": 0}}, {"rate": {"0": 250_000}})) == 3


def test_a_clock_that_is_set_back_undoes_nothing() -> None:
    future = OPTIONS | {"startms": "99999999999999"}
    assert RateStreamReader(future).latestOffset({"rate": {"0": 7}}) == {"rate": {"0": 7}}
