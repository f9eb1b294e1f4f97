"""The stream of ``format("aio-statestore")``: a snapshot of the keys, then every change, from a TubeMQ topic.

The node copies each change into the topic (``statestore.capture_topic``), in the order of the versions and once, so the
offsets are those of the topic, and a range of them gives the same rows whenever it is read.

A stream that starts with a snapshot notes the end of the topic *before* it reads the keys. So nothing is missed between
the two; a change during the snapshot appears again as a change, with a version that the snapshot may already have
or an older one. A snapshot that is read again, since the first batch failed, may be newer than it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from penstock.errors import ConfigError, DataLossError
from penstock.spark.statestore.options import FeedOptions
from penstock.spark.statestore.snapshot import KeysPartition, plan_keys, read_keys
from penstock.spark.triggers import SupportsTriggerAvailableNow
from penstock.spark.tube.offsets import Bounds, Positions, Slice, TopicPartition, to_json
from penstock.spark.tube.source import TubeStreamReader
from penstock.spark.tube.tasks import RangePartition, read_messages
from penstock.spark.tube.tube_client import ServerAccess, TubeClient, explain_missing_topic
from penstock.statestore.hlc import Hlc
from penstock.tube.codec.message import INDEX_RECORD_BYTES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = ["SNAPSHOT_DONE", "StoreStreamReader", "position_of"]

SNAPSHOT_DONE: Final = "$snapshot"
"""Key in the offset: 1 if the snapshot was read, else 0. No topic can have this name."""

Offset = dict[str, dict[str, int]]


class StoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Runs in one process next to the driver for the whole query; ``read`` runs in executors, on a copy."""

    def __init__(self, options: FeedOptions, servers: ServerAccess | None = None) -> None:
        self._options = options
        self._servers = servers
        self._topic = options.source.topics[0]
        given = options.starting
        starting = given if isinstance(given, str) and given in ("earliest", "latest") else None
        self._changes = TubeStreamReader(replace(options.source, starting=starting), servers)
        self._initial: Offset | None = None
        self._ends = False
        """True if the run ends with the changes that exist now."""
        self._is_placed = False
        """True if this process knows the query's offsets; Spark 4.1 does not pass them."""
        self._done: int | None = None
        """1 if the snapshot was read, else 0; None for a query without a snapshot."""

    def initialOffset(self) -> Offset:
        """Return the start of a query without a checkpoint. Spark calls it twice, so the first result is kept."""
        self._is_placed = True
        if self._initial is None:
            starting = self._options.starting
            with self._telling_of_capture():
                if starting == "snapshot" or isinstance(starting, Hlc):
                    source = replace(self._options.source, starting=to_json(self._start(starting)))
                    self._changes.stop()
                    self._changes = TubeStreamReader(source, self._servers)
                    if self._ends:
                        self._changes.prepareForTriggerAvailableNow()
                self._initial = self._changes.initialOffset()
            if starting == "snapshot":
                self._initial |= {SNAPSHOT_DONE: {"done": 0}}
                self._done = 0
        return self._initial

    def latestOffset(
        self, start: Mapping[str, Mapping[str, int]] | None = None, limit: ReadLimit | None = None
    ) -> Offset:
        """Return the end of the next batch. The snapshot is one batch, whatever its size."""
        if start is None and not self._is_placed:  # Spark 4.1, first call of a query
            self.initialOffset()
        done = self._done if start is None else _done(start)
        if done == 0:
            begin = self.initialOffset() if start is None else start
            return {**_positions(begin), SNAPSHOT_DONE: {"done": 1}}
        end = self._changes.latestOffset(None if start is None else _positions(start), limit)
        return end if done is None else {**end, SNAPSHOT_DONE: {"done": done}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """That of the topic of changes."""
        return self._changes.getDefaultReadLimit()

    def reportLatestOffset(self) -> Offset | None:
        """The end of the topic when it was last looked at: progress reports show the lag."""
        newest = self._changes.reportLatestOffset()
        return newest if newest is None or self._done is None else {**newest, SNAPSHOT_DONE: {"done": 1}}

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the run: the snapshot, and the current end of the topic. Spark calls this method first."""
        self._ends = True
        with self._telling_of_capture():
            self._changes.prepareForTriggerAvailableNow()

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """The tasks of one batch: of the snapshot where it lies in it, of the topic."""
        self._is_placed = True
        self._done = _done(end)
        pieces = self._changes.partitions(_positions(start), _positions(end))
        if self._done != 1 or _done(start) == 1:
            return pieces
        if self._options.snapshot is None:
            raise ConfigError(
                "the checkpoint stopped at the snapshot, and the stream is to start without one",
                option="startingVersion",
                do="say startingVersion=snapshot, or give the query a checkpoint location of its own",
            )
        return [*plan_keys(self._options.snapshot), *pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task: keys of the snapshot, or a range of changes."""
        if isinstance(partition, KeysPartition):
            assert self._options.snapshot is not None, "only then are such tasks planned"
            yield from read_keys(self._options.snapshot, partition)
        elif isinstance(partition, RangePartition):
            from penstock.spark.statestore.rows import change_batches

            messages = read_messages(self._options.source, partition, self._servers)
            yield from change_batches(self._topic, messages, self._options.keys)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Nothing to do: positions live in the query's checkpoint."""

    def stop(self) -> None:
        """Close the connection to the topic."""
        self._changes.stop()

    def _start(self, starting: Hlc | str) -> Positions:
        """Return the offsets at which changes begin: the end of the topic before the snapshot, or a version."""
        with TubeClient.of(self._options.source, servers=self._servers) as tube:
            bounds = tube.bounds(tube.partitions(self._options.source.topics))
            if not isinstance(starting, Hlc):
                return {partition: bound.end for partition, bound in bounds.items()}
            loses = not self._options.source.fail_on_data_loss
            return {p: position_of(tube, p, bound, starting, may_lose=loses) for p, bound in bounds.items()}

    def _telling_of_capture(self) -> AbstractContextManager[None]:
        """Explain a missing topic: most likely the node is not configured to write changes to it."""
        return explain_missing_topic(
            "the changes of the state store are not stored",
            why="a node copies changes into a topic only where statestore.capture_topic names it",
            do=f"set statestore.capture_topic: {self._topic} in the node's configuration and start it again",
        )


def position_of(
    tube: TubeClient, partition: TopicPartition, bounds: Bounds, version: Hlc, *, may_lose: bool = False
) -> int:
    """Return the offset of the first change with ``version`` or a later one; the end if there is none yet.

    Versions increase along the topic, so a binary search finds it, with two small requests per step.

    Raises:
        DataLossError: the topic's oldest change is newer (not with ``may_lose``).
        PenstockError: a record is not a change.
    """
    from penstock.spark.statestore.rows import version_at

    def first_from(position: int) -> Hlc | None:
        """The version of the first change at ``position`` or after it."""
        reached, count = tube.plan(Slice(partition, position, bounds.end), 1)
        if not count:
            return None
        return next(version_at(partition.topic, batch) for batch in tube.read(Slice(partition, position, reached)))

    wanted = version.position
    low, high = bounds.oldest // INDEX_RECORD_BYTES, bounds.end // INDEX_RECORD_BYTES
    while low < high:
        middle = (low + high) // 2
        found = first_from(middle * INDEX_RECORD_BYTES)
        if found is None or found.position >= wanted:
            high = middle
        else:
            low = middle + 1
    position = low * INDEX_RECORD_BYTES
    if position == bounds.oldest > 0 and not may_lose:
        oldest = first_from(position)
        if oldest is not None and oldest.position > wanted:
            raise DataLossError(
                f"{partition}: changes from version {version} on are no longer kept, the oldest has version {oldest}",
                why="retention of the topic removed them",
                do="start with a snapshot (startingVersion=snapshot), at a later version, or set failOnDataLoss=false "
                "to start at the oldest",
            )
    return position


def _positions(offset: Mapping[str, Mapping[str, int]]) -> Offset:
    """The offset without what it says of the snapshot."""
    return {topic: dict(named) for topic, named in offset.items() if topic != SNAPSHOT_DONE}


def _done(offset: Mapping[str, Mapping[str, int]]) -> int | None:
    named: Any = offset.get(SNAPSHOT_DONE)
    return None if named is None else int(named["done"])
