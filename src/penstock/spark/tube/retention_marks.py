"""Marks: from which byte of a store's data the messages after a position are. Pure.

Apache's brokers delete segments of index and data apart, and a reader gets no sign of an index entry whose data are
gone: the message is left out. So with each end that is planned the source keeps the end of the data, as the broker said
both in one answer. Every message from that position on has its data behind that byte; a range that begins there is
whole if, after it was read, the broker still has that byte.

A position in the middle of the log has the mark of the last planned end before it. That is on the safe side: where
retention removes data between the two, a loss is reported that may be none.

In offsets a mark is next to its position, as ``{"topic": {"1:0": 280, "1:0@data": 4000}}``. Brokers of ours notice
such a loss by themselves and have no marks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from penstock.errors import DataLossError
from penstock.spark.tube.offsets import MARK, Bounds, Positions, TopicPartition, split_key

__all__ = ["LogEnds", "Marks", "check_data", "marks_of", "with_marks"]

Marks = dict[TopicPartition, int]
"""The byte of its store's data at or before which what follows a partition's position begins."""

MOST = 1024


def marks_of(offset: Mapping[str, Mapping[str, int]]) -> Marks:
    """The marks in offset JSON; none for partitions that are named without a broker."""
    marks: Marks = {}
    for topic, named in offset.items():
        for key, byte in named.items():
            if key.endswith(MARK):
                broker_id, partition = split_key(key.removesuffix(MARK))
                if broker_id is not None:
                    marks[TopicPartition(topic, broker_id, partition)] = byte
    return marks


def with_marks(offset: dict[str, dict[str, int]], marks: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """``offset`` with the ``marks`` of its partitions."""
    for partition in sorted(marks):
        named = offset.get(partition.topic, {})
        if partition.key in named:
            named[partition.key + MARK] = marks[partition]
    return offset


def check_data(position: int, mark: int | None, bounds: Bounds, partition: TopicPartition) -> None:
    """Raise if data behind ``position``, whose mark is ``mark``, may be gone.

    Raises:
        DataLossError: the broker has no longer the byte where they began.
    """
    if mark is not None and bounds.oldest_data is not None and bounds.oldest_data > mark:
        raise DataLossError(
            f"{partition}: data from position {position} on are no longer kept (oldest position {bounds.oldest}): "
            f"they begin at byte {mark} or later, the oldest byte kept is {bounds.oldest_data}",
            why="retention removed data before they were read",
            do="keep data longer, or set failOnDataLoss=false to continue with the rest and accept the gap",
        )


class LogEnds:
    """The ends of the log that were seen while a query ran, each with the end of the data: at most MOST a partition."""

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, list[tuple[int, int]]] = {}

    def see(self, bounds: Mapping[TopicPartition, Bounds]) -> None:
        """An answer of the brokers."""
        for partition, bound in bounds.items():
            if bound.end_data is not None:
                seen = self._seen.setdefault(partition, [])
                if not seen or seen[-1][0] < bound.end:
                    seen.append((bound.end, bound.end_data))
                if len(seen) > MOST:
                    del seen[1::2]

    def marks(
        self,
        positions: Positions,
        bounds: Mapping[TopicPartition, Bounds],
        *,
        begin: Positions | None = None,
        before: Marks | None = None,
    ) -> Marks:
        """The marks of ``positions``; ``before`` are those of ``begin``, which lies at or before them.

        A position that did not move keeps its mark: equal offsets mean that there is nothing new. One that nothing is
        known of gets the oldest byte there is now.
        """
        begin, before = begin or {}, before or {}
        marks: Marks = {}
        for partition, position in positions.items():
            if partition in before and begin.get(partition) == position:
                marks[partition] = before[partition]
                continue
            seen = self._seen.get(partition, [])
            place = bisect_right(seen, position, key=lambda pair: pair[0])
            known = [seen[place - 1][1]] if place else []
            if partition in before:
                known.append(before[partition])
            oldest = bounds[partition].oldest_data if partition in bounds else None
            if known:
                marks[partition] = max(known)
            elif oldest is not None:
                marks[partition] = oldest
        return marks
