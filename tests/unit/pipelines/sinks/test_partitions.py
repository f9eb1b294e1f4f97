"""Partitions of Delta tables without Spark: files, values, readers, compaction, and changes that are refused."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError
from penstock.pipelines.sinks import parquet, partitions
from penstock.pipelines.sinks.delta import DeltaWriter, check_partitions
from penstock.pipelines.sinks.maintenance import maintain
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.sinks.partitions import partition_directory, partition_values, split, split_file
from penstock.pipelines.spec.sinks import PartitionField, TableSink

NULL = "__HIVE_DEFAULT_PARTITION__"
TEXTS = ["plain", "p ä/=%:é?#*", "a+b&c\"'", None, "100%25", "..", "a\\b", "x\ny", "a=b", "{x}[1]", "x\u2028y", ".-_"]
TYPES = {"n": "long", "k": "string", "day": "date", "b": "integer", "ok": "boolean"}
BUCKET = {"k_bucket_4": "integer"}
FIELDS = [PartitionField("identity", name) for name in ("k", "day", "b", "ok")]


def made(number: int = 0) -> pa.RecordBatch:
    count = len(TEXTS)
    return pa.RecordBatch.from_pydict(
        {
            "n": pa.array(range(number, number + count), pa.int64()),
            "k": pa.array(TEXTS, pa.string()),
            "day": pa.array([date(2026, 11, 27) if n % 3 else None for n in range(count)], pa.date32()),
            "b": pa.array([n % 2 for n in range(count)], pa.int32()),
            "ok": pa.array([n % 2 == 0 for n in range(count)]),
        }
    )


def commit(writer: DeltaWriter, batch: int, rows: pa.RecordBatch, names: list[str]) -> None:
    """Write the files of a batch, as a task of an executor does."""
    attempt = writer.new_attempt(batch)
    assert isinstance(attempt, Path)
    fields = [{"name": n, "type": (TYPES | BUCKET)[n], "nullable": True, "metadata": {}} for n in rows.schema.names]
    metadata = {SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": fields})}
    written = []
    for number, (directory, part) in enumerate(split(rows, names)):
        written.append(f"{directory}/part-{number}.parquet")
        (attempt / directory).mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(attempt / written[-1], part.schema, store_schema=False) as file:
            file.add_key_value_metadata(metadata)
            file.write(part)
    writer.commit(batch, attempt, written, len(rows))


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Return the rows of the table, which all engines read in the same way."""
    table = DeltaTable(path)
    columns = list(TYPES)
    found = sorted(tuple(row[name] for name in columns) for row in table.to_pyarrow_table().to_pylist())
    polars = pl.scan_delta(str(path)).select(columns).collect()
    assert sorted(polars.rows()) == found
    by_duckdb = duckdb.from_arrow(table.to_pyarrow_dataset()).project(", ".join(columns))
    assert sorted(by_duckdb.fetchall()) == found
    return found


def test_values_are_escaped_to_ascii_and_back() -> None:
    for text in TEXTS:
        directory = partition_directory({"k ä": text, "b": "1"})
        assert directory.isascii()
        assert directory.count("/") == 1
        assert partition_values(directory) == {"k ä": text, "b": "1"}
    # An empty text is null in Delta.
    assert partition_directory({"k": ""}) == partition_directory({"k": None}) == f"k={NULL}"


def test_rows_are_split_by_all_columns() -> None:
    rows = pa.RecordBatch.from_pydict({"n": [1, 2, 3, 4, 5], "a": ["x", "y", "x", None, "x"], "b": [1, 1, 2, 1, 1]})
    found = {directory: part.to_pydict() for directory, part in split(rows, ["a", "b"])}
    assert found == {
        "a=x/b=1": {"n": [1, 5]},
        "a=y/b=1": {"n": [2]},
        "a=x/b=2": {"n": [3]},
        f"a={NULL}/b=1": {"n": [4]},
    }
    assert [part.to_pydict() for _, part in split(rows.slice(0, 1), ["a"])] == [{"n": [1], "b": [1]}]


def test_a_file_is_split_with_its_metadata(tmp_path: Path) -> None:
    rows, metadata = made(), {SPARKS_SCHEMA.decode(): "{}"}
    with pq.ParquetWriter(tmp_path / "a.parquet", rows.schema, store_schema=False) as file:
        file.add_key_value_metadata(metadata)
        file.write(rows)
    names = split_file(tmp_path / "a.parquet", ["k", "b"])
    assert sorted(tmp_path.rglob("*.parquet")) == sorted(tmp_path / name for name in names)
    assert names[0].startswith("k=plain/b=0/")
    found = pq.ParquetFile(tmp_path / names[1])
    assert found.metadata.metadata == {SPARKS_SCHEMA: b"{}"}
    assert found.read().to_pylist() == [{"n": 1, "day": date(2026, 11, 27), "ok": False}]


def test_partitions_are_read_by_all_engines_and_combined_separately(tmp_path: Path) -> None:
    path, names = tmp_path / "table", [field.name for field in FIELDS]
    writer = DeltaWriter(path, "rows", "q", partitions=FIELDS)
    for batch in (0, 1, 1, 0):
        commit(writer, batch, made(batch * 100), names)
    expected = sorted(tuple(row.values()) for number in (0, 100) for row in made(number).to_pylist())
    assert rows_of(path) == expected
    assert all(Path(uri).relative_to(path).as_posix().isascii() for uri in DeltaTable(path).file_uris())
    for text in ("a=b", "p ä/=%:é?#*"):
        lazy = pl.scan_delta(str(path)).filter(pl.col("k") == text)
        assert lazy.select("n").collect().sort("n").to_series().to_list() == [
            TEXTS.index(text),
            TEXTS.index(text) + 100,
        ]
    found = maintain(path, retention_h=0, target_bytes=1 << 20)
    assert (found.combined, found.written, found.removed) == (24, 12, 24)
    assert rows_of(path) == expected
    # A combined file is combined again with files of the next batches.
    again = DeltaWriter(path, "rows", "q", partitions=FIELDS)
    for used, batch in ((again, 1), (again, 2), (writer, 2), (writer, 3)):
        commit(used, batch, made(batch * 100), names)
    found = maintain(path, retention_h=0, target_bytes=1 << 20)
    assert (found.combined, found.written) == (36, 12)
    assert sum(1 for _ in path.glob("k=*/**/*.parquet")) == 12
    assert rows_of(path) == sorted(tuple(row.values()) for n in range(4) for row in made(n * 100).to_pylist())


def test_rows_of_partitions_are_merged(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path, "rows", "q", ["n"], FIELDS)
    # The files of a merge are not split: it writes others.
    commit(writer, 0, made(), [])
    changed = made().set_column(2, "day", pa.array([date(2027, 1, 1)] * len(TEXTS), pa.date32()))
    for batch in (1, 1):
        commit(writer, batch, changed, [])
    commit(writer, 0, made(), [])
    assert rows_of(tmp_path) == sorted(tuple(row.values()) for row in changed.to_pylist())


def test_a_crash_before_the_commit_leaves_files_that_maintenance_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [field.name for field in FIELDS]
    with monkeypatch.context() as patch:
        patch.setattr(DeltaWriter, "_create_version", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            commit(DeltaWriter(tmp_path, "rows", "q", partitions=FIELDS), 0, made(), names)
    commit(DeltaWriter(tmp_path, "rows", "q", partitions=FIELDS), 0, made(), names)
    assert maintain(tmp_path, retention_h=0, target_bytes=1 << 20).removed == len(TEXTS)
    assert len(rows_of(tmp_path)) == len(TEXTS)


def test_partitions_of_a_table_do_not_change(tmp_path: Path) -> None:
    bucket = PartitionField("bucket", "k", 4)
    rows = made().append_column(bucket.name, pa.array([1] * len(TEXTS), pa.int32()))
    commit(DeltaWriter(tmp_path, "rows", "q", partitions=[bucket]), 0, rows, [bucket.name])
    check_partitions(tmp_path, "rows", [bucket])
    for other in ([], [PartitionField("identity", bucket.name)], [PartitionField("bucket", "k", 8)]):
        with pytest.raises(ConfigError, match=r"is partitioned by bucket\(4, k\)") as refused:
            check_partitions(tmp_path, "rows", other)
        assert refused.value.hint is not None
        assert "set partition_by: [bucket(4, k)]" in refused.value.hint
    # The run is refused, too, if the check before it found no table yet.
    with pytest.raises(ConfigError, match="is partitioned by"):
        commit(DeltaWriter(tmp_path, "other", "q2"), 0, made(), [])


def test_a_table_that_another_program_partitioned_continues(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, pa.table({"n": [0], "k": ["x"]}).schema, partition_by=["k"])
    with pytest.raises(ConfigError, match=r"has no partition_by, the table .* is partitioned by k"):
        check_partitions(tmp_path, "rows", [])
    commit(DeltaWriter(tmp_path, "rows", "q", partitions=FIELDS[:1]), 0, made().select(["n", "k"]), ["k"])
    assert DeltaTable(tmp_path).to_pyarrow_table().num_rows == len(TEXTS)
    check_partitions(tmp_path / "new", "rows", FIELDS)


@pytest.mark.parametrize(
    ("text", "name", "normal"),
    [
        ("k", "k", "k"),
        ("day( at )", "at_day", "day(at)"),
        ("hour(_timestamp)", "timestamp_hour", "hour(_timestamp)"),
        (" bucket( 16,machine )", "machine_bucket_16", "bucket(16, machine)"),
    ],
)
def test_partitions_have_names(text: str, name: str, normal: str) -> None:
    (field,) = TableSink(path="new", partition_by=[text]).partitions
    assert (field.name, field.text) == (name, normal)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"partition_by": ["month(at)"]}, "expected a column, day"),
        ({"partition_by": ["a.b"]}, "expected a column, day"),
        ({"partition_by": ["bucket(1, k)"]}, "expected 2 to 10000 buckets"),
        ({"partition_by": ["_topic"]}, "expected a column of the stream"),
        ({"partition_by": ["bucket(4, _timestamp)"]}, "expected a column of the stream"),
        ({"partition_by": ["k" * 201]}, "expected a name of at most 200 characters"),
        ({"partition_by": ["k", "K"]}, "expected different partitions"),
        ({"partition_by": ["k"], "format": "parquet"}, "expected partition_by only for a Delta table"),
        ({"partition_by": ["k"], "path": "hdfs://host/t"}, "expected partition_by only for a Delta table"),
        ({"partition_by": ["a", "b", "c", "d", "e"]}, "at most 4 items"),
    ],
)
def test_wrong_partitions_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TableSink.model_validate({"path": "new", **given})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("k", None),
        ("day(at)", None),
        ("hour(at)", None),
        ("bucket(4, price)", None),
        ("unknown", None),
        ("hour(unknown)", None),
        ("nothing", "the column does not exist"),
        ("K", "write 'k', as the column is named"),
        ("at", "the column is TIMESTAMP, which identity does not accept"),
        ("hour(k)", "the column is STRING, which hour does not accept"),
        ("day(list)", "the column is ARRAY<INT>, which day does not accept"),
        ("x", "the column is DOUBLE, which identity does not accept"),
        ("day(_timestamp)", None),
        ("hour(_timestamp)", "the stream has a column 'timestamp_hour'"),
        ("day(other)", "the stream has a column 'other_day'"),
    ],
)
def test_columns_of_partitions_are_checked(text: str, problem: str | None) -> None:
    kinds = {
        "k": "STRING", "at": "TIMESTAMP", "price": "DECIMAL(9, 2)", "unknown": None, "x": "DOUBLE",
        "list": "ARRAY<INT>", "other": "DATE", "Other_Day": "DATE",
        "timestamp_hour": "STRING",
    }  # fmt: skip
    (field,) = TableSink(path="new", partition_by=[text]).partitions
    found = field.problem(kinds, reads_windows=False)
    assert found == problem or (problem is not None and found is not None and found.startswith(problem))


def test_rows_that_wait_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_WAITING_BYTES", 200)
    monkeypatch.setattr(partitions, "ROW_GROUP_BYTES", 1)
    files = partitions.PartitionFiles(parquet.FileTarget(tmp_path, {}), ["k"])
    waiting = []
    for _ in range(3):
        files.write(made())
        waiting.append(sum(file.waiting_bytes for file in files._files.values()))
    files.close()
    assert max(waiting) <= 200
    assert files.count == 3 * len(TEXTS)
    assert len(files.names) == len(set(files.names)) > len(TEXTS)
    assert sorted(files.names) == sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.parquet"))
    assert sum(pq.read_metadata(tmp_path / name).num_rows for name in files.names) == files.count


def test_files_of_many_partitions_are_not_open_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_MAX_OPEN", 3)
    monkeypatch.setattr(partitions, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    files = partitions.PartitionFiles(parquet.FileTarget(tmp_path, {}), ["k"])
    rows = pa.RecordBatch.from_pydict({"k": [n % 20 for n in range(100)], "n": list(range(100))})
    for _ in range(2):
        files.write(rows)
        assert sum(file.is_open for file in files._files.values()) <= 3
    files.close()
    found = pl.concat(
        pl.read_parquet(tmp_path / name).with_columns(k=int(name.split("/")[0].removeprefix("k=")))
        for name in files.names
    )
    assert sorted(found["n"]) == sorted([*range(100)] * 2)
    assert (found["n"] % 20 == found["k"]).all()


def test_rows_of_many_values_wait_as_one_batch_for_each(tmp_path: Path) -> None:
    """The objects of a batch with one row are a hundred times larger than the row."""
    files = partitions.PartitionFiles(parquet.FileTarget(tmp_path, {}), ["k"])
    rows = pa.RecordBatch.from_pydict({"k": list(range(50)), "n": list(range(50))})
    for _ in range(20):
        files.write(rows)
    files.close()
    assert len(files.names) == 50
    assert {pq.read_metadata(tmp_path / name).num_rows for name in files.names} == {20}


def test_a_task_begins_another_file_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    files = parquet.FileWriter(parquet.FileTarget(tmp_path, {}, 2_000))
    for _ in range(6):
        files.write(made())
    files.close()
    sizes = [(tmp_path / name).stat().st_size for name in files.names]
    assert len(sizes) >= 2
    assert all(2_000 <= size < 6_000 for size in sizes[:-1])
    assert sum(pq.read_metadata(tmp_path / name).num_rows for name in files.names) == files.count == 6 * len(TEXTS)
    one = parquet.FileWriter(parquet.FileTarget(tmp_path, {}))
    for _ in range(6):
        one.write(made())
    one.close()
    assert len(one.names) == 1


@pytest.mark.parametrize(("text", "expected"), [("64MiB", 64 << 20), ("2GiB", 2 << 30), ("1MiB", 1 << 20)])
def test_a_table_has_a_size_of_files(text: str, expected: int) -> None:
    assert TableSink(path="new", target_file_size=text).file_bytes == expected
    assert TableSink(path="new").file_bytes == 128 << 20


@pytest.mark.parametrize(("text", "expected"), [("64MB", "is not a size"), ("100KiB", "expected at least 1MiB")])
def test_wrong_sizes_of_files_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TableSink(path="new", target_file_size=text)
