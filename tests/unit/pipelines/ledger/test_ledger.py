from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry, QueryCounts
from penstock.pipelines.spec.expectations import ExpectationCounts
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.state_dir.layout import read_json, write_json


def entry(batch: int, *, read: int = 10, dead: int = 0, duplicates: int | None = 1) -> LedgerEntry:
    return LedgerEntry(
        sink="rows",
        batch=batch,
        start={"t": {"1:0": 28 * batch}},
        end={"t": {"1:0": 28 * batch + 28}},
        read=read,
        out=read - dead - (duplicates or 0),
        dead=dead,
        filtered=0,
        duplicates=duplicates,
        late=0,
        late_watermark_ms=0,
        watermark_ms=0,
        fencing_token="1:0:n",
        letters=dead,
        letters_by_step={"parsed": 1, "known": dead - 1} if dead else {},
    )


def test_entries_come_back_in_order_and_a_batch_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for batch in (10, 2, 2):
        ledger.write(entry(batch))
    assert ledger.entries("rows") == [entry(2), entry(10)]
    assert ledger.entries("others") == []


def test_sums(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(entry(0, dead=2))
    ledger.write(entry(1, duplicates=None))
    ledger.write(entry(2, dead=3))
    by_step = {"parsed": 2, "known": 3}
    sums = QueryCounts(batches=3, read=30, out=23, dead=5, duplicates=2, letters=5, letters_by_step=by_step)
    assert ledger.counts("rows") == sums
    assert ledger.counts("others") == QueryCounts()


def test_rows_of_a_join_are_added_and_balanced(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    # Of ten records one is dead and three are late; a pair, and a row without a partner from before, come out.
    joined = replace(
        entry(0, dead=1, duplicates=0),
        late=3,
        out=1,
        filtered=1,
        join={"left": 4, "right": 2, "joined": 1, "unmatched_right": 1, "late_left": 3},
    )
    assert joined.is_balanced
    assert not replace(joined, late=2).is_balanced
    assert not replace(joined, join={**joined.join, "joined": 2}).is_balanced
    for batch in range(2):
        ledger.write(replace(joined, batch=batch))
    ledger.write(entry(2))
    assert ledger.last("rows") == entry(2)
    sums = {"left": 8, "right": 4, "joined": 2, "unmatched_right": 2, "late_left": 6}
    assert ledger.counts("rows").join == sums


def test_counts_of_expectations_are_added(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    even, small = ExpectationCounts(rows=9, violations=4), ExpectationCounts(rows=1, violations=1)
    # The first batch precedes the expectations, the second one of them.
    for batch, found in enumerate(({}, {"q.even": even}, {"q.even": even, "q.small": small})):
        ledger.write(replace(entry(batch), expectations=found))
    assert ledger.last("rows") == replace(entry(2), expectations={"q.even": even, "q.small": small})
    sums = ledger.counts("rows").expectations
    assert sums == {"q.even": ExpectationCounts(rows=18, violations=8), "q.small": small}


def test_added_rows_are_summed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(replace(entry(0), exploded=7))
    ledger.write(replace(entry(1), exploded=2))
    assert ledger.counts("rows").exploded == 9


def test_an_entry_of_an_older_version_has_no_expectations(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(entry(0))
    path = tmp_path / "rows" / "0.json"
    value = read_json(path)
    del value["expectations"], value["exploded"]
    write_json(path, value)
    assert ledger.entries("rows") == [entry(0)]


def test_an_incomplete_entry_is_an_error(tmp_path: Path) -> None:
    write_json(tmp_path / "rows" / "0.json", {"sink": "rows"})
    with pytest.raises(StorageError, match="lacks"):
        Ledger(tmp_path).entries("rows")


def planned(batch: int, watermark_ms: int = 0) -> str:
    """The entry of an offset log for the batch of :func:`entry`."""
    return f'v1\n{{"batchWatermarkMs":{watermark_ms}}}\n{{"t":{{"1:0":{28 * batch + 28}}}}}'


def test_a_changed_bit_in_the_last_plan_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    ledger, checkpoint = Ledger(tmp_path / "ledger"), Checkpoint(tmp_path / "rows")
    ledger.check_end("rows", checkpoint)
    for batch in range(3):
        checkpoint.begin(batch, planned(batch))
        ledger.check_end("rows", checkpoint)
        ledger.write(entry(batch))
        checkpoint.commit(batch)
        ledger.check_end("rows", checkpoint)
    last = tmp_path / "rows" / "offsets" / "2"
    found = last.read_bytes()
    for changed in (found.replace(b"84", b"85"), found.replace(b"84", b"80"), planned(2, watermark_ms=8).encode()):
        last.write_bytes(changed)
        with pytest.raises(StorageError, match="differ in batch 2") as told:
            ledger.check_end("rows", checkpoint)
        assert told.value.path == str(last)
    # A batch that was begun after it starts at these offsets.
    checkpoint.begin(3, planned(3))
    with pytest.raises(StorageError, match="differ in batch 2"):
        ledger.check_end("rows", checkpoint)


def test_a_checkpoint_that_was_restored_is_not_refused(tmp_path: Path) -> None:
    ledger, checkpoint = Ledger(tmp_path / "ledger"), Checkpoint(tmp_path / "rows")
    for batch in range(2):
        checkpoint.begin(batch, planned(batch))
        ledger.write(entry(batch))
    checkpoint.commit(0)
    # Batch 1 was planned again after the restoration, and ends elsewhere than the one that the ledger has.
    (tmp_path / "rows" / "offsets" / "1").write_text(planned(5))
    ledger.check_end("rows", checkpoint)
    # A ledger that was removed, or is older.
    checkpoint.commit(1)
    (tmp_path / "ledger" / "rows" / "1.json").unlink()
    ledger.check_end("rows", checkpoint)
