"""Delta tables as sinks: each batch once, merged by key. As sources: as delta-spark writes them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.errors import PenstockError
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.delivery import COORDINATES, last_of_each_key
from penstock.pipelines.sinks.delta import DeltaWriter
from penstock.pipelines.sinks.maintenance import maintain, maintained_at
from penstock.pipelines.sinks.migration import migrate
from penstock.pipelines.sinks.partitions import mark_unpartitionable
from penstock.pipelines.sinks.remote_delta import RemoteDeltaTable
from penstock.pipelines.sinks.table import files
from penstock.pipelines.sinks.table import read as read_table
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink, TableSink
from penstock.spark.environment import jars
from penstock.spark.files.source import FileLog, FilesStreamReader
from tests.spark.pipelines import Setup
from tests.spark.processes import DEADLINE_S, until
from tests.spark.test_pipeline_steps import apply, no_lookup, steps
from tests.spark.test_pipeline_steps import rows as records

COLUMNS = "_id STRING, k STRING, a STRING, n INT"


@pytest.fixture
def delta_spark() -> None:
    if not jars.is_set_up():
        pytest.skip("Delta Lake was never set up here: `make jars` does, which needs Maven")


def rows(spark: SparkSession, *values: tuple[str, str, int]) -> DataFrame:
    return spark.createDataFrame([(f"i{n}", k, a, v) for n, (k, a, v) in enumerate(values)], COLUMNS)


def table(path: Path) -> list[tuple[Any, ...]]:
    found = DeltaTable(path).to_pyarrow_table().select(["k", "a", "n"]).to_pylist()
    return sorted(tuple(row.values()) for row in found)


def test_batches_of_spark_are_appended_once(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "it`s a table"
    writer = DeltaWriter(path, "rows", "q1")
    assert writer.write(0, rows(spark), 0) == 0
    for batch in (1, 2, 2, 1):
        # The content of a batch that is repeated does not matter.
        assert writer.write(batch, rows(spark, ("a", "x", batch)), 1) == 1
    DeltaWriter(path, "more", "q2").write(1, rows(spark, ("b", "y", 9)), 1)
    assert table(path) == [("a", "x", 1), ("a", "x", 2), ("b", "y", 9)]


@pytest.mark.usefixtures("delta_spark")
def test_tables_continue_in_both_directions(spark: SparkSession, tmp_path: Path) -> None:
    """Tables that were written with Delta's jars continue without them, and delta-spark honours our transactions."""
    path, uri = tmp_path / "t", f"file://{tmp_path}/t"
    remote = RemoteDeltaTable(TableSink(format="delta", path=uri), "rows", "q")
    remote.write(0, rows(spark, ("a", "x", 0)), 1)
    writer = DeltaWriter(path, "rows", "q")
    for batch in (0, 1):
        writer.write(batch, rows(spark, ("b", "ä", batch)), 1)
    remote.write(1, rows(spark, ("c", "x", 1)), 1)
    remote.write(2, rows(spark, ("d", "x", 2)), 1)
    DeltaWriter(path, "rows", "q").write(2, rows(spark, ("e", "x", 2)), 1)
    expected = [("a", "x", 0), ("b", "ä", 1), ("d", "x", 2)]
    assert table(path) == expected
    read = spark.read.format("delta").load(uri)
    assert sorted(tuple(row) for row in read.select("k", "a", "n").collect()) == expected
    # delta-spark skips files by our statistics.
    assert [row["k"] for row in read.where("n = 1 AND a > 'z'").collect()] == ["b"]


@pytest.mark.usefixtures("delta_spark")
def test_delta_spark_finds_nan_and_times_without_a_zone(spark: SparkSession, tmp_path: Path) -> None:
    writer = DeltaWriter(tmp_path / "t", "rows", "q")
    for batch, value in enumerate(("1.0D", "double('NaN')")):
        made = spark.sql(f"SELECT {value} AS x, timestamp_ntz'2026-03-01 00:00:00.00000{batch}' AS at, {batch} AS n")
        writer.write(batch, made, 1)
    read = spark.read.format("delta").load(str(tmp_path / "t"))
    for condition in ("x > 5", "isnan(x)", "at > timestamp_ntz'2026-03-01'"):
        assert [row["n"] for row in read.where(condition).collect()] == [1]


@pytest.mark.usefixtures("delta_spark")
def test_delta_spark_reads_and_continues_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """Rows that are not written in one pass, such as windows: Spark writes one file, which the driver splits."""
    partitions = TableSink(path="new", partition_by=["k", "bucket(4, n)"]).partitions
    keys = ["p ä/=%:é?#", "x", "", "a b"]

    def batch(number: int) -> None:
        made = rows(spark, *((key, "r", number) for key in keys)).withColumn("n_bucket_4", sf.expr("pmod(hash(n), 4)"))
        DeltaWriter(tmp_path, "rows", "q", partitions=partitions).write(number, made, len(keys))

    for number in (0, 1, 1):
        batch(number)
    maintain(tmp_path, retention_h=168, target_bytes=1 << 20)
    batch(2)
    read = spark.read.format("delta").load(str(tmp_path))
    expected = sorted((key, n) for key in ("", *filter(None, keys)) for n in range(3))
    # An empty text is null in a partition.
    assert sorted((row["k"] or "", row["n"]) for row in read.collect()) == expected
    assert sorted(row["n"] for row in read.where(sf.col("k") == keys[0]).collect()) == [0, 1, 2]
    assert sorted((row["k"] or "", row["n"]) for row in read_table(spark, tmp_path).collect()) == expected


def test_rows_are_merged_by_key_and_a_batch_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    merged = TableSink(format="delta", path=str(tmp_path / "t"), mode="merge", keys=["k", "a"], order_by="n")

    def write(batch: int, *values: tuple[str, str, int]) -> None:
        last = last_of_each_key(rows(spark, *values), merged, "rows")
        DeltaWriter(tmp_path / "t", "rows", "q", merged.keys).write(batch, last, len(values))

    write(1, ("a", "x", 2), ("a", "x", 1), ("b", "x", 5))
    write(2, ("a", "x", 7), ("c", "x", 0), ("a", "x", 3))
    expected = [("a", "x", 7), ("b", "x", 5), ("c", "x", 0)]
    assert table(tmp_path / "t") == expected
    # An earlier batch, of a run that resumed, is left out.
    write(1, ("a", "x", 100), ("d", "x", 1))
    write(2, ("a", "x", 100))
    assert table(tmp_path / "t") == expected


def test_two_rows_of_a_key_need_an_order(spark: SparkSession) -> None:
    merged = TableSink(format="delta", path="t", mode="merge", keys=["k"])
    with pytest.raises(PenstockError, match="2 rows of one batch have the key k 'a'"):
        last_of_each_key(rows(spark, ("a", "x", 1), ("a", "y", 2)), merged, "rows")
    assert last_of_each_key(rows(spark, ("a", "x", 1), ("b", "y", 2)), merged, "rows").count() == 2


PIPELINE = """
name: {name}
source: {{topics: [{topic}], master: "{master}"}}
statestore: {{broker: "{broker}"}}
steps:
  - {{name: parsed, parse: {{schema: "k STRING NOT NULL, n INT"}}}}
sinks:
  - name: rows
    table:
      path: "{lake}/rows"
      partition_by: [k, day(_timestamp), "bucket(4, n)"]
      maintenance: {{every: 1 hour, retention: 1 day}}
  - {{name: again, table: {{{format}path: "{lake}/again"}}}}
  - name: newest
    table: {{path: "{lake}/newest", mode: merge, keys: [k], order_by: n, partition_by: ["bucket(2, k)"]}}
dead_letters: {{path: "{lake}/dead"}}
"""


def test_a_text_that_is_not_utf8_is_no_partition(spark: SparkSession) -> None:
    """No directory has its name: the task would fail at each attempt."""
    made = steps(
        {"name": "raw", "parse": {"format": "raw", "schema": "body BINARY"}},
        {"name": "named", "map": {"compute": {"place": "CAST(body AS STRING)"}}},
    )
    sink = Sink.model_validate({"name": "rows", "table": {"path": "lake/rows", "partition_by": ["place"]}})
    marked = mark_unpartitionable(apply(records(spark, b"north", b"caf\xe9"), made, no_lookup), sink)
    found = marked.orderBy("_id").collect()
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == [None, "sink.partition"]


def message(key: str, n: int) -> bytes:
    return json.dumps({"k": key, "n": n}).encode()


def test_a_pipeline_writes_delta_tables_and_one_that_was_migrated(
    spark: SparkSession, setup_of: Callable[[str], Setup]
) -> None:
    setup = setup_of(PIPELINE.replace("{format}", "format: parquet, "))
    # Two tables and a merge accept the row whose key cannot be a directory.
    setup.send(message("a", 1), message("b", 2), message("~", 9), b"broken")
    setup.run()
    assert migrate(setup.lake / "again") == (1, 1, 3)
    migrated = setup.pipeline.model_dump(by_alias=True)
    migrated["sinks"][1]["table"]["format"] = "delta"
    setup.pipeline = Pipeline.model_validate(migrated)
    setup.send(message("a", 3))
    setup.run()
    # The table did not exist at the start of the first run, and was due at the start of the second one.
    assert [event["sink"] for event in setup.events if event["event"] == "maintenance"] == ["rows"]
    assert maintained_at(setup.lake / "rows") > 0
    for name in ("rows", "again"):
        found = DeltaTable(setup.lake / name).to_pyarrow_table()
        partitioned = name == "rows"
        assert Counter(found["n"].to_pylist()) == {1: 1, 2: 1, 3: 1} | ({} if partitioned else {9: 1})
        computed = {"timestamp_day", "n_bucket_4"} if partitioned else set()
        assert set(found.schema.names) == {"k", "n", "_id", *(f"_{each}" for each in COORDINATES)} | computed
        assert DeltaTable(setup.lake / name).metadata().partition_columns == (
            ["k", *sorted(computed, reverse=True)] if partitioned else []
        )
    assert {letter["code"] for letter in setup.dead()} == {"parse.not_json", "sink.partition"}
    by_spark = read_table(spark, setup.lake / "rows")
    assert sorted(by_spark.select("k", "n").collect()) == [("a", 1), ("a", 3), ("b", 2)]
    assert by_spark.where("timestamp_day IS NULL OR timestamp_day <> CAST(_timestamp AS DATE)").count() == 0
    assert by_spark.where("n_bucket_4 <> pmod(hash(n), 4)").count() == 0
    newest = {row["k"]: row["n"] for row in DeltaTable(setup.lake / "newest").to_pyarrow_table().to_pylist()}
    assert newest == {"a": 3, "b": 2, "~": 9}
    for accounts in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (accounts.off, accounts.unknown) == ((), ())
        assert accounts.counts.out + accounts.counts.dead == 5


MISSING = """
name: {name}
source: {{topics: [{topic}], master: "{master}"}}
statestore: {{broker: "{broker}"}}
steps:
  - {{name: parsed, parse: {{schema: "k STRING NOT NULL, n INT"}}}}
sinks:
  - {{name: rows, table: {{path: "{lake}/rows"}}}}
  - {{name: files, table: {{path: "{lake}/files", format: parquet}}}}
"""


@pytest.mark.parametrize("sink", ["rows", "files"])
def test_a_table_that_disappears_is_not_created_again(sink: str, setup_of: Callable[[str], Setup]) -> None:
    setup = setup_of(MISSING)
    path = setup.lake / sink
    setup.send(message("a", 1), message("b", 2))

    def lose_the_table() -> None:
        with setup.running() as run:
            until(lambda: sum(entry.out for entry in setup.ledger.entries(sink)) == 2, "two rows are written")
            path.rename(setup.lake / "moved")
            setup.send(message("c", 3))
            run.exception(DEADLINE_S)

    with pytest.raises(PenstockError, match=f"sink '{sink}': table .* with 2 rows in it") as lost:
        lose_the_table()
    assert "mount the volume" in (lost.value.hint or "")
    started = len(setup.events)
    with pytest.raises(PenstockError, match=f"sink '{sink}': table .* with 2 rows in it"):
        setup.run()
    assert [event["event"] for event in setup.events[started:]] == ["starting"]
    assert files(path) == []
    # Of the other sink, nothing is lost, and nothing is repeated.
    setup.run(new_tables=True)
    assert sum(len(pq.read_table(file)) for file in files(path)) == 1
    other = next(name for name in ("rows", "files") if name != sink)
    assert sum(len(pq.read_table(file)) for file in files(setup.lake / other)) == 3


def read(path: Path, log: Path, **options: str) -> list[dict[str, Any]]:
    """What the next batch of the source brings."""
    given = {"path": str(path), "content": "delta", "skiplines": "0", "maxfiles": "1000", "inbox": str(log) + ".d"}
    reader = FilesStreamReader(given | {"log": str(log)} | options)
    before = {"files": {"0": len(FileLog(log).entries())}}
    tasks = reader.partitions(before, reader.latestOffset(before))
    return [json.loads(row["value"]) for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


@pytest.mark.nightly
@pytest.mark.usefixtures("delta_spark")
def test_a_table_is_read_as_delta_wrote_it(spark: SparkSession, tmp_path: Path) -> None:
    """A table that the test writes as Delta does is read by day: test_pipeline_graph.py."""
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


MIRROR = """
name: {name}
source: {{format: statestore, tube_topic: statestore_changes, master: "{master}", keys: "{name}/*", deletes: true}}
statestore: {{broker: "{broker}"}}
steps:
  - {{name: parsed, parse: {{schema: "x INT NOT NULL, until STRING", allow_empty: true}}}}
sinks:
  - name: newest
    table:
      path: "{lake}/newest"
      mode: merge
      keys: [state_key]
      order_by: _offset
      delete_when: operation = 'DELETE' OR CAST(until AS INT) < 100
      partition_by: ["bucket(2, state_key)"]
  - {{name: history, table: {{path: "{lake}/history"}}}}
dead_letters: {{path: "{lake}/dead"}}
"""


def test_a_table_follows_a_state_store_with_its_deletes(setup_of: Callable[[str], Setup]) -> None:
    setup = setup_of(MIRROR)

    def change(*changes: tuple[str, int | str | None]) -> None:
        """Set or delete keys, one after the other."""
        before = setup.node.capture.stats.captured
        for key, x in changes:
            if x is None:
                setup.node.delete(f"{setup.topic}/{key}")
            else:
                value = {"x": x} if isinstance(x, int) else {"x": 0, "until": x}
                setup.node.set_keys({f"{setup.topic}/{key}": json.dumps(value).encode()})
        setup.node.wait_captured(before + len(changes))

    def newest() -> dict[str, int]:
        found = DeltaTable(setup.lake / "newest").to_pyarrow_table().to_pylist()
        return {row["state_key"].rpartition("/")[2]: row["x"] for row in found}

    # The last change of a key in a batch decides; `until` of most rows is null, and so is the condition.
    change(("a", 1), ("b", 1), ("a", 2), ("c", 1), ("c", None), ("d", 1), ("d", None), ("d", 3))
    setup.run()
    assert newest() == {"a": 2, "b": 1, "d": 3}
    change(("a", None), ("c", 5), ("b", None), ("b", 7), ("d", "99"), ("e", "100"), ("f", "never"))
    setup.run()
    expected = {"b": 7, "c": 5, "e": 0}
    assert newest() == expected
    # A row on which the condition fails is neither written nor deleted; a table without a condition accepts it.
    (letter,) = setup.dead()
    assert (letter["step"], letter["code"]) == ("sink:newest", "expression.failed")
    assert setup.ledger.counts("newest").letters_by_step == {"sink:newest": 1}
    # Only rows that the table does not have are deleted, then this batch is repeated.
    change(("g", 1), ("g", None))
    setup.run()
    versions = DeltaTable(setup.lake / "newest").version()
    setup.forget_the_last_commit("newest")
    setup.run()
    assert (newest(), DeltaTable(setup.lake / "newest").version()) == (expected, versions)
    history = DeltaTable(setup.lake / "history").to_pyarrow_table()
    assert Counter(history["operation"].to_pylist()) == {"SET": 12, "DELETE": 5}
    assert "_delete" not in history.schema.names
    for accounts in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (accounts.off, accounts.unknown) == ((), ())
