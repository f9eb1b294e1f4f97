"""Write the rows of a batch to a topic of Kafka from one task; see ``penstock.spark.kafka.writes``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from penstock.spark.kafka.writes import TopicBatch, write_batch, written_batches

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["write_kafka"]


def write_kafka(messages: DataFrame, count: int, write: TopicBatch) -> int:
    """Write the ``count`` ``messages``, which are in one partition; return the number that the topic has of the batch.

    Raises:
        UnavailableError: Kafka does not answer, as text in a Spark error; the batch may be repeated.
        RefusedError: Kafka refuses a row or the connection, or a later run has written, also as text.
    """
    if not count:
        # A repeated batch may have had rows, for example if a lookup has another value now.
        found = written_batches(write.target, write.pipeline, write.sink, write.query)
        return found.rows if found is not None and found.batch == write.batch else 0
    (task,) = messages.mapInArrow(partial(_write, write), "rows LONG").collect()
    return int(task["rows"])


def _write(write: TopicBatch, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"rows": pa.array([write_batch(write, batches)], pa.int64())})
