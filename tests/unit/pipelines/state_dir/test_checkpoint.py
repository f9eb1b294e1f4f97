from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir.checkpoint import (
    KEPT_BATCHES,
    Checkpoint,
    PlannedBatch,
    Position,
    parse_offsets,
    prepare_shared,
)

# Origin: a query of Spark 4.2.1 with one source; the metadata line shortened.
ENTRY = 'v1\n{"batchWatermarkMs":1647772200000,"batchTimestampMs":1795258116728,"conf":{}}\n{"t":{"1:0":56}}'


def checkpoint(path: Path, *watermarks: int) -> Checkpoint:
    (path / "offsets").mkdir()
    (path / "commits").mkdir()
    for batch, watermark in enumerate(watermarks):
        meta = json.dumps({"batchWatermarkMs": watermark})
        (path / "offsets" / str(batch)).write_text(f"v1\n{meta}\n" + json.dumps({"t": {"1:0": 28 * (batch + 1)}}))
    return Checkpoint(path)


def test_an_entry_of_the_offset_log() -> None:
    assert parse_offsets(ENTRY) == PlannedBatch(1647772200000, {"t": {"1:0": 56}})
    assert parse_offsets('v1\n{"batchWatermarkMs":0}\n-') == PlannedBatch(0, {})


def test_the_streams_of_several_sources_are_distinguished() -> None:
    text = 'v1\n{"batchWatermarkMs":0}\n{"t":{"1:0":56}}\n{"t":{"1:0":28}}\n-'
    found = parse_offsets(text, ("source", "source#2", "clock"))
    assert found.end == {"t": {"1:0": 56}, "source#2/t": {"1:0": 28}}
    with pytest.raises(ValueError, match="1 lines for the sources"):
        parse_offsets(text)


@pytest.mark.parametrize("text", ["", "v1", "v1\n{}", "x\n{}\n-", 'v1\n{"batchWatermarkMs":0}\n{'])
def test_something_else_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text(text)
    with pytest.raises(StorageError, match="batch 0"):
        Checkpoint(tmp_path).planned(0)


def test_a_range_begins_where_the_batch_before_it_ended(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, 0, 5)
    assert found.range(0) == (None, {"t": {"1:0": 28}})
    assert found.range(1) == ({"t": {"1:0": 28}}, {"t": {"1:0": 56}})


def test_what_a_killed_driver_has_written_is_synced_before_a_query_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    path = tmp_path / "checkpoints" / "rows"
    Checkpoint(path).sync()
    assert synced == []
    path.mkdir(parents=True)
    (path / "offsets").mkdir()
    Checkpoint(path).sync()
    assert synced == [directory.stat().st_ino for directory in (path.parent, path, path / "offsets")]


def test_events_are_late_by_the_watermark_of_the_batch_before(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, 0, 10, 20)
    assert [found.late_watermark_ms(batch) for batch in range(3)] == [0, 0, 10]


def test_committed_and_id(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, 0)
    assert not found.is_committed(0)
    (tmp_path / "commits" / "0").write_text("v1\n{}")
    assert found.is_committed(0)
    (tmp_path / "metadata").write_text('{"id":"abc"}')
    assert found.query_id() == "abc"


def entry(offset: int, time: int = 0) -> str:
    return f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{time}}}\n{{"t": {{"1:0": {offset}}}}}'


def test_a_checkpoint_that_the_run_writes_is_where_its_last_batch_ended(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path / "rows")
    assert not made.exists()
    made.create()
    assert made.exists()
    found = made.query_id()
    made.create()
    assert made.query_id() == found
    assert made.position() == Position(0, None, None)
    made.begin(0, entry(28))
    assert made.position() == Position(0, None, entry(28))
    made.commit(0)
    assert made.position() == Position(1, entry(28), None)
    made.begin(1, entry(56))
    assert made.position() == Position(1, entry(28), entry(56))
    assert made.range(1) == ({"t": {"1:0": 28}}, {"t": {"1:0": 56}})
    assert made.is_committed(0)
    assert not made.is_committed(1)


def test_positions_are_the_same_if_their_offsets_are(tmp_path: Path) -> None:
    assert Position(3, entry(28, time=1), None).key == Position(7, entry(28, time=2), None).key
    assert Position(3, entry(28), None).key != Position(3, entry(28), entry(56)).key
    assert Position(3, "v1\n{}\n-", None).key == ("-", None)


def test_entries_of_old_batches_are_removed(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path)
    made.create()
    for batch in range(KEPT_BATCHES + 3):
        made.begin(batch, entry(28 * batch))
        made.commit(batch)
    for log in ("offsets", "commits"):
        assert sorted(int(path.name) for path in (tmp_path / log).iterdir()) == list(range(3, KEPT_BATCHES + 3))


def test_a_shared_checkpoint_starts_where_its_sinks_are(tmp_path: Path) -> None:
    for n, (finished, begun) in enumerate([(entry(28), entry(56)), (None, entry(56)), (None, None)]):
        path = tmp_path / str(n)
        prepare_shared(path, finished, begun)
        assert Checkpoint(path).position() == Position(0 if finished is None else 1, finished, begun)


def test_a_run_that_lost_its_lease_cannot_change_a_batch_that_another_one_has_begun(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path)
    made.create()
    made.begin(0, entry(28))
    made.begin(0, entry(28, time=9))
    with pytest.raises(StorageError, match="another run has begun this batch"):
        made.begin(0, entry(56))
    assert made.position() == Position(0, None, entry(28))
