"""Maintenance of Delta tables: fewer files, the same rows, and batches continue."""

from __future__ import annotations

import json
import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError
from penstock.pipelines.sinks.delta import DeltaWriter, delta_files
from penstock.pipelines.sinks.maintenance import maintain
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA

FIELDS = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("n", "long"), ("x", "double"))]


def commit(writer: DeltaWriter, batch: int) -> None:
    attempt = writer.new_attempt(batch)
    attempt.mkdir(parents=True)
    rows = pa.table({"n": [batch], "x": [float("nan") if batch == 3 else 1.0]})
    with pq.ParquetWriter(attempt / "part.parquet", rows.schema, store_schema=False) as file:
        file.add_key_value_metadata({SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": FIELDS})})
        file.write(rows)
    writer.commit(batch, attempt, ["part.parquet"], 1)


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


def test_regular_maintenance_bounds_files_and_log(tmp_path: Path) -> None:
    """Eight hours of ten commits each, with maintenance every hour that keeps the log of two hours."""
    log = tmp_path / "_delta_log"
    files, entries = [], []
    writer = DeltaWriter(tmp_path, "rows", "q")
    for hour in range(8):
        for batch in range(hour * 10, hour * 10 + 10):
            commit(writer, batch)
        maintain(tmp_path, retention_h=0, target_bytes=1 << 20, log_retention_h=2)
        files.append(parquet_files(tmp_path))
        entries.append(len(list(log.glob("*.json"))))
        for entry in log.iterdir():
            at = entry.stat().st_mtime - 3600
            os.utime(entry, (at, at))
    assert files == [1] * 8
    # Ten batches and the versions of maintenance in each hour, since the last checkpoint before the retention.
    assert max(entries[4:]) == entries[4] <= 3 * 15
    assert DeltaTable(tmp_path).metadata().configuration == {"delta.logRetentionDuration": "interval 2 hours"}
    assert numbers(tmp_path) == list(range(80))
    commit(DeltaWriter(tmp_path, "rows", "q"), 79)
    assert numbers(tmp_path) == list(range(80))


def test_only_delta_tables_are_maintained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Delta table"):
        maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
