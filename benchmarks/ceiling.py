"""A Spark source without a server, which repeats the same Arrow batches: the upper limit for Python sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Ceiling"]

PARTITIONS = 3
BATCH_BYTES = 1 << 20


class Ceiling(DataSource):
    """``rows`` messages of ``size`` bytes, in the form of the ``tubemq`` source."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        from penstock.spark.tube.source import spark_schema

        return spark_schema()

    def reader(self, schema: StructType) -> _Reader:
        return _Reader(int(self.options["rows"]), int(self.options["size"]))


class _Reader(DataSourceReader):
    def __init__(self, rows: int, size: int) -> None:
        self._rows = rows
        self._size = size

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from penstock.spark.tube.arrow import record_batches
        from penstock.spark.tube.offsets import TopicPartition
        from penstock.tube.reader import MessageBatch

        left = self._rows // PARTITIONS + (partition.value < self._rows % PARTITIONS)
        count = max(1, BATCH_BYTES // (self._size + 52))
        messages = MessageBatch.from_payloads(range(count), range(count), [0] * count, [bytes(self._size)] * count)
        [whole] = record_batches(TopicPartition("ceiling", 1, partition.value), [messages])
        while left > 0:
            yield whole.slice(0, left)
            left -= count
