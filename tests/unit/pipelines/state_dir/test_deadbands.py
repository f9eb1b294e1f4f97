"""Deadbands: which rows report a change, and the files of their state under repeats and late attempts."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir.deadbands import (
    Bucket,
    Comparison,
    LastReport,
    Limit,
    Reading,
    state_size,
    stored_buckets,
)
from penstock.pipelines.state_dir.layout import create_json
from penstock.spark.files.object_storage import ObjectPath, StoragePath, storage_path
from tests.object_storage import ObjectStorage

NAN = math.nan
State = dict[tuple[object, ...], LastReport]
HALF = Limit(0.5, relative=False)
SHARE = Limit(0.01, relative=True)
USED = Comparison((HALF,))


def reported(comparison: Comparison, *values: object, step_us: int = 10) -> list[bool]:
    """Return which of ``values`` of one key are reported, one each ``step_us``."""
    rows = [Reading(("a",), n * step_us, n * step_us, (value,)) for n, value in enumerate(values)]
    return comparison.reported({}, rows)


@pytest.mark.parametrize(
    ("limit", "values", "expected"),
    [
        (HALF, (1.0, 1.5, 1.6, 1.2, 1.0), "10101"),
        # Compared with the last report, not with the row before: a slow drift is reported.
        (HALF, (0.0, 0.4, 0.8, 1.2), "1010"),
        (HALF, (1, 1, 2, None, None, 2), "101101"),
        (HALF, (NAN, NAN, 1.0, NAN), "1011"),
        (HALF, (math.inf, math.inf, -math.inf, 5.0), "1011"),
        (SHARE, (100.0, 101.0, 101.1, math.inf, 5.0, 5.0), "101110"),
        (SHARE, (-100.0, -101.0, -101.1, 0.0, 0.0, 0.0001), "101101"),
        (Limit(Decimal("0.1"), relative=False), (Decimal("0.3"), Decimal("0.2"), Decimal("0.1")), "101"),
        (Limit(Decimal("0.1"), relative=True), (Decimal(10), Decimal(9), Decimal("8.9")), "101"),
        (HALF, (2**63 - 1, 2**63 - 1, 2**63 - 2), "101"),
        (None, ("on", "on", "off", None, None, "off"), "101101"),
        (None, (NAN, NAN, 0.0, -0.0), "1010"),
    ],
)
def test_a_value_beyond_its_limit_is_reported(limit: Limit | None, values: tuple[object, ...], expected: str) -> None:
    assert reported(Comparison((limit,)), *values) == [digit == "1" for digit in expected]


def test_one_of_several_columns_and_other_keys_suffice() -> None:
    rows = [
        Reading(("a", 1), 0, 0, (1.0, "x")),
        Reading(("a", 2), 0, 0, (1.0, "x")),
        Reading(("a", None), 0, 0, (1.0, "x")),
        Reading(("a", 1), 1, 1, (1.1, "y")),
        # Both were reported with the row before.
        Reading(("a", 1), 2, 2, (1.6, "y")),
        Reading(("a", None), 2, 2, (1.4, "x")),
    ]
    assert Comparison((HALF, None)).reported({}, rows) == [True, True, True, True, False, False]


def test_a_row_is_reported_after_the_longest_interval() -> None:
    assert reported(Comparison((HALF,), max_interval_us=20), 1, 1, 1, 1, 1) == [True, False, True, False, True]
    # An older row that reports a change does not set the interval back.
    state: State = {("a",): LastReport((1.0,), 100, 100)}
    older, same, due = (Reading(("a",), time, 101, (value,)) for time, value in ((50, 9.0), (119, 9.0), (120, 9.0)))
    assert Comparison((HALF,), max_interval_us=20).reported(state, [older, same, due]) == [True, False, True]
    assert state == {("a",): LastReport((9.0,), 120, 101)}


def test_keys_without_rows_expire() -> None:
    state: State = {("idle",): LastReport((1.0,), 0, 0), ("used",): LastReport((1.0,), 0, 50)}
    comparison = Comparison((HALF,), expire_us=50)
    assert comparison.reported(state, [Reading(("used",), 60, 60, (1.0,))]) == [False]
    assert list(state) == [("used",)]
    assert comparison.reported(state, [Reading(("used",), 61, 111, (1.0,))]) == [True]


def bucket(directory: StoragePath, batch: int, comparison: Comparison = USED) -> Bucket:
    made = Bucket(directory, batch, [pa.string()], [pa.float64()], comparison)
    made.read()
    return made


def run(directory: StoragePath, batch: int, value: float, limit: Limit = HALF) -> bool:
    """Process one row as an attempt of ``batch``."""
    found = bucket(directory, batch, Comparison((limit,)))
    made = found.comparison.reported(found.state, [Reading(("a",), batch, batch, (value,))])
    found.write()
    return made[0]


def names(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.iterdir())


def test_a_state_in_a_bucket_is_one_of_objects(object_storage: ObjectStorage) -> None:
    step = storage_path(f"{object_storage.url}/deadbands/changes")
    state = step / "0"
    assert [run(state, 0, 1.0), run(state, 1, 2.0), run(state, 1, 2.0), run(state, 4, 2.0)] == [True, True, True, False]
    assert isinstance(state, ObjectPath)
    assert sorted(state.names()) == [f"{batch:020}.arrow" for batch in (1, 4)]
    with pytest.raises(StorageError, match="before batch 3 no longer exists"):
        run(state, 3, 9.0)
    assert stored_buckets(step, 3) == 3
    assert stored_buckets(step, 5) == 3
    assert state_size(step, ["changes"]) is None


def test_a_repeated_batch_begins_with_the_same_state(tmp_path: Path) -> None:
    assert [run(tmp_path, 0, 1.0), run(tmp_path, 0, 1.0)] == [True, True]
    assert [run(tmp_path, 3, 2.0), run(tmp_path, 3, 2.0)] == [True, True]
    # Two files are enough: the last one, and the one that it was computed from.
    assert run(tmp_path, 4, 2.0) is False
    assert names(tmp_path) == [3, 4]
    assert run(tmp_path, 4, 2.0) is False
    assert not list(tmp_path.glob(".*"))


def test_a_repeated_batch_follows_the_limits_of_its_first_attempt(tmp_path: Path) -> None:
    assert [run(tmp_path, 0, 1.0), run(tmp_path, 1, 2.0)] == [True, True]
    wide = Limit(5.0, relative=False)
    # Its state has 2.0 as reported, so the row must be reported again.
    assert run(tmp_path, 1, 2.0, wide) is True
    assert run(tmp_path, 2, 6.9, wide) is False
    assert run(tmp_path, 2, 6.9) is False
    assert run(tmp_path, 3, 6.9) is True


def test_comparisons_are_stored_as_they_are(tmp_path: Path) -> None:
    kinds: list[pa.DataType] = [pa.float64(), pa.decimal128(9, 2), pa.string()]
    used = Comparison((Limit(0.1, relative=True), Limit(Decimal("0.1"), relative=False), None), 7, 9)
    first = Bucket(tmp_path, 0, [pa.string()], kinds, used)
    first.read()
    first.write()
    again = Bucket(tmp_path, 0, [pa.string()], kinds, Comparison((None, None, None)))
    again.read()
    assert again.comparison == used
    assert again.comparison.limits[1] is not None
    assert isinstance(again.comparison.limits[1].most, Decimal)


def test_two_attempts_at_the_same_time_have_the_same_result(tmp_path: Path) -> None:
    run(tmp_path, 0, 1.0)
    attempts = [bucket(tmp_path, 1), bucket(tmp_path, 1)]
    for each in attempts:
        assert Comparison((HALF,)).reported(each.state, [Reading(("a",), 1, 1, (2.0,))]) == [True]
        each.write()
    assert bucket(tmp_path, 2).state == {("a",): LastReport((2.0,), 1, 1)}


def test_an_attempt_by_other_limits_fails_if_one_at_the_same_time_stores_its_state(tmp_path: Path) -> None:
    """Its rows would lack a report that the state has."""
    run(tmp_path, 0, 1.0)
    wide = Comparison((Limit(5.0, relative=False),))
    first, second = bucket(tmp_path, 1), bucket(tmp_path, 1, wide)
    row = Reading(("a",), 1, 1, (2.0,))
    assert first.comparison.reported(first.state, [row]) == [True]
    assert second.comparison.reported(second.state, [row]) == [False]
    first.write()
    with pytest.raises(StorageError, match="after batch 1 differs from that of another attempt"):
        second.write()
    assert run(tmp_path, 1, 2.0, Limit(5.0, relative=False)) is True


def test_an_attempt_that_ends_late_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 0, 1.0)
    late = bucket(tmp_path, 1)
    late.state[("a",)] = LastReport((99.0,), 9, 9)
    for batch in (1, 2, 3):
        run(tmp_path, batch, float(batch * 10))
    before = bucket(tmp_path, 4).state
    # The file of batch 1 was deleted and comes back; no later batch reads it, and the next one deletes it.
    late.write()
    assert bucket(tmp_path, 4).state == before
    run(tmp_path, 4, 40.0)
    assert names(tmp_path) == [3, 4]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_an_attempt_that_begins_late_fails_instead_of_beginning_empty(tmp_path: Path, batch: int) -> None:
    for each in (0, 1, 2, 3):
        run(tmp_path, each, each)
    with pytest.raises(StorageError, match=f"before batch {batch} no longer exists") as failed:
        bucket(tmp_path, batch)
    assert "this attempt is late, this run has lost its lease" in (failed.value.why or "")


def test_an_unreadable_state_and_other_types_are_refused(tmp_path: Path) -> None:
    run(tmp_path, 0, 1.0)
    with pytest.raises(StorageError, match="columns of other types") as failed:
        Bucket(tmp_path, 1, [pa.string()], [pa.int64()], Comparison((HALF,))).read()
    assert failed.value.why == "it has string, double, and the step compares string, int64"
    with pytest.raises(StorageError, match="columns of other types"):
        Bucket(tmp_path, 1, [pa.string()], [pa.float64()] * 2, Comparison((HALF, HALF))).read()
    for data in (b"", b"ARROW1", b"{}"):
        next(tmp_path.iterdir()).write_bytes(data)
        with pytest.raises(StorageError, match="not readable"):
            bucket(tmp_path, 1)


def test_an_empty_state_is_stored_too(tmp_path: Path) -> None:
    run(tmp_path, 0, 1.0)
    found = bucket(tmp_path, 1)
    found.state.clear()
    found.write()
    assert bucket(tmp_path, 2).state == {}


def test_the_size_is_that_of_the_newest_files(tmp_path: Path) -> None:
    for step, place, batch in (("a", "0", 0), ("a", "0", 1), ("a", "3", 1), ("b", "1", 0), ("other", "0", 0)):
        stored_buckets(tmp_path / step, 4)
        run(tmp_path / step / place, batch, float(batch))
    empty = bucket(tmp_path / "a" / "3", 2)
    empty.state.clear()
    empty.write()
    newest = [
        tmp_path / "a/0" / f"{1:020}.arrow",
        tmp_path / "a/3" / f"{2:020}.arrow",
        tmp_path / "b/1" / f"{0:020}.arrow",
    ]
    assert state_size(tmp_path, ["a", "b"]) == (2, sum(path.stat().st_size for path in newest))


def test_the_number_of_buckets_stays(tmp_path: Path) -> None:
    assert stored_buckets(tmp_path / "step", 4) == 4
    assert stored_buckets(tmp_path / "step", 8) == 4
    # A cluster has 200 partitions: a small batch would create 200 files. Those of an earlier version stay.
    assert stored_buckets(tmp_path / "large", 200) == 32
    create_json(tmp_path / "older" / "buckets.json", {"buckets": 200})
    assert stored_buckets(tmp_path / "older", 2) == 200
