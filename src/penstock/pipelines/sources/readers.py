"""Readers of the sources of a pipeline: streams, rereading of ranges, and counts.

TubeMQ topics may contain MQTT messages that a rule copies, or changes of the state store. Sources without a broker are
files in a directory, and records generated at a rate.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.catalyst import make_thread_safe
from penstock.pipelines.rows import header_names, source_rows
from penstock.pipelines.sources.lag import (
    LAG_TIMEOUT_MS,
    FileMeter,
    Lag,
    NoMeter,
    PollingMeter,
    SourceMeter,
    measure,
    unread_share,
)
from penstock.pipelines.spec.sources import SOURCE, StateStoreSource, TubeOptions
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import create_bytes, first_json, make_directory, read_json
from penstock.pipelines.state_dir.replay import Copies, ReplayRange
from penstock.spark import local_sources
from penstock.spark.files import source as files
from penstock.spark.files.change_feed import ChangeFeed, DeltaDataSource, count_changes, is_empty
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.files.source import FileLog, check_unchanged, count_records
from penstock.spark.kafka.source import KafkaDataSource, KafkaLog, ranges
from penstock.spark.tube.offsets import (
    Bounds,
    OffsetSpec,
    PartitionOffsets,
    TimeSpec,
    TopicPartition,
    check_not_replaced,
    check_offset_in_range,
    epochs_at,
    epochs_of,
    from_json,
    marks_of,
    to_json,
    with_epochs,
    with_marks,
)
from penstock.spark.tube.options import COLUMNS, HEADERS, WITH_HEADERS, SourceOptions, canonical_names
from penstock.spark.tube.source import GroupProgress, spark_schema
from penstock.spark.tube.tube_client import TubeClient, count_rows, explain_missing_topic, header_values

if TYPE_CHECKING:
    from penstock.pipelines.spec.sources import DeltaSource, FilesSource, KafkaSource, RateSource

__all__ = [
    "CHECK_TIMEOUT_MS",
    "DeltaSourceReader",
    "FilesSourceReader",
    "KafkaSourceReader",
    "QueryInput",
    "RateSourceReader",
    "SourceReader",
    "TubeSourceReader",
    "explain_missing_changes",
]


_log = logging.getLogger(__name__)


class QueryInput(NamedTuple):
    """Input of the query ``query`` from the source ``name``.

    ``directory`` is for files that the source needs to reread a range of this input.
    """

    query: str
    name: str
    directory: StoragePath


class SourceReader(Protocol):
    """One source. Its offsets are stream -> partition -> offset. ``doubts``: data that a replay may lack."""

    doubts: list[str]

    def check(self) -> None:
        """Check that the source can be read, before Spark is started."""

    def start(self, input_: QueryInput) -> Offsets:
        """Return the start offsets of a new query."""

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return a stream of rows (``rows.rows_of``) from ``start``; a query with a checkpoint continues from the
        checkpoint."""

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """Return the rows in ``[start, end)``, the same each time; None if there are none."""

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Return the number of records in ``[start, end)``, counted by the source."""

    def size(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Return ``count``, or a larger number if the source can only count records by reading them."""
        return self.count(input_, start, end)

    def meter(self, clock: Callable[[], int]) -> SourceMeter:
        """Return a meter of the lag of queries behind this source; ``clock`` returns ms since 1970."""

    def publish(self, input_: QueryInput, end: Offsets) -> None:
        """Publish ``end`` as the offsets that a query has reached, if the source shows offsets. Returns immediately."""

    def close(self) -> None:
        """Publish the last offsets."""


PUBLISH_MS = 5_000
"""Timeout of publishing offsets, in a thread of their own."""
PUBLISH_S = 10.0
"""Timeout of publishing the last offsets of a run."""
HEADERS_MS = 5_000
"""Timeout of reading headers for traces, in a thread of their own."""
CHECK_TIMEOUT_MS = 10_000
"""Timeout of the check before Spark starts: long enough for a node that is starting."""


class TubeSourceReader(SourceReader):
    """Reads TubeMQ topics as the source ``name``. A ``span`` has an end, whose offsets are stored in ``starts``.

    Without a ``span``, offsets are published for a group with the prefix ``group`` (unless the source sets a group) and
    the names of query and source. ``headers``: True if rows contain all headers of a record. ``redriven``: records
    and their copies; a record whose copy is in the span as well is marked as filtered, and of a record with copies of
    single parts, these are left out by the explode step.
    """

    def __init__(
        self,
        name: str,
        source: TubeOptions,
        starts: StoragePath,
        span: ReplayRange | None = None,
        *,
        group: str = "",
        headers: bool = True,
        redriven: Copies = MappingProxyType({}),
    ) -> None:
        self._columns = (*COLUMNS, *((HEADERS,) if headers else ()), *(f"header.{n}" for n in header_names(source)))
        self.options = canonical_names(source.all_options() | {"columns": ",".join(self._columns)})
        self.checked = SourceOptions.parse(self.options)
        self.doubts: list[str] = []
        """Data that a replay may lack, found when it starts."""
        self._name = name
        self._source = source
        self._starts = starts
        self._span = span
        self._redriven = redriven
        self._group = self.options.get("tubemq.group", self.options.get("groupIdPrefix", group))
        self._progress: GroupProgress | None = None

    def open(self) -> TubeClient:
        """Open a client with a short timeout."""
        return TubeClient.from_options(self.checked, timeout_ms=LAG_TIMEOUT_MS)

    def check(self) -> None:
        """Check that TubeMQ answers and has the topics.

        Raises:
            UnavailableError: no master answers.
            ConfigError: a topic does not exist.
        """
        with TubeClient.from_options(self.checked, timeout_ms=min(self.checked.timeout_ms, CHECK_TIMEOUT_MS)) as tube:
            source = self._source
            with explain_missing_changes(source.tube_topic) if isinstance(source, StateStoreSource) else nullcontext():
                tube.partitions(self.checked.topics)

    def start(self, input_: QueryInput) -> Offsets:
        """Resolve ``startingOffsets``, or the start of the span, to offsets."""
        with TubeClient.from_options(self.checked) as tube:
            bounds = tube.bounds(tube.partitions(self.checked.topics))
            wanted = self.checked.for_stream() if self._span is None else self._span.begin
            positions = tube.resolve_offsets(wanted, bounds, "startingOffsets")
            replaced = tube.replaced(positions, epochs_of(wanted) if isinstance(wanted, dict) else {}, bounds)
        if self.checked.fail_on_data_loss:
            check_not_replaced(positions, replaced)
        positions |= replaced
        if self._span is not None:
            self._check_gaps(positions, bounds)
        return with_epochs(to_json(positions), epochs_at(positions, bounds, {}, {}))

    def end_of_span(self) -> Offsets | None:
        """Return the end offsets of the span, or None. They are resolved once and stored."""
        if self._span is None:
            return None
        wanted = self._span.end

        def resolve() -> Offsets:
            with TubeClient.from_options(self.checked) as tube:
                bounds = tube.bounds(tube.partitions(self.checked.topics))
                positions = tube.resolve_offsets(wanted, bounds, "endingOffsets")
                for partition, position in positions.items():
                    check_offset_in_range(position, Bounds(0, bounds[partition].end), partition)
            return to_json(positions)

        return _stored_end(self._starts, self._name, resolve)

    def bounds(self, tube: TubeClient) -> dict[TopicPartition, Bounds]:
        """Return the readable ranges: from the earliest stored offset to the end of the log, or of the span."""
        bounds = tube.bounds(tube.partitions(self.checked.topics, max_age_s=LAG_TIMEOUT_MS / 1000))
        end = self.end_of_span()
        if end is None:
            return bounds
        last = from_json(end)
        return {p: b._replace(end=min(b.end, last[p])) for p, b in bounds.items() if p in last}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return the stream from ``start``."""
        options = self.options | {"startingOffsets": json.dumps(start), "tubemq.group": ""}
        end = self.end_of_span()
        if end is not None:
            options |= {"endingOffsets": json.dumps(end)}
        make_thread_safe(spark, "tubemq")
        return self._rows(spark.readStream.format("tubemq").options(**options).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """Return the records in ``[start, end)``, the same each time; None if there are none.

        A partition that is only in ``end`` is empty: the source adds it one batch before it reads from it.
        """
        begin, stop = from_json(start), from_json(end)
        ends = {
            partition: position for partition, position in stop.items() if begin.get(partition, position) < position
        }
        if not ends:
            return None
        starts = with_marks(to_json({partition: begin[partition] for partition in ends}), marks_of(start))
        stops = with_epochs(to_json(ends), epochs_of(end))
        left_out = {"subscribe", "maxOffsetsPerTrigger", "startingOffsets"}
        options = {name: value for name, value in self.options.items() if name not in left_out} | {
            "assign": json.dumps({topic: list(named) for topic, named in to_json(ends).items()}),
            "startingOffsets": json.dumps(starts),
            "endingOffsets": json.dumps(stops),
        }
        return self._rows(spark.read.format("tubemq").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(self._columns)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Return the number of records in ``[start, end)``, counted by the brokers."""
        return count_rows(self.options, start, end)

    def header_values(self, start: Offsets, end: Offsets, name: str, max_records: int) -> list[str]:
        """Return the values of the header ``name`` of the first records in ``[start, end)``."""
        options = dataclasses.replace(self.checked, timeout_ms=HEADERS_MS)
        return header_values(options, from_json(start), from_json(end), name, max_records=max_records)

    def meter(self, clock: Callable[[], int]) -> PollingMeter[TubeClient]:
        """Return a meter of the lag."""

        def measured(tube: TubeClient, ends: Mapping[str, Offsets]) -> dict[str, Lag]:
            bounds = self.bounds(tube)
            now_ms = clock()
            return {name: measure(tube, bounds, end, now_ms) for name, end in ends.items()}

        return PollingMeter(self.open, measured)

    def publish(self, input_: QueryInput, end: Offsets) -> None:
        """Publish ``end`` for the group of the query, unless it is a replay. Returns immediately.

        The streams do not publish: several could share a group, and Spark ends their processes without waiting, so a
        registration could remain and block the group's next commit.
        """
        if not self._group or self._span is not None:
            return
        if self._progress is None:
            self._progress = GroupProgress(lambda: TubeClient.from_options(self.checked, timeout_ms=PUBLISH_MS))
        after = [input_.name] if input_.name != SOURCE else []
        self._progress.publish(["-".join([self._group, input_.query, *after])], from_json(end))

    def close(self) -> None:
        """Publish the last offsets, for :data:`PUBLISH_S` at most."""
        if self._progress is not None:
            self._progress.close(PUBLISH_S)
            self._progress = None

    def _check_gaps(self, positions: PartitionOffsets, bounds: Mapping[TopicPartition, Bounds]) -> None:
        """Check the start offsets: a deleted offset is an error; a time before the oldest record adds a doubt."""
        assert self._span is not None
        for partition, position in positions.items():
            if self.checked.fail_on_data_loss:
                check_offset_in_range(position, bounds[partition], partition)
            if isinstance(self._span.begin, TimeSpec) and position == bounds[partition].oldest > 0:
                self.doubts.append(
                    f"{partition}: the log now starts at offset {position}; retention has deleted earlier records, "
                    "which the replay lacks"
                )

    def _rows(self, records: DataFrame) -> DataFrame:
        end = self.end_of_span() if self._redriven else None
        rows = source_rows(self._name, self._source, records)
        return rows if end is None else _without_copied(rows, self._redriven, from_json(end))


def _stored_end(starts: StoragePath, name: str, resolve: Callable[[], Offsets]) -> Offsets:
    """Return the end of the span of the source ``name`` as stored in ``starts``, after ``resolve`` the first time.

    Threads of several queries and meters may resolve it at the same time: the first one that stores it decides.
    """
    path = starts / ("_end.json" if name == SOURCE else f"_end-{name}.json")
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return first_json(path, resolve())


class _Place(NamedTuple):
    """A record of a partition; ``at_us``: see :class:`RecordPart`."""

    offset: int
    at_us: int | None


_RepeatedParts = dict[_Place, list[tuple[str, str | None]]]
"""Step and part of redriven letters, by record."""


def _without_copied(rows: DataFrame, redriven: Copies, ends: Mapping[TopicPartition, int]) -> DataFrame:
    """Mark ``rows`` whose redriven copies are before ``ends``, the end of the span.

    Copies are appended after their records, so they are in the span if the records are, except after its end.
    """
    found: dict[TopicPartition, _RepeatedParts] = {}
    for ((topic, broker, partition, offset), part, _, at_us), (copy, step, _) in redriven.items():
        if copy[3] < ends.get(TopicPartition(copy[0], copy[1], copy[2]), 0):
            repeated = found.setdefault(TopicPartition(topic, broker, partition), {})
            repeated.setdefault(_Place(offset, at_us), []).append((step, part))
    for place, repeated in found.items():
        rows = _without_replaced(rows, place, repeated)
    return rows


_AT_US = "unix_micros(_source.timestamp)"


def _without_replaced(rows: DataFrame, partition: TopicPartition, repeated: _RepeatedParts) -> DataFrame:
    """Mark ``rows`` of ``partition`` that redriven copies replace: as filtered, or in the column ``_replaced``."""
    is_here = (
        (sf.col("_source.topic") == partition.topic)
        & (sf.col("_source.broker") == partition.broker_id)
        & (sf.col("_source.partition") == partition.partition)
    )
    whole = {place for place, copies in repeated.items() if any(part is None for _, part in copies)}
    if whole:
        is_repeated = is_here & sf.expr(_is_one_of(whole))
        # With another id, because a dedupe would mistake the copy for a duplicate of the record.
        replaced = sf.when(is_repeated, sf.concat("_id", sf.lit("/replaced"))).otherwise(sf.col("_id"))
        is_filtered = sf.coalesce("_filtered", sf.when(is_repeated, sf.col("_source.source")))
        rows = rows.withColumns({"_id": replaced, "_filtered": is_filtered})
    parts = []
    for place, copies in repeated.items():
        of_any = place._replace(at_us=None)
        if whole.isdisjoint((place, of_any)):
            # Notes of older versions lack the time.
            every = copies if place == of_any else [*copies, *repeated.get(of_any, ())]
            name = str(place.offset) if place.at_us is None else f"{place.offset}@{place.at_us}"
            parts += [sf.lit(name), sf.array(*(_step_and_part(step, part or "") for step, part in every))]
    if parts:
        before = sf.col("_replaced") if "_replaced" in rows.columns else sf.lit(None)
        by_place, names = sf.create_map(*parts), ("_source.offset", f"concat_ws('@', _source.offset, {_AT_US})")
        at_time, at_any = (sf.try_element_at(by_place, sf.expr(f"cast({name} AS STRING)")) for name in reversed(names))
        rows = rows.withColumn("_replaced", sf.coalesce(sf.when(is_here, sf.coalesce(at_time, at_any)), before))
    return rows


def _is_one_of(places: Collection[_Place]) -> str:
    """Return the condition in SQL that a row is the record of one of ``places``."""
    of_any = sorted(place.offset for place in places if place.at_us is None)
    at_time = sorted(place for place in places if place.at_us is not None)
    # As text: an object for each number would take longer than everything else.
    conditions = [f"_source.offset IN ({', '.join(map(str, of_any))})"] if of_any else []
    if at_time:
        pairs = ", ".join(f"({offset}L, {at_us}L)" for offset, at_us in at_time)
        conditions.append(f"coalesce((_source.offset, {_AT_US}) IN ({pairs}), false)")
    return f"({' OR '.join(conditions)})"


def _step_and_part(step: str, part: str) -> Column:
    return sf.struct(sf.lit(step).alias("step"), sf.lit(part).alias("part"))


class FilesSourceReader(SourceReader):
    """Reads files of a directory as the source ``name``; ``state`` is the pipeline's state directory."""

    def __init__(self, name: str, source: FilesSource, state: Path, span: ReplayRange | None = None) -> None:
        self.doubts: list[str] = []
        self._span = span
        self._name = name
        self._source = source
        self._state = state
        self._inbox = layout.inbox(state, name)
        self._path = str(Path(source.path).absolute())
        self._logs: dict[str, FileLog] = {}

    def check(self) -> None:
        """Check that the directory is readable.

        Raises:
            ConfigError: it does not exist, is not a Delta table although one is configured, or a span is requested.
            StorageError: it is not readable.
        """
        _refuse_part(self._name, self._span)
        path = Path(self._path)
        if self._source.content == "delta":
            DeltaLog(path).check()
            return
        directory = path.parent if any(mark in path.name for mark in "*?[") else path
        if not directory.is_dir():
            raise ConfigError(
                f"the source {self._name!r} cannot read {str(directory)!r}: the directory does not exist",
                option="path",
                hint="create it, or correct the path (it is relative to the working directory of the run)",
            )
        if not os.access(directory, os.R_OK | os.X_OK):
            raise StorageError(
                f"the source {self._name!r} cannot read {str(directory)!r}",
                path=str(directory),
                why="this user has no read permission",
                hint="give this user read permission, or start the run as another user",
            )

    def start(self, input_: QueryInput) -> Offsets:
        """Return the offset before the first file."""
        return {files.STREAM: {"0": 0}}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return a stream of the files as they arrive."""
        make_directory(self._inbox)
        # Appending to it syncs its contents, not its name.
        create_bytes(_log_of(input_), b"")
        spark.dataSource.register(files.FilesDataSource)
        make_thread_safe(spark, files.FilesDataSource.name())
        options = {
            "path": self._path,
            "content": self._source.content,
            "skipLines": str(self._source.skip_lines),
            "changes": self._source.changes,
            "maxFiles": str(self._source.max_files),
            "inbox": str(self._inbox),
            "log": str(_log_of(input_)),
        }
        return self._rows(spark.readStream.format("penstock-files").options(**options).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """Return the records of the files in ``[start, end)``."""
        first, last = _range(files.STREAM, start, end)
        if first == last:
            return None
        options = {"log": str(_log_of(input_)), "start": str(first), "end": str(last)}
        return self._rows(spark.read.format("penstock-files").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(WITH_HEADERS)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Count the records of those files by reading them.

        Raises:
            DataLossError: a file has changed.
        """
        entries = self._log(input_.query).entries(*_range(files.STREAM, start, end))
        for entry in entries:
            check_unchanged(entry)
        return sum(
            entry.records if entry.content == "letters" else count_records(entry.path, entry.content, entry.skip)
            for entry in entries
        )

    def meter(self, clock: Callable[[], int]) -> FileMeter:
        """Return a meter of files that were found and not read yet."""
        return FileMeter(self._log, clock)

    def _log(self, query: str) -> FileLog:
        """Return the list of files of ``query``, which is kept: it is long, and read for each batch."""
        if query not in self._logs:
            self._logs[query] = FileLog(_log_of(QueryInput(query, self._name, self._state)))
        return self._logs[query]

    def publish(self, input_: QueryInput, end: Offsets) -> None:
        """Do nothing: files have no groups."""

    def close(self) -> None:
        """Do nothing: files have no groups."""

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)


_Stored = TypeVar("_Stored", bound="KafkaSource | DeltaSource")


class _StoredOffsetsReader(SourceReader, Generic[_Stored]):
    """Reads a source whose offsets are in the checkpoint only, with a data source that gets them as options."""

    data_source: ClassVar[type[local_sources.LocalSource]]

    def __init__(self, name: str, source: _Stored, span: ReplayRange | None) -> None:
        self.doubts: list[str] = []
        self._span = span
        self._name = name
        self._source = source

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return the stream from ``start``."""
        return self._stream(spark, start=start)

    def _stream(self, spark: SparkSession, **offsets: Offsets) -> DataFrame:
        self._register(spark)
        reader = spark.readStream.format(self.data_source.name())
        return self._rows(reader.options(**self._texts(**offsets)).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """Return the records in ``[start, end)``; None if there are no offsets."""
        if self._is_empty(start, end):
            return None
        self._register(spark)
        reader = spark.read.format(self.data_source.name())
        return self._rows(reader.options(**self._texts(start=start, end=end)).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(WITH_HEADERS)))

    def publish(self, input_: QueryInput, end: Offsets) -> None:
        """Do nothing: no group is used."""

    def close(self) -> None:
        """Do nothing: no group is used."""

    @abstractmethod
    def _is_empty(self, start: Offsets, end: Offsets) -> bool: ...

    def _texts(self, **offsets: Offsets) -> dict[str, str]:
        """Return the options of the data source."""
        return self._source.read_options.as_texts() | {name: json.dumps(at) for name, at in offsets.items()}

    def _register(self, spark: SparkSession) -> None:
        spark.dataSource.register(self.data_source)
        make_thread_safe(spark, self.data_source.name())

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)


class KafkaSourceReader(_StoredOffsetsReader["KafkaSource"]):
    """Reads topics of Kafka as the source ``name``. A ``span`` has an end, whose offsets are stored in ``starts``.

    ``redriven``: as for :class:`TubeSourceReader`.
    """

    data_source = KafkaDataSource

    def __init__(
        self,
        name: str,
        source: KafkaSource,
        starts: StoragePath,
        span: ReplayRange | None = None,
        *,
        redriven: Copies = MappingProxyType({}),
    ) -> None:
        super().__init__(name, source, span)
        self._redriven = redriven
        self._begin: OffsetSpec = source.start if span is None else span.begin
        self._starts = starts
        self._options = source.read_options

    def check(self) -> None:
        """Check that Kafka answers and has the topics.

        Raises:
            UnavailableError: Kafka did not answer.
            ConfigError: a topic does not exist, or a span has offsets of TubeMQ.
            RefusedError: the connection was refused.
        """
        if self._span is not None and any(isinstance(wanted, Mapping) for wanted in self._span):
            raise ConfigError(
                f"the source {self._name!r} cannot be replayed from or to offsets: it reads Kafka",
                option="--from",
                why="--from and --to accept offsets of TubeMQ only",
                hint="use times, earliest or latest",
            )
        with KafkaLog(self._options, CHECK_TIMEOUT_MS / 1000) as log:
            log.bounds()

    def start(self, input_: QueryInput) -> Offsets:
        """Resolve ``start``, or the start of the span, to offsets."""
        with KafkaLog(self._options) as log:
            lows, ends = log.bounds()
            found = _resolved(log, self._begin, lows, ends)
        if isinstance(self._begin, TimeSpec):
            self.doubts += [
                f"{topic}:{partition}: the topic now starts at offset {offset}; retention has deleted earlier records, "
                "which the replay may lack"
                for topic, places in found.items()
                for partition, offset in places.items()
                if offset == lows[topic][partition] > 0
            ]
        return found

    def end_of_span(self) -> Offsets | None:
        """Return the end offsets of the span, or None. They are resolved once and stored."""
        if self._span is None:
            return None
        wanted = self._span.end

        def resolve() -> Offsets:
            with KafkaLog(self._options) as log:
                return _resolved(log, wanted, *log.bounds())

        return _stored_end(self._starts, self._name, resolve)

    def newest(self, records: int) -> tuple[Offsets, Offsets]:
        """Return offsets ``records`` before the ends of the partitions, or the earliest ones, and the ends."""
        with KafkaLog(self._options) as log:
            lows, ends = log.bounds()
        starts = {
            topic: {partition: max(lows[topic][partition], end - records) for partition, end in places.items()}
            for topic, places in ends.items()
        }
        return starts, ends

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return the stream from ``start`` to the end of the span, if there is one."""
        end = self.end_of_span()
        return self._stream(spark, **({"start": start} if end is None else {"start": start, "end": end}))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Count the records in ``[start, end)`` by reading them: offsets have gaps.

        Raises:
            DataLossError: records were deleted.
        """
        with KafkaLog(self._options) as log:
            return sum(len(messages) for place in ranges(start, end) for messages in log.read(place))

    def size(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Return the number of offsets in ``[start, end)``, without a request: at least that of the records."""
        return sum(place.end - place.start for place in ranges(start, end))

    def meter(self, clock: Callable[[], int]) -> PollingMeter[KafkaLog]:
        """Return a meter of the offsets that were not read yet; ``seconds`` is 0, or None if there are some."""

        def measured(log: KafkaLog, ends: Mapping[str, Offsets]) -> dict[str, Lag]:
            lows, latest = log.bounds()
            latest = self.end_of_span() or latest
            found = {}
            for name, end in ends.items():
                waiting = ranges({topic: {**low, **end.get(topic, {})} for topic, low in lows.items()}, latest)
                records = sum(place.end - place.start for place in waiting)
                unread = [unread_share(lows[at.topic][str(at.partition)], at.start, at.end) for at in waiting]
                found[name] = Lag(records, None if records else 0.0, max(unread, default=0.0))
            return found

        return PollingMeter(lambda: KafkaLog(self._options, LAG_TIMEOUT_MS / 1000), measured)

    def _is_empty(self, start: Offsets, end: Offsets) -> bool:
        return not ranges(start, end)

    def _rows(self, records: DataFrame) -> DataFrame:
        end = self.end_of_span() if self._redriven else None
        if end is None:
            return super()._rows(records)
        # Their dead letters have the broker 0.
        ends = {TopicPartition(topic, 0, int(n)): at for topic, places in end.items() for n, at in places.items()}
        return _without_copied(super()._rows(records), self._copies, ends)

    @cached_property
    def _copies(self) -> Copies:
        """The redriven letters and their copies, without those of topics that were created again since."""
        if not any(copy.topic_id for copy in self._redriven.values()):
            return self._redriven
        with KafkaLog(self._options) as log:
            topic_ids = log.topic_ids()
        return {
            place: copy
            for place, copy in self._redriven.items()
            if not copy.topic_id or copy.topic_id == topic_ids.get(copy.record[0])
        }


def _resolved(log: KafkaLog, wanted: OffsetSpec, lows: Offsets, ends: Offsets) -> Offsets:
    if isinstance(wanted, TimeSpec):
        assert isinstance(wanted.at, int)  # one for each partition only in options of the Spark source
        return log.at(wanted.at, ends)
    return lows if wanted == "earliest" else ends


class DeltaSourceReader(_StoredOffsetsReader["DeltaSource"]):
    """Reads the change data feed of a Delta table as the source ``name``."""

    data_source = DeltaDataSource

    def __init__(self, name: str, source: DeltaSource, span: ReplayRange | None = None) -> None:
        super().__init__(name, source, span)
        self._options = source.read_options

    def check(self) -> None:
        """Check that the table exists and has a change data feed.

        Raises:
            UnavailableError: the storage does not answer.
            ConfigError: it does not, or a span is requested.
        """
        _refuse_part(self._name, self._span)
        self._feed().check()

    def start(self, input_: QueryInput) -> Offsets:
        """Return the offsets of the snapshot or of the version at which a new query starts."""
        return self._feed().start(self._source.start)

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Count the changes in ``[start, end)``, from the log and from footers of files.

        Raises:
            DataLossError: a version or a file no longer exists.
        """
        return count_changes(self._options.table, self._feed().files(start, end))

    def meter(self, clock: Callable[[], int]) -> PollingMeter[dict[str, ChangeFeed]]:
        """Return a meter of the changes that were not read yet."""
        known: dict[str, int] = {}  # so that each footer is read once, also by the last measurement

        def measured(feeds: dict[str, ChangeFeed], ends: Mapping[str, Offsets]) -> dict[str, Lag]:
            found: dict[str, Lag] = {}
            waiting: set[str] = set()
            for name, end in ends.items():
                feed = feeds.setdefault(name, self._feed())
                files = feed.files(end, feed.latest(end))
                feed.forget(end)
                waiting.update(file.path for file in files)
                changes = count_changes(self._options.table, files, known)
                times = [file.committed_ms for file in files if file.committed_ms]  # logs may lack them
                seconds = max(clock() - min(times), 0) / 1000 if times else None
                found[name] = Lag(changes, seconds if files else 0.0)
            for path in known.keys() - waiting:
                del known[path]
            return found

        return PollingMeter(lambda: nullcontext({}), measured)

    def _is_empty(self, start: Offsets, end: Offsets) -> bool:
        return is_empty(start, end)

    def _feed(self) -> ChangeFeed:
        return ChangeFeed(self._options.table)


class RateSourceReader(SourceReader):
    """Generates records at a rate as the source ``name``."""

    def __init__(self, name: str, source: RateSource, span: ReplayRange | None = None) -> None:
        self.doubts: list[str] = []
        self._span = span
        self._name = name
        self._source = source

    def check(self) -> None:
        """Reject a replay of a part; nothing else can fail."""
        _refuse_part(self._name, self._span)

    def start(self, input_: QueryInput) -> Offsets:
        """Return the offset before the first row."""
        return {local_sources.STREAM: {"0": 0}}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Return a stream of rows as they become due."""
        spark.dataSource.register(local_sources.RateDataSource)
        make_thread_safe(spark, local_sources.RateDataSource.name())
        return self._rows(spark.readStream.format("penstock-rate").options(**self._options(input_)).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """Return the rows in ``[start, end)``."""
        first, last = _range(local_sources.STREAM, start, end)
        if first == last:
            return None
        options = self._options(input_) | {"start": str(first), "end": str(last)}
        return self._rows(spark.read.format("penstock-rate").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(WITH_HEADERS)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Return the number of rows in ``[start, end)``."""
        first, last = _range(local_sources.STREAM, start, end)
        return last - first

    def meter(self, clock: Callable[[], int]) -> NoMeter:
        """Return a meter that always reports no lag."""
        return NoMeter()

    def publish(self, input_: QueryInput, end: Offsets) -> None:
        """Do nothing: generated records have no groups."""

    def close(self) -> None:
        """Do nothing: generated records have no groups."""

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)

    def _options(self, input_: QueryInput) -> dict[str, str]:
        options = {"rowsPerSecond": str(self._source.rows_per_second), "startMs": str(_clock(input_))}
        return options if self._source.rows is None else options | {"rows": str(self._source.rows)}


def _clock(input_: QueryInput) -> int:
    """Return the time, ms since 1970, of the first row of ``input_``: chosen once and stored."""
    path = layout.clock(input_.directory, input_.query, input_.name)
    try:
        return int(read_json(path)["start_ms"])
    except FileNotFoundError:
        return int(first_json(path, {"start_ms": time.time_ns() // 1_000_000})["start_ms"])


def _log_of(input_: QueryInput) -> Path:
    assert isinstance(input_.directory, Path)
    return layout.file_log(input_.directory, input_.query, input_.name)


def _range(stream: str, start: Offsets, end: Offsets) -> tuple[int, int]:
    # A source without data so far has no offset.
    last = end.get(stream, {}).get("0", 0)
    return min(start.get(stream, {}).get("0", 0), last), last


def _refuse_part(name: str, span: ReplayRange | None) -> None:
    if span is not None and (span.begin, span.end) != ("earliest", "latest"):
        raise ConfigError(
            f"the source {name!r} cannot be replayed in part: its records cannot be addressed by time",
            option="--from",
            hint="omit --from and --to, which replays all of it",
        )


def explain_missing_changes(topic: str) -> AbstractContextManager[None]:
    """Explain a missing topic of changes, with the option that makes the node write to it."""
    return explain_missing_topic(
        "the changes of the state store are not stored",
        why="a node copies changes to a topic only if statestore.capture_topic is set",
        hint=f"set statestore.capture_topic: {topic} in the node's configuration and restart the node",
        option="tube_topic",
    )
