from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.pipelines.ledger import ledger as ledger_module
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry, QueryCounts
from penstock.pipelines.spec.expectations import ExpectationCounts
from penstock.pipelines.state_dir import layout
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of five batches, and no syncs, which take most of the time."""
    monkeypatch.setattr(ledger_module, "SEGMENT", 5)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def written(path: Path, batches: int) -> tuple[Ledger, list[LedgerEntry]]:
    ledger = Ledger(path)
    entries = [entry(batch, read=10 + batch, dead=2 if batch % 3 else 0) for batch in range(batches)]
    for each in entries:
        ledger.write(each)
    return ledger, entries


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("batches", [4, 5, 9, 10, 11, 14, 15, 52])
def test_old_batches_are_in_segments_and_nothing_of_them_is_lost(tmp_path: Path, batches: int) -> None:
    ledger, entries = written(tmp_path, batches)
    assert ledger.entries("rows") == entries
    assert ledger.last("rows") == entries[-1]
    assert ledger.counts("rows") == QueryCounts.of(entries)
    own = [path for path in (tmp_path / "rows").iterdir() if path.name != "closed"]
    assert len(own) < 10


@pytest.mark.usefixtures("small")
def test_a_start_and_the_sums_read_a_number_of_files_that_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> dict[str, Any]:
        read.append(path)
        return read_json(path)

    ledger, entries = written(tmp_path, 14)
    monkeypatch.setattr(ledger_module, "read_json", counted)
    found = []
    for batch in range(14, 60):
        entries.append(entry(batch))
        ledger.write(entries[-1])
        read.clear()
        assert ledger.last("rows") == entries[-1]
        assert len(read) == 1
        assert ledger.counts("rows") == QueryCounts.of(entries)
        found.append(len(read) - 1)
    # Those of five to nine batches, and the sums.
    assert set(found) == set(range(6, 11))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", range(4))
def test_a_crash_while_old_batches_are_put_together_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before the segment, before the sums, before the first file is removed, and before the second one."""
    ledger, entries = written(tmp_path, 14)
    steps = iter(range(100))

    def crashing(write: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            if next(steps) == step:
                raise KeyboardInterrupt
            write(*given)

        return call

    with monkeypatch.context() as patches:
        for name in ("write_text", "_remove"):
            patches.setattr(ledger_module, name, crashing(getattr(ledger_module, name)))
        entries.append(entry(14))
        with pytest.raises(KeyboardInterrupt):
            ledger.write(entries[-1])
    for batch in range(15, 21):
        assert Ledger(tmp_path).entries("rows") == entries
        assert Ledger(tmp_path).counts("rows") == QueryCounts.of(entries)
        entries.append(entry(batch))
        ledger.write(entries[-1])
    assert ledger.counts("rows") == QueryCounts.of(entries)
    assert len(list((tmp_path / "rows").glob("*.json"))) < 10


@pytest.mark.usefixtures("small")
def test_a_batch_in_a_segment_is_replaced_by_a_later_run_only(tmp_path: Path) -> None:
    ledger, entries = written(tmp_path, 15)
    entries[2] = replace(entries[2], read=99, fencing_token="2:0:n")
    # The checkpoint was restored.
    ledger.write(entries[2])
    assert ledger.counts("rows") == QueryCounts.of(entries)
    for batch in range(15, 20):
        entries.append(entry(batch))
        ledger.write(entries[-1])
    assert len(list((tmp_path / "rows").glob("*.json"))) < 10
    assert ledger.entries("rows") == entries
    assert ledger.counts("rows") == QueryCounts.of(entries)
    with pytest.raises(StorageError, match=r"has written it, with the fencing token 2:0:n"):
        ledger.write(entry(2))
    assert ledger.entries("rows") == entries


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("batches", [1, 5, 23])
def test_entries_that_are_put_together_while_they_are_read_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Also if that happens each time when they are listed."""
    ledger, entries = written(tmp_path, 14)

    def slow(directory: Path, pattern: Any) -> Any:
        found = layout.listed(directory, pattern)
        if directory.name == "rows":
            with monkeypatch.context() as patches:
                patches.setattr(ledger_module, "listed", layout.listed)
                for batch in range(len(entries), len(entries) + batches):
                    entries.append(entry(batch, read=batch))
                    ledger.write(entries[-1])
        return found

    monkeypatch.setattr(ledger_module, "listed", slow)
    for _ in range(6):
        known = len(entries)
        found = Ledger(tmp_path).entries("rows")
        assert known <= len(found)
        assert found == entries[: len(found)]
        known = len(entries)
        sums = Ledger(tmp_path).counts("rows")
        assert known <= sums.batches
        assert sums == QueryCounts.of(entries[: sums.batches])


@pytest.mark.usefixtures("small")
def test_the_newest_entry_is_found_while_batches_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, entries = written(tmp_path, 14)

    def slow(directory: Path, pattern: Any) -> Any:
        found = layout.listed(directory, pattern)
        monkeypatch.setattr(ledger_module, "listed", layout.listed)
        for batch in range(14, 40):
            entries.append(entry(batch))
            ledger.write(entries[-1])
        return found

    monkeypatch.setattr(ledger_module, "listed", slow)
    assert Ledger(tmp_path).last("rows") == entries[39]


@pytest.mark.usefixtures("small")
def test_a_ledger_of_an_older_version_is_put_together_too(tmp_path: Path) -> None:
    entries = [entry(batch) for batch in range(23)]
    for each in entries:
        write_json(tmp_path / "rows" / f"{each.batch}.json", asdict(each))
    ledger = Ledger(tmp_path)
    assert ledger.counts("rows") == QueryCounts.of(entries)
    for batch in (23, 24):
        entries.append(entry(batch))
        ledger.write(entries[-1])
    assert len(list((tmp_path / "rows").glob("*.json"))) == 5
    assert ledger.entries("rows") == entries
    assert ledger.counts("rows") == QueryCounts.of(entries)


@pytest.mark.usefixtures("small")
def test_a_ledger_of_an_older_version_is_put_together_in_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_AT_ONCE", 2)
    entries = [entry(batch) for batch in range(33)]
    for each in entries:
        write_json(tmp_path / "rows" / f"{each.batch}.json", asdict(each))
    ledger, files = Ledger(tmp_path), []
    for batch in range(33, 60):
        entries.append(entry(batch))
        ledger.write(entries[-1])
        files.append(len(list((tmp_path / "rows").glob("*.json"))))
        assert ledger.counts("rows") == QueryCounts.of(entries)
    assert files[1] == 25
    assert files[-1] == 5
    assert ledger.entries("rows") == entries


@pytest.mark.usefixtures("small")
def test_sums_that_were_removed_are_computed_again(tmp_path: Path) -> None:
    ledger, entries = written(tmp_path, 22)
    (tmp_path / "rows" / "closed" / "sums.json").unlink()
    assert ledger.counts("rows") == QueryCounts.of(entries)
    for batch in range(22, 30):
        entries.append(entry(batch))
        ledger.write(entries[-1])
        assert ledger.counts("rows") == QueryCounts.of(entries)


@pytest.mark.usefixtures("small")
def test_sums_are_right_after_a_crash_before_them_and_a_restoration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, entries = written(tmp_path, 19)
    write_text = layout.write_text

    def crashing(path: Path, text: str) -> None:
        if path.name == "sums.json":
            raise KeyboardInterrupt
        write_text(path, text)

    with monkeypatch.context() as patches:
        patches.setattr(ledger_module, "write_text", crashing)
        entries.append(entry(19))
        with pytest.raises(KeyboardInterrupt):
            ledger.write(entries[-1])
    # The checkpoint was restored: these batches are repeated, and others follow.
    for batch in range(3, 40):
        entries[batch : batch + 1] = [entry(batch, read=99)]
        ledger.write(entries[batch])
        assert ledger.counts("rows") == QueryCounts.of(entries)
    assert ledger.entries("rows") == entries


@pytest.mark.usefixtures("small")
def test_a_run_that_lost_its_lease_while_it_put_batches_together_changes_no_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, entries = written(tmp_path, 9)
    write_text = layout.write_text

    def paused(path: Path, text: str) -> None:
        if path.name == "sums.json":
            monkeypatch.setattr(ledger_module, "write_text", write_text)
            # Meanwhile its successor repeats the batch and runs on.
            for batch in range(9, 32):
                entries.append(replace(entry(batch), fencing_token="2:0:n"))
                Ledger(tmp_path).write(entries[-1])
        write_text(path, text)

    monkeypatch.setattr(ledger_module, "write_text", paused)
    ledger.write(entry(9))
    assert len(entries) == 32
    for batch in range(32, 45):
        assert ledger.counts("rows") == QueryCounts.of(entries)
        entries.append(replace(entry(batch), fencing_token="2:0:n"))
        Ledger(tmp_path).write(entries[-1])
    assert ledger.counts("rows") == QueryCounts.of(entries)
    assert ledger.entries("rows") == entries


@pytest.mark.usefixtures("small")
def test_a_file_that_a_run_without_lease_writes_after_its_batch_is_in_a_segment_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, entries = written(tmp_path, 2)
    later = Ledger(tmp_path)

    def paused(_: LedgerEntry) -> None:
        """Nothing was found, and before the file is written, the successor repeats the batch and runs on."""
        for batch in range(2, 12):
            entries.append(replace(entry(batch, read=99), fencing_token="2:0:n"))
            later.write(entries[-1])

    monkeypatch.setattr(ledger, "_closed_token", paused)
    ledger.write(entry(2))
    assert (tmp_path / "rows" / "2.json").exists()
    for batch in range(12, 22):
        assert later.entries("rows") == entries
        assert later.counts("rows") == QueryCounts.of(entries)
        entries.append(replace(entry(batch), fencing_token="2:0:n"))
        later.write(entries[-1])
    assert len(list((tmp_path / "rows").glob("*.json"))) < 10
    assert later.entries("rows") == entries


@pytest.mark.usefixtures("small")
def test_no_batch_fails_because_files_of_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", refused)
        ledger, entries = written(tmp_path, 20)
    assert ledger.counts("rows") == QueryCounts.of(entries)
    assert ledger.entries("rows") == entries
    for batch in range(20, 25):
        entries.append(entry(batch))
        ledger.write(entries[-1])
    assert len(list((tmp_path / "rows").glob("*.json"))) == 5
    assert ledger.counts("rows") == QueryCounts.of(entries)
