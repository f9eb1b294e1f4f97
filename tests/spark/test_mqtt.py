"""``format("mqtt")``: what a rule brought to the tube is read by topic, rows are published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.tube.record import Record
from tests.spark.node import Node


def test_messages_of_a_filter_are_read(
    spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic(2)
    site = [("site", "north"), ("site", "south")]
    records: list[bytes | Record] = [
        Record(b"1", b"k", [*site], "plant/a/flow", 5, "id-1", "flow", "text/plain"),
        Record(b"2", b"k", [], "plant/a/heat", None, "id-2"),
        Record(b"\xff", b"k", [], "plant/b/flow", None, "id-3"),
        b"not of MQTT",
    ]
    node.append(topic, [(number % 2, record) for number, record in enumerate(records)])
    options = {"tubemq.master": node.master, "tubemq.topic": topic, "topicFilter": "plant/+/flow"}
    frame = spark.read.format("mqtt").options(**options).load()
    first, second = frame.orderBy("topic").collect()
    assert (first.topic, bytes(first.payload), first.id, first.content_type) == (
        "plant/a/flow",
        b"1",
        "id-1",
        "text/plain",
    )
    assert [(p.key, p.value) for p in first.properties] == site
    assert (second.topic, bytes(second.payload), second.content_type, second.properties) == (
        "plant/b/flow",
        b"\xff",
        None,
        [],
    )
    stream = spark.readStream.format("mqtt").options(**options, startingOffsets="earliest").load()
    query = (
        stream.writeStream.format("parquet")
        .option("path", f"{tmp_path}/out")
        .option("checkpointLocation", f"{tmp_path}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)
    assert sorted(row.id for row in spark.read.parquet(f"{tmp_path}/out").collect()) == ["id-1", "id-3"]


def test_rows_are_published(spark: SparkSession, node: Node) -> None:
    rows = spark.range(20).selectExpr(
        "concat('sink/', lpad(id, 2, '0')) AS topic",
        "cast(id AS string) AS payload",
        "if(id = 3, 2, null) AS qos",
        "if(id = 3, 'text/plain', null) AS content_type",
        "if(id = 3, 600, null) AS expiry_s",
        "if(id = 3, array(named_struct('key', 'unit', 'value', 'm3')), null) AS properties",
    )
    sink = rows.write.format("mqtt").mode("append").option("mqtt.broker", node.mqtt).option("retain", "true")
    sink.save()
    found = node.retained("sink/#", 20)
    assert [(message.topic, message.payload) for message in found] == [(f"sink/{n:02}", b"%d" % n) for n in range(20)]
    assert found[3].properties.content_type == "text/plain"
    assert found[3].properties.message_expiry_interval is not None
    assert 0 < found[3].properties.message_expiry_interval <= 600
    assert found[3].properties.user_properties[0] == ("unit", "m3")
    assert len({message.properties.user_property("id") for message in found}) == 20


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("'a' AS payload", "it lacks topic"),
        ("'a' AS topic, 1 AS payload", "it has payload as int"),
        ("'a' AS topic, CAST(NULL AS STRING) AS payload", "a row without a payload"),
        ("'a/#' AS topic, 'b' AS payload", "a/#"),
    ],
)
def test_rows_that_cannot_be_published(spark: SparkSession, node: Node, select: str, message: str) -> None:
    sink = spark.sql(f"SELECT {select}").write.format("mqtt").mode("append").option("mqtt.broker", node.mqtt)
    with pytest.raises(PySparkException, match=message):
        sink.save()
