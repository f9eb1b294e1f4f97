"""The tasks of a batch of the tube's log: which partitions are read, what each task reads, and its rows.

Planned beside the driver; read in executors, which get a :class:`RangePartition` and the options and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from penstock.errors import DataLossError
from penstock.spark.tube.client import Address, Batch, Client
from penstock.spark.tube.cluster import Tube
from penstock.spark.tube.offsets import Partition, Slice, select, split
from penstock.spark.tube.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RangePartition", "planned", "read_messages", "read_rows", "selected"]


class RangePartition(InputPartition):
    """What one task reads. ``address`` is where its broker was last seen, a hint that saves a question.

    ``mark``: that of the start, see ``marks``.
    """

    def __init__(self, piece: Slice, address: Address | None, mark: int | None = None) -> None:
        super().__init__(piece)
        self.piece = piece
        self.address = address
        self.mark = mark

    def __repr__(self) -> str:
        partition, start, end = self.piece
        return f"{partition} [{start}, {end})"


def selected(
    options: SourceOptions, tube: Tube, required: Collection[Partition] = (), max_age_s: float = 0.0
) -> list[Partition]:
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
            do="set failOnDataLoss=false to go on with the other topics",
        )
    still = [partition for partition in required if partition.topic in matching]
    return tube.partitions(matching, required=still, max_age_s=max_age_s, announced=False)


def planned(
    pieces: list[Slice],
    options: SourceOptions,
    tube: Tube | None,
    marks: Mapping[Partition, int],
) -> list[InputPartition]:
    pieces = split(pieces, options.min_partitions or 1, options.max_records)
    return [
        RangePartition(piece, tube.address(piece.partition) if tube else None, marks.get(piece.partition))
        for piece in pieces
    ]


def read_rows(options: SourceOptions, partition: InputPartition, client: Client | None) -> Iterator[pa.RecordBatch]:
    """The rows of one task."""
    if not isinstance(partition, RangePartition):
        return  # Spark's own stand-in for a batch without partitions
    from penstock.spark.tube.arrow import record_batches

    batches = read_messages(options, partition, client)
    yield from record_batches(partition.piece.partition, batches, options.columns)


def read_messages(options: SourceOptions, partition: InputPartition, client: Client | None = None) -> Iterator[Batch]:
    """The messages of one task, as they came. Runs in an executor: everything it needs is made here."""
    if not isinstance(partition, RangePartition):
        return
    with Tube.of(options, client=client) as tube:
        yield from tube.read(
            partition.piece,
            address=partition.address,
            fail_on_data_loss=options.fail_on_data_loss,
            mark=partition.mark,
        )
