"""The tubemq sink: what the source reads it writes, batches and streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.tube.record import Record
from tests.spark.node import Node


def read(spark: SparkSession, node: Node, topic: str) -> DataFrame:
    options = {"tubemq.master": node.master, "subscribe": topic, "includeHeaders": "true"}
    return spark.read.format("tubemq").options(**options).load()


def test_a_topic_is_copied_with_everything(spark: SparkSession, node: Node, new_topic: Callable[..., str]) -> None:
    origin, copy = new_topic(2), new_topic(2)
    records = [
        Record(b"%d" % n, b"k%d" % (n % 3), [("unit", "m3"), ("raw", b"\xff\x00")], "a/b", 1_000 + n, f"id-{n}", "b")
        for n in range(40)
    ]
    node.append(origin, [(n % 2, record) for n, record in enumerate(records)])
    rows = read(spark, node, origin).select("key", "value", "headers", "partition")
    sink = rows.write.format("tubemq").mode("append").option("tubemq.master", node.master).option("topic", copy)
    sink.save()

    def content(topic: str) -> list[tuple[object, ...]]:
        found = read(spark, node, topic).orderBy("partition", "offset").collect()
        return [
            (row.partition, bytes(row.key), bytes(row.value), [(h.key, bytes(h.value)) for h in row.headers])
            for row in found
        ]

    assert content(copy) == content(origin)
    assert len(content(copy)) == 40


def test_a_stream_writes_each_row_and_numbers_it(
    spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic(2)
    rows = spark.range(30).selectExpr("concat('k', id % 4) AS key", "cast(id AS string) AS value")
    rows.coalesce(1).write.json(f"{tmp_path}/in")
    stream = spark.readStream.schema(rows.schema).json(f"{tmp_path}/in")
    query = (
        stream.writeStream.format("tubemq")
        .option("tubemq.master", node.master)
        .option("topic", topic)
        .option("deliveryGuarantee", "at-least-once")
        .option("checkpointLocation", f"{tmp_path}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)
    assert query.exception() is None
    found = read(spark, node, topic).collect()
    assert sorted(int(row.value) for row in found) == list(range(30))
    ids = {bytes(header.value).decode() for row in found for header in row.headers if header.key == "id"}
    assert len(ids) == 30
    assert {identity.rsplit("/", 1)[0] for identity in ids} == {f"{query.id}/0/0"}
    of_key: dict[bytes, set[int]] = {}
    for row in found:
        of_key.setdefault(bytes(row.key), set()).add(row.partition)
    assert all(len(partitions) == 1 for partitions in of_key.values())


def test_a_stream_that_dies_around_its_commit_writes_each_row_once(
    spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic(2)
    rows = spark.range(40).selectExpr("concat('k', id % 4) AS key", "cast(id AS string) AS value")
    rows.repartition(2).write.json(f"{tmp_path}/in")
    stream = spark.readStream.schema(rows.schema).json(f"{tmp_path}/in")
    checkpoint = tmp_path / "checkpoint"

    def run() -> StreamingQuery:
        query = (
            # Without an order, so that each run may put other rows into a task.
            stream.repartition(2)
            .writeStream.format("tubemq")
            .option("tubemq.master", node.master)
            .option("topic", topic)
            .option("deliveryGuarantee", "exactly-once")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        with suppress(StreamingQueryException):
            assert query.awaitTermination(240)
        return query

    with node.refusing_commits():
        query = run()
    assert "the disk is on fire" in str(query.exception())
    assert read(spark, node, topic).count() == 0
    assert run().exception() is None
    assert node.staged == 0
    # As if the driver had died after the commit of the rows and before Spark's own.
    (checkpoint / "commits" / "0").unlink()
    (checkpoint / "commits" / ".0.crc").unlink(missing_ok=True)
    again = run()
    assert again.exception() is None
    assert [progress["batchId"] for progress in again.recentProgress] == [0]
    found = [int(row.value) for row in read(spark, node, topic).collect()]
    assert sorted(found) == list(range(40))
    assert node.staged == 0


def test_a_batch_write_that_is_named_is_written_once(
    spark: SparkSession, node: Node, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(2)
    for values in (range(3), range(5)):
        rows = spark.createDataFrame([(str(n),) for n in values], "value string")
        sink = rows.write.format("tubemq").mode("append").option("tubemq.master", node.master).option("topic", topic)
        sink.option("txnAppId", "nightly").option("txnVersion", "1").save()
    assert sorted(int(row.value) for row in read(spark, node, topic).collect()) == [0, 1, 2]


def test_a_topic_that_is_not_there_fails_the_job(spark: SparkSession, node: Node) -> None:
    rows = spark.sql("SELECT 'a' AS value")
    sink = rows.write.format("tubemq").mode("append").option("tubemq.master", node.master).option("topic", "nowhere")
    with pytest.raises(PySparkException, match="topic 'nowhere' does not exist") as caught:
        sink.save()
    assert "Failed to initialize Python data source writer" in str(caught.value), "found before tasks are started"
