"""A Spark source without a server: the upper limit for Python sources.

A batch repeats the same Arrow batches; a stream has a message per millisecond, whose body is its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = ["Ceiling"]

PARTITIONS = 3
BATCH_BYTES = 1 << 20


class Ceiling(DataSource):
    """``rows`` messages of ``size`` bytes, or a stream of messages, in the form of the ``tubemq`` source."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        from penstock.spark.tube.source import spark_schema

        return spark_schema()

    def reader(self, schema: StructType) -> _Reader:
        return _Reader(int(self.options["rows"]), int(self.options["size"]))

    def streamReader(self, schema: StructType) -> _StreamReader:  # noqa: N802 - Spark's name
        return _StreamReader()


class _Reader(DataSourceReader):
    def __init__(self, rows: int, size: int) -> None:
        self._rows = rows
        self._size = size

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = self._rows // PARTITIONS + (partition.value < self._rows % PARTITIONS)
        count = max(1, BATCH_BYTES // (self._size + 52))
        whole = _rows(partition.value, [bytes(self._size)] * count)
        while left > 0:
            yield whole.slice(0, left)
            left -= count


class _StreamReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"ms": int(time.time() * 1000)}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        return self.initialOffset()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["ms"], end["ms"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value[0] < partition.value[1]:
            yield _rows(0, [b"%.3f" % (ms / 1000) for ms in range(*partition.value)])


def _rows(partition: int, bodies: list[bytes]) -> pa.RecordBatch:
    from penstock.spark.tube.arrow import record_batches
    from penstock.spark.tube.offsets import TopicPartition
    from penstock.tube.reader import MessageBatch

    count = len(bodies)
    messages = MessageBatch.from_payloads(range(count), range(count), [0] * count, bodies)
    [rows] = record_batches(TopicPartition("ceiling", 1, partition), [messages])
    return rows
