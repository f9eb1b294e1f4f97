"""Sources without a broker: their base class, and ``penstock-rate``, which generates records for tests of pipelines.

They have the columns of the ``tubemq`` source, and options that a pipeline has validated. Unlike Spark's ``rate``
source, ``penstock-rate`` always returns the same rows for a range of offsets: the timestamp of row n is computed from a
start time that the pipeline stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import SupportsTriggerAvailableNow, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = ["LocalSource", "RateDataSource", "RatePartition", "RateReader", "RateStreamReader", "due", "rate_rows"]


@plain_errors
class LocalSource(DataSource):
    """A source whose options were written by a pipeline and need no validation."""

    format_name: ClassVar[str]
    readers: ClassVar[
        tuple[Callable[[Mapping[str, str]], DataSourceReader], Callable[[Mapping[str, str]], DataSourceStreamReader]]
    ]
    """Constructors of the batch reader and the stream reader, called with the options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return cls.format_name

    def schema(self) -> StructType:
        """Return the columns of ``tubemq`` including headers."""
        return spark_schema(WITH_HEADERS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        return self.readers[0](dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the stream reader."""
        return self.readers[1](dict(self.options))


STREAM = "rate"
"""Key of the offset: ``{"rate": {"0": <rows>}}``."""
_PER_TASK = 100_000


class RatePartition(InputPartition):
    """Input of one task: the rows ``[start, end)``."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(None)
        self.start = start
        self.end = end


class RateReader(DataSourceReader):
    """Batch reader of a range of rows."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Return the tasks of the rows ``[start, end)`` in the options."""
        return _planned(int(self._options["start"]), int(self._options["end"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Generate the rows of one task."""
        assert isinstance(partition, RatePartition)
        yield rate_rows(partition.start, partition.end, self._options)


class RateStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader: rows at the configured rate."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._target: int | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the offset 0: offsets are row numbers."""
        return {STREAM: {"0": 0}}

    def latestOffset(
        self,
        start: Mapping[str, Mapping[str, int]] | None = None,
        limit: ReadLimit | None = None,
    ) -> dict[str, dict[str, int]]:
        """Return the number of rows that are due, at least the number in ``start``."""
        rows = due(self._options, time.time_ns()) if self._target is None else self._target
        # Offsets must not decrease if the clock is set back.
        return {STREAM: {"0": max(rows, 0 if start is None else start[STREAM]["0"])}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit: a batch has all due rows."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run: the rows that are due now."""
        self._target = due(self._options, time.time_ns())

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """Return the tasks of the rows ``[start, end)``."""
        return _planned(start[STREAM]["0"], end[STREAM]["0"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Generate the rows of one task."""
        assert isinstance(partition, RatePartition)
        yield rate_rows(partition.start, partition.end, self._options)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Do nothing: the query's checkpoint stores the offsets."""


class RateDataSource(LocalSource):
    """``penstock-rate``. Options: ``rowsPerSecond``, ``startMs``, ``rows``; for batches ``start`` and ``end``."""

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
    """Return the rows ``[start, end)`` as a record batch of the source's columns."""
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
