"""Statistics of Parquet files, as a Delta log stores them."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.pipelines.sinks.parquet import read_footer, statistics

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def found(path: Path, values: pa.Array[Any], **options: Any) -> dict[str, Any]:
    pq.write_table(pa.table({"c": values}), path / "a.parquet", **options)
    stats = statistics(read_footer(path / "a.parquet"))
    json.dumps(stats, allow_nan=False)
    return stats


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (pa.array([3, None, -1], pa.int64()), -1, 3),
        (pa.array([7], pa.int8()), 7, 7),
        (pa.array(["ü", "a", "z"]), "a", "ü"),
        (pa.array([date(2026, 3, 1), date(1500, 1, 1)]), "1500-01-01", "2026-03-01"),
        (pa.array([NOON], pa.timestamp("us", "UTC")), *["2026-03-01T12:00:00.123456Z"] * 2),
        (pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us")), *["2026-03-01T12:00:00.123456"] * 2),
    ],
)
def test_bounds_are_those_of_the_values(tmp_path: Path, values: pa.Array[Any], low: Any, high: Any) -> None:
    stats = found(tmp_path, values)
    assert (stats["minValues"], stats["maxValues"]) == ({"c": low}, {"c": high})
    assert stats["numRecords"] == len(values)
    assert stats["nullCount"] == {"c": values.null_count}


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.0, float("nan")]),
        pa.array([float("inf")]),
        pa.array(["x" * 129]),
        pa.array([b"\xff"]),
        pa.array([Decimal("1.5")]),
        pa.array([True]),
        pa.array([None], pa.int32()),
        # The year 17814, which a datetime of Python does not have.
        pa.array([5 * 10**17], pa.timestamp("us", "UTC")),
    ],
)
def test_uncertain_bounds_are_left_out(tmp_path: Path, values: pa.Array[Any]) -> None:
    stats = found(tmp_path, values)
    assert stats["minValues"] == stats["maxValues"] == {}
    assert stats["nullCount"] == {"c": values.null_count}


def test_bounds_cover_all_row_groups(tmp_path: Path) -> None:
    stats = found(tmp_path, pa.array([5, 9, None, None, 1, 2]), row_group_size=2)
    assert (stats["minValues"], stats["maxValues"], stats["nullCount"]) == ({"c": 1}, {"c": 9}, {"c": 2})
    assert found(tmp_path, pa.array(["a", "b", "x" * 200]), row_group_size=2)["maxValues"] == {}


def test_nested_columns_and_files_without_statistics_have_none(tmp_path: Path) -> None:
    nested = found(tmp_path, pa.array([{"a": 1}]))
    assert nested == {"numRecords": 1, "minValues": {}, "maxValues": {}, "nullCount": {}}
    assert found(tmp_path, pa.array([1]), write_statistics=False)["nullCount"] == {}
