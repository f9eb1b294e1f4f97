"""Changes of keys in files, compared with a plain list of changes as the model."""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.pipelines.state_dir import changes
from penstock.pipelines.state_dir.changes import (
    BEGINNING,
    Change,
    ChangeFiles,
    ChangeFilesWriter,
    KeyHistory,
    Version,
    VisibleChanges,
)

PARTITIONS = ("1:0", "2:0")


def model(log: list[Change], key: bytes, time_ms: int, known: VisibleChanges) -> bytes | None:
    """The value that ``key`` had at ``time_ms``."""
    seen = [c for c in log if c.key == key and c.time_ms <= time_ms and (c.offset < 0 or known.includes(*c[:2]))]
    return max(seen, key=lambda change: (change.time_ms, change.offset)).value if seen else None


def value(found: Version | None) -> bytes | None:
    return None if found is None else found.value


@st.composite
def logs(draw: st.DrawFn) -> list[Change]:
    """Changes of a few keys; a key is always in the same partition. Times increase with offsets, until the store was
    restored from a backup."""
    made = []
    ends = dict.fromkeys(PARTITIONS, 0)
    times = st.lists(st.integers(0, 40), max_size=15).map(sorted)
    for time_ms in [*draw(times), *draw(times)]:
        number = draw(st.integers(0, 3))
        partition = PARTITIONS[number % 2]
        content = draw(st.sampled_from([None, b"1", b"2", b"3"]))
        made.append(Change(partition, ends[partition], b"key%d" % number, time_ms, content, None))
        ends[partition] += 28
    return made


@settings(max_examples=20, deadline=None)
@given(data=st.data(), log=logs())
def test_a_batch_finds_the_same_whatever_was_appended_compacted_or_written_by_a_late_driver(
    data: Any, log: list[Change]
) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr(changes, "_FEW_CHANGES", data.draw(st.sampled_from([0, 3, 10_000])))
        files = ChangeFiles(Path(directory))
        base = [Change("", -1, b"key0", -5, b"old", None)]
        known: list[VisibleChanges] = []
        drivers: list[ChangeFilesWriter] = []
        # The second driver starts later, and the first one goes on writing.
        reached = 0
        floor_ms = BEGINNING
        for _ in range(data.draw(st.integers(1, 12))):
            number = data.draw(st.integers(0, 1))
            if not drivers or (number == 1 and len(drivers) == 1):
                writer = ChangeFilesWriter(files)
                if writer.ends is None:
                    writer.begin(dict.fromkeys(PARTITIONS, 0), BEGINNING, base, {})
                drivers.append(writer)
            number = min(number, len(drivers) - 1)
            writer = drivers[number]
            assert writer.ends is not None
            if data.draw(st.booleans()):
                # Both read to the end of the topic before a batch knows it.
                reached = max(reached, data.draw(st.integers(0, len(log))))
                ends = {p: 28 * sum(c.partition == p for c in log[:reached]) for p in PARTITIONS}
                new = [c for c in log if writer.ends[c.partition] <= c.offset < ends[c.partition]]
                writer.add({**writer.ends, **ends}, new, {})
                known.append(VisibleChanges(dict(writer.ends), BEGINNING))
            else:
                # Batches that may be repeated have event times from here on.
                floor_ms = max(floor_ms, data.draw(st.integers(-1, 20)))
                oldest = {p: min([batch.ends[p] for batch in known], default=0) for p in PARTITIONS}
                writer.compact(VisibleChanges(oldest, floor_ms))
        old = KeyHistory(files)
        for batch in known:
            for history in (KeyHistory(files), old):
                history.refresh(batch)
                for key in (b"key0", b"key1", b"key2", b"key3", b"other"):
                    for time_ms in range(max(floor_ms, -6), 42, 3):
                        found = history.at(key, time_ms, batch)
                        assert value(found) == model([*base, *log], key, time_ms, batch)
                assert history.floor_ms <= max(floor_ms, BEGINNING)


def test_a_compaction_leaves_out_what_no_event_time_needs(tmp_path: Path) -> None:
    files = ChangeFiles(tmp_path)
    writer = ChangeFilesWriter(files)
    log = [
        Change("1:0", 28 * n, key, n, content, None)
        for n, (key, content) in enumerate([(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"a", b"3")])
    ]
    writer.begin({"1:0": 28 * 4}, BEGINNING, log[:4], {})
    writer.add({"1:0": 28 * 5}, log[4:], {})
    assert not writer.is_due()
    writer.compact(VisibleChanges({"1:0": 28 * 4}, 3))
    assert len(files.names()) == 1
    kept = files.read(files.names()[0])
    # Of `b` nothing: it was deleted before.
    assert [(c["key"], c["value"]) for c in kept.changes.to_pylist()] == [(b"a", b"2"), (b"a", b"3")]
    assert (kept.floor_ms, ChangeFilesWriter(files).floor_ms) == (3, 3)
    # A driver that has lost its lease, and has the files from before in memory.
    late = ChangeFilesWriter(files)
    late.ends = {"": 0, "1:0": 28}
    late.add({"": 0, "1:0": 28 * 3}, log[1:3], {})
    history = KeyHistory(files)
    history.refresh(VisibleChanges({"1:0": 28 * 5}, 3))
    assert history.at(b"b", 4) is None


@pytest.mark.parametrize("few", [0, 10_000])
def test_changes_of_a_restored_store_are_found_by_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """They are after those of the store before, which are newer."""
    monkeypatch.setattr(changes, "_FEW_CHANGES", few)
    files = ChangeFiles(tmp_path)
    writer = ChangeFilesWriter(files)
    log = [Change("1:0", 28 * n, b"a", time_ms, b"%d" % n, None) for n, time_ms in enumerate((1, 5, 9, 3, 6))]
    writer.begin({"1:0": 28 * 3}, BEGINNING, log[:3], {})
    writer.add({"1:0": 28 * 5}, log[3:], {})
    known = VisibleChanges({"1:0": 28 * 5}, BEGINNING)
    for _ in range(2):
        history = KeyHistory(files)
        history.refresh(known)
        found = [value(history.at(b"a", time_ms, known)) for time_ms in (1, 2, 3, 4, 5, 6, 8, 9, 10)]
        assert found == [b"0", b"0", b"3", b"3", b"1", b"4", b"4", b"2", b"2"]
        writer.compact(known)


def test_files_are_compacted_when_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_MOST_FILES", 4)
    writer = ChangeFilesWriter(ChangeFiles(tmp_path))
    writer.begin({"1:0": 0}, BEGINNING, [], {"1:0": 7})
    due = []
    for n in range(20):
        writer.add({"1:0": 28 * (n + 1)}, [Change("1:0", 28 * n, b"a", n, b"%d" % n, None)], {})
        if writer.is_due():
            due.append(n)
            writer.compact(VisibleChanges({}, BEGINNING))
    # Without a floor nothing is left out, so each snapshot is made of as many new changes as the one before had.
    assert due == [2, 6, 13]
    assert ChangeFilesWriter(ChangeFiles(tmp_path)).epochs == {"1:0": 7}


def test_a_worker_reads_again_if_files_were_replaced_meanwhile(tmp_path: Path) -> None:
    files = ChangeFiles(tmp_path)
    writer = ChangeFilesWriter(files)
    writer.begin({"1:0": 28}, 7, [Change("1:0", 0, b"a", 0, b"0", None)], {})
    history = KeyHistory(files)
    read = files.read
    reads: list[str] = []

    def replaced(name: str) -> changes.ChangeFile:
        if not reads:
            reads.append(name)
            writer.compact(VisibleChanges({}, BEGINNING))
        return read(name)

    files.read = replaced  # type: ignore[method-assign]
    history.refresh(VisibleChanges({"1:0": 28}, 0))
    assert value(history.at(b"a", 9)) == b"0"
    assert history.begin_ms == 7


def test_a_worker_reads_again_what_it_could_not_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ChangeFiles(tmp_path)
    writer = ChangeFilesWriter(files)
    writer.begin({"1:0": 28}, BEGINNING, [Change("1:0", 0, b"a", 0, b"0", None)], {})
    history = KeyHistory(files)
    with monkeypatch.context() as patch:
        patch.setattr(history, "_append", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            history.refresh(VisibleChanges({"1:0": 28}, BEGINNING))
    writer.add({"1:0": 56}, [Change("1:0", 28, b"b", 1, b"1", None)], {})
    history.refresh(VisibleChanges({"1:0": 56}, BEGINNING))
    assert [value(history.at(key, 9)) for key in (b"a", b"b")] == [b"0", b"1"]


def test_missing_and_broken_files_are_errors(tmp_path: Path) -> None:
    files = ChangeFiles(tmp_path)
    with pytest.raises(StorageError, match="changes of the state store are missing"):
        KeyHistory(files).refresh(VisibleChanges({"1:0": 28}, 0))
    (tmp_path / "base.arrow").write_bytes(b"nothing")
    with pytest.raises(StorageError, match="are not readable"):
        KeyHistory(files).refresh(VisibleChanges({}, 0))


def test_two_drivers_that_begin_at_the_same_time_have_the_same_base(tmp_path: Path) -> None:
    writers = [ChangeFilesWriter(ChangeFiles(tmp_path)) for _ in range(4)]
    threads = [
        threading.Thread(target=writer.begin, args=({"1:0": n}, n, [Change("", -1, b"a", n, b"%d" % n, None)], {}))
        for n, writer in enumerate(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(writer.ends) for writer in writers}) == 1
    history = KeyHistory(ChangeFiles(tmp_path))
    history.refresh(VisibleChanges({}, 0))
    assert value(history.at(b"a", 9)) == b"%d" % history.begin_ms
