"""Sources without a broker: their base class, and ``penstock-rate``, records of the clock for trying out pipelines.

They have the columns of the ``tubemq`` source, and options that a pipeline has validated. Unlike Spark's own ``rate``,
a range of offsets of ``penstock-rate`` always has the same rows: row n belongs to the instant at which it was due,
counted from a start that the pipeline keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import SupportsTriggerAvailableNow, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = ["LocalSource", "RateDataSource", "RatePartition", "RateReader", "RateStreamReader", "due", "rate_rows"]


class LocalSource(DataSource):
    """A source whose options were written by a pipeline and need no validation."""

    format_name: ClassVar[str]
    readers: ClassVar[
        tuple[Callable[[Mapping[str, str]], DataSourceReader], Callable[[Mapping[str, str]], DataSourceStreamReader]]
    ]
    """Of a batch and of a stream, made from the options."""

    @classmethod
    def name(cls) -> str:
        """Name for ``format``."""
        return cls.format_name

    def schema(self) -> StructType:
        """The columns of ``tubemq``, headers included."""
        return spark_schema(WITH_HEADERS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For a batch."""
        return self.readers[0](dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For a stream."""
        return self.readers[1](dict(self.options))


STREAM = "rate"
"""The name under which the offset stands: ``{"rate": {"0": <rows>}}``."""
_PER_TASK = 100_000


class RatePartition(InputPartition):
    """Rows [start, end)."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(None)
        self.start = start
        self.end = end


class RateReader(DataSourceReader):
    """The rows of one range."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """The rows ``[start, end)`` of the options, split evenly."""
        return _planned(int(self._options["start"]), int(self._options["end"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, RatePartition)
        yield rate_rows(partition.start, partition.end, self._options)


class RateStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Rows as they come due."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._target: int | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Before the first row. Offsets count rows."""
        return {STREAM: {"0": 0}}

    def latestOffset(
        self,
        start: Mapping[str, Mapping[str, int]] | None = None,
        limit: ReadLimit | None = None,
    ) -> dict[str, dict[str, int]]:
        """Return the number of rows that are due, never fewer than before."""
        rows = due(self._options, time.time_ns()) if self._target is None else self._target
        # A clock that was set back makes nothing undone.
        return {STREAM: {"0": max(rows, 0 if start is None else start[STREAM]["0"])}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """None: a batch has what is due."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix where the run ends: at the rows that are due now."""
        self._target = due(self._options, time.time_ns())

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """The rows ``[start, end)``, split evenly."""
        return _planned(start[STREAM]["0"], end[STREAM]["0"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, RatePartition)
        yield rate_rows(partition.start, partition.end, self._options)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Nothing to do: positions live in the query's checkpoint."""


class RateDataSource(LocalSource):
    """Options: ``rowsPerSecond``, ``startMs``, ``rows``; for a batch ``start`` and ``end``."""

    format_name = "penstock-rate"
    readers = (RateReader, RateStreamReader)


def due(options: Mapping[str, str], now_ns: int) -> int:
    """Return the number of rows that are due at ``now_ns``; with the option ``rows``, all of them at once."""
    if options.get("rows"):
        return int(options["rows"])
    passed_ms = max(0, now_ns // 1_000_000 - int(options["startms"]))
    return passed_ms * int(options["rowspersecond"]) // 1000


def _planned(start: int, end: int) -> list[InputPartition]:
    return [RatePartition(first, min(first + _PER_TASK, end)) for first in range(start, end, _PER_TASK)]


def rate_rows(start: int, end: int, options: Mapping[str, str]) -> pa.RecordBatch:
    """Rows [start, end) in the source's columns."""
    from datetime import UTC, datetime

    import pyarrow as pa

    from penstock.spark.tube.arrow import arrow_schema

    begin_ms, rate = int(options["startms"]), int(options["rowspersecond"])
    instants = [begin_ms + number * 1000 // rate for number in range(start, end)]
    times = [datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z" for ms in instants]
    values = [b'{"value":%d,"timestamp":"%s"}' % (n, at.encode()) for n, at in enumerate(times, start)]
    rows = end - start
    schema = arrow_schema(WITH_HEADERS)
    columns = [
        pa.nulls(rows, pa.binary()),
        pa.array(values, pa.binary()),
        pa.repeat(pa.scalar(STREAM, pa.string()), rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.array(range(start, end), pa.int64()),
        pa.array([ms * 1000 for ms in instants], pa.int64()).cast(schema.field("timestamp").type),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.array([[]] * rows, schema.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
