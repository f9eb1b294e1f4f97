"""The log of a Delta table, written by hand; tests/spark reads tables that Delta itself has written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError, DataLossError, PenstockError, StorageError
from penstock.spark.files import source
from penstock.spark.files.delta_log import LIST_S, DeltaLog, DeltaVersion
from penstock.spark.files.source import FileEntry, FileLog, FilesStreamReader, list_new_versions

COLUMNS = [
    {"name": "machine", "type": "string", "nullable": True, "metadata": {}},
    {"name": "year", "type": "integer", "nullable": True, "metadata": {}},
    {"name": "ok", "type": "boolean", "nullable": True, "metadata": {}},
    {"name": "of", "type": {"type": "array", "elementType": "string", "containsNull": True}, "metadata": {}},
]


def meta(**configuration: str) -> dict[str, Any]:
    return {"metaData": {"schemaString": json.dumps({"fields": COLUMNS}), "configuration": configuration}}


def add(path: str, at: int = 0, *, changes: bool = True, **more: Any) -> dict[str, Any]:
    action = {"path": path, "modificationTime": at, "dataChange": changes, "partitionValues": {}, "size": 1}
    return {"add": action | more}


def remove(path: str, *, changes: bool = True) -> dict[str, Any]:
    return {"remove": {"path": path, "dataChange": changes}}


class Table:
    """A Delta table, one version after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "_delta_log").mkdir(parents=True)
        self.version = -1

    def commit(self, *actions: dict[str, Any]) -> None:
        self.version += 1
        lines = [json.dumps(action) for action in actions]
        self.log(self.version).write_text("\n".join([*lines, json.dumps({"commitInfo": {}})]))
        for action in actions:
            if "add" in action and not (self.path / action["add"]["path"]).exists():
                file = self.path / action["add"]["path"]
                file.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"machine": ["a", "b"]}), file)

    def log(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020}.json"

    def checkpoint(self, version: int, actions: list[dict[str, Any]], part: str = "") -> None:
        empty = {"add": None, "metaData": None, "protocol": None}
        kinds = pa.schema(
            [
                ("add", pa.struct([("path", pa.string()), ("modificationTime", pa.int64()),
                                   ("partitionValues", pa.map_(pa.string(), pa.string()))])),
                ("metaData", pa.struct([("schemaString", pa.string()),
                                        ("configuration", pa.map_(pa.string(), pa.string()))])),
                ("protocol", pa.struct([("minReaderVersion", pa.int32())])),
            ]
        )  # fmt: skip
        rows = pa.Table.from_pylist([empty | action for action in actions], schema=kinds)
        pq.write_table(rows, self.path / "_delta_log" / f"{version:020}.checkpoint{part}.parquet")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "t")


def names(files: list[Any]) -> list[str]:
    return [Path(file.path).name for file in files]


def test_a_snapshot_is_what_was_added_and_not_removed(table: Table) -> None:
    table.commit({"protocol": {"minReaderVersion": 1}}, meta(), add("late", at=5), add("early", at=1))
    table.commit(add("more", at=9, stats='{"numRecords": 7}'), remove("late"))
    number, files = DeltaLog(table.path).snapshot()
    assert (number, names(files), [file.records for file in files]) == (1, ["early", "more"], [None, 7])
    assert files[0].path == str((table.path / "early").resolve())


def test_values_by_which_a_table_is_partitioned_have_their_types(table: Table) -> None:
    values = {"machine": "a=b", "year": "2024", "ok": "true"}
    none = {"machine": None, "year": "", "ok": "false"}
    table.commit(meta(), add("machine=a%253Db/x%20y", partitionValues=values), add("z", partitionValues=none))
    found = {Path(file.path).name: file for file in DeltaLog(table.path).snapshot()[1]}
    assert found["x y"].columns == {"machine": "a=b", "year": 2024, "ok": True}
    assert Path(found["x y"].path).parent.name == "machine=a%3Db"
    assert found["z"].columns == {"machine": None, "year": None, "ok": False}


def test_versions_say_what_was_added_taken_away_and_by_whom(table: Table) -> None:
    table.commit(meta(), add("a"))
    table.commit(add("b"), {"txn": {"appId": "penstock/rows/q", "version": 4}})
    table.commit(add("ab", changes=False), remove("a", changes=False), remove("b", changes=False))
    table.commit(remove("ab"), add("c"))
    found = list(DeltaLog(table.path).versions(0))
    assert [(v.number, names(v.added), v.removes_rows, v.transactions) for v in found] == [
        (1, ["b"], False, {"penstock/rows/q": 4}),
        (2, [], False, {}),
        (3, ["c"], True, {}),
    ]
    assert isinstance(found[0], DeltaVersion)
    assert list(DeltaLog(table.path).versions(3)) == []


@pytest.mark.parametrize("parts", [[""], [".0000000001.0000000002", ".0000000002.0000000002"]])
def test_a_snapshot_begins_at_a_checkpoint_where_older_versions_are_gone(table: Table, parts: list[str]) -> None:
    for name in "abc":
        table.commit(meta(), add(name))
    kept: list[dict[str, Any]] = [add("a", partitionValues=[("year", "7")]), add("b")]
    for file in kept:
        file["add"] = {name: file["add"][name] for name in ("path", "modificationTime", "partitionValues")}
    for part in parts:
        table.checkpoint(1, [*kept, meta()] if part == parts[-1] else [], part)
    table.log(0).unlink()
    number, files = DeltaLog(table.path).snapshot()
    assert (number, names(files), files[0].columns) == (2, ["a", "b", "c"], {"year": 7})
    with pytest.raises(DataLossError, match=r"version 0 of the Delta table .* is no longer in its log"):
        list(DeltaLog(table.path).versions(-1))


def test_an_incomplete_checkpoint_is_ignored(table: Table) -> None:
    table.commit(meta(), add("a"))
    table.commit(add("b"))
    table.checkpoint(0, [], ".0000000001.0000000002")
    table.log(0).unlink()
    with pytest.raises(StorageError, match="has neither version 0 nor a checkpoint"):
        DeltaLog(table.path).snapshot()


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ({"metaData": {"schemaString": "{}", "configuration": {"delta.columnMapping.mode": "name"}}}, "by name"),
        ({"protocol": {"minReaderVersion": 3, "readerFeatures": ["variantType"]}}, "the feature variantType"),
        (add("b", deletionVector={"storageType": "u"}), "REORG TABLE"),
    ],
)
def test_unsupported_table_features_are_refused(table: Table, action: dict[str, Any], says: str) -> None:
    table.commit(meta(), add("a"))
    table.commit(action)
    with pytest.raises(ConfigError, match=says):
        DeltaLog(table.path).snapshot()
    with pytest.raises(ConfigError, match=says):
        list(DeltaLog(table.path).versions(0))


def test_no_table_and_no_log(table: Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Delta table"):
        DeltaLog(tmp_path / "elsewhere").check()
    table.log(0).write_text("{")
    with pytest.raises(StorageError, match="is not a Delta log"):
        DeltaLog(table.path).snapshot()


def found(table: Table, known: list[FileEntry], *, skip: bool = False) -> list[FileEntry]:
    last = max((entry.version for entry in known if entry.version is not None), default=None)
    return list_new_versions(DeltaLog(table.path), last, skip_changes=skip)[0]


def test_files_are_found_version_by_version(table: Table, tmp_path: Path) -> None:
    log = FileLog(tmp_path / "q.jsonl")
    table.commit(meta(), add("a"), add("b"))
    log.append(first := found(table, []))
    assert [(Path(e.path).name, e.version, e.more, e.records) for e in first] == [("a", 0, True, 2), ("b", 0, False, 2)]
    assert found(table, log.entries()) == []
    table.commit(add("c"))
    table.commit(remove("a", changes=False), add("a2", changes=False))
    table.commit(add("d", stats='{"numRecords": 9}'))
    log.append(found(table, log.entries()))
    assert [(Path(e.path).name, e.records) for e in log.entries()] == [("a", 2), ("b", 2), ("c", 2), ("d", 9)]


def test_a_version_that_a_crash_cut_off_is_found_again_as_a_whole(table: Table, tmp_path: Path) -> None:
    table.commit(meta(), *(add(name) for name in "abc"))
    log = FileLog(tmp_path / "q.jsonl")
    log.append(found(table, []))
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:2]))
    assert log.entries() == []
    log.append(found(table, log.entries()))
    assert log.path.read_bytes() == b"".join(lines)


def test_rows_that_are_replaced_end_the_run_or_are_left_out(table: Table) -> None:
    table.commit(meta(), add("a"))
    known = found(table, [])
    table.commit(remove("a"), add("a2"))
    table.commit(add("b"))
    with pytest.raises(PenstockError, match=r"version 1 .* deleted or replaced rows"):
        found(table, known)
    assert names(found(table, known, skip=True)) == ["b"]


def test_a_vacuumed_file_is_a_data_loss(table: Table) -> None:
    table.commit(meta(), add("a"))
    (table.path / "a").unlink()
    with pytest.raises(DataLossError, match="VACUUM"):
        found(table, [])


def test_a_stream_lists_the_log_once_a_minute_and_reads_each_version_once(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for name in ("_listed", "_actions"):
        monkeypatch.setattr(DeltaLog, name, _counted(calls, name, getattr(DeltaLog, name)))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    table.commit(meta(), add("a"))
    given = {"path": str(table.path), "content": "delta", "skiplines": "0", "maxfiles": "9"}
    reader = FilesStreamReader(given | {"inbox": str(tmp_path / "inbox"), "log": str(tmp_path / "q.jsonl")})

    def found(start: int) -> int:
        return int(reader.latestOffset({"files": {"0": start}})["files"]["0"])

    assert found(0) == 1
    calls.clear()
    for each in range(1, 10):
        assert found(each) == each
        table.commit(add(f"new{each}"))
        assert found(each) == each + 1
        # A version without rows is not in the log.
        table.commit(remove(f"new{each}", changes=False), add(f"again{each}", changes=False))
    assert found(10) == 10
    assert calls == {"_actions": 18}
    assert len(list(table.log(0).parent.iterdir())) == 19
    # Another process has removed the next version: that is not noticed without the list.
    table.commit(add("lost"))
    table.commit(add("last"))
    table.log(table.version - 1).unlink()
    assert found(10) == 10
    now[0] += LIST_S
    with pytest.raises(DataLossError, match="is no longer in its log"):
        found(10)
    assert calls["_listed"] > 0


def test_versions_that_another_run_reads_meanwhile_are_in_the_list_once(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit(meta(), add("a"))
    given = {"path": str(table.path), "content": "delta", "skiplines": "0", "maxfiles": "9"}
    given |= {"inbox": str(tmp_path / "inbox"), "log": str(tmp_path / "q.jsonl")}
    late, successor = FilesStreamReader(given), FilesStreamReader(given)

    def paused(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(source, "list_new_versions", list_new_versions)
        found = list_new_versions(*args, **options)
        table.commit(add("b"))
        assert successor.latestOffset({"files": {"0": 0}}) == {"files": {"0": 2}}
        table.commit(add("c"))
        return found

    monkeypatch.setattr(source, "list_new_versions", paused)
    assert late.latestOffset({"files": {"0": 0}}) == {"files": {"0": 3}}
    assert [Path(entry.path).name for entry in FileLog(Path(given["log"])).entries()] == ["a", "b", "c"]


def _counted(calls: Counter[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        calls[name] += 1
        return method(*given)

    return call
