"""``spark.readStream.format("tubemq")``: limits, restarts, repetition, loss."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.node import SEGMENT_RECORDS, Node

Batches = dict[int, list[int]]


class Stream:
    """A query over one topic whose batches are collected; checkpoints live in ``directory``."""

    def __init__(self, spark: SparkSession, node: Node, topic: str, directory: Path) -> None:
        self.spark = spark
        self.node = node
        self.topic = topic
        self.checkpoint = directory / "checkpoint"
        self.batches: Batches = {}

    def start(self, *, available_now: bool = False, **options: str) -> StreamingQuery:
        defaults = {
            "tubemq.master": self.node.master,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "tubemq.timeoutMs": "5000",
        }
        df = self.spark.readStream.format("tubemq").options(**(defaults | options)).load()

        def collect(rows: DataFrame, batch_id: int) -> None:
            self.batches[batch_id] = sorted(int(row.value) for row in rows.select("value").collect())

        writer = df.writeStream.foreachBatch(collect).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def drain(self, **options: str) -> StreamingQuery:
        query = self.start(available_now=True, **options)
        assert query.awaitTermination(240)
        return query

    def rows(self) -> list[int]:
        return sorted(row for batch in self.batches.values() for row in batch)

    def sizes(self) -> list[int]:
        return [len(self.batches[batch_id]) for batch_id in sorted(self.batches)]

    def append(self, numbers: range) -> list[int]:
        return self.node.append(self.topic, [(number % 2, b"%d" % number) for number in numbers])


@pytest.fixture
def stream(spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path) -> Stream:
    return Stream(spark, node, new_topic(partitions=2), tmp_path)


def test_available_now_drains_all_records_in_limited_batches_and_continues(stream: Stream) -> None:
    stream.append(range(1000))
    query = stream.drain(maxOffsetsPerTrigger="300", **{"tubemq.group": "drained"})
    assert stream.sizes() == [300, 300, 300, 100]
    # The group's offsets of all batches but the last are published: Spark commits a batch when it plans the next.
    shown = [stream.node.position("drained", stream.topic, partition) for partition in (0, 1)]
    assert all(position is not None and position >= 300 * 28 for position in shown), shown
    assert stream.rows() == list(range(1000))
    progress = query.lastProgress
    assert progress is not None
    source = progress.sources[0]
    assert json.loads(source.endOffset) == json.loads(source.latestOffset)

    # A restart from the checkpoint: nothing lost, nothing twice.
    stream.append(range(1000, 1100))
    stream.drain()
    assert stream.rows() == list(range(1100))

    # Killed between the sink and the commit of the batch: the same batch has the same rows again.
    last = max(stream.batches)
    commit = stream.checkpoint / "commits" / str(last)
    commit.unlink()
    (commit.parent / f".{last}.crc").unlink(missing_ok=True)
    before = stream.batches.pop(last)
    stream.append(range(1100, 1150))
    stream.drain(maxOffsetsPerTrigger="20")
    assert stream.batches[last] == before
    assert stream.rows() == list(range(1150))
    assert stream.sizes()[last + 1 :] == [20, 20, 10]


def test_a_running_query_sees_what_comes_and_where_the_log_ends(stream: Stream) -> None:
    stream.append(range(10))
    query = stream.start(startingOffsets="latest")
    query.processAllAvailable()
    assert stream.batches == {0: []}
    positions = stream.append(range(10, 40))
    query.processAllAvailable()
    assert stream.rows() == list(range(10, 40))
    offsets = [json.loads(p.sources[0].latestOffset) for p in query.recentProgress if p.sources[0].latestOffset]
    end = max(positions) + 28
    newest = {key: offset for key, offset in offsets[-1][stream.topic].items() if "@" not in key}
    assert newest == {"1:0": end, "1:1": end}
    query.stop()


def test_a_broker_joins_under_a_running_query(spark: SparkSession, tmp_path: Path) -> None:
    """Its partitions are read from their first message on, whatever the query's start, in a restarted query too."""
    with Node(tmp_path / "tube") as node:
        node.create_topic("growing", partitions=2)
        stream = Stream(spark, node, "growing", tmp_path)
        stream.append(range(10))
        query = stream.start(startingOffsets="latest")
        query.processAllAvailable()
        stream.append(range(10, 20))
        query.processAllAvailable()
        assert stream.rows() == list(range(10, 20))
        node.add_broker(2)
        node.append("growing", [(number % 2, b"%d" % number) for number in range(20, 40)], broker_id=2)
        stream.append(range(40, 50))
        deadline = time.monotonic() + 60
        while len(stream.rows()) < 40 and time.monotonic() < deadline:
            query.processAllAvailable()  # until the master was asked again
        assert stream.rows() == list(range(10, 50))
        query.stop()
        node.append("growing", [(0, b"50")], broker_id=2)
        stream.drain(startingOffsets="latest")
        assert stream.rows() == list(range(10, 51))


def test_files_of_a_checkpoint_are_made_without_a_process_each(spark: SparkSession, tmp_path: Path) -> None:
    """Hadoop starts the program chmod for each."""
    hadoop = spark._jvm.org.apache.hadoop.fs  # type: ignore[union-attr]
    files = hadoop.FileSystem.getLocal(spark._jsc.hadoopConfiguration())
    path = hadoop.Path(str(tmp_path / "file"))
    files.create(path, True).close()
    assert files.getClass().getName() == "penstock.spark.LocalFiles"
    for mode in (0o640, 0o1777):  # Java knows no sticky bit
        files.setPermission(path, hadoop.permission.FsPermission(f"{mode:o}"))
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_query_waits_for_enough_messages(stream: Stream) -> None:
    stream.append(range(10))
    query = stream.start(minOffsetsPerTrigger="50", maxTriggerDelay="1h")
    query.processAllAvailable()
    stream.append(range(10, 20))
    query.processAllAvailable()
    assert stream.sizes() == [10]
    stream.append(range(20, 60))  # the last of them makes it fifty, however few a poll sees
    query.processAllAvailable()
    assert stream.sizes() == [10, 50]
    query.stop()
    # A run that ends takes what there is.
    stream.append(range(60, 70))
    stream.drain(minOffsetsPerTrigger="50")
    assert stream.rows() == list(range(70))


def test_a_first_batch_from_the_latest_survives_a_restart(stream: Stream) -> None:
    """Spark keeps no start of a first batch: were it taken anew, what came in between would be lost."""
    stream.append(range(10))
    query = stream.start(startingOffsets="latest")
    query.processAllAvailable()
    query.stop()
    for name in ("commits/0", "commits/.0.crc"):
        (stream.checkpoint / name).unlink(missing_ok=True)
    stream.append(range(10, 20))
    stream.drain(startingOffsets="latest")
    assert stream.rows() == list(range(10, 20))


def test_a_topic_that_is_created_again_fails_the_query_or_is_read_from_its_beginning(stream: Stream) -> None:
    stream.append(range(10))
    stream.drain()
    stream.node.delete_topic(stream.topic)
    stream.node.create_topic(stream.topic, partitions=2)
    stream.append(range(10, 40))  # the new log is longer than the offset in the checkpoint
    with pytest.raises(StreamingQueryException) as caught:
        stream.drain()
    text = str(caught.value)
    assert f"topic '{stream.topic}' partition 1:0: offset 280 belongs to a log that was replaced" in text
    assert "failOnDataLoss=false" in text
    stream.drain(failOnDataLoss="false", maxOffsetsPerTrigger="20")
    assert stream.rows() == list(range(40))
    assert stream.sizes() == [10, 0, 20, 10]
    stream.append(range(40, 50))
    stream.drain()
    assert stream.rows() == list(range(50))


def test_loss_fails_the_query_or_is_accepted(stream: Stream) -> None:
    stream.append(range(10))
    stream.drain()
    stream.append(range(10, SEGMENT_RECORDS + 60))
    stream.node.expire_closed_segments()
    with pytest.raises(StreamingQueryException) as caught:
        stream.drain()
    text = str(caught.value)
    assert f"topic '{stream.topic}' partition 1:0: offset 280 is no longer stored (oldest:" in text
    assert "failOnDataLoss=false" in text
    stream.drain(failOnDataLoss="false")
    rows = stream.rows()
    assert rows[:10] == list(range(10))
    assert rows[10:] == list(range(rows[10], SEGMENT_RECORDS + 60))
    assert 10 < rows[10] <= SEGMENT_RECORDS
