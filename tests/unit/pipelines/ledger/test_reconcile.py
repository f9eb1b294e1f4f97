from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataLossError
from penstock.pipelines.ledger.reconcile import reconcile
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import write_json
from tests.unit.pipelines.files import parse
from tests.unit.pipelines.recorded_run import RecordedRun, letter


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path)


def ten(_sink: str, start: Offsets, end: Offsets) -> int:
    assert (start, end) == ({"t": {"1:0": 0}}, {"t": {"1:0": 560}})
    return 10


def test_a_consistent_run_has_no_discrepancies(run: RecordedRun) -> None:
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert (account.sink, account.off, account.unknown) == ("rows", (), ())
    assert (account.counts.batches, account.counts.read, account.counts.out, account.counts.dead) == (2, 10, 7, 2)


def test_topics_and_partitions_that_come_and_go_are_counted(run: RecordedRun) -> None:
    """A partition is named where it begins, by the batch before the first one that reads it."""
    run.change(0, end={"t": {"1:0": 280, "1:1": 56}})
    run.change(1, start={"t": {"1:0": 280, "1:1": 56}}, end={"t": {"1:0": 560, "1:1": 84}, "u": {"1:0": 28}})
    asked: list[tuple[Offsets, Offsets]] = []

    def count(_sink: str, start: Offsets, end: Offsets) -> int:
        asked.append((start, end))
        return 10

    (account,) = reconcile(run.pipeline, run.state, count)
    assert account.off == ()
    run.change(1, start={"t": {"1:0": 280, "1:1": 56}}, end={"u": {"1:0": 28}})
    reconcile(run.pipeline, run.state, count)
    start = {"t": {"1:0": 0, "1:1": 56}, "u": {"1:0": 28}}
    assert asked == [
        (start, {"t": {"1:0": 560, "1:1": 84}, "u": {"1:0": 28}}),
        (start, {"t": {"1:0": 280, "1:1": 56}, "u": {"1:0": 28}}),
    ]


def test_rows_are_looked_for_where_they_were_written(run: RecordedRun) -> None:
    """The sink and the dead letters were given other tables before the second batch."""
    for number, tables in enumerate((("rows", "dead"), ("new", "lost"))):
        table, letters = (str(run.root / name) for name in tables)
        run.change(number, table=table, letters_table=letters)
    (run.root / "dead/_commits/rows-1.json").unlink()
    (run.root / "rows/_commits/rows-1.json").unlink()
    run.commit("new", 1, [{"x": n} for n in range(3)])
    run.commit("lost", 1, [letter(1)])
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ()
    (run.root / "lost/_commits/rows-1.json").unlink()
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == (f"{run.root}/lost has 0 rows committed, the ledger has 1 dead letters",)


def test_a_pipeline_that_has_not_run(run: RecordedRun, tmp_path: Path) -> None:
    for table in ("rows", "dead"):
        for commit in (tmp_path / table / "_commits").iterdir():
            commit.unlink()
    (account,) = reconcile(run.pipeline, tmp_path / "elsewhere", ten)
    assert (account.counts.batches, account.off, account.unknown) == (0, (), ())


@pytest.mark.parametrize(
    ("spoil", "off"),
    [
        (lambda b: b.change(1, out=2), "batch 1: 4 read, but 2 out, 1 dead, 0 filtered, 0 duplicates"),
        (
            lambda b: b.change(1, exploded=2, out=4),
            "batch 1: 4 read and 2 rows added by explode, but 4 out, 1 dead, 0 filtered, 0 duplicates",
        ),
        (lambda b: b.change(1, duplicates=-1, out=4), "batch 1: 4 read, but 4 out"),
        (
            lambda b: b.change(1, late=1, join={"left": 1, "right": 1, "joined": 2}),
            "batch 1: 4 read, but 3 out, 1 dead, 0 filtered, 0 duplicates, 1 late; join: 1 left, 1 right, 2 joined",
        ),
        (lambda b: b.change(1, start={"t": {"1:0": 252}}), "batch 1 does not begin where batch 0 ended"),
        (lambda b: b.change(1, batch=3), "after batch 1 comes batch 3"),
        (lambda b: b.change(1, read=5, out=4), "the source has 10 records in the range of the batches, 11 were read"),
        (lambda b: b.commit("rows", 1, [{"x": 1}]), "rows has 5 rows committed, the ledger has 7 out"),
        (lambda b: b.commit("rows", 1, [{"x": 1}], committed=3), "rows has 5 rows, 7 were committed"),
        (lambda b: b.commit("rows", 1, [{"x": 1}]).unlink(), "lacks its file writer=rows/batch=1"),
        (
            lambda b: (b.root / "dead/_commits/rows-0.json").unlink(),
            "dead has 1 rows committed, the ledger has 2 dead letters",
        ),
    ],
)
def test_discrepancies_are_reported(run: RecordedRun, spoil: Callable[[RecordedRun], object], off: str) -> None:
    spoil(run)
    (account,) = reconcile(run.pipeline, run.state, lambda *_: 10)
    assert any(off in text for text in account.off), account.off


def test_a_range_that_retention_removed_is_unknown_not_off(run: RecordedRun) -> None:
    def gone(*_: object) -> int:
        raise DataLossError("offset 0 is no longer kept")

    (account,) = reconcile(run.pipeline, run.state, gone)
    assert account.off == ()
    assert account.unknown == ("the source cannot be counted from the first batch: offset 0 is no longer kept",)


def delta(root: Path, mode: str, versions: list[tuple[int, int]], first: int = 0) -> RecordedRun:
    """RecordedRun of a Delta sink; each of ``versions`` is the batch and the rows that it added."""
    run = RecordedRun(root)
    options = "format: delta" if mode == "append" else "format: delta, mode: merge, keys: [x]"
    text = run.file.read_text().replace(f"{{path: {root}/rows, format: parquet}}", f"{{path: {root}/delta, {options}}}")
    run.pipeline = parse(text)
    write_json(run.state / "checkpoints" / "rows" / "metadata", {"id": "q"})
    log = root / "delta" / "_delta_log"
    log.mkdir(parents=True)
    for number, (batch, rows) in enumerate(versions):
        add = {"path": f"{number}.parquet", "modificationTime": 1, "stats": json.dumps({"numRecords": rows})}
        actions = [{"txn": {"appId": "penstock/rows/q", "version": batch}}, {"add": add}]
        (log / f"{number + first:020}.json").write_text("\n".join(map(json.dumps, actions)))
    return run


@pytest.mark.parametrize(
    ("mode", "versions", "off"),
    [
        ("append", [(0, 4), (1, 3), (2, 9)], None),
        ("append", [(0, 4)], "delta lacks batch 1, which has 3 rows in the ledger"),
        ("append", [(0, 4), (1, 2)], "delta has 2 rows of batch 1, the ledger has 3"),
        ("append", [(0, 4), (1, 1), (1, 2)], "delta has batch 1 in 2 versions"),
        # Rows of a merge take the place of others, so their number says nothing.
        ("merge", [(0, 4), (1, 1)], None),
        ("merge", [(1, 3)], "delta lacks batch 0, which has 4 rows in the ledger"),
        ("merge", [(0, 4), (1, 3), (1, 3)], "delta has batch 1 in 2 versions"),
    ],
)
def test_a_delta_table_is_compared_batch_by_batch(
    tmp_path: Path, mode: str, versions: list[tuple[int, int]], off: str | None
) -> None:
    run = delta(tmp_path, mode, versions)
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.unknown == ()
    assert [text.endswith(off or "-") for text in account.off] == ([] if off is None else [True])


@pytest.mark.parametrize("mode", ["append", "merge"])
def test_rows_of_a_batch_that_had_none_are_reported(tmp_path: Path, mode: str) -> None:
    """A batch that is repeated with other data, such as another value of a lookup, may have had rows before."""
    run = delta(tmp_path, mode, [(0, 4), (1, 3)])
    run.change(1, out=0, filtered=3)
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == (f"{run.root}/delta has 3 rows of batch 1, the ledger has 0",)


def test_batches_that_the_ledger_lacks_are_reported(run: RecordedRun) -> None:
    for log in ("offsets", "commits"):
        directory = run.state / "checkpoints/rows" / log
        directory.mkdir(parents=True)
        for batch in range(2):
            (directory / str(batch)).touch()
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ()
    # The next one has begun: its plan is stored.
    (run.state / "checkpoints/rows/offsets/2").touch()
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ()
    (run.state / "checkpoints/rows/commits/2").touch()
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ("the checkpoint has committed batch 2, the ledger ends with batch 1",)
    (run.state / "ledger/rows/0.json").unlink()
    (account,) = reconcile(run.pipeline, run.state, lambda *_: 4)
    assert account.off[0] == "the ledger begins with batch 1"
    (run.state / "ledger/rows/1.json").unlink()
    (account,) = reconcile(run.pipeline, run.state, lambda *_: 0)
    assert account.off[0] == "the checkpoint has committed batch 2, the ledger has no batch"


def test_batches_that_a_delta_table_has_forgotten_are_unknown(tmp_path: Path) -> None:
    run = delta(tmp_path, "append", [(1, 3)], first=5)
    checkpoint = run.root / "delta/_delta_log" / f"{4:020}.checkpoint.parquet"
    pq.write_table(pa.table({"txn": [0]}), checkpoint)
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ()
    assert account.unknown == (f"the log of {run.root}/delta starts at version 5: 1 batches are older",)
    checkpoint.write_bytes(b"")
    (account,) = reconcile(run.pipeline, run.state, ten)
    assert account.off == ()
    assert "is not a checkpoint" in account.unknown[0]
