"""The Arrow function of a deadband step, compared with a model in plain Python."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.pipelines.state_dir.deadbands import Comparison, Limit
from penstock.pipelines.steps.deadbands import CompareRows

COMPARISON = Comparison((Limit(1.0, relative=False), None), max_interval_us=8, expire_us=12)
MARKS: list[tuple[str, pa.DataType]] = [
    ("bucket", pa.int32()),
    ("compared", pa.bool_()),
    ("time_us", pa.int64()),
    ("arrived_us", pa.int64()),
    ("order", pa.struct([("at0", pa.string()), ("at1", pa.int64()), ("id0", pa.string())])),
    ("key", pa.struct([("key0", pa.string())])),
    ("value", pa.struct([("value0", pa.float64()), ("value1", pa.string())])),
]
COLUMNS: list[tuple[str, pa.DataType]] = [
    ("_id", pa.string()),
    ("_filtered", pa.string()),
    ("payload", pa.binary()),
    ("_deadband", pa.struct(MARKS)),
]
SCHEMA = pa.schema(COLUMNS)


class Row(NamedTuple):
    """A row as the step reads it; ``left_out``: dead, or filtered before."""

    id: str
    key: str
    time: int
    number: float | None
    state: str
    left_out: bool
    arrived: int = 0


def batches_of(rows: Sequence[Row], size: int) -> list[pa.RecordBatch]:
    """Return ``rows`` as Spark passes them, ``size`` in a batch."""
    made = [
        {
            "_id": row.id,
            "_filtered": "before" if row.left_out else None,
            "payload": row.id.encode(),
            "_deadband": {
                "bucket": ord(row.key) % 2,
                "compared": not row.left_out,
                "time_us": None if row.left_out else row.time,
                "arrived_us": row.arrived,
                "order": {"at0": None, "at1": row.arrived, "id0": row.id},
                "key": {"key0": row.key},
                "value": {"value0": row.number, "value1": row.state},
            },
        }
        for row in rows
    ]
    return pa.Table.from_pylist(made, SCHEMA).to_batches(size)


def filtered_by(function: CompareRows, rows: Sequence[Row], size: int = 3) -> dict[str, Any]:
    """Return ``_filtered`` of each row by id."""
    made = [each.to_pylist() for each in function(iter(batches_of(rows, size)))]
    found = [row for rows in made for row in rows]
    assert [row.keys() for row in found] == [{"_id", "_filtered", "payload"}] * len(rows)
    assert [(row["_id"], row["payload"]) for row in found] == [(row.id, row.id.encode()) for row in rows]
    return {row["_id"]: row["_filtered"] for row in found}


def model(batches: Sequence[Sequence[Row]]) -> dict[str, str | None]:
    """Return what becomes of each row: a history of reports for each key, searched from its end."""
    reports: dict[str, list[Row]] = defaultdict(list)
    used: dict[str, int] = {}
    found: dict[str, str | None] = {}
    for rows in batches:
        for row in sorted(rows, key=lambda row: (row.time, row.arrived, row.id)):
            if row.left_out:
                found[row.id] = "before"
                continue
            if row.arrived - used.get(row.key, row.arrived) > 12:
                reports[row.key] = []
            used[row.key] = max(row.arrived, used.get(row.key, row.arrived))
            history = reports[row.key]
            is_same = (
                history
                and row.time < max(each.time for each in history) + 8
                and row.state == history[-1].state
                and (
                    row.number is history[-1].number is None
                    or (
                        None not in (row.number, history[-1].number)
                        and abs((row.number or 0) - (history[-1].number or 0)) <= 1
                    )
                )
            )
            found[row.id] = "changes" if is_same else None
            if not is_same:
                history.append(row)
    return found


ROWS = st.builds(
    Row,
    id=st.just(""),
    key=st.sampled_from("abc"),
    time=st.integers(0, 30),
    number=st.none() | st.sampled_from([0.0, 1.0, 1.5, 3.0]),
    state=st.sampled_from(["on", "on", "on", "off"]),
    left_out=st.integers(0, 9).map(lambda n: n == 9),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(ROWS, max_size=8), max_size=5), st.randoms(use_true_random=False), st.integers(1, 4))
def test_repeated_batches_in_any_order_have_the_rows_of_the_model(
    given_batches: list[list[Row]], random: Any, size: int
) -> None:
    batches, count = list[list[Row]](), 0
    for n, rows in enumerate(given_batches):
        # All rows of a batch arrive at the same time, later than those before it.
        batches.append([row._replace(id=f"{count + m:03}", arrived=n * 5) for m, row in enumerate(rows)])
        count += len(rows)
    expected = model(batches)
    with tempfile.TemporaryDirectory() as directory:
        found: dict[str, str | None] = {}
        for n, rows in enumerate(batches):
            function = CompareRows("changes", COMPARISON, Path(directory), partial(int, n))
            for _ in range(random.randint(1, 2)):
                random.shuffle(rows)
                found |= filtered_by(function, rows, size)
        assert found == expected


def test_dates_and_times_that_python_does_not_have_are_compared(tmp_path: Path) -> None:
    zoned = pa.timestamp("us", tz="Europe/Paris")
    far = pa.array([4_000_000, None, -4_000_000, 4_000_000, None], pa.int32()).cast(pa.date32())
    later = pa.array([2**62, 2**62, 2**62, 2**62, -(2**62)], pa.int64()).view(zoned)
    places = pa.array(range(5), pa.int64())
    marks: dict[str, pa.Array[Any]] = {
        "bucket": pa.array([0] * 5, pa.int32()),
        "compared": pa.array([True] * 5),
        "time_us": places,
        "arrived_us": places,
        "order": pa.StructArray.from_arrays([places], names=["at0"]),
        "key": pa.StructArray.from_arrays([far], names=["key0"]),
        "value": pa.StructArray.from_arrays([later, far], names=["value0", "value1"]),
    }
    made: dict[str, pa.Array[Any]] = {
        "_filtered": pa.nulls(5, pa.string()),
        "_deadband": pa.StructArray.from_arrays(list(marks.values()), names=list(marks)),
    }
    rows = pa.record_batch(made)
    for batch, reported in enumerate(({0, 1, 2, 4}, {1, 4})):
        (found,) = CompareRows("changes", Comparison((None, None)), tmp_path, partial(int, batch))(iter([rows]))
        assert {n for n, step in enumerate(found["_filtered"].to_pylist()) if step is None} == reported


def test_an_empty_task_and_rows_that_are_left_out_write_no_state(tmp_path: Path) -> None:
    function = CompareRows("changes", COMPARISON, tmp_path, lambda: 0)
    assert list(function(iter(batches_of([], 1)))) == []
    dead = Row("1", "a", 0, 1.0, "on", left_out=True)
    assert filtered_by(function, [dead]) == {"1": "before"}
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_each_call_begins_empty() -> None:
    function = CompareRows("changes", COMPARISON, None)
    rows = [Row("1", "a", 0, 1.0, "on", left_out=False), Row("2", "a", 1, 1.0, "on", left_out=False)]
    assert [filtered_by(function, rows) for _ in range(2)] == [{"1": None, "2": "changes"}] * 2


def test_no_row_comes_out_before_the_state_is_stored(tmp_path: Path) -> None:
    row = Row("1", "a", 0, 1.0, "on", left_out=False)
    (tmp_path / "1").write_text("no directory")
    with pytest.raises(StorageError):
        next(CompareRows("changes", COMPARISON, tmp_path, lambda: 0)(iter(batches_of([row], 1))))
