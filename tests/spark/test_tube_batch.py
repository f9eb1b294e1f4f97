"""``spark.read.format("tubemq")`` in a real session, on a real tube."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.tube.options import COLUMNS, HEADERS
from penstock.spark.tube.source import spark_schema
from penstock.spark.tube.tube_client import count_rows
from penstock.tube.record import Record
from tests.spark.node import SEGMENT_RECORDS, Node


def read(spark: SparkSession, node: Node, topic: str, **options: str) -> DataFrame:
    return (
        spark.read.format("tubemq")
        .options(**{"tubemq.master": node.master, "subscribe": topic, "tubemq.timeoutMs": "5000", **options})
        .load()
    )


def test_rows_are_what_was_appended(spark: SparkSession, node: Node, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2, stores=2)
    before = int(time.time())
    messages: list[tuple[int, bytes | Record]] = [
        (0, Record(b"one", key=b"k", headers=[("site", "north")], topic="plant/flow", id="i-1", event_time_ms=5)),
        (10_001, b"two"),
        (0, b"three"),
    ]
    positions = node.append(topic, messages)
    df = read(spark, node, topic, includeHeaders="true")
    assert df.schema == spark_schema((*COLUMNS, HEADERS))
    rows = sorted(df.collect(), key=lambda row: (row.partition, row.offset))
    assert [(row.partition, row.offset, bytes(row.value)) for row in rows] == [
        (0, positions[0], b"one"),
        (0, positions[2], b"three"),
        (10_001, positions[1], b"two"),
    ]
    assert bytes(rows[0].key) == b"k"
    assert rows[1].key is None
    assert {(row.topic, row.broker, row.timestampType) for row in rows} == {(topic, 1, 1)}
    assert {header.key: bytes(header.value) for header in rows[0].headers} == {
        "mqtt.topic": b"plant/flow",
        "event-time": b"5",
        "id": b"i-1",
        "site": b"north",
    }
    assert rows[1].headers == []
    seconds = [row.s for row in df.selectExpr("unix_timestamp(timestamp) AS s").collect()]
    assert all(before <= second <= time.time() for second in seconds)
    assert read(spark, node, topic).columns == list(COLUMNS)


def test_from_a_time_to_a_time(spark: SparkSession, node: Node, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2)
    node.append(topic, [(0, b"early"), (1, b"early")])
    time.sleep(0.005)  # the broker's clock has milliseconds
    between = time.time_ns() // 1_000_000
    time.sleep(0.005)
    node.append(topic, [(0, b"late"), (1, b"late")])
    later = read(spark, node, topic, startingTimestamp=str(between))
    assert [bytes(row.value) for row in later.collect()] == [b"late"] * 2
    earlier = read(spark, node, topic, endingTimestamp=str(between))
    assert [bytes(row.value) for row in earlier.collect()] == [b"early"] * 2


def test_a_range_read_twice_is_the_same(spark: SparkSession, node: Node, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=3)
    positions = node.append(topic, [(index % 3, b"%d" % index) for index in range(3000)])
    start, end = positions[500], positions[2500]
    edges = [{topic: {f"1:{partition}": at for partition in range(3)}} for at in (start, end)]
    options = {"startingOffsets": json.dumps(edges[0]), "endingOffsets": json.dumps(edges[1]), "minPartitions": "5"}

    def rows() -> list[tuple[int, int, bytes]]:
        collected = read(spark, node, topic, **options).select("partition", "offset", "value").collect()
        return [(row.partition, row.offset, bytes(row.value)) for row in collected]

    first = rows()
    node.append(topic, [(index % 3, b"later") for index in range(30)])
    assert rows() == first
    assert sorted(first) == sorted((index % 3, positions[index], b"%d" % index) for index in range(500, 2500))
    df = read(spark, node, topic, **options)
    assert df.rdd.getNumPartitions() == 5
    counted = count_rows({"tubemq.master": node.master, "subscribe": topic}, edges[0], json.dumps(edges[1]))
    assert counted == len(first) == 2000


def test_an_empty_topic_has_no_rows(spark: SparkSession, node: Node, new_topic: Callable[..., str]) -> None:
    assert read(spark, node, new_topic()).collect() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger?"),
        ({"startingOffsets": "first"}, "startingOffsets first: neither a keyword nor JSON"),
        ({"columns": "value,ofset"}, "'ofset' is not a column of the source"),
        ({"tubemq.master": "nowhere"}, "'nowhere' is not HOST:PORT"),
    ],
)
def test_bad_options_are_refused_at_load(spark: SparkSession, node: Node, options: dict[str, str], words: str) -> None:
    with pytest.raises(AnalysisException) as caught:
        read(spark, node, "a", **options)
    assert words in str(caught.value)


def test_a_topic_that_does_not_exist(spark: SparkSession, node: Node) -> None:
    with pytest.raises(AnalysisException, match="topic 'nothing_here' does not exist at tube master"):
        read(spark, node, "nothing_here").collect()


def test_offsets_removed_by_retention_fail_the_read_or_are_skipped(
    spark: SparkSession, node: Node, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=1)
    positions = node.append(topic, [(0, b"%d" % index) for index in range(SEGMENT_RECORDS + 50)])
    node.expire_closed_segments()
    options = {"startingOffsets": json.dumps({topic: {"0": positions[10]}})}
    with pytest.raises(PySparkException) as caught:
        read(spark, node, topic, **options).collect()
    assert f"topic '{topic}' partition 1:0: offset {positions[10]} is no longer stored (oldest:" in str(caught.value)
    kept = [int(row.value) for row in read(spark, node, topic, failOnDataLoss="false", **options).collect()]
    assert kept == list(range(kept[0], SEGMENT_RECORDS + 50))
    assert 0 < kept[0] <= SEGMENT_RECORDS
    assert [int(row.value) for row in read(spark, node, topic).collect()] == kept
