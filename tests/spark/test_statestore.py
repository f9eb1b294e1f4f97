"""The statestore source and sink against a real store."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.spark.node import Node


def write(frame: DataFrame, node: Node, **options: str) -> None:
    frame.write.format("aio-statestore").mode("append").option("statestore.broker", node.mqtt).options(**options).save()


def read(spark: SparkSession, node: Node, **options: str) -> dict[bytes, bytes]:
    source = spark.read.format("aio-statestore").option("statestore.broker", node.mqtt).options(**options).load()
    rows = source.collect()
    assert all(row.version for row in rows)
    return {bytes(row.key): bytes(row.value) for row in rows}


def test_rows_become_keys_and_keys_rows(spark: SparkSession, node: Node) -> None:
    rows = spark.range(50).selectExpr("concat('rows/', id) AS key", "cast(id AS string) AS value", "600000L AS ttl_ms")
    write(rows.repartition(3), node)
    assert read(spark, node, keys="rows/*", minPartitions="4") == {b"rows/%d" % n: b"%d" % n for n in range(50)}
    write(rows.where("id >= 10").selectExpr("key", "cast(null AS string) AS value"), node)
    assert sorted(read(spark, node, keys="rows/*")) == sorted(b"rows/%d" % n for n in range(10))
    assert read(spark, node, keys="nothing/*") == {}


def test_the_last_row_of_a_key_is_told_by_a_column(spark: SparkSession, node: Node) -> None:
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
    for _ in range(2):  # the second start finds nothing new, and writes nothing
        query = (
            stream.writeStream.format("aio-statestore")
            .option("statestore.broker", node.mqtt)
            .option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
        assert query.exception() is None
        assert read(spark, node, keys="stream/*") == {b"stream/%d" % n: b"%d" % n for n in range(20)}


@pytest.mark.parametrize(
    ("select", "mode", "message"),
    [
        ("'a' AS key", "append", "it lacks value"),
        ("'a' AS key, 'b' AS value, 1 AS other", "append", "it has other"),
        ("1 AS key, 'b' AS value", "append", "it has key"),
        ("'' AS key, 'b' AS value", "append", "an empty key"),
        ("'a' AS key, 'b' AS value", "overwrite", "no mode"),
    ],
)
def test_rows_that_cannot_be_written(spark: SparkSession, node: Node, select: str, mode: str, message: str) -> None:
    frame = spark.sql(f"SELECT {select}")
    with pytest.raises(PySparkException, match=message):
        frame.write.format("aio-statestore").mode(mode).option("statestore.broker", node.mqtt).save()
