"""``format("tubemq")``: TubeMQ as a batch and streaming source; its sink is in ``sink``.

Contract: ``apache/spark: python/pyspark/sql/datasource.py``. The streaming offset is small JSON (see ``offsets``).
``partitions(start, end)`` depends on its arguments only, if both name the same partitions. ``read`` opens its own
connection and returns exactly ``[start, end)`` each time. Delivery: every message of every range at least once, and the
same rows for the same range, so that a sink that is idempotent by batch makes it exactly once. Retention and a broker's
loss of acknowledged data break that; both are errors unless ``failOnDataLoss`` is false.

The driver plans the tasks of a batch; an executor gets a :class:`RangePartition` and the options and nothing else.

One class serves Spark 4.1 to 4.3. Spark 4.1 has no admission control: there the reader remembers its position and
applies the limit itself, and a trigger ``availableNow`` with ``maxOffsetsPerTrigger`` reads one limited batch and ends.
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
from penstock.spark.tube.offsets import (
    LATEST,
    Bounds,
    LogEnds,
    Marks,
    Positions,
    Slice,
    Times,
    TopicPartition,
    check_data,
    check_kept,
    counted,
    from_json,
    marks_of,
    packed,
    select,
    share,
    slices,
    split,
    stops,
    to_json,
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
"""Messages. A task costs Spark some milliseconds on a core, in which so many are read: short ranges share one, as the
small files of a file source do."""


class Range(NamedTuple):
    """Messages of one partition. ``address`` is where its broker was last seen, a hint that saves a question.

    ``mark``: that of the start, see ``offsets``.
    """

    piece: Slice
    address: BrokerAddress | None
    mark: int | None = None


class RangePartition(InputPartition):
    """Ranges of one task, read one after the other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__([range_.piece for range_ in ranges])
        self.ranges = ranges

    def __repr__(self) -> str:
        return ", ".join(f"{partition} [{start}, {end})" for partition, start, end in self.value)


def selected(
    options: SourceOptions, tube: TubeClient, required: Collection[TopicPartition] = (), max_age_s: float = 0.0
) -> list[TopicPartition]:
    """The partitions that the options select, of those that exist now; waits for ``required``."""
    if options.pattern is None:
        existing = tube.partitions(options.topics, required=required, max_age_s=max_age_s)
        return select(existing, options.topics, options.assigned)
    matching = [topic for topic in tube.topics(max_age_s=max_age_s) if re.fullmatch(options.pattern, topic)]
    gone = sorted({partition.topic for partition in required} - set(matching))
    if gone and options.fail_on_data_loss:
        raise DataLossError(
            f"topic {gone[0]!r} matched subscribePattern and is gone",
            why="it was removed, with what was not read of it",
            do="set failOnDataLoss=false to continue with the other topics",
        )
    still = [partition for partition in required if partition.topic in matching]
    return tube.partitions(matching, required=still, max_age_s=max_age_s, announced=False)


def planned(
    pieces: list[Slice],
    options: SourceOptions,
    tube: TubeClient | None,
    marks: Mapping[TopicPartition, int],
) -> list[InputPartition]:
    """Return the tasks that read ``pieces``: one per partition, split by the options, else short ones together."""
    if options.min_partitions is None and options.max_records is None:
        tasks = packed(pieces, _SHORT)
    else:
        tasks = [[piece] for piece in split(pieces, options.min_partitions or 1, options.max_records)]

    def found(piece: Slice) -> Range:
        return Range(piece, tube.address(piece.partition) if tube else None, marks.get(piece.partition))

    return [RangePartition([found(piece) for piece in task]) for task in tasks]


def read_rows(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None
) -> Iterator[pa.RecordBatch]:
    """The rows of one task."""
    from penstock.spark.tube.arrow import record_batches

    for range_, batches in _read(options, partition, servers):
        yield from record_batches(range_.piece.partition, batches, options.columns)


def read_messages(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None = None
) -> Iterator[MessageBatch]:
    """The messages of one task, as they came. Runs in an executor: everything it needs is made here."""
    for _, batches in _read(options, partition, servers):
        yield from batches


def _read(
    options: SourceOptions, partition: InputPartition, servers: ServerAccess | None
) -> Iterator[tuple[Range, Iterator[MessageBatch]]]:
    """The messages of each range of a task; those of one are to be taken before the next."""
    if not isinstance(partition, RangePartition):
        return  # Spark's own stand-in for a batch without partitions
    with TubeClient.from_options(options, servers=servers) as tube:
        for range_ in partition.ranges:
            piece, address, mark = range_
            yield (
                range_,
                tube.read(piece, address=address, fail_on_data_loss=options.fail_on_data_loss, mark=mark),
            )
    if TaskContext.get() is not None:
        _spare_what_is_loaded()


@cache
def _spare_what_is_loaded() -> None:
    """Once in an executor's process, whose loop collects garbage after each task: that looks at every object there is.

    What was imported up to the end of the first task are so many that it takes as long as reading thousands of rows.
    """
    gc.collect()
    gc.freeze()


CLOSE_S = 20.0
"""Longest time that a query which stops waits for its last offsets to be committed. Each commit is a registration, for
which a busy broker of Apache's needs seconds; one that is cut off keeps its partition from the group's next commit."""

_log = logging.getLogger(__name__)


class GroupProgress:
    """Shows positions as those of ``group``; ``connect`` makes the connection that only its thread uses."""

    def __init__(self, connect: Callable[[], TubeClient], group: str) -> None:
        self._connect = connect
        self._group = group
        self._wanted: Positions = {}
        self._changed = threading.Condition()
        self._closing = False
        self._shown: Positions = {}
        self._refused: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="positions", daemon=True)
        self._thread.start()

    def show(self, positions: Positions) -> None:
        """Everything before ``positions`` is committed. Returns at once."""
        with self._changed:
            self._wanted = positions
            self._changed.notify()

    def close(self) -> None:
        """Show what is left, for a short time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with self._connect() as tube:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._wanted != self._shown)
                    wanted, closing = self._wanted, self._closing
                self._show(tube, wanted)
                if closing:
                    return

    def _show(self, tube: TubeClient, wanted: Positions) -> None:
        for partition, position in wanted.items():
            if self._shown.get(partition) == position:
                continue
            try:
                if tube.address(partition) is None:
                    tube.partitions([partition.topic])
                tube.commit_offset(partition, self._group, position)
            except PenstockError as error:
                if error.what not in self._refused:
                    self._refused.add(error.what)
                    _log.warning("the position of group %s is not shown: %s", self._group, error.what)
        # Also what failed: the next batch brings newer positions, and nothing depends on these.
        self._shown = wanted


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


class MinBatchWait:
    """Waits until ``least`` messages are there, but not longer than ``longest_s`` after the last batch that was due.

    The first batch of a run does not wait, as with Kafka's connector.
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


class TubeDataSource(DataSource):
    """The format ``tubemq``. Options: ``READ_OPTIONS`` of the source, ``WRITE_OPTIONS`` of the sink."""

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
        with TubeClient.from_options(self._options, servers=self._servers) as tube:
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
            self._ends.record(bounds)
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
                    lambda: TubeClient.from_options(self._options, servers=self._servers), self._options.group
                )
            self._progress.show(done)

    def _connected(self) -> TubeClient:
        if self._tube is None:
            self._tube = TubeClient.from_options(self._options, servers=self._servers)
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
        self._ends.record(bounds)
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
