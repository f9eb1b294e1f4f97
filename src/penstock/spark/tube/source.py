"""``format("tubemq")``: TubeMQ as a batch and streaming source; its sink is in ``sink``.

Contract: ``apache/spark: python/pyspark/sql/datasource.py``. The streaming offset is small JSON (see ``offsets``).
``partitions(start, end)`` depends on its arguments only, if both contain the same partitions. ``read`` opens its own
connection and returns exactly ``[start, end)`` each time. Delivery: every message of every range at least once, and the
same rows for the same range, so a sink that is idempotent by batch makes the query exactly once. Retention, or a
broker's loss of acknowledged data, breaks this guarantee; both are errors unless ``failOnDataLoss`` is false.

The driver plans the tasks of a batch; an executor receives only a :class:`RangePartition` and the options.

One class serves Spark 4.1 to 4.3. Spark 4.1 has no admission control: there the reader stores its offsets and applies
the limit itself, and a trigger ``availableNow`` with ``maxOffsetsPerTrigger`` reads one limited batch and ends.
"""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
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

from penstock.errors import ConfigError, DataLossError, PenstockError
from penstock.spark import sink_rows
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.offsets import (
    LATEST,
    Bounds,
    Epochs,
    LogEnds,
    Marks,
    PartitionOffsets,
    Slice,
    TimeSpec,
    TopicPartition,
    check_data_stored,
    check_not_replaced,
    check_offset_in_range,
    epochs_at,
    epochs_of,
    from_json,
    group_for_counting,
    marks_of,
    pack_tasks,
    select,
    share_limit,
    slices,
    split,
    stop_offsets,
    to_json,
    with_epochs,
    with_marks,
)
from penstock.spark.tube.options import COLUMNS, HEADERS, SinkOptions, SourceOptions
from penstock.spark.tube.sink import TubeStreamWriter, TubeWriter, check_columns
from penstock.spark.tube.tube_client import BrokerAddress, ServerAccess, TubeClient

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

    from penstock.tube.reader import MessageBatch
else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:  # Spark 4.1

        class SupportsTriggerAvailableNow:
            """Placeholder for versions of Spark without this mixin."""


__all__ = [
    "GroupProgress",
    "MinBatchWait",
    "Range",
    "RangePartition",
    "SupportsTriggerAvailableNow",
    "TubeDataSource",
    "TubeReader",
    "TubeStreamReader",
    "planned",
    "read_messages",
    "read_rows",
    "selected",
    "spark_schema",
]

_SHORT = 1000
"""Messages per task that combines short ranges, as file sources combine small files: starting a task costs Spark
several milliseconds of CPU time, about as long as reading this many messages."""


class Range(NamedTuple):
    """Messages of one partition. ``address`` is the last known address of its broker, so that no request to a master is
    needed.

    ``mark`` is the mark of the start offset and ``epoch`` the epoch of ``piece``, see ``offsets``.
    """

    piece: Slice
    address: BrokerAddress | None
    mark: int | None = None
    epoch: int | None = None


class RangePartition(InputPartition):
    """The ranges that one task reads, in order."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__([range_.piece for range_ in ranges])
        self.ranges = ranges

    def __repr__(self) -> str:
        return ", ".join(f"{partition} [{start}, {end})" for partition, start, end in self.value)


def selected(
    options: SourceOptions, tube: TubeClient, required: Collection[TopicPartition] = (), max_age_s: float = 0.0
) -> list[TopicPartition]:
    """Return the existing partitions that the options select; waits until all of ``required`` are available."""
    if options.pattern is None:
        existing = tube.partitions(options.topics, required=required, max_age_s=max_age_s)
        return select(existing, options.topics, options.assigned)
    matching = [topic for topic in tube.topics(max_age_s=max_age_s) if re.fullmatch(options.pattern, topic)]
    gone = sorted({partition.topic for partition in required} - set(matching))
    if gone and options.fail_on_data_loss:
        raise DataLossError(
            f"topic {gone[0]!r}, which matched subscribePattern, no longer exists",
            why="it was deleted with unread records",
            hint="set the source option failOnDataLoss=false to continue with the other topics",
        )
    still = [partition for partition in required if partition.topic in matching]
    return tube.partitions(matching, required=still, max_age_s=max_age_s, announced=False)


def planned(
    pieces: list[Slice],
    options: SourceOptions,
    tube: TubeClient | None,
    marks: Mapping[TopicPartition, int],
    epochs: Mapping[TopicPartition, int],
) -> list[InputPartition]:
    """Return the tasks that read ``pieces``, one range per partition.

    With ``minPartitions`` or ``maxRecordsPerPartition`` ranges are split; otherwise short ranges share a task.
    """
    if options.min_partitions is None and options.max_records is None:
        tasks = pack_tasks(pieces, _SHORT)
    else:
        tasks = [[piece] for piece in split(pieces, options.min_partitions or 1, options.max_records)]

    def found(piece: Slice) -> Range:
        partition = piece.partition
        address = tube.address(partition) if tube else None
        return Range(piece, address, marks.get(partition), epochs.get(partition))

    return [RangePartition([found(piece) for piece in task]) for task in tasks]


def read_rows(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None
) -> Iterator[pa.RecordBatch]:
    """Read the rows of one task as record batches."""
    from penstock.spark.tube.arrow import record_batches

    for range_, batches in _read(options, partition, servers):
        yield from record_batches(range_.piece.partition, batches, options.columns)


def read_messages(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None = None
) -> Iterator[MessageBatch]:
    """Read the messages of one task, undecoded. Runs in an executor and opens its own connections."""
    for _, batches in _read(options, partition, servers):
        yield from batches


def _read(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None
) -> Iterator[tuple[Range, Iterator[MessageBatch]]]:
    """Yield each range of a task with its messages; consume the messages before requesting the next range."""
    if not isinstance(partition, RangePartition):
        return  # Spark's placeholder for a batch without partitions
    with TubeClient.from_options(options, servers=servers) as tube:
        for range_ in partition.ranges:
            piece, address, mark, epoch = range_
            fails = options.fail_on_data_loss
            yield range_, tube.read(piece, address=address, fail_on_data_loss=fails, mark=mark, epoch=epoch)
    if TaskContext.get() is not None:
        _freeze_gc()


@cache
def _freeze_gc() -> None:
    """Exclude imported modules from garbage collection, once per executor process.

    Spark's worker collects garbage after each task, which scans all objects. Modules imported by the first task have so
    many objects that a collection takes as long as reading thousands of rows.
    """
    gc.collect()
    gc.freeze()


CLOSE_S = 20.0
"""Timeout for the last commit of the group's offsets when a query stops. Each commit registers a consumer, which takes
a busy Apache broker seconds; an interrupted registration blocks the group's next commit for the partition."""

_log = logging.getLogger(__name__)


class GroupProgress:
    """Publishes offsets of groups, for monitoring, in a separate thread.

    ``connect`` creates the client, which only this thread uses.
    """

    def __init__(self, connect: Callable[[], TubeClient]) -> None:
        self._connect = connect
        self._requested: dict[tuple[str, TopicPartition], int] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._attempted: dict[tuple[str, TopicPartition], int] = {}
        self._published: dict[tuple[str, TopicPartition], int] = {}
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="offsets", daemon=True)
        self._thread.start()

    def publish(self, groups: Sequence[str], offsets: PartitionOffsets) -> None:
        """Publish ``offsets`` for each of ``groups``: they have processed all messages before them. Returns
        immediately."""
        with self._changed:
            for group in groups:
                self._requested |= {(group, partition): offset for partition, offset in offsets.items()}
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Publish the last offsets and stop the thread; waits for at most ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._connect() as tube:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._requested != self._attempted)
                    requested, closing = dict(self._requested), self._closing
                self._commit(tube, requested)
                self._attempted = requested
                if closing:
                    return

    def _commit(self, tube: TubeClient, requested: dict[tuple[str, TopicPartition], int]) -> None:
        """Commit what is not committed yet; failed commits are repeated with the next offsets and at the end."""
        for (group, partition), offset in requested.items():
            if self._published.get((group, partition)) == offset:
                continue
            try:
                if tube.address(partition) is None:
                    tube.partitions([partition.topic])
                tube.commit_offset(partition, group, offset)
                self._published[group, partition] = offset
            except PenstockError as error:
                if error.what not in self._logged:
                    self._logged.add(error.what)
                    _log.warning("the offsets of group %s were not published: %s", group, error.line())


_DISCOVERY_S = 1.0
"""Minimum interval at which a running query asks the master for new partitions; micro-batches may be shorter."""

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
    """Return the schema of the source: the columns of Kafka's connector, and ``broker``.

    ``offset`` is the message's offset in the index of its store and ``timestamp`` the broker's append time (UTC), so
    ``timestampType`` is 1 (log append time). Apache's brokers return neither: there ``offset`` is the start of the
    fetch that returned the message, ``timestamp`` is null and ``timestampType`` -1. The schema is not created from DDL,
    because parsing DDL needs a JVM, which planner and worker processes do not have.
    """
    return StructType([StructField(name, _TYPES.get(name) or StringType()) for name in columns])


class MinBatchWait:
    """Delays a batch until ``least`` messages are available, but at most ``longest_s`` since the previous batch.

    The first batch of a run is not delayed, as with Kafka's connector.
    """

    def __init__(self, least: int, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._longest_s = longest_s
        self._clock = clock
        self._last: float | None = None

    def waits(self, count: int) -> bool:
        """Return True if a batch of ``count`` messages is not due yet; otherwise restart the timer."""
        now = self._clock()
        if self._last is not None and count < self._least and now - self._last < self._longest_s:
            return True
        self._last = now
        return False


@plain_errors
class TubeDataSource(DataSource):
    """The format ``tubemq``. Options: ``READ_OPTIONS`` of the source, ``WRITE_OPTIONS`` of the sink."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "tubemq"

    def schema(self) -> StructType:
        """Return the schema. Also validates the options, because Spark calls this in ``load()``."""
        return spark_schema(SourceOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> TubeReader:
        """Return the reader of a batch. Raises ConfigError: an option or the schema is invalid."""
        return TubeReader(self._checked(schema))

    def streamReader(self, schema: StructType) -> TubeStreamReader:
        """Return the reader of a stream. Raises ConfigError: an option or the schema is invalid."""
        return TubeStreamReader(self._checked(schema))

    def writer(self, schema: StructType, overwrite: bool) -> TubeWriter:
        """Return the writer of a batch.

        Raises:
            ConfigError: the mode is overwrite, or an option or column is invalid.
            RefusedError, UnavailableError: the topic in the option ``topic`` is not writable.
        """
        from penstock.spark.tube.sink_writes import TOPIC_S, check_topic

        if overwrite:
            raise sink_rows.refuse_overwrite("tubemq", why="a log is only appended to")
        options = self._sink_options(schema)
        # An error here is reported once; an error in a task is reported for each attempt, with a Java stack trace.
        check_topic(options, min(options.timeout_s, TOPIC_S))
        return TubeWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TubeStreamWriter:
        """Return the writer of a stream. Raises ConfigError: an option or column is invalid."""
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
                hint="remove .schema(...) and select columns of the data frame instead",
            )
        return options


@plain_errors
class TubeReader(DataSourceReader):
    """Batch reader: all messages between two offsets per partition, which are resolved when Spark plans the job."""

    def __init__(self, options: SourceOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._starting, self._ending = options.for_batch()

    def partitions(self) -> list[InputPartition]:
        """Return the tasks of the batch.

        Raises:
            ConfigError: the start of a partition is after its end.
            DataLossError: records of the range are no longer stored, and ``failOnDataLoss`` is true.
        """
        with TubeClient.from_options(self._options, servers=self._servers) as tube:
            bounds = tube.bounds(selected(self._options, tube))
            start = tube.resolve_offsets(self._starting, bounds, "startingOffsets")
            end = tube.resolve_offsets(self._ending, bounds, "endingOffsets")
            epochs = {partition: bound.epoch for partition, bound in bounds.items() if bound.epoch is not None}
            for offsets, wanted in ((start, self._starting), (end, self._ending)):
                known = epochs_of(wanted) if isinstance(wanted, dict) else {}
                replaced = tube.replaced(offsets, known, bounds)
                if self._options.fail_on_data_loss:
                    check_not_replaced(offsets, replaced)
                offsets.update(replaced)
                # An end in a replaced log may precede a start without an epoch: nothing of the range is left.
                start.update({partition: min(start[partition], offset) for partition, offset in replaced.items()})
        for partition, offset in start.items():
            if offset > end[partition]:
                raise ConfigError(
                    f"{partition}: startingOffsets {offset} is after endingOffsets {end[partition]}",
                    option="startingOffsets",
                    hint=f"start at {end[partition]} or earlier",
                )
            if self._options.fail_on_data_loss:
                check_offset_in_range(offset, bounds[partition], partition)
                check_offset_in_range(end[partition], Bounds(0, bounds[partition].end), partition)
        given = marks_of(self._starting) if isinstance(self._starting, dict) else {}
        marks = LogEnds().marks(start, bounds, begin=start, before=given)
        return planned(slices(start, end), self._options, tube, marks, epochs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task; a repeated call returns the same rows."""
        return read_rows(self._options, partition, self._servers)


@plain_errors
class TubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader. It runs in one process next to the driver for the whole query; executors ``read`` with copies."""

    def __init__(self, options: SourceOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._starting = options.for_stream()
        self._tube: TubeClient | None = None
        self._initial: PartitionOffsets | None = None
        self._is_anchored = True
        self._offsets: PartitionOffsets | None = None
        self._planned = False
        """True after a batch was planned: the next one begins at its end."""
        self._target: PartitionOffsets | None = None
        self._newest: dict[str, dict[str, int]] | None = None
        self._ends = LogEnds()
        self._initial_marks: Marks = {}
        self._initial_epochs: Epochs = {}
        self._marks: Marks = {}  # time of _offsets
        self._epochs: Epochs = {}  # as _marks
        self._progress: GroupProgress | None = None
        self._min_wait = (
            None if options.min_messages is None else MinBatchWait(options.min_messages, options.max_delay_ms / 1000)
        )

    def __getstate__(self) -> dict[str, Any]:
        # Spark sends the reader to every executor; connections and threads stay in this process.
        return self.__dict__ | {"_tube": None, "_progress": None, "_ends": None}

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the start of a query without a checkpoint. Spark calls it twice, so the first result is kept."""
        if self._initial is None:
            tube = self._connected()
            bounds = tube.bounds(selected(self._options, tube))
            initial = tube.resolve_offsets(self._starting, bounds, "startingOffsets")
            given = self._starting if isinstance(self._starting, dict) else {}
            replaced = tube.replaced(initial, epochs_of(given), bounds)
            if self._options.fail_on_data_loss:
                check_not_replaced(initial, replaced)
                for partition, offset in initial.items():
                    check_offset_in_range(offset, bounds[partition], partition)
            self._initial = initial | replaced
            self._is_anchored = not self._starts_at_latest()
            self._ends.record(bounds)
            self._initial_marks = self._ends.marks(self._initial, bounds, begin=self._initial, before=marks_of(given))
            self._initial_epochs = epochs_at(self._initial, bounds, {}, {})
        if self._offsets is None:
            self._offsets, self._epochs = self._initial, self._initial_epochs
        return with_epochs(with_marks(to_json(self._initial), self._initial_marks), self._initial_epochs)

    def latestOffset(
        self, start: Mapping[str, Mapping[str, int]] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: never before ``start``, at most ``limit`` messages after it.

        The first batch of a query that starts at the latest offset is deliberately empty. Spark stores where a batch
        ends, not where a query starts: if the driver were killed during a first batch with rows, the restarted query
        would resolve "latest" again, and these rows would be lost.
        """
        begin = self._start_of_batch(start)
        if start is not None or self._planned:
            self._publish(begin)
        before = self._marks if start is None else marks_of(start)
        epochs = self._epochs if start is None else epochs_of(start)
        if not self._is_anchored and begin == self._initial:
            self._is_anchored = True
            return with_epochs(with_marks(to_json(begin), before), epochs)
        # Spark 4.1 has no admission control and passes no start: apply the option. Otherwise use Spark's limit.
        rows = self._options.max_messages if start is None else getattr(limit, "max_rows", None)
        bounds, replaced = self._bounds(begin, before, epochs)
        present = {partition: bound for partition, bound in bounds.items() if partition not in replaced}
        # The first offset of a log that replaces another one is stored by this batch, and read from by the next one.
        ends = self._limited(begin, self._reachable(begin, present), rows) | replaced
        document = with_marks(to_json(ends), self._ends.marks(ends, bounds, begin=begin, before=before))
        return with_epochs(document, epochs_at(ends, bounds, begin, epochs))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return ``maxOffsetsPerTrigger`` as Spark's limit; without the option, all available messages."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._options.max_messages
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """Return the end of the log at the last request, regardless of limits: progress reports contain the lag."""
        return self._newest

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run: the current end of each partition that exists now."""
        tube = self._connected()
        bounds = tube.bounds(selected(self._options, tube))
        self._target = {partition: bound.end for partition, bound in bounds.items()}

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """Return the tasks of one batch; the result depends on the arguments only.

        Exception: ``end`` has a partition that ``start`` lacks if the first batch of a query is repeated after a
        restart while a broker is unavailable. Such a partition begins at ``startingOffsets``.
        """
        begin, stop = from_json(start), from_json(end)
        self._offsets, self._marks, self._epochs, self._planned = stop, marks_of(end), epochs_of(end), True
        unknown = stop.keys() - begin.keys()
        if unknown:
            begin |= self._starts_of(unknown, stop)
        return planned(slices(begin, stop), self._options, self._tube, marks_of(start), epochs_of(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task; a repeated call returns the same rows."""
        return read_rows(self._options, partition, self._servers)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Publish ``end`` as the offsets of the query's group.

        Spark calls this when it begins the next batch, so not after the last one; see :meth:`_publish`.
        """
        self._publish(from_json(end))

    def stop(self) -> None:
        """Publish the last offsets and close the driver's connections; tasks have their own connections."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._tube is not None:
            self._tube.close()
            self._tube = None

    def _publish(self, done: PartitionOffsets) -> None:
        """Publish ``done`` as the offsets of the query's group, for monitoring: a restart uses the checkpoint.

        Spark runs batches sequentially, so when it requests the end of the next batch, the previous batches are
        committed. It makes this request once more after the last batch, and repeatedly while there are no new records;
        with :meth:`commit` alone the group would stay one batch behind until the next record arrives.
        """
        groups = [name for part in self._options.group.split(",") if (name := part.strip())]
        if groups:
            if self._progress is None:
                self._progress = GroupProgress(lambda: TubeClient.from_options(self._options, servers=self._servers))
            self._progress.publish(groups, done)

    def _connected(self) -> TubeClient:
        if self._tube is None:
            self._tube = TubeClient.from_options(self._options, servers=self._servers)
        return self._tube

    def _starts_at_latest(self) -> bool:
        if isinstance(self._starting, TimeSpec):
            return self._starting.or_latest
        if isinstance(self._starting, str):
            return self._starting == "latest"
        return any(offset == LATEST for named in self._starting.values() for offset in named.values())

    def _start_of_batch(self, start: Mapping[str, Mapping[str, int]] | None) -> PartitionOffsets:
        if start is not None:
            return from_json(start)
        if self._offsets is None:  # Spark 4.1, first call of a query
            self.initialOffset()
        assert self._offsets is not None
        return self._offsets

    def _bounds(
        self, begin: PartitionOffsets, before: Marks, epochs: Epochs
    ) -> tuple[dict[TopicPartition, Bounds], PartitionOffsets]:
        """Return the bounds of each selected partition, and those with a replaced log (``TubeClient.replaced``).

        Checks that the data after ``begin`` is still stored.
        """
        options, tube = self._options, self._connected()
        mine = [partition for partition in begin if options.selects(partition)]
        bounds = tube.bounds(selected(options, tube, required=mine, max_age_s=_DISCOVERY_S))
        newest = begin | {partition: bound.end for partition, bound in bounds.items()}
        self._newest = with_epochs(to_json(newest), epochs_at(newest, bounds, begin, epochs))
        self._ends.record(bounds)
        replaced = tube.replaced(begin, epochs, bounds)
        if options.fail_on_data_loss:
            check_not_replaced(begin, replaced)
            for partition, bound in bounds.items():
                if partition in begin:
                    check_offset_in_range(begin[partition], bound, partition)
                    if begin[partition] < bound.end:
                        check_data_stored(begin[partition], before.get(partition), bound, partition)
        return bounds, replaced

    def _reachable(
        self, begin: PartitionOffsets, bounds: Mapping[TopicPartition, Bounds]
    ) -> dict[TopicPartition, Bounds]:
        """Return the available range of each partition, regardless of limits.

        For a partition that is new to the query both ends are its oldest offset: this batch stores the partition's
        start, and the next one reads it. Partitions of topics that are no longer subscribed are omitted. If the stream
        has an end, partitions that the end lacks are not read.
        """
        named = self._options.stop_offsets()
        last = None if named is None else stop_offsets(named, bounds, "endingOffsets")
        reachable: dict[TopicPartition, Bounds] = {}
        for partition, bound in bounds.items():
            offset, end = begin.get(partition), bound.end
            if last is not None:
                end = min(end, last.get(partition, offset or 0))
            if offset is None:
                if self._target is None or partition in self._target:
                    reachable[partition] = Bounds(bound.oldest, bound.oldest)
                continue
            if self._target is not None:
                # For a broker that was unavailable when the run began, use its end when it returned.
                end = min(end, self._target.setdefault(partition, end))
            reachable[partition] = Bounds(max(offset, bound.oldest), max(offset, end))
        return reachable

    def _limited(
        self, begin: PartitionOffsets, reachable: Mapping[TopicPartition, Bounds], limit: int | None
    ) -> PartitionOffsets:
        """Return the end of the batch for each partition of ``begin`` and ``reachable``.

        Returns ``begin`` to wait for more rows; not with ``availableNow``, where an empty batch would end the run.
        """
        ends = begin | {partition: bounds.end for partition, bounds in reachable.items()}
        waiting = [Slice(p, b.oldest, b.end) for p, b in sorted(reachable.items()) if b.oldest < b.end]
        wait = self._min_wait if self._target is None else None
        if not waiting or (limit is None and wait is None):
            return ends
        tube = self._connected()
        asked = group_for_counting(waiting, tube.has_ranges)
        counts = [tube.weigh(whole) for whole, _ in asked]
        if wait is not None and wait.waits(sum(counts)):
            return begin
        if limit is None:
            return ends
        for (whole, pieces), count, granted in zip(asked, counts, share_limit(limit, counts), strict=True):
            if granted < count:
                reached = tube.plan(whole, granted)[0] if granted else whole.start
                for partition, start, end in pieces:
                    ends[partition] = min(reached, end) if start < reached else begin[partition]
        return ends

    def _starts_of(self, unknown: Collection[TopicPartition], stop: PartitionOffsets) -> PartitionOffsets:
        if self._starting == "latest":
            return {partition: stop[partition] for partition in unknown}
        tube = self._connected()
        existing = tube.partitions({partition.topic for partition in unknown}, required=unknown)
        bounds = tube.bounds(partition for partition in existing if partition in unknown)
        if isinstance(self._starting, TimeSpec) and isinstance(self._starting.at, int):
            return tube.resolve_offsets(self._starting._replace(or_latest=True), bounds, "startingOffsets")
        return {partition: bound.oldest for partition, bound in bounds.items()}
