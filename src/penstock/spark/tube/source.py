"""``format("tubemq")``: TubeMQ as a batch and streaming source; its sink is in ``sink``.

Contract: ``apache/spark: python/pyspark/sql/datasource.py``. The streaming offset is small JSON (see ``offsets``);
``partitions(start, end)`` asks nobody where ``start`` has what ``end`` has; ``read`` opens its own connection and gives
exactly ``[start, end)`` each time. Delivery: every message of every range at least once, and the same rows for the
same range, so that a sink which is idempotent by batch makes it exactly once. What breaks that: retention or a
broker's loss of acknowledged data, both of which are errors unless ``failOnDataLoss`` is false.

One class serves Spark 4.1 to 4.3. Spark 4.1 knows no admission control: there the reader remembers where it is and
caps by itself, and a trigger ``availableNow`` together with ``maxOffsetsPerTrigger`` reads one capped batch and ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError
from penstock.spark import sink_rows
from penstock.spark.triggers import MinBatchWait, SupportsTriggerAvailableNow
from penstock.spark.tube.group_progress import GroupProgress
from penstock.spark.tube.offsets import (
    LATEST,
    Bounds,
    Positions,
    Slice,
    Times,
    TopicPartition,
    check_kept,
    counted,
    from_json,
    share,
    slices,
    stops,
    to_json,
)
from penstock.spark.tube.options import COLUMNS, HEADERS, SourceOptions
from penstock.spark.tube.retention_marks import LogEnds, Marks, check_data, marks_of, with_marks
from penstock.spark.tube.sink import TubeStreamWriter, TubeWriter, check_columns
from penstock.spark.tube.sink_options import SinkOptions
from penstock.spark.tube.tasks import planned, read_rows, selected
from penstock.spark.tube.tube_client import ServerAccess, TubeClient

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = [
    "TubeDataSource",
    "TubeReader",
    "TubeStreamReader",
    "spark_schema",
]

_LOOK_FOR_NEW_S = 1.0
"""A running query asks the master for new partitions at most this often; micro-batches may follow each other faster."""

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "broker": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    HEADERS: ArrayType(_HEADER),
}


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    """The columns of the source: Kafka's, and the broker.

    ``offset`` is the message's position in its store's index, ``timestamp`` the broker's append time (UTC), therefore
    ``timestampType`` 1 (log append time). Apache's brokers tell neither: there ``offset`` is where the fetch began that
    brought the message, ``timestamp`` null and ``timestampType`` -1. Not made from DDL: parsing that needs a JVM, which
    the processes that plan and read do not have.
    """
    return StructType([StructField(name, _TYPES.get(name) or StringType()) for name in columns])


class TubeDataSource(DataSource):
    """The format ``tubemq``. Options: `options.OPTIONS` of the source, `sink_options.OPTIONS` of the sink."""

    @classmethod
    def name(cls) -> str:
        """Name for ``format``."""
        return "tubemq"

    def schema(self) -> StructType:
        """Also the place where options are checked: Spark asks for it at ``load()``."""
        return spark_schema(SourceOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> TubeReader:
        """One batch between two positions of each partition. Raises ConfigError: an option or column is wrong."""
        return TubeReader(self._checked(schema))

    def streamReader(self, schema: StructType) -> TubeStreamReader:
        """A stream that can read every range of offsets again. Raises ConfigError as :meth:`reader`."""
        return TubeStreamReader(self._checked(schema))

    def writer(self, schema: StructType, overwrite: bool) -> TubeWriter:
        """Sends each row.

        Raises:
            ConfigError: the mode is overwrite, or an option or column is wrong.
            RefusedError, UnavailableError: the topic that the option names cannot be written to.
        """
        from penstock.spark.tube.sink_writes import TOPIC_S, check_topic

        if overwrite:
            raise sink_rows.refuse_overwrite("tubemq", why="a log is only appended to")
        options = self._sink_options(schema)
        # Asked here it is one error; of a task's Spark shows every attempt, each with a page of Java.
        check_topic(options, min(options.timeout_s, TOPIC_S))
        return TubeWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TubeStreamWriter:
        """As :meth:`writer`, batch after batch, under the delivery guarantee that was asked for."""
        return TubeStreamWriter(self._sink_options(schema))

    def _sink_options(self, schema: StructType) -> SinkOptions:
        options = SinkOptions.parse(self.options)
        check_columns(schema, options)
        return options

    def _checked(self, schema: StructType) -> SourceOptions:
        options = SourceOptions.parse(self.options)
        expected = spark_schema(options.columns)
        if schema != expected:
            raise ConfigError(
                f"the tubemq source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {expected.simpleString()}",
                do="leave .schema(...) out and select what is needed from the data frame",
            )
        return options


class TubeReader(DataSourceReader):
    """A batch: every message between two positions per partition, fixed when Spark plans the job."""

    def __init__(self, options: SourceOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._starting, self._ending = options.for_batch()

    def partitions(self) -> list[InputPartition]:
        """The tasks between the two positions of each partition. Raises ConfigError: they are in the wrong order."""
        with TubeClient.of(self._options, servers=self._servers) as tube:
            bounds = tube.bounds(selected(self._options, tube))
            start = tube.positions(self._starting, bounds, "startingOffsets")
            end = tube.positions(self._ending, bounds, "endingOffsets")
        for partition, position in start.items():
            if position > end[partition]:
                raise ConfigError(
                    f"{partition}: startingOffsets {position} lies after endingOffsets {end[partition]}",
                    option="startingOffsets",
                    do=f"start at {end[partition]} or before",
                )
            if self._options.fail_on_data_loss:
                check_kept(position, bounds[partition], partition)
                check_kept(end[partition], Bounds(0, bounds[partition].end), partition)
        given = marks_of(self._starting) if isinstance(self._starting, dict) else {}
        marks = LogEnds().marks(start, bounds, begin=start, before=given)
        return planned(slices(start, end), self._options, tube, marks)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, row for row the same as often as it is read."""
        return read_rows(self._options, partition, self._servers)


class TubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Runs in one process next to the driver for the whole query; ``read`` runs in executors, on a copy."""

    def __init__(self, options: SourceOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._starting = options.for_stream()
        self._tube: TubeClient | None = None
        self._initial: Positions | None = None
        self._is_anchored = True
        self._position: Positions | None = None
        self._planned = False
        """True if a batch was planned: the next one begins at its end."""
        self._target: Positions | None = None
        self._newest: Positions | None = None
        self._ends = LogEnds()
        self._initial_marks: Marks = {}
        self._marks: Marks = {}  # of _position
        self._progress: GroupProgress | None = None
        self._min_wait = (
            None if options.min_messages is None else MinBatchWait(options.min_messages, options.max_delay_ms / 1000)
        )

    def __getstate__(self) -> dict[str, Any]:
        # Spark sends the reader to every executor; connections and threads stay here.
        return self.__dict__ | {"_tube": None, "_progress": None, "_ends": None}

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the start of a query without a checkpoint. Spark calls it twice, so the first result is kept."""
        if self._initial is None:
            tube = self._connected()
            bounds = tube.bounds(selected(self._options, tube))
            self._initial = tube.positions(self._starting, bounds, "startingOffsets")
            if self._options.fail_on_data_loss:
                for partition, position in self._initial.items():
                    check_kept(position, bounds[partition], partition)
            self._is_anchored = not self._asks_for_latest()
            self._ends.see(bounds)
            given = marks_of(self._starting) if isinstance(self._starting, dict) else {}
            self._initial_marks = self._ends.marks(self._initial, bounds, begin=self._initial, before=given)
        if self._position is None:
            self._position = self._initial
        return with_marks(to_json(self._initial), self._initial_marks)

    def latestOffset(
        self, start: Mapping[str, Mapping[str, int]] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: never before ``start``, at most ``limit`` messages after it.

        The first batch of a query that starts at the latest offset is deliberately empty. Spark stores where a batch
        ends, not where a query starts: if the driver were killed during a first batch with rows, the restarted query
        would resolve "latest" again, and these rows would be lost.
        """
        begin = self._begin(start)
        if start is not None or self._planned:
            self._show(begin)
        before = self._marks if start is None else marks_of(start)
        if not self._is_anchored and begin == self._initial:
            self._is_anchored = True
            return with_marks(to_json(begin), before)
        # Without admission control (start is not given) our own option counts, else what Spark made of it.
        rows = self._options.max_messages if start is None else getattr(limit, "max_rows", None)
        bounds = self._bounds(begin, before)
        ends = self._limited(begin, self._reachable(begin, bounds), rows)
        return with_marks(to_json(ends), self._ends.marks(ends, bounds, begin=begin, before=before))

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxOffsetsPerTrigger`` of the options, else everything."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._options.max_messages
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """The end of the log when it was last looked at, whatever limits apply: progress reports show the lag."""
        return None if self._newest is None else to_json(self._newest)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix where the run ends: at what is there now, in the partitions that exist now."""
        tube = self._connected()
        bounds = tube.bounds(selected(self._options, tube))
        self._target = {partition: bound.end for partition, bound in bounds.items()}

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """The tasks of one batch, the same for the same arguments.

        ``end`` has a partition that ``start`` lacks only if the first batch of a query is repeated after a restart and
        a broker is away; such a partition begins where ``startingOffsets`` says.
        """
        begin, stop = from_json(start), from_json(end)
        self._position, self._marks, self._planned = stop, marks_of(end), True
        unknown = stop.keys() - begin.keys()
        if unknown:
            begin |= self._beginnings(unknown, stop)
        return planned(slices(begin, stop), self._options, self._tube, marks_of(start))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, row for row the same as often as it is read."""
        return read_rows(self._options, partition, self._servers)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Show where the query is, as the offset of its group.

        Spark calls this when it begins the next batch, so not after the last one; see :meth:`_show`.
        """
        self._show(from_json(end))

    def stop(self) -> None:
        """Close what the driver has open; tasks have connections of their own."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._tube is not None:
            self._tube.close()
            self._tube = None

    def _show(self, done: Positions) -> None:
        """Show ``done`` as the offsets of the query's group; it is never read back: the checkpoint decides.

        Spark runs one batch after the other, so where it asks for the next batch to begin, all before is committed.
        It asks once more after the last batch, and repeatedly while there is nothing to read; with :meth:`commit`
        alone the group would stay one batch behind until the next record comes.
        """
        if self._options.group:
            if self._progress is None:
                self._progress = GroupProgress(
                    lambda: TubeClient.of(self._options, servers=self._servers), self._options.group
                )
            self._progress.show(done)

    def _connected(self) -> TubeClient:
        if self._tube is None:
            self._tube = TubeClient.of(self._options, servers=self._servers)
        return self._tube

    def _asks_for_latest(self) -> bool:
        if isinstance(self._starting, Times):
            return self._starting.or_latest
        if isinstance(self._starting, str):
            return self._starting == "latest"
        return any(position == LATEST for named in self._starting.values() for position in named.values())

    def _begin(self, start: Mapping[str, Mapping[str, int]] | None) -> Positions:
        if start is not None:
            return from_json(start)
        if self._position is None:  # Spark 4.1, first call of a query
            self.initialOffset()
        assert self._position is not None
        return self._position

    def _bounds(self, begin: Positions, before: Marks) -> dict[TopicPartition, Bounds]:
        """Return the bounds of each partition that is read; check that the data after ``begin`` still exist."""
        options, tube = self._options, self._connected()
        mine = [partition for partition in begin if options.selects(partition)]
        bounds = tube.bounds(selected(options, tube, required=mine, max_age_s=_LOOK_FOR_NEW_S))
        self._newest = begin | {partition: bound.end for partition, bound in bounds.items()}
        self._ends.see(bounds)
        if options.fail_on_data_loss:
            for partition, bound in bounds.items():
                if partition in begin:
                    check_kept(begin[partition], bound, partition)
                    if begin[partition] < bound.end:
                        check_data(begin[partition], before.get(partition), bound, partition)
        return bounds

    def _reachable(self, begin: Positions, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, Bounds]:
        """Return the range of each partition that can be read, without a limit.

        For a partition that is new to the query both ends are its oldest offset: this batch stores where the partition
        begins, the next one reads it. Partitions of topics that are no longer subscribed do not appear. If the stream
        has an end, partitions that the end does not name are not read.
        """
        named = self._options.last_positions()
        last = None if named is None else stops(named, bounds, "endingOffsets")
        reachable: dict[TopicPartition, Bounds] = {}
        for partition, bound in bounds.items():
            position, end = begin.get(partition), bound.end
            if last is not None:
                end = min(end, last.get(partition, position or 0))
            if position is None:
                if self._target is None or partition in self._target:
                    reachable[partition] = Bounds(bound.oldest, bound.oldest)
                continue
            if self._target is not None:
                # A broker that was away when the run began counts from when it is back.
                end = min(end, self._target.setdefault(partition, end))
            reachable[partition] = Bounds(max(position, bound.oldest), max(position, end))
        return reachable

    def _limited(self, begin: Positions, reachable: Mapping[TopicPartition, Bounds], limit: int | None) -> Positions:
        """Return the end of the batch in each partition of ``begin`` and ``reachable``, or ``begin`` to wait.

        A run with ``availableNow`` does not wait for more rows: waiting would end it.
        """
        ends = begin | {partition: bounds.end for partition, bounds in reachable.items()}
        waiting = [Slice(p, b.oldest, b.end) for p, b in sorted(reachable.items()) if b.oldest < b.end]
        wait = self._min_wait if self._target is None else None
        if not waiting or (limit is None and wait is None):
            return ends
        tube = self._connected()
        asked = counted(waiting, tube.has_ranges)
        counts = [tube.weigh(whole) for whole, _ in asked]
        if wait is not None and wait.waits(sum(counts)):
            return begin
        if limit is None:
            return ends
        for (whole, pieces), count, granted in zip(asked, counts, share(limit, counts), strict=True):
            if granted < count:
                reached = tube.plan(whole, granted)[0] if granted else whole.start
                for partition, start, end in pieces:
                    ends[partition] = min(reached, end) if start < reached else begin[partition]
        return ends

    def _beginnings(self, unknown: Collection[TopicPartition], stop: Positions) -> Positions:
        if self._starting == "latest":
            return {partition: stop[partition] for partition in unknown}
        tube = self._connected()
        existing = tube.partitions({partition.topic for partition in unknown}, required=unknown)
        bounds = tube.bounds(partition for partition in existing if partition in unknown)
        if isinstance(self._starting, Times) and isinstance(self._starting.at, int):
            return tube.positions(self._starting._replace(or_latest=True), bounds, "startingOffsets")
        return {partition: bound.oldest for partition, bound in bounds.items()}
