from __future__ import annotations

import fcntl
import gzip
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataLossError, StorageError
from penstock.spark.files.source import (
    Content,
    FileEntry,
    FileLog,
    check_unchanged,
    count_records,
    list_new_files,
    records,
)


def entry(path: str) -> FileEntry:
    return FileEntry(path, 3, 7, "lines", 0, 1)


def test_the_log_keeps_its_order_and_forgets_a_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "deep" / "q.jsonl")
    assert log.entries() == []
    log.append([])
    log.append([entry("a"), entry("b")])
    with log.path.open("ab") as file:
        file.write(b'["c", 3')
    assert log.entries() == [entry("a"), entry("b")]
    log.append([entry("d")])
    assert [found.path for found in FileLog(log.path).entries()] == ["a", "b", "d"]


def test_another_file_is_not_a_log(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("{}\n5\n")
    with pytest.raises(StorageError, match="is not a file log"):
        FileLog(tmp_path / "q.jsonl").entries()


def test_files_come_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for age, name in enumerate(("b.csv", "a.csv", "c.txt", ".a.csv.tmp", "_SUCCESS", "known.csv")):
        (tmp_path / name).write_text("1\n2")
        os.utime(tmp_path / name, ns=(age, age))
    (tmp_path / "d.csv").mkdir()
    known = {str(tmp_path / "known.csv")}
    found = list(list_new_files(str(tmp_path / "*.csv"), "lines", 1, known))
    assert [(Path(f.path).name, f.size, f.mtime_ns, f.records) for f in found] == [
        ("b.csv", 3, 0, 1),
        ("a.csv", 3, 1, 1),
    ]
    assert [Path(f.path).name for f in list_new_files(str(tmp_path), "whole", 0, known)] == ["b.csv", "a.csv", "c.txt"]
    assert list(list_new_files(str(tmp_path / "none"), "lines", 0, set())) == []


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
def test_lines_are_counted(tmp_path: Path, content: bytes, lines: int) -> None:
    plain, packed = tmp_path / "a", tmp_path / "a.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    assert [count_records(str(path), "lines", 0) for path in (plain, packed)] == [lines, lines]
    assert count_records(str(plain), "lines", 1) == max(0, lines - 1)
    assert count_records(str(plain), "whole", 0) == 1


_LATE = 253_402_300_800_000_000
"""The first microsecond after the year 9999."""


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pa.array([b"a", b"\xff"]).view(pa.string()), "column 'a' has a text that is not UTF-8"),
        (
            pa.array([0, _LATE]).view(pa.timestamp("us")),
            "column 'a' has a date or a time that is",
        ),
        (pa.array([_LATE // 86_400_000_000], pa.int32()).view(pa.date32()), "column 'a' has a date or a time that is"),
    ],
)
def test_a_file_with_a_value_that_is_no_json_is_named(tmp_path: Path, column: pa.Array[Any], why: str) -> None:
    pq.write_table(pa.table({"n": range(len(column)), "a": column}), tmp_path / "a.parquet")
    (found,) = list_new_files(str(tmp_path), "parquet", 0, set())
    with pytest.raises(StorageError, match=re.escape(f"{found.path!r} cannot be read\n  why: {why}")):
        list(records([(found, 0, found.size)]))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(10_000)}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[50:5_000] = bytes(4_950)
    (tmp_path / "a.parquet").write_bytes(content)
    (found,) = list_new_files(str(tmp_path), "parquet", 0, set())
    with pytest.raises(StorageError, match=re.escape(f"{found.path!r} cannot be read")):
        list(records([(found, 0, found.size)]))
    (tmp_path / "b.parquet").write_bytes(b"not a file of Parquet")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"x\n" * 1000)[:-9])
    damaged: list[tuple[str, Content]] = [("b.parquet", "parquet"), ("b.gz", "lines")]
    for name, kind in damaged:
        path = str(tmp_path / name)
        with pytest.raises(StorageError, match=re.escape(f"{path!r} cannot be read\n  why: ")):
            count_records(path, kind, 0)
    with pytest.raises(FileNotFoundError):
        count_records(str(tmp_path / "none"), "lines", 0)


def test_a_file_that_is_no_longer_what_it_was_is_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1\n")
    (found,) = list_new_files(str(path.parent), "lines", 0, set())
    check_unchanged(found)
    path.write_text("1\n2\n")
    with pytest.raises(DataLossError, match="has changed") as raised:
        check_unchanged(found)
    # Put back as the error says, it is the same file again.
    time = re.search(r"touch -d @(\d+)\.(\d{9})\)", str(raised.value))
    assert time is not None
    path.write_text("1\n")
    os.utime(path, ns=(0, int(time[1] + time[2])))
    check_unchanged(found)
    path.unlink()
    with pytest.raises(DataLossError, match="no longer exists"):
        check_unchanged(found)


def test_entries_already_read_are_not_read_again(tmp_path: Path) -> None:
    reader, writer = FileLog(tmp_path / "q.jsonl"), FileLog(tmp_path / "q.jsonl")
    names: list[list[str]] = []
    for name in ("a", "b"):
        writer.append([entry(name)])
        with writer.path.open("ab") as log:
            log.write(b'["half", 1')
        found = reader.entries()
        names.append([each.path for each in found])
        # What a caller does with its list is its own.
        found.clear()
    assert names == [["a"], ["a", "b"]]
    assert [each.path for each in pickle.loads(pickle.dumps(reader)).entries()] == ["a", "b"]
    assert len(pickle.dumps(reader)) < 500
    writer.path.write_bytes(b"")
    assert reader.entries() == []
    writer.path.unlink()
    assert reader.entries() == []


def test_the_name_of_a_new_log_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loss of power could remove a log to which an offset refers."""
    synced: list[int] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    log = FileLog(tmp_path / "q.jsonl")
    assert log.append([entry("a")])
    assert synced == [log.path.stat().st_ino, tmp_path.stat().st_ino]
    assert log.append([entry("b")])
    assert synced[2:] == [log.path.stat().st_ino]


def test_no_other_process_appends_between_the_check_and_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its entries, to which an offset may refer, would be removed."""
    log, later = FileLog(tmp_path / "q.jsonl"), FileLog(tmp_path / "q.jsonl")
    locked: list[bool] = []
    read_on = FileLog._read_on

    def look(self: FileLog) -> None:
        read_on(self)
        with self.path.open("rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(FileLog, "_read_on", look)
        assert log.append([entry("a")], after=0)
    assert locked == [True]
    assert not later.append([entry("b")], after=0)
    assert later.append([entry("b")], after=1)
    assert [found.path for found in log.entries()] == ["a", "b"]


def test_a_process_that_is_paused_while_it_writes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(tmp_path / "q.jsonl")
    assert log.append([entry("a")])
    monkeypatch.setattr("penstock.spark.files.source._LOCK_S", 0.0)
    with log.path.open("rb") as paused:
        fcntl.flock(paused, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process has been writing it"):
            log.append([entry("b")])
    assert log.append([entry("b")], after=1)
