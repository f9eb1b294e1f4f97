"""The statestore source and sink against a real store."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.spark.statestore.options import SnapshotOptions
from penstock.spark.statestore.source import StoreReader
from penstock.spark.tube.options import SourceOptions
from penstock.statestore.codec.commands import Extension
from tests.spark.node import CAPTURE_TOPIC, Node


def write(frame: DataFrame, node: Node, **options: str) -> None:
    frame.write.format("aio-statestore").mode("append").option("statestore.broker", node.mqtt).options(**options).save()


def read(spark: SparkSession, node: Node, **options: str) -> dict[bytes, bytes]:
    source = spark.read.format("aio-statestore").option("statestore.broker", node.mqtt).options(**options).load()
    rows = source.collect()
    assert all(row.version and row.operation == "SNAPSHOT" and row.timestamp for row in rows)
    return {bytes(row.key): bytes(row.value) for row in rows}


def run_once(stream: DataFrame, directory: Path) -> None:
    """What there is now into a Parquet table."""
    query = (
        stream.writeStream.format("parquet")
        .option("path", f"{directory}/out")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)
    assert query.exception() is None


def test_rows_become_keys_and_keys_rows(spark: SparkSession, node: Node) -> None:
    rows = spark.range(50).selectExpr("concat('rows/', id) AS key", "cast(id AS string) AS value", "600000L AS ttl_ms")
    write(rows.repartition(3), node)
    assert read(spark, node, keys="rows/*", minPartitions="4") == {b"rows/%d" % n: b"%d" % n for n in range(50)}
    write(rows.where("id >= 10").selectExpr("key", "cast(null AS string) AS value"), node)
    assert sorted(read(spark, node, keys="rows/*")) == sorted(b"rows/%d" % n for n in range(10))
    assert read(spark, node, keys="nothing/*") == {}


def test_the_last_row_of_a_key_is_chosen_by_a_column(spark: SparkSession, node: Node) -> None:
    rows = spark.range(100, numPartitions=4).selectExpr(
        "concat('last/', id % 3) AS key", "cast(id AS string) AS value", "id AS at"
    )
    write(rows, node, orderBy="at")
    assert read(spark, node, keys="last/*") == {b"last/0": b"99", b"last/1": b"97", b"last/2": b"98"}
    with pytest.raises(PySparkException, match="two rows of key 'last/"):
        write(rows.drop("at"), node)


def test_a_run_that_was_replaced_writes_nothing_more(spark: SparkSession, node: Node) -> None:
    rows = spark.sql("SELECT 'fenced/a' AS key, 'new' AS value")
    write(rows, node, fencingToken="2000:0:later")
    with pytest.raises(PySparkException, match="belongs to a later run"):
        write(spark.sql("SELECT 'fenced/a' AS key, 'old' AS value"), node, fencingToken="1000:0:earlier")
    assert node.get("fenced/a") == b"new"


def test_a_stream_writes_each_batch(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    rows = spark.range(20).selectExpr("concat('stream/', id) AS key", "cast(id AS string) AS value")
    rows.coalesce(1).write.json(f"{tmp_path}/in")
    stream = spark.readStream.schema(rows.schema).json(f"{tmp_path}/in")
    query: StreamingQuery | None = None
    # The second start finds nothing new, and writes nothing; the third repeats the batch.
    for batches in ([0], [], [0]):
        if query is not None and batches:  # as if the driver had died between the write and Spark's commit of it
            (tmp_path / "checkpoint" / "commits" / "0").unlink()
            (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
        query = (
            stream.writeStream.format("aio-statestore")
            .option("statestore.broker", node.mqtt)
            .option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)
        assert query.exception() is None
        assert [p.batchId for p in query.recentProgress if p.numInputRows] == batches
        assert read(spark, node, keys="stream/*") == {b"stream/%d" % n: b"%d" % n for n in range(20)}


def test_a_stream_has_the_keys_and_then_every_change(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    node.set_keys({"feed/a": b"1", "feed/b": b"2"}, writer="setter")
    options = {"statestore.broker": node.mqtt, "tubemq.master": node.master, "tubemq.topic": CAPTURE_TOPIC}
    stream = spark.readStream.format("aio-statestore").options(**options, keys="feed/*", minPartitions="2").load()
    run_once(stream, tmp_path)
    before = node.capture.stats.captured
    node.set_keys({"feed/a": b"3", "other": b"x", "feed/a%,=": b""}, ttl_ms=600_000, writer="setter")
    node.delete("feed/a")
    node.wait_captured(before + 4)
    for _ in range(2):  # the second run finds nothing new
        run_once(stream, tmp_path)
    rows = spark.read.parquet(f"{tmp_path}/out").orderBy("version").collect()
    found = [(bytes(r.key), None if r.value is None else bytes(r.value), r.operation, r.writer) for r in rows]
    changes = [row for row in found if row[2] != "SNAPSHOT"]
    assert sorted(set(found) - set(changes)) == [
        (b"feed/a", b"1", "SNAPSHOT", None),
        (b"feed/b", b"2", "SNAPSHOT", None),
    ]
    # What was set while or shortly before the snapshot was read may come again.
    again = [(b"feed/a", b"1", "SET", "setter"), (b"feed/b", b"2", "SET", "setter")]
    assert [row for row in changes if row not in again] == [
        (b"feed/a", b"3", "SET", "setter"),
        (b"feed/a%,=", b"", "SET", "setter"),
        (b"feed/a", None, "DELETE", changes[-1][3]),
    ]
    assert [row.expires_at is not None for row in rows][-3:] == [True, True, False]


def test_a_stream_needs_the_topic_of_the_changes(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    options = {"statestore.broker": node.mqtt, "tubemq.master": node.master, "tubemq.topic": "nowhere"}
    stream = spark.readStream.format("aio-statestore").options(**options).load()
    with pytest.raises(PySparkException, match=r"set statestore.capture_topic: nowhere"):
        run_once(stream, tmp_path)


def keys_of(options: SnapshotOptions) -> list[dict[str, Any]]:
    reader = StoreReader(options)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("extensions", [Extension.NONE, Extension.MGET])
def test_a_snapshot_of_many_keys(tmp_path: Path, extensions: Extension) -> None:
    """With a request a key, and with one for many."""
    with Node(tmp_path, extensions=extensions) as node:
        node.set_keys({f"many/{number}": b"%d" % number for number in range(150)})
        node.set_keys({"many/short": b"lived"}, ttl_ms=600_000, writer="setter")
        node.wait_captured(151)
        changes = SourceOptions.parse({"tubemq.master": node.master, "subscribe": CAPTURE_TOPIC})
        found = keys_of(SnapshotOptions(node.mqtt, "many/*", 3, include_expiry=True, changes=changes))
        assert all(row["writer"] for row in found)
        assert [row["key"] for row in found if row["writer"] == "setter"] == [b"many/short"]
        assert {row["key"]: row["value"] for row in found} == {
            **{b"many/%d" % number: b"%d" % number for number in range(150)},
            b"many/short": b"lived",
        }
        (expiry,) = [row["expires_at"] for row in found if row["expires_at"] is not None]
        assert 0 < (expiry - datetime.now(UTC)).total_seconds() < 601
        assert {row["writer"] for row in keys_of(SnapshotOptions(node.mqtt, "many/1*"))} == {None}
        assert keys_of(SnapshotOptions(node.mqtt, "none/*", 3)) == []


@pytest.mark.parametrize(
    ("select", "mode", "message"),
    [
        ("'a' AS key", "append", "it lacks value"),
        ("'a' AS key, 'b' AS value, 1 AS other", "append", "it has other"),
        ("1 AS key, 'b' AS value", "append", "it has key as int"),
        ("'' AS key, 'b' AS value", "append", "an empty key"),
        ("'a' AS key, 'b' AS value, 0 AS ttl_ms", "append", "a row with ttl_ms 0"),
        ("'a' AS key, 'b' AS value", "overwrite", "no mode"),
    ],
)
def test_rows_that_cannot_be_written(spark: SparkSession, node: Node, select: str, mode: str, message: str) -> None:
    frame = spark.sql(f"SELECT {select}")
    with pytest.raises(PySparkException, match=message):
        frame.write.format("aio-statestore").mode(mode).option("statestore.broker", node.mqtt).save()
