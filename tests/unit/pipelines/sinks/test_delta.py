"""Delta tables without Spark: each batch once after crashes, repetitions and lost leases; read by other engines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, TableFeatures, Transaction
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, CommitProperties

from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.pipelines.sinks.delta import (
    DELETES,
    DeltaWriter,
    check_fields,
    delta_files,
    delta_writers,
    is_delta_table,
)
from penstock.pipelines.sinks.maintenance import maintain
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.sinks.partitions import split_file
from penstock.pipelines.sinks.table import check_types, files, writers
from penstock.pipelines.spec.sinks import TableSink
from penstock.pipelines.state_dir.layout import create_text, sync_file
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import StoragePath

SPARK_TYPES = {
    "int64": "long",
    "int32": "integer",
    "string": "string",
    "double": "double",
    "timestamp[us, tz=UTC]": "timestamp",
    "timestamp[us]": "timestamp_ntz",
    "bool": "boolean",
}


def spark_type(kind: Any) -> Any:
    """Return the type in Spark's JSON."""
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [field(each.name, spark_type(each.type)) for each in kind]}
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": spark_type(kind.value_type), "containsNull": True}
    if pa.types.is_map(kind):
        types = {"keyType": spark_type(kind.key_type), "valueType": spark_type(kind.item_type)}
        return {"type": "map", **types, "valueContainsNull": True}
    return SPARK_TYPES[str(kind)]


def field(name: str, kind: Any, *, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def staged(writer: DeltaWriter, batch: int, rows: pa.Table, *, nullable: bool = True) -> tuple[Path, list[str]]:
    """Write the file of an attempt, as a task of an executor does."""
    attempt = writer.new_attempt(batch)
    assert isinstance(attempt, Path)
    attempt.mkdir(parents=True)
    fields = [field(each.name, spark_type(each.type), nullable=nullable) for each in rows.schema]
    metadata = {SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": fields})}
    with pq.ParquetWriter(attempt / "part-0.parquet", rows.schema, store_schema=False) as file:
        file.add_key_value_metadata(metadata)
        file.write(rows)
    return attempt, ["part-0.parquet"]


def commit(writer: DeltaWriter, batch: int, rows: pa.Table | None = None) -> int:
    rows = pa.table({"n": [batch]}) if rows is None else rows
    return writer.commit(batch, *staged(writer, batch, rows), len(rows))


def numbers(path: Path, column: str = "n") -> list[Any]:
    return sorted(DeltaTable(path).to_pyarrow_table()[column].to_pylist())


def test_each_batch_is_in_the_table_once_also_batch_0(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path / "t", "rows", "q")
    for batch in (0, 0, 1, 2, 2, 1, 0, 3):
        assert commit(writer, batch) == 1
    assert numbers(tmp_path / "t") == [0, 1, 2, 3]
    again = DeltaWriter(tmp_path / "t", "rows", "q")
    for batch in (3, 4):
        commit(again, batch)
    assert numbers(tmp_path / "t") == [0, 1, 2, 3, 4]
    assert delta_writers(tmp_path / "t") == {"rows": {"q": 4}}
    assert writers(tmp_path / "t") == {"rows": 5}
    assert list((tmp_path / "t" / "_attempts").iterdir()) == []


@pytest.mark.parametrize("keys", [(), ("n",)])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_table_that_must_not_be_created_is_not(tmp_path: Path, keys: Sequence[str], *, is_known: bool) -> None:
    """Neither by the first batch of a writer nor by a later one, after the table was removed."""
    path, refuses = tmp_path / "t", not is_known

    def check() -> None:
        if refuses:
            raise PenstockError("no")

    writer = DeltaWriter(path, "rows", "q", keys, check_new=check)
    if is_known:
        commit(writer, 0)
        shutil.rmtree(path)
        refuses = True
    for _ in range(2):
        with pytest.raises(PenstockError, match=r"^no$"):
            commit(writer, 1)
    assert not is_delta_table(path)
    assert [each for each in path.rglob("*") if not each.is_dir()] == []


def test_a_batch_without_rows_is_no_version(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path / "t", "rows", "q")
    assert writer.commit(0, writer.new_attempt(0), [], 0) == 0
    assert not is_delta_table(tmp_path / "t")


STEPS = ("_open", "_place", "_create_version")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_crash_at_any_step_neither_loses_nor_repeats_a_batch(
    tmp_path: Path, step: str, batch: int, *, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    for earlier in range(batch):
        commit(DeltaWriter(path, "rows", "q"), earlier)
    crashing = DeltaWriter(path, "rows", "q")
    real: Callable[..., Any] = getattr(DeltaWriter, step)

    def crash(*arguments: Any) -> None:
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaWriter, step, crash)
        with pytest.raises(KeyboardInterrupt):
            commit(crashing, batch)
    # The next run repeats the batch.
    commit(DeltaWriter(path, "rows", "q"), batch)
    commit(DeltaWriter(path, "rows", "q"), batch + 1)
    assert numbers(path) == list(range(batch + 2))


def test_a_run_that_lost_its_lease_during_a_commit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    paused, later = DeltaWriter(path, "rows", "q"), DeltaWriter(path, "rows", "q")
    commit(paused, 0)
    place = DeltaWriter._place

    def pause(self: DeltaWriter, found: Sequence[StoragePath]) -> list[StoragePath]:
        # The later run commits between the check and the commit of the paused one.
        monkeypatch.setattr(DeltaWriter, "_place", place)
        commit(later, 1)
        commit(later, 2)
        return place(self, found)

    attempt = staged(paused, 1, pa.table({"n": [1]}))
    monkeypatch.setattr(DeltaWriter, "_place", pause)
    paused.commit(1, *attempt, 1)
    assert numbers(path) == [0, 1, 2]
    commit(paused, 2)
    commit(paused, 3)
    assert numbers(path) == [0, 1, 2, 3]


def test_a_commit_does_not_list_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What deltalake does for a commit takes a time that grows with the log."""
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "_listed", None)
        patch.setattr(DeltaWriter, "_load", None)
        for function in ("__init__", "create_write_transaction", "update_incremental"):
            patch.setattr(DeltaTable, function, None)
        for batch in (1, 2, 2):
            commit(writer, batch)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 1, 2], 3)


def test_a_table_that_was_created_again_gets_the_next_batch(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    for batch in range(3):
        commit(writer, batch)
    path.rename(tmp_path / "old")
    commit(DeltaWriter(path, "others", "p"), 0)
    commit(writer, 3)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 3], 2)


def test_versions_are_those_that_deltalake_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = tmp_path / "t", TableSink(path="new", partition_by=["k", "d"]).partitions
    writer = DeltaWriter(path, "rows", "q", (), fields, change_data_feed=True)
    rows = pa.table(
        {
            "n": [1, 2, 3],
            "k": ["ä c:/%", None, "a'!=*&+,;@$"],
            "t": pa.array([0, None, 1], pa.timestamp("us")),
            "d": [1, 1, 2],
        }
    )
    found = []
    for batch in range(3):
        attempt, names = staged(writer, batch, rows)
        names = [part for name in names for part in split_file(attempt / name, ["k", "d"])]
        monkeypatch.setattr(DeltaWriter, "_is_due", lambda *_, batch=batch: batch == 2)
        writer.commit(batch, attempt, names, len(rows))
        text = (path / "_delta_log" / f"{batch + 1:020}.json").read_text()
        found.append([json.loads(line) for line in text.splitlines()])
    assert [list(action) for action in found[1]] == [list(action) for action in found[2]]
    for ours, theirs in zip(found[1], found[2], strict=True):
        kind = next(iter(ours))
        one, other = ours[kind], theirs[kind]
        if kind == "add":
            assert one["path"].rpartition("/")[0] == other["path"].rpartition("/")[0]
            for varying in ("path", "modificationTime", "size"):
                assert type(one.pop(varying)) is type(other.pop(varying))
            assert one == {name: value for name, value in other.items() if value is not None}
        elif kind == "commitInfo":
            assert (one["operation"], one["operationParameters"]) == (other["operation"], other["operationParameters"])
        else:
            assert one | {"version": 2} == other
    assert sorted(DeltaTable(path).to_pyarrow_table()["k"].to_pylist(), key=str) == sorted(
        [*rows["k"].to_pylist()] * 3, key=str
    )


def test_a_version_that_was_removed_is_not_written_again(tmp_path: Path) -> None:
    """A writer had no batch for hours, while others wrote the table and its old versions were removed."""
    path = tmp_path / "t"
    idle, other = DeltaWriter(path, "rows", "q"), DeltaWriter(path, "others", "p")
    commit(idle, 0)
    commit(idle, 1)
    for batch in range(3):
        commit(other, batch)
    table = DeltaTable(path)
    table.create_checkpoint()
    for version in range(4):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    commit(idle, 2)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 0, 1, 1, 2, 2], 6)
    assert not (path / "_delta_log" / f"{3:020}.json").exists()
    # The version that it knows may still exist when the next one does not.
    other = DeltaWriter(path, "others", "p")
    for batch in range(3, 5):
        commit(other, batch)
    DeltaTable(path).create_checkpoint()
    (path / "_delta_log" / f"{7:020}.json").unlink()
    assert idle._known is not None
    idle._known.forget()
    commit(idle, 3)
    assert (numbers(path)[-3:], DeltaTable(path).version()) == ([3, 3, 4], 9)


def test_a_version_that_was_removed_before_it_was_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was paused for hours between its last check and the commit."""
    path = tmp_path / "t"
    paused, other = DeltaWriter(path, "rows", "q"), DeltaWriter(path, "others", "p")
    commit(paused, 0)

    def late(entry: Path, text: str, **options: Any) -> bool:
        monkeypatch.setattr("penstock.pipelines.sinks.delta.create_text", create_text)
        commit(other, 0)
        commit(other, 1)
        DeltaTable(path).create_checkpoint()
        for version in range(3):
            (path / "_delta_log" / f"{version:020}.json").unlink()
        return create_text(entry, text, **options)

    monkeypatch.setattr("penstock.pipelines.sinks.delta.create_text", late)
    commit(paused, 1)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 0, 1, 1], 4)


@pytest.mark.parametrize(
    ("is_checked", "by_deltalake"), [(False, [0, 2, 5]), (True, range(8))], ids=["interval", "feature"]
)
def test_versions_with_other_rules_are_left_to_deltalake(
    tmp_path: Path, by_deltalake: Sequence[int], *, is_checked: bool
) -> None:
    path = tmp_path / "t"
    DeltaTable.create(path, pa.schema([("n", pa.int64())]), configuration={"delta.checkpointInterval": "3"})
    if is_checked:
        DeltaTable(path).alter.add_feature(TableFeatures.CheckConstraints, allow_protocol_versions_increase=True)
    writer = DeltaWriter(path, "rows", "q")
    for batch in range(7 - is_checked):
        commit(writer, batch)
    versions = [path / "_delta_log" / f"{number:020}.json" for number in range(8)]
    engines = [json.loads(version.read_text().split("\n")[0])["commitInfo"]["engineInfo"] for version in versions]
    assert [number for number, engine in enumerate(engines) if "delta-rs" in engine] == list(by_deltalake)
    assert (path / "_delta_log" / f"{5:020}.checkpoint.parquet").exists()
    assert numbers(path) == list(range(7 - is_checked))


@pytest.mark.parametrize("every", ["0", "often"])
def test_an_interval_of_checkpoints_that_is_no_number_is_the_default(tmp_path: Path, every: str) -> None:
    path = tmp_path / "t"
    DeltaTable.create(path, pa.schema([("n", pa.int64())]), configuration={"delta.checkpointInterval": every})
    commit(DeltaWriter(path, "rows", "q"), 0)
    assert numbers(path) == [0]


def test_two_sinks_write_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    one, other = DeltaWriter(path, "one", "q1"), DeltaWriter(path, "other", "q2")
    commit(one, 0)
    place = DeltaWriter._place

    def meanwhile(self: DeltaWriter, found: Sequence[StoragePath]) -> list[StoragePath]:
        monkeypatch.setattr(DeltaWriter, "_place", place)
        # It adds a column, too: the first commit fails, and is made with the new schema.
        commit(other, 0, pa.table({"n": [10], "more": ["x"]}))
        return place(self, found)

    monkeypatch.setattr(DeltaWriter, "_place", meanwhile)
    commit(one, 1)
    assert numbers(path) == [0, 1, 10]


def test_sinks_that_write_one_table_read_the_versions_of_each_other_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    one, other, zombie = (DeltaWriter(path, *named) for named in (("one", "q1"), ("other", "q2"), ("one", "q1")))
    for writer in (one, other, zombie):
        commit(writer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "_listed", None)
        patch.setattr(DeltaWriter, "_load", None)
        for function in ("__init__", "create_write_transaction", "update_incremental"):
            patch.setattr(DeltaTable, function, None)
        for batch in (1, 2):
            for writer in (one, other, other, zombie):
                commit(writer, batch)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 0, 1, 1, 2, 2], 6)
    # deltalake removes rows: a version with files only.
    DeltaTable(path).delete("n = 1")
    commit(one, 3)
    # Other versions change what was checked: the table is loaded.
    DeltaTable(path).alter.add_columns([Field("more", PrimitiveType("string"))])
    commit(other, 3, pa.table({"n": [30], "more": ["x"]}))
    DeltaTable(path).alter.add_feature(TableFeatures.CheckConstraints, allow_protocol_versions_increase=True)
    commit(one, 4)
    entry = path / "_delta_log" / f"{12:020}.json"
    assert "delta-rs" in json.loads(entry.read_text().split("\n")[0])["commitInfo"]["engineInfo"]
    assert (numbers(path), DeltaTable(path).version()) == ([0, 0, 2, 2, 3, 4, 30], 12)


def test_deltalake_finds_a_version_if_many_clients_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    writer, others = DeltaWriter(path, "rows", "q"), DeltaWriter(path, "others", "p")
    commit(writer, 0)
    made = []

    def created_by_others(entry: Path, text: str, **options: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return create_text(entry, text, **options)
        made.append(entry)
        thread = threading.Thread(target=commit, args=(others, len(made)))
        thread.start()
        thread.join()
        return create_text(entry, text, **options)

    monkeypatch.setattr("penstock.pipelines.sinks.delta.create_text", created_by_others)
    commit(writer, 1)
    assert (numbers(path), DeltaTable(path).version()) == ([0, 1, 1, 2, 3, 4, 5], 7)


def test_without_links_a_version_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        with pytest.raises(StorageError, match="cannot be created: Operation not permitted"):
            commit(writer, 1)
    assert numbers(path) == [0]
    commit(writer, 1)
    assert numbers(path) == [0, 1]


def test_a_transaction_does_not_expire(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = {"delta.setTransactionRetentionDuration": "interval 0 seconds"}
    DeltaTable.create(path, pa.schema([("n", pa.int64())]), configuration=kept)
    for _ in range(2):
        commit(DeltaWriter(path, "rows", "q"), 0)
        DeltaTable(path).create_checkpoint()
    assert numbers(path) == [0]


def test_what_earlier_attempts_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    mine = staged(DeltaWriter(path, "rows", "q"), 1, pa.table({"n": [1]}))[0]
    others = [staged(DeltaWriter(path, name, "q"), 1, pa.table({"n": [1]}))[0] for name in ("rows-1", "all-rows")]
    DeltaWriter(path, "rows", "q")
    assert not mine.exists()
    assert all(other.exists() for other in others)


def test_a_writer_refuses_its_own_batches_of_another_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "t"
    commit(DeltaWriter(path, "rows", "old"), 4)
    with pytest.raises(PenstockError, match="another checkpoint") as refused:
        DeltaWriter(path, "rows", "new")
    assert refused.value.why is not None
    assert "batch 4 was written by query old" in refused.value.why
    # Rows that are replaced by key may be written again.
    DeltaWriter(path, "rows", "new", ["n"])
    commit(DeltaWriter(path, "others", "new"), 0)


def test_the_check_of_checkpoints_outlives_the_log(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "old")
    for batch in range(3):
        commit(writer, batch)
    DeltaTable(path).create_checkpoint()
    for version in range(3):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    assert delta_writers(path) == {"rows": {"old": 2}}
    with pytest.raises(PenstockError, match="another checkpoint"):
        DeltaWriter(path, "rows", "new")


def test_columns_are_added_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    at = datetime(2026, 3, 1)  # noqa: DTZ001 - a time without a zone
    commit(writer, 0, pa.table({"n": [0]}))
    commit(
        writer,
        1,
        pa.table({"n": [1], "at": pa.array([at], pa.timestamp("us"))}),
    )
    commit(writer, 2, pa.table({"at": pa.array([at], pa.timestamp("us"))}))
    rows = DeltaTable(path).to_pyarrow_table().select(["n", "at"]).to_pylist()
    assert sorted(rows, key=lambda row: (row["n"] is None, row["n"])) == [
        {"n": 0, "at": None},
        {"n": 1, "at": at},
        {"n": None, "at": at},
    ]


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    with pytest.raises(ConfigError, match=r"column 'n' is STRING now, in .* it is LONG"):
        commit(writer, 1, pa.table({"n": ["x"]}))
    # The same without rows, from the types in a pipeline file.
    with pytest.raises(ConfigError, match=r"column 'n' is STRING now, in .* it is BIGINT"):
        check_types(path, "rows", {"n": "STRING"})
    assert numbers(path) == [0]


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("a b", "string", "a space"),
        ("v", "variant", "no type for VARIANT"),
        ("v", "interval day to second", "no type for INTERVAL"),
        ("v", {"type": "array", "elementType": "variant", "containsNull": True}, "no type for ARRAY"),
        ("N", "long", "upper and lower case"),
    ],
)
def test_columns_that_delta_does_not_have_are_refused(tmp_path: Path, name: str, kind: Any, why: str) -> None:
    commit(DeltaWriter(tmp_path, "rows", "q"), 0)
    with pytest.raises(ConfigError) as refused:
        check_fields(tmp_path, "rows", [field(name, kind)])
    assert refused.value.why is not None
    assert why in refused.value.why


def test_types_of_a_new_table_may_be_nested(tmp_path: Path) -> None:
    nested = {"type": "struct", "fields": [field("a", "decimal(10,2)")]}
    mapped = {"type": "map", "keyType": "string", "valueType": nested, "valueContainsNull": True}
    check_fields(tmp_path, "rows", [field("m", mapped), field("at", "timestamp_ntz")])


def test_a_damaged_table_is_an_error_with_its_path(tmp_path: Path) -> None:
    commit(DeltaWriter(tmp_path, "rows", "q"), 0)
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text('{"add": 1}\n')
    with pytest.raises(StorageError, match="cannot be read or written"):
        check_types(tmp_path, "rows", {"n": "STRING"})


def test_texts_with_line_separators_are_no_lines_of_the_log(tmp_path: Path) -> None:
    for batch, text in enumerate(("a\u2028b", "a\x85b", "a\x0bb", "a\r\nb")):
        commit(DeltaWriter(tmp_path, "rows", "q"), batch, pa.table({"s": [text]}))
    merging = DeltaWriter(tmp_path, "merged", "q", ["s"])
    commit(merging, 0, pa.table({"s": ["a\u2028b", "c\u2029d"]}))
    assert delta_writers(tmp_path) == {"rows": {"q": 3}, "merged": {"q": 0}}
    assert len(numbers(tmp_path, "s")) == 5


def test_names_are_ascii_and_the_schema_has_no_not_null(tmp_path: Path) -> None:
    path = tmp_path / "it`s a täble"
    writer = DeltaWriter(path, "röws", "q")
    attempt, names = staged(writer, 0, pa.table({"n": [1]}), nullable=False)
    writer.commit(0, attempt, names, 1)
    assert [file.relative_to(path).as_posix().isascii() for file in delta_files(path)] == [True]
    assert [each.nullable for each in DeltaTable(path).schema().fields] == [True]
    assert numbers(path) == [1]


def test_data_log_and_directories_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    synced: list[str] = []
    versions: list[bool] = []

    def record(file: Path) -> None:
        synced.append(file.relative_to(tmp_path).as_posix())
        versions.append((path / "_delta_log" / f"{2:020}.json").exists())

    for module in ("sinks.delta", "state_dir.layout"):
        monkeypatch.setattr(f"penstock.pipelines.{module}.sync_directory", record)
    monkeypatch.setattr("penstock.pipelines.sinks.delta.sync_file", record)
    commit(writer, 1)
    # The contents of the version are synced before it gets its name.
    assert synced == ["t/data", "t", "t/_delta_log"]
    assert versions == [False, False, True]
    synced.clear()
    # As deltalake writes versions, which a checkpoint follows.
    monkeypatch.setattr(DeltaWriter, "_is_due", lambda *_: True)
    commit(writer, 2)
    assert synced == ["t/data", "t", f"t/_delta_log/{3:020}.json", "t/_delta_log", "t", "."]


def test_rows_replace_rows_with_the_same_keys_once(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "newest", "q", ["k", 'a "b"'])

    def batch(*rows: tuple[str | None, int]) -> pa.Table:
        return pa.table(
            {"k": pa.array([k for k, _ in rows], pa.string()), 'a "b"': ["x"] * len(rows), "n": [n for _, n in rows]}
        )

    # Delta accepts no such name in a new table.
    DeltaTable.create(path, batch(("a", 1)).schema)
    for number, rows in (
        (0, batch(("a", 1), (None, 2))),
        (1, batch(("a", 5), ("b", 6), (None, 7))),
        (0, batch(("a", 9))),
    ):
        commit(writer, number, rows)
    commit(DeltaWriter(path, "newest", "q", ["k", 'a "b"']), 1, batch(("c", 9)))
    found = {row["k"]: row["n"] for row in DeltaTable(path).to_pyarrow_table().to_pylist()}
    assert found == {"a": 5, "b": 6, None: 7}


class Synced(NamedTuple):
    """Numbers of the files (inodes) that were synced, and the entries of directories when they were synced."""

    files: set[int]
    entries: set[Path]


def synced_by(monkeypatch: pytest.MonkeyPatch) -> Synced:
    """Record what is synced from now on."""
    synced = Synced(set(), set())
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.files.add(os.fstat(descriptor).st_ino)
        synced.entries.update(path.iterdir() if path.is_dir() else ())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return synced


def unsynced(path: Path, above: Path, version: int, synced: Synced) -> set[Path]:
    """Return the version, the files that it names and their directories below ``above`` that would not survive a power
    loss: a file must be synced, and each directory above it while it had the name of its entry."""
    entry = path / "_delta_log" / f"{version:020}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    added = [each[kind] for each in actions for kind in ("add", "cdc") if kind in each]
    named = [entry, *(path / unquote(each["path"]) for each in added)]
    directories = {each for file in named for each in file.parents if above in each.parents}
    lost = {file for file in named if file.stat().st_ino not in synced.files}
    return lost | ({*named, *directories} - synced.entries)


@pytest.mark.parametrize("keys", [(), ("k",)])
@pytest.mark.parametrize("partition_by", [(), ("k", "bucket(2, n)")])
def test_all_that_a_version_names_is_synced_before_the_commit_returns(
    tmp_path: Path, keys: Sequence[str], partition_by: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also new directories: those of the table, and those of partitions that only a merge creates."""
    path = tmp_path / "new" / "lake" / "t"
    synced = synced_by(monkeypatch)
    fields = TableSink(path="new", partition_by=list(partition_by)).partitions
    writer = DeltaWriter(path, "rows", "q", keys, fields, change_data_feed=True)
    names = [name for name in ("k", "n_bucket_2") if partition_by]
    for number, found in enumerate((["a", "b"], ["b", "ä c"], ["d"])):
        rows = pa.table({"k": found, "n": range(len(found)), "n_bucket_2": pa.array([0, 1][: len(found)], pa.int32())})
        attempt, files_ = staged(writer, number, rows if partition_by else rows.drop_columns(["n_bucket_2"]))
        for file in files_:
            # As a task of an executor does.
            sync_file(attempt / file)
        if names and not keys:
            files_ = [part for file in files_ for part in split_file(attempt / file, names)]
        writer.commit(number, attempt, files_, len(found))
        newest = DeltaTable(path).version()
        assert newest == number + 1
        assert unsynced(path, tmp_path, newest, synced) == set()
    assert unsynced(path, tmp_path, 0, synced) == set()
    assert sorted(numbers(path, "k")) == (["a", "b", "d", "ä c"] if keys else ["a", "b", "b", "d", "ä c"])


def test_a_new_column_is_synced_before_the_rows_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    synced = synced_by(monkeypatch)
    append = DeltaWriter._create_version

    def checked(self: DeltaWriter, *arguments: Any) -> bool:
        assert unsynced(path, path, 2, synced) == set()
        return append(self, *arguments)

    monkeypatch.setattr(DeltaWriter, "_create_version", checked)
    commit(writer, 1, pa.table({"n": [1], "more": ["x"]}))
    assert (numbers(path), DeltaTable(path).version()) == ([0, 1], 3)


def test_a_table_has_a_change_data_feed_from_the_next_batch_on(tmp_path: Path) -> None:
    path = tmp_path / "t"
    commit(DeltaWriter(path, "rows", "q", ("k",)), 0, pa.table({"k": ["a"], "n": [1]}))
    with pytest.raises(ConfigError, match="has no change data feed"):
        DeltaLog(path).check_change_feed()
    writer = DeltaWriter(path, "rows", "q", ("k",), change_data_feed=True)
    for batch in (1, 2, 2):
        commit(writer, batch, pa.table({"k": ["a", "b"], "n": [batch, batch]}))
    assert DeltaLog(path).check_change_feed() == 4  # 2 has set the property
    found = pa.table(DeltaTable(path).load_cdf(starting_version=3)).to_pylist()
    changes = [("update_preimage", "a", 1), ("update_postimage", "a", 1), ("insert", "b", 1)]
    assert {(row["_change_type"], row["k"], row["n"]) for row in found if row["_commit_version"] == 3} == set(changes)
    commit(DeltaWriter(path, "rows", "q", ("k",)), 3, pa.table({"k": ["c"], "n": [1]}))
    assert DeltaLog(path).check_change_feed() == 5


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_a_repeated_batch_is_synced_if_its_run_was_killed_before_that(
    tmp_path: Path, keys: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    rows = pa.table({"k": ["a"], "n": [1]})
    commit(DeltaWriter(path, "rows", "q", keys), 0, rows)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaWriter, "_sync", killed)
        patch.setattr("penstock.pipelines.state_dir.layout.sync_directory", killed)
        with pytest.raises(KeyboardInterrupt):
            commit(DeltaWriter(path, "rows", "q", keys), 1, rows)
    commit(DeltaWriter(path, "others", "p", keys), 0, rows)
    synced = synced_by(monkeypatch)
    commit(DeltaWriter(path, "rows", "q", keys), 1, rows)
    entry = path / "_delta_log" / f"{2:020}.json"
    assert (DeltaTable(path).version(), entry.stat().st_ino in synced.files, entry in synced.entries) == (3, True, True)
    assert not keys or unsynced(path, tmp_path, 2, synced) <= {path}


def test_rows_are_deleted_by_key_in_the_order_of_batches(tmp_path: Path) -> None:
    """A row that does not exist is no error, and a batch that changes nothing is known all the same."""
    path = tmp_path / "t"

    def batch(number: int, *rows: tuple[str | None, int | None, bool], again: DeltaWriter | None = None) -> None:
        keys, values, deletes = zip(*rows, strict=True)
        made = pa.table({"k": pa.array(keys, pa.string()), "n": pa.array(values, pa.int64()), DELETES: deletes})
        commit(again or writer, number, made)

    def found() -> dict[str | None, int | None]:
        return {row["k"]: row["n"] for row in DeltaTable(path).to_pyarrow_table().to_pylist()}

    writer = DeltaWriter(path, "newest", "q", ["k"])
    # The table does not exist yet, and is created by a batch with deletes only.
    batch(0, ("x", None, True))
    assert (found(), delta_writers(path)) == ({}, {"newest": {"q": 0}})
    batch(1, ("a", 1, False), ("b", 2, False), (None, 3, False), ("y", None, True))
    assert found() == {"a": 1, "b": 2, None: 3}
    batch(2, ("a", None, True), ("b", 5, False), (None, None, True))
    assert found() == {"b": 5}
    batch(3, ("a", 7, False), ("b", None, True))
    assert found() == {"a": 7}
    for number in (4, 4):
        batch(number, ("b", None, True))
    versions = DeltaTable(path).version()
    # A repeated batch, and those of a run that lost its lease, change nothing.
    for late in (writer, DeltaWriter(path, "newest", "q", ["k"])):
        batch(2, ("a", None, True), again=late)
        batch(4, ("a", None, True), again=late)
    assert (found(), DeltaTable(path).version(), versions) == ({"a": 7}, 5, 5)
    assert DeltaTable(path).schema().to_arrow().names == ["k", "n"]
    committed = [version.transactions.get("penstock/newest/q") for version in DeltaLog(path).versions(-1)]
    assert committed == [None, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_during_a_merge_neither_loses_nor_repeats_it(
    tmp_path: Path, *, after: bool, deletes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"k": ["a", "b"], "n": [1, 5]})
    changed = pa.table({"k": ["a", "b"], "n": [2, 5], **({DELETES: [False, True]} if deletes else {})})
    commit(DeltaWriter(tmp_path, "newest", "q", ["k"]), 0, rows)
    merge = DeltaWriter._merge

    def crash(*arguments: Any) -> None:
        if after:
            merge(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaWriter, "_merge", crash)
        with pytest.raises(KeyboardInterrupt):
            commit(DeltaWriter(tmp_path, "newest", "q", ["k"]), 1, changed)
    commit(DeltaWriter(tmp_path, "newest", "q", ["k"]), 1, changed)
    assert numbers(tmp_path) == ([2] if deletes else [2, 5])


def test_a_merged_nan_is_found(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path, "newest", "q", ["k"])
    for batch in range(2):
        commit(writer, batch, pa.table({"k": ["a", "b"], "x": [float(batch), float("nan")]}))
    assert pl.scan_delta(str(tmp_path)).filter(pl.col("x") > 5).collect()["k"].to_list() == ["b"]


def test_columns_of_any_name_are_merged(tmp_path: Path) -> None:
    names = ["a.b", "b`k", "c``", 'q"t', "d-e", "$v", "sel'ect", "order", "Ünï"]
    writer = DeltaWriter(tmp_path, "newest", "q", names[:4])
    for batch in range(2):
        keys = {name: [0, batch + 1] for name in names[:4]}
        commit(writer, batch, pa.table(keys | {name: [batch, batch] for name in names[4:]}))
    found = DeltaTable(tmp_path).to_pyarrow_table().to_pylist()
    expected = [dict.fromkeys(names[:4], key) | dict.fromkeys(names[4:], n) for key, n in ((0, 1), (1, 0), (2, 1))]
    assert sorted(found, key=lambda row: int(row["a.b"])) == expected


NESTED_TYPES: dict[str, pa.DataType] = {
    "k": pa.string(),
    "a.b": pa.int64(),
    "s": pa.struct([("x", pa.float64()), ("y", pa.int64())]),
    "l": pa.list_(pa.struct([("z", pa.float64())])),
    "m": pa.map_(pa.string(), pa.list_(pa.float64())),
}


def test_nested_columns_are_merged_and_combined(tmp_path: Path) -> None:
    def row(k: str, n: int, x: float) -> dict[str, Any]:
        return {"k": k, "a.b": n, "s": {"x": x, "y": n}, "l": [{"z": x}, None], "m": [(k, [x])]}

    writer = DeltaWriter(tmp_path, "newest", "q", ["k"])
    batches = [[row("a", 1, 1.0), row("b", 2, 2.0)], [row("b", 3, float("nan")), row("c", 4, 4.0)], [row("a", 5, 5.0)]]
    for batch, rows in enumerate(batches):
        commit(writer, batch, pa.Table.from_pylist(rows, pa.schema(NESTED_TYPES)))
    expected = [row("a", 5, 5.0), row("b", 3, float("nan")), row("c", 4, 4.0)]
    for is_combined in (False, True):
        found = sorted(DeltaTable(tmp_path).to_pyarrow_table().to_pylist(), key=lambda each: str(each["k"]))
        # As text, since a NaN does not equal itself.
        assert list(map(repr, found)) == list(map(repr, expected))
        newest = max((tmp_path / "_delta_log").glob("*.json"))
        log = [json.loads(line) for line in newest.read_text().splitlines()]
        bounds = [json.loads(each["add"]["stats"])["maxValues"] for each in log if "add" in each]
        # No bounds of the numbers in structs: they would not contain the NaN, and readers would skip the file.
        assert {name for each in bounds for name in each} == {"k", "a.b"}
        if not is_combined:
            maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
    assert len(delta_files(tmp_path)) == 1


def test_a_table_of_another_program_with_the_same_transactions_continues(tmp_path: Path) -> None:
    """delta-spark writes the same ids: tables that were written with Delta's jars have them."""
    rows = pa.table({"n": [0]})
    table = DeltaTable.create(tmp_path, rows.schema)
    pq.write_table(rows, tmp_path / "a.parquet")
    add = AddAction("a.parquet", (tmp_path / "a.parquet").stat().st_size, {}, 0, True, '{"numRecords":1}')
    properties = CommitProperties(app_transactions=[Transaction("penstock/rows/q", 7)])
    table.create_write_transaction([add], "append", table.schema(), commit_properties=properties)
    writer = DeltaWriter(tmp_path, "rows", "q")
    for batch in (6, 7, 8):
        commit(writer, batch)
    assert numbers(tmp_path) == [0, 8]


def test_other_engines_read_the_same_rows(tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path, "rows", "q")
    at = [datetime(2026, 3, 1, 12, 0, 0, micro, UTC) for micro in (1, 2)]
    times = [pa.array([each], pa.timestamp("us", "UTC")) for each in at]
    commit(writer, 0, pa.table({"n": [1], "at": times[0], "x": [1.5], "s": ["ä"]}))
    commit(writer, 1, pa.table({"n": [2], "at": times[1], "x": [float("nan")], "s": pa.array([None], pa.string())}))
    lazy = pl.scan_delta(str(tmp_path))
    assert lazy.sort("n").collect()["at"].to_list() == at
    # Files are skipped by statistics: a NaN is larger than all numbers, and must not be lost by that.
    assert lazy.filter(pl.col("x") > 5).collect()["n"].to_list() == [2]
    assert lazy.filter(pl.col("at") == at[1]).collect()["n"].to_list() == [2]
    found = duckdb.from_arrow(DeltaTable(tmp_path).to_pyarrow_dataset()).project("n, s").order("n")
    assert found.fetchall() == [(1, "ä"), (2, None)]
    assert sorted(files(tmp_path)) == sorted(delta_files(tmp_path))
    assert sum(pq.read_metadata(file).num_rows for file in files(tmp_path)) == 2


def test_the_allocator_of_deltalake_returns_freed_pages() -> None:
    """In a process of its own: it reads its options once, and prints them at its end."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "import penstock.pipelines.sinks.delta as delta\n"
        "os.environ['_RJEM_MALLOC_CONF'] += ',stats_print:true'\n"
        "try:\n"
        "    delta.load(Path('/nonexistent'))\n"
        "except delta.StorageError:\n"
        "    pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "_RJEM_MALLOC_CONF"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "opt.dirty_decay_ms: 0 " in ended.stderr
    assert "opt.muzzy_decay_ms: 0 " in ended.stderr
