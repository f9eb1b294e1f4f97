"""Delta tables as sinks: each batch once, by transaction id; merged by key. And as sources: as Delta wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import PenstockError
from penstock.pipelines.sinks.delivery import DeltaSink
from penstock.pipelines.spec.sinks import TableSink
from penstock.spark.environment import jars
from penstock.spark.files.source import FileLog, FilesStreamReader

COLUMNS = "_id STRING, k STRING, a STRING, n INT"


@pytest.fixture(autouse=True)
def delta() -> None:
    if not jars.is_set_up():
        pytest.skip("Delta Lake was never set up here: `make jars` does, which needs Maven")


def rows(spark: SparkSession, *values: tuple[str, str, int]) -> DataFrame:
    return spark.createDataFrame([(f"i{n}", k, a, v) for n, (k, a, v) in enumerate(values)], COLUMNS)


def table(spark: SparkSession, path: Path) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.format("delta").load(str(path)).select("k", "a", "n").collect())


def test_a_batch_is_appended_once_by_each_query(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "it`s a table"
    sink = DeltaSink(TableSink(format="delta", path=str(path)), "rows", "q1")
    assert sink.write(0, rows(spark), 0) == 0
    for batch in (1, 2, 2, 1):
        # What a batch holds when it runs again does not matter.
        assert sink.write(batch, rows(spark, ("a", "x", batch)), 1) == 1
    DeltaSink(TableSink(format="delta", path=str(path)), "rows", "q2").write(1, rows(spark, ("b", "y", 9)), 1)
    assert table(spark, path) == [("a", "x", 1), ("a", "x", 2), ("b", "y", 9)]


def test_rows_are_merged_by_key_and_a_batch_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    merged = TableSink(format="delta", path=str(tmp_path / "t"), mode="merge", keys=["k", "a"], order_by="n")
    sink = DeltaSink(merged, "rows", "q")
    sink.write(1, rows(spark, ("a", "x", 2), ("a", "x", 1), ("b", "x", 5)), 3)
    sink.write(2, rows(spark, ("a", "x", 7), ("c", "x", 0), ("a", "x", 3)), 3)
    expected = [("a", "x", 7), ("b", "x", 5), ("c", "x", 0)]
    assert table(spark, tmp_path / "t") == expected
    # An earlier batch, of a run that woke up, is left out.
    sink.write(1, rows(spark, ("a", "x", 100), ("d", "x", 1)), 2)
    sink.write(2, rows(spark, ("a", "x", 100)), 1)
    assert table(spark, tmp_path / "t") == expected


def test_two_rows_of_a_key_need_an_order(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(TableSink(format="delta", path=str(tmp_path / "t"), mode="merge", keys=["k"]), "rows", "q")
    with pytest.raises(PenstockError, match="2 rows of one batch have the key k 'a'"):
        sink.write(1, rows(spark, ("a", "x", 1), ("a", "y", 2)), 2)
    sink.write(1, rows(spark, ("a", "x", 1), ("b", "y", 2)), 2)
    assert [row[0] for row in table(spark, tmp_path / "t")] == ["a", "b"]


def read(path: Path, log: Path, **options: str) -> list[dict[str, Any]]:
    """What the next batch of the source brings."""
    given = {"path": str(path), "content": "delta", "skiplines": "0", "maxfiles": "1000", "inbox": str(log) + ".d"}
    reader = FilesStreamReader(given | {"log": str(log)} | options)
    before = {"files": {"0": len(FileLog(log).entries())}}
    tasks = reader.partitions(before, reader.latestOffset(before))
    return [json.loads(row["value"]) for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def test_a_table_is_read_as_delta_wrote_it(spark: SparkSession, tmp_path: Path) -> None:
    path, log = tmp_path / "a table", tmp_path / "log.jsonl"
    # A checkpoint soon, so that what older versions said is read out of it.
    made = {"delta.checkpointInterval": "3"}
    for n in range(4):
        more = rows(spark, ("it's a/k=1", "x", n))
        more.write.format("delta").mode("append").partitionBy("k", "n").options(**made).save(str(path))
    for version in (0, 1):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    expected = [{"_id": "i0", "a": "x", "k": "it's a/k=1", "n": n} for n in range(4)]
    assert sorted(read(path, log), key=lambda row: row["n"]) == expected
    assert read(path, log) == []
    rows(spark, ("b", "y", 9)).write.format("delta").mode("append").save(str(path))
    assert read(path, log) == [{"_id": "i0", "a": "y", "k": "b", "n": 9}]
    # Files put together hold no new rows; rows that are replaced are told of, or left out.
    spark.sql(f"OPTIMIZE delta.`{path}`")
    assert read(path, log) == []
    spark.sql(f"UPDATE delta.`{path}` SET a = 'z' WHERE n = 9")
    with pytest.raises(PenstockError, match="deleted or replaced rows"):
        read(path, log)
    rows(spark, ("c", "y", 10)).write.format("delta").mode("append").save(str(path))
    assert read(path, log, changes="skip") == [{"_id": "i0", "a": "y", "k": "c", "n": 10}]
