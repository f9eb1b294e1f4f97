"""Which sinks share a query, depending on how far each of them is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import StorageError
from penstock.pipelines.run.shared import QueryBuilder, SharedBatches, grouped, is_before
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Position
from tests.unit.pipelines.recorded_run import RecordedRun

START = {"t": {"1:0": 0}}


def entry(offset: int, time: int = 1) -> str:
    """An entry of an offset log; queries that have planned the same end wrote it at different times."""
    return f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{time}}}\n{json.dumps({"t": {"1:0": offset}})}'


def at(offset: int | None, begun: int | None = None, time: int = 1) -> Position:
    finished = None if offset is None else entry(offset, time)
    return Position(1 + time, finished, None if begun is None else entry(begun, time))


def groups(near: bool = False, starts: dict[str, int] | None = None, **positions: Position) -> list[tuple[str, ...]]:
    found = grouped(
        positions,
        {name: {"t": {"1:0": (starts or {}).get(name, 0)}} for name in positions},
        lambda behind, ahead: near and is_before(_end(positions[behind]), _end(positions[ahead])),
    )
    return [group.sinks for group in found]


def _end(position: Position) -> dict[str, dict[str, int]]:
    return START if position.finished is None else json.loads(position.finished.splitlines()[-1])


def test_sinks_at_the_same_offsets_share_a_query_whenever_they_got_there() -> None:
    assert groups(a=at(5, time=1), b=at(7), c=at(5, time=2)) == [("a", "c"), ("b",)]
    assert groups(a=at(None), b=at(None)) == [("a", "b")]
    assert groups(a=at(None), b=at(None), starts={"b": 3}) == [("a",), ("b",)]


def test_a_batch_that_some_have_begun_is_repeated_without_those_that_finished_it() -> None:
    assert groups(a=at(9), b=at(5, 9), c=at(5, 9, time=4)) == [("a", "b", "c")]
    assert groups(a=at(9), b=at(5, 8)) == [("a",), ("b",)]
    # The run ended while it stored what the sinks had begun.
    assert groups(a=at(5, 9), b=at(5)) == [("a", "b")]
    assert groups(a=at(None, 9), b=at(None), c=at(9)) == [("a", "b", "c")]


def test_two_batches_that_were_begun_are_run_by_two_queries() -> None:
    assert groups(near=True, a=at(5, 9), b=at(5, 8)) == [("a",), ("b",)]
    assert groups(near=True, a=at(5, 9), b=at(9, 12)) == [("a",), ("b",)]


@pytest.mark.parametrize("behind", [at(5), at(None)])
def test_a_sink_that_is_a_little_behind_gets_one_batch_to_reach_the_others(behind: Position) -> None:
    (group,) = grouped({"a": at(9), "b": behind, "c": at(9)}, dict.fromkeys("abc", START), lambda b, _: b == "b")
    assert (group.sinks, group.lead, group.finished, group.begun) == (("a", "b", "c"), "b", behind.finished, entry(9))
    assert groups(near=False, a=at(9), b=behind) == [("a",), ("b",)]


def test_no_sink_can_be_behind_in_one_partition_and_ahead_in_another() -> None:
    assert is_before({"t": {"1:0": 5, "1:1": 5}}, {"t": {"1:0": 5, "1:1": 6}})
    assert not is_before({"t": {"1:0": 6, "1:1": 5}}, {"t": {"1:0": 5, "1:1": 6}})
    # A partition that only one of them has would not be read from its start.
    assert not is_before({"t": {"1:0": 5}}, {"t": {"1:0": 5, "1:1": 6}})
    assert not is_before({"t": {"1:0": 5, "1:1": 0}}, {"t": {"1:0": 5}})
    # Marks of Apache's brokers are no offsets.
    assert is_before({"t": {"1:0": 5, "1:0@data": 900}}, {"t": {"1:0": 5, "1:0@data": 800}})


def test_sinks_ahead_do_not_need_the_records_of_the_first_batch() -> None:
    """If these records were deleted before a sink has begun the batch, only those that are behind fail."""
    positions = {"ahead": at(7), "behind": at(3), "begun": at(3, 7), "new": at(None)}
    members = [SimpleNamespace(name=name, position=position) for name, position in positions.items()]
    batches = cast(SharedBatches, SimpleNamespace(members=members))
    assert SharedBatches.at_offsets_of(batches, "behind") == ("behind", "begun")
    assert SharedBatches.at_offsets_of(batches, "ahead") == ("ahead",)
    assert SharedBatches.at_offsets_of(batches, "new") == ("new",)


def test_a_run_refuses_a_checkpoint_that_its_ledger_contradicts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    checkpoint = Checkpoint(layout.checkpoint(run.state, "rows"))
    for batch, end in ((0, 280), (1, 560 ^ 1)):
        checkpoint.begin(batch, entry(end))
        checkpoint.commit(batch)
    context: Any = SimpleNamespace(ledger=run.ledger)
    with pytest.raises(StorageError, match="the checkpoint and the ledger of sink 'rows' differ in batch 1"):
        QueryBuilder(run.pipeline, cast("Any", None), run.state, context)
