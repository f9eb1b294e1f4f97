from __future__ import annotations

import base64
import gzip
import json
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.files import source as files
from penstock.spark.files.source import (
    Content,
    FileEntry,
    FilesPartition,
    FilesReader,
    FilesStreamReader,
    list_new_files,
    records,
)


def entries(directory: Path, content: Content = "lines", skip: int = 0) -> list[FileEntry]:
    return list(list_new_files(str(directory), content, skip, set()))


def rows(directory: Path, content: Content = "lines", skip: int = 0) -> list[dict[str, Any]]:
    pieces = [(entry, 0, entry.size) for entry in entries(directory, content, skip)]
    return [row for batch in records(pieces) for row in batch.to_pylist()]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_a_file_in_pieces_gives_each_line_once(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"head", b"a", b"", b"bb\r", b"\xff\x00", b"the last one has no end"]
    (tmp_path / "x.csv").write_bytes(b"\n".join(lines))
    monkeypatch.setattr(files, "_PIECE_BYTES", piece)
    planned = files._planned(entries(tmp_path, skip=1))
    found = [
        (row["offset"], row["value"])
        for task in planned
        if isinstance(task, FilesPartition)
        for batch in records(task.pieces)
        for row in batch.to_pylist()
    ]
    offsets = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    assert found == list(zip(offsets, lines, strict=True))[1:]


def test_small_files_share_a_task(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("1\n")
    assert len(files._planned(entries(tmp_path))) == 1


def test_a_packed_file_is_read_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"head\na\nb\n"))
    assert [(row["offset"], row["value"]) for row in rows(tmp_path, skip=1)] == [(5, b"a"), (7, b"b")]


def test_a_whole_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a":\n1}\n')
    (row,) = rows(tmp_path, "whole")
    assert (row["value"], row["offset"], row["key"], row["headers"]) == (b'{"a":\n1}\n', 0, None, [])
    assert row["topic"] == str(tmp_path / "x.json")
    assert row["timestamp"] == datetime.fromtimestamp((tmp_path / "x.json").stat().st_mtime_ns // 1000 / 1e6, UTC)


def test_rows_of_parquet_are_json(tmp_path: Path) -> None:
    table = {
        "name": ["é", None],
        "at": [datetime(2022, 3, 20, tzinfo=UTC), None],
        "naive": [datetime(2022, 3, 20, 1), None],  # noqa: DTZ001 - Parquet knows such times
        "price": [Decimal("1.50"), None],
        "raw": [b"\xff", None],
        "nested": [{"x": [1, 2]}, None],
    }
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    first, second = rows(tmp_path, "parquet")
    assert json.loads(first["value"]) == {
        "name": "é",
        "at": "2022-03-20T00:00:00+00:00",
        "naive": "2022-03-20T01:00:00Z",
        "price": 1.5,
        "raw": base64.b64encode(b"\xff").decode(),
        "nested": {"x": [1, 2]},
    }
    assert (first["offset"], second["offset"]) == (0, 1)
    assert set(json.loads(second["value"]).values()) == {None}
    assert [entry.records for entry in entries(tmp_path, "parquet")] == [2]


def test_maps_are_objects_at_all_levels(tmp_path: Path) -> None:
    numbers, texts = pa.map_(pa.string(), pa.int64()), pa.map_(pa.int32(), pa.string())
    inner = pa.struct([("m", numbers), ("n", pa.int32())])
    deep = pa.map_(pa.string(), pa.struct([("m", numbers)]))
    fields: dict[str, tuple[pa.DataType, Any]] = {
        "plain": (numbers, [[("a", 1), ('"b"', 2)], [], None]),
        "keys": (texts, [[(1, "x"), (2, None)], [], None]),
        "days": (pa.map_(pa.date32(), pa.decimal128(5, 2)), [[(date(2026, 1, 2), Decimal("1.50"))], [], None]),
        "listed": (pa.list_(numbers), [[[("a", 1)], None, []], [], None]),
        "inner": (inner, [{"m": [("a", 1)], "n": 1}, {"m": None, "n": 2}, None]),
        "deep": (deep, [[("k", {"m": [("a", 1)]})], [("k", None)], None]),
    }
    table = pa.table({name: pa.array(values, kind) for name, (kind, values) in fields.items()})
    pq.write_table(table, tmp_path / "x.parquet")
    first, second, third = (json.loads(row["value"]) for row in rows(tmp_path, "parquet"))
    assert first == {
        "plain": {"a": 1, '"b"': 2},
        "keys": {"1": "x", "2": None},
        "days": {"2026-01-02": 1.5},
        "listed": [{"a": 1}, None, {}],
        "inner": {"m": {"a": 1}, "n": 1},
        "deep": {"k": {"m": {"a": 1}}},
    }
    assert second == {
        "plain": {},
        "keys": {},
        "days": {},
        "listed": [],
        "inner": {"m": None, "n": 2},
        "deep": {"k": None},
    }
    assert set(third.values()) == {None}


def test_no_value_of_a_map_with_the_same_key_twice_is_left_out(tmp_path: Path) -> None:
    table = pa.table({"m": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))})
    pq.write_table(table, tmp_path / "x.parquet")
    (row,) = rows(tmp_path, "parquet")
    # A dead letter, as all objects with two equal names.
    assert row["value"] == b'{"m": {"a": 1, "a": 2}}'


def test_decimals_in_nested_columns_have_all_digits(tmp_path: Path) -> None:
    texts = ["12345678901234567890.123456789012345678", "-0.000000000000000001", "100.000000000000000000"]
    exact = [Decimal(text) for text in texts]
    kind = pa.decimal128(38, 18)
    table = pa.table(
        {
            "plain": pa.array(exact[:1], kind),
            "of": pa.array(
                [{"all": exact, "name": 'a"b'}], pa.struct([("all", pa.list_(kind)), ("name", pa.string())])
            ),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    (row,) = rows(tmp_path, "parquet")
    found = json.loads(row["value"], parse_float=str)
    assert found == {"plain": texts[0], "of": {"all": texts, "name": 'a"b'}}


def test_times_of_parquet_that_spark_writes_are_in_all_years(tmp_path: Path) -> None:
    """INT96, Spark's default, has nanoseconds; many tables have the end of the year 9999 for "no end"."""
    times = [datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1, 1, 1, tzinfo=UTC)]
    table = pa.table({"at": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    assert [json.loads(row["value"])["at"] for row in rows(tmp_path, "parquet")] == [
        "9999-12-31T23:59:59.999999Z",
        "0001-01-01T00:00:00Z",
    ]


def options(root: Path, **given: str) -> dict[str, str]:
    (root / "in").mkdir(exist_ok=True)
    base = {"path": str(root / "in"), "content": "lines", "skiplines": "0", "maxfiles": "2"}
    return base | {"inbox": str(root / "inbox"), "log": str(root / "log")} | given


def test_a_stream_takes_new_files_and_a_batch_the_same_again(tmp_path: Path) -> None:
    reader = FilesStreamReader(options(tmp_path))
    assert reader.initialOffset() == reader.latestOffset({"files": {"0": 0}}) == {"files": {"0": 0}}
    for name in "abc":
        (tmp_path / "in" / name).write_text(name)
    assert reader.latestOffset({"files": {"0": 0}}) == {"files": {"0": 2}}
    # A reader after a restart, and one of Spark 4.1, which tells no start, go on in the same order.
    again = FilesStreamReader(options(tmp_path))
    assert again.latestOffset({"files": {"0": 2}}) == {"files": {"0": 3}}
    again.partitions({"files": {"0": 0}}, {"files": {"0": 3}})
    assert again.latestOffset() == {"files": {"0": 3}}
    batch = FilesReader({"log": str(tmp_path / "log"), "start": "1", "end": "3"})
    found = [row["value"] for task in batch.partitions() for b in batch.read(task) for row in b.to_pylist()]
    assert found == [b"b", b"c"]


def test_files_that_a_killed_process_has_listed_are_on_disk_before_an_offset_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    FilesStreamReader(options(tmp_path)).latestOffset({"files": {"0": 0}})
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    reader = FilesStreamReader(options(tmp_path))
    for _ in range(2):
        assert reader.latestOffset({"files": {"0": 0}}) == {"files": {"0": 1}}
    assert synced == [(tmp_path / "log").stat().st_ino]


def test_files_that_another_run_lists_meanwhile_are_in_the_list_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, successor = (FilesStreamReader(options(tmp_path, maxfiles="9")) for _ in range(2))
    for name in "ab":
        (tmp_path / "in" / name).write_text(name)
    count = files.count_records

    def paused(*given: Any) -> int:
        """Another run takes over while the first one reads a file."""
        monkeypatch.setattr(files, "count_records", count)
        assert successor.latestOffset({"files": {"0": 0}}) == {"files": {"0": 2}}
        (tmp_path / "in" / "c").write_text("c")
        return count(*given)

    monkeypatch.setattr(files, "count_records", paused)
    assert late.latestOffset({"files": {"0": 0}}) == {"files": {"0": 3}}
    assert [Path(entry.path).name for entry in successor._log.entries()] == ["a", "b", "c"]


def test_available_now_ends_at_the_existing_files(tmp_path: Path) -> None:
    reader = FilesStreamReader(options(tmp_path))
    for name in "abc":
        (tmp_path / "in" / name).write_text(name)
    reader.prepareForTriggerAvailableNow()
    (tmp_path / "in" / "d").write_text("d")
    ends = [reader.latestOffset({"files": {"0": start}})["files"]["0"] for start in (0, 2, 3)]
    assert ends == [2, 3, 3]


def test_a_trigger_reads_only_what_is_new_in_the_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FilesStreamReader(options(tmp_path, maxfiles="1000"))
    for n in range(300):
        (tmp_path / "in" / f"{n:03}").write_text("x")
    assert reader.latestOffset({"files": {"0": 0}}) == {"files": {"0": 300}}
    parsed: list[object] = []

    def counted(line: bytes) -> Any:
        parsed.append(line)
        return json.loads(line)

    monkeypatch.setattr(files, "json", SimpleNamespace(loads=counted, dumps=json.dumps))
    for n in range(300, 310):
        assert reader.latestOffset({"files": {"0": n}}) == {"files": {"0": n}}
        (tmp_path / "in" / str(n)).write_text("x")
        assert reader.latestOffset({"files": {"0": n}}) == {"files": {"0": n + 1}}
    assert len(parsed) == 10
