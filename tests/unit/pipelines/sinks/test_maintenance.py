"""Maintenance of Delta tables: fewer files, the same rows, and batches continue."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.run import maintenance as scheduling
from penstock.pipelines.run.maintenance import MaintenanceSchedule
from penstock.pipelines.sinks import maintenance as maintaining
from penstock.pipelines.sinks.delta import DeltaWriter, certain_bounds, delta_files
from penstock.pipelines.sinks.maintenance import TableMaintenance, maintain, maintained_at
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.spec.sinks import Maintenance, Sink, TableSink

FIELDS = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("n", "long"), ("x", "double"))]


def commit(writer: DeltaWriter, batch: int, files: int = 1) -> None:
    attempt = writer.new_attempt(batch)
    assert isinstance(attempt, Path)
    attempt.mkdir(parents=True)
    rows = pa.table({"n": [batch], "x": [float("nan") if batch == 3 else 1.0]})
    names = [f"part{n}.parquet" for n in range(files)]
    with pq.ParquetWriter(attempt / names[0], rows.schema, store_schema=False) as file:
        file.add_key_value_metadata({SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": FIELDS})})
        file.write(rows)
    for name in names[1:]:
        shutil.copyfile(attempt / names[0], attempt / name)
    writer.commit(batch, attempt, names, files)


def numbers(path: Path) -> list[int]:
    return sorted(n for n in DeltaTable(path).to_pyarrow_table()["n"].to_pylist() if n is not None)


def parquet_files(path: Path) -> int:
    return sum("_delta_log" not in file.parts for file in path.rglob("*.parquet"))


def test_small_files_are_combined_and_batches_continue(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path, "rows", "q")
    for batch in range(10):
        commit(writer, batch)
    # Left by a crash: after the files were moved, and during an attempt.
    pq.write_table(pa.table({"n": [99]}), tmp_path / "data" / "orphan.parquet")
    (tmp_path / "_attempts" / "rows-10-0123456789ab").mkdir()
    pq.write_table(pa.table({"n": [99]}), tmp_path / "_attempts" / "rows-10-0123456789ab" / "a.parquet")
    kept = maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
    assert (kept.combined, kept.written) == (10, 1)
    assert len(delta_files(tmp_path)) == 1
    # Versions of the last week still name the small files.
    assert parquet_files(tmp_path) >= 11
    found = maintain(tmp_path, retention_h=0, target_bytes=1 << 20)
    assert (found.combined, found.written) == (0, 0)
    assert kept.removed + found.removed == 11
    assert parquet_files(tmp_path) == 1
    assert numbers(tmp_path) == list(range(10))
    # The combined file has no bounds that would hide a NaN.
    assert pl.scan_delta(str(tmp_path)).filter(pl.col("x") > 5).collect()["n"].to_list() == [3]
    for used in (writer, DeltaWriter(tmp_path, "rows", "q")):
        for batch in (9, 10):
            commit(used, batch)
    assert numbers(tmp_path) == list(range(11))


REMOVED_FILES = "delta.deletedFileRetentionDuration"


@pytest.mark.parametrize(
    ("before", "retention_h", "options", "after"),
    [
        # The log must name removed files as long as they are kept: otherwise they would be removed before.
        (None, 720, {}, "interval 720 hours"),
        ("interval 1 day", 168, {}, "interval 168 hours"),
        ("interval 90 minutes", 2, {}, "interval 2 hours"),
        # A shorter time only if the table is maintained regularly, or properties are given.
        (None, 24, {}, None),
        (None, 24, {"in_use": True}, "interval 24 hours"),
        ("INTERVAL 2 weeks", 24, {"log_retention_h": 48}, "interval 24 hours"),
        (None, 0, {"in_use": True}, "interval 1 hours"),
        ("interval 7 days", 168, {"in_use": True}, "interval 7 days"),
        ("interval 1 week 2 days", 168, {}, "interval 1 week 2 days"),
    ],
)
def test_the_log_names_removed_files_as_long_as_they_are_kept(
    tmp_path: Path, before: str | None, retention_h: int, options: dict[str, Any], after: str | None
) -> None:
    commit(DeltaWriter(tmp_path, "rows", "q"), 0)
    if before is not None:
        DeltaTable(tmp_path).alter.set_table_properties({REMOVED_FILES: before})
    maintain(tmp_path, retention_h=retention_h, target_bytes=1 << 20, **options)
    assert DeltaTable(tmp_path).metadata().configuration.get(REMOVED_FILES) == after
    version = DeltaTable(tmp_path).version()
    maintain(tmp_path, retention_h=retention_h, target_bytes=1 << 20, **options)
    assert DeltaTable(tmp_path).metadata().configuration.get(REMOVED_FILES) == after
    # The property is not set again.
    assert max(metadata_versions(tmp_path)) <= version


def metadata_versions(path: Path) -> list[int]:
    """Return the versions of the log that changed the metadata of the table."""
    entries = sorted((path / "_delta_log").glob("*.json"))
    return [int(entry.stem) for entry in entries if '"metaData"' in entry.read_text(encoding="utf-8")]


class Round(NamedTuple):
    """State of a table after some commits and its maintenance."""

    files: int
    log_entries: int
    log_bytes: int
    open_ms: float


def rounds(path: Path, count: int, commits: int, files: int, *, every_s: float) -> list[Round]:
    """Maintain a table ``count`` times, after ``commits`` of ``files`` each, as if this were ``every_s`` seconds.

    Instead of waiting for this time, all files of the table become older. Combined files are removed at once: the
    log has the time of their removal, which cannot be changed.
    """
    writer = DeltaWriter(path, "rows", "q")
    found: list[Round] = []
    for number in range(count):
        for batch in range(number * commits, (number + 1) * commits):
            commit(writer, batch, files)
        maintain(path, retention_h=0, target_bytes=1 << 20, log_retention_h=2, in_use=True)
        began = time.perf_counter()
        DeltaTable(path)
        open_ms = (time.perf_counter() - began) * 1000
        entries = [entry.stat() for entry in (path / "_delta_log").iterdir()]
        found.append(Round(parquet_files(path), len(entries), sum(entry.st_size for entry in entries), open_ms))
        _age(path, every_s)
    return found


def _age(path: Path, seconds: float) -> None:
    """Make all files of the table older."""
    for file in path.rglob("*"):
        if file.is_file():
            at = file.stat().st_mtime - seconds
            os.utime(file, (at, at))


def test_regular_maintenance_bounds_files_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six hours of six commits each, with maintenance every hour that keeps the log of two hours."""
    monkeypatch.setattr(maintaining, "_SHORTEST_H", 0)
    found = rounds(tmp_path, 6, 6, 2, every_s=3_600)
    assert [each.files for each in found] == [1] * 6
    # A checkpoint does not name files that were removed before.
    assert found[-1].log_bytes <= 1.1 * found[3].log_bytes
    # Six batches and the versions of maintenance in each hour, since the last checkpoint before the retention.
    assert max(each.log_entries for each in found[3:]) <= found[3].log_entries + 1 <= 3 * 14
    assert DeltaTable(tmp_path).metadata().configuration == {
        "delta.logRetentionDuration": "interval 2 hours",
        REMOVED_FILES: "interval 0 hours",
    }
    assert numbers(tmp_path) == sorted([*range(36), *range(36)])
    commit(DeltaWriter(tmp_path, "rows", "q"), 35, 2)
    assert len(numbers(tmp_path)) == 72


def test_a_table_is_maintained_when_it_is_due(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path / "a", "rows", "q")
    plan = Maintenance(every="1 hour", log_retention="2 hours")
    sinks = [
        Sink(name=name, table=TableSink(path=str(tmp_path / path), maintenance=plan))
        for name, path in (("rows", "a"), ("others", "a"), ("later", "b"))
    ]
    events: list[dict[str, Any]] = []

    def schedule() -> MaintenanceSchedule:
        return MaintenanceSchedule(sinks, lambda event, **fields: events.append({"event": event, **fields}))

    for batch in range(3):
        commit(writer, batch)
    first = schedule()
    first.run_due(time.time())
    first.run_due(time.time() + 3_000)
    assert len(events) == 1
    # A run that was started again knows the time of the last maintenance.
    schedule().run_due(time.time() + 3_000)
    assert len(events) == 1
    commit(writer, 3)
    with (tmp_path / "a" / "_maintenance").open("a", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        first.run_due(time.time() + 3_601)
    second = schedule()
    second.start()
    second.close(60)
    schedule().run_due(time.time() + 3_601)
    shown = [(event["event"], event.get("sink"), event.get("combined"), event.get("text", "")) for event in events]
    assert [each[:3] for each in shown] == [
        ("maintenance", "others", 3),
        ("warning", None, None),
        ("maintenance", "others", 2),
    ]
    assert "is being maintained by another process" in shown[1][3]
    assert numbers(tmp_path / "a") == [0, 1, 2, 3]


def test_an_error_of_one_table_does_not_end_the_maintenance_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = []
    for name in ("bad", "good"):
        commit(DeltaWriter(tmp_path / name, "rows", "q"), 0)
        plan = Maintenance(retention="90 minutes")
        sinks.append(Sink(name=name, table=TableSink(path=str(tmp_path / name), maintenance=plan)))
    retentions: list[int] = []

    def maintain_or_fail(path: Path, *, retention_h: int, **_: object) -> TableMaintenance:
        if path.name == "bad":
            raise RuntimeError("an error that the library does not document")
        retentions.append(retention_h)
        return TableMaintenance(0, 0, 0)

    monkeypatch.setattr(scheduling, "maintain", maintain_or_fail)
    events: list[tuple[str, object]] = []
    schedule = MaintenanceSchedule(sinks, lambda event, **fields: events.append((event, fields.get("text"))))
    schedule.run_due(time.time())
    text = "sink 'bad': its table was not maintained: an error that the library does not document"
    assert events == [("warning", text), ("maintenance", None)]
    # Not less than the retention of the file.
    assert retentions == [2]
    schedule.run_due(time.time())
    assert [event for event, _ in events].count("warning") == 1


@pytest.mark.nightly
@pytest.mark.timeout(2_400)
def test_a_day_of_commits_of_four_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit every ten seconds, maintenance every ten minutes: files and log do not grow."""
    # A power loss is not part of this test, and a hundred thousand fsyncs would be most of its time.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(maintaining, "_SHORTEST_H", 0)
    found = rounds(tmp_path, 144, 60, 4, every_s=600)
    sys.stdout.write("hour  files  log entries  log bytes  open ms\n")
    for hour, each in enumerate(found[5::6], 1):
        sys.stdout.write(f"{hour:4} {each.files:6} {each.log_entries:12} {each.log_bytes:10} {each.open_ms:8.1f}\n")
    assert max(each.files for each in found) <= 2
    # From the third hour the log has the versions of the two hours before.
    assert max(each.log_entries for each in found[18:]) <= 1.1 * found[18].log_entries
    assert max(each.log_bytes for each in found[18:]) <= 1.1 * found[18].log_bytes
    assert DeltaTable(tmp_path).to_pyarrow_dataset().count_rows() == 8_640 * 4


def test_one_process_maintains_a_table_at_a_time(tmp_path: Path) -> None:
    """Two compactions of the same version would double the rows."""
    writer = DeltaWriter(tmp_path, "rows", "q")
    commit(writer, 0)
    before = maintained_at(tmp_path)
    with (tmp_path / "_maintenance").open("a", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PenstockError, match="is being maintained by another process"):
            maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
    os.utime(tmp_path / "_maintenance", (1, 1))
    maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
    assert before == 0
    assert maintained_at(tmp_path) > 1


def test_a_merge_during_the_compaction_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DeltaWriter(tmp_path, "rows", "q", ["x"])
    commit(writer, 0)
    commit(writer, 3)
    merged: list[int] = []

    def merge_first(table: DeltaTable) -> Any:
        if not merged:
            merged.append(4)
            commit(writer, 4)
        return certain_bounds(table)

    monkeypatch.setattr(maintaining, "certain_bounds", merge_first)
    found = maintain(tmp_path, retention_h=168, target_bytes=1 << 20, in_use=True)
    assert (merged, found.combined, found.written) == ([4], 2, 1)
    # Batch 4 has replaced the row of batch 0, which has the same key.
    assert numbers(tmp_path) == [3, 4]


def test_maintenance_keeps_what_a_run_writes_at_the_moment(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path, "rows", "q")
    commit(writer, 0)
    attempt = writer.new_attempt(1)
    assert isinstance(attempt, Path)
    attempt.mkdir(parents=True)
    (tmp_path / "data" / "placed.parquet").write_bytes(b"moved to its place, and committed in a moment")
    maintain(tmp_path, retention_h=1, target_bytes=1 << 20, in_use=True)
    assert attempt.is_dir()
    assert (tmp_path / "data" / "placed.parquet").exists()


def test_only_delta_tables_are_maintained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Delta table"):
        maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
