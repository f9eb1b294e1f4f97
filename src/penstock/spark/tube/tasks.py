"""Tasks of a batch: the partitions that are read, the ranges of each task, and its rows.

Planned next to the driver; read in executors, which get a :class:`RangePartition` and the options and nothing else.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from penstock.errors import DataLossError
from penstock.spark.tube.offsets import Slice, TopicPartition, packed, select, split
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.tube_client import BrokerAddress, ServerAccess, TubeClient

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.tube.reader import MessageBatch

__all__ = ["Range", "RangePartition", "planned", "read_messages", "read_rows", "selected"]


_SHORT = 1000
"""Messages. A task costs Spark some milliseconds on a core, in which so many are read: short ranges share one, as the
small files of a file source do."""


class Range(NamedTuple):
    """Messages of one partition. ``address`` is where its broker was last seen, a hint that saves a question.

    ``mark``: that of the start, see ``marks``.
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
    with TubeClient.of(options, servers=servers) as tube:
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
