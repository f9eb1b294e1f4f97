"""Which ranges of the log the tasks of a batch read. Pure, and the same for the same positions.

Sizes are told by positions, which costs no question to a server: what lies between two of them is shared by the
partitions of a store, so the number of a partition's own messages is an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from penstock.spark.tube.offsets import Partition, Slice
from penstock.tube.codec.message import INDEX_RECORD_BYTES

__all__ = ["counted", "packed", "share", "slices", "split"]


def slices(start: Mapping[Partition, int], end: Mapping[Partition, int]) -> list[Slice]:
    """The ranges between two positions, one a partition, sorted; none where nothing lies between.

    Partitions of ``start`` that ``end`` does not know are not read: ``end`` is what a batch promised.

    Raises:
        KeyError: ``end`` has a partition that ``start`` lacks; the caller decides where such a one begins.
    """
    return [
        Slice(partition, start[partition], end[partition])
        for partition in sorted(end)
        if start[partition] < end[partition]
    ]


def counted(ranges: Sequence[Slice], counts_own: Callable[[Partition], bool]) -> list[tuple[Slice, list[Slice]]]:
    """``ranges`` by what their broker counts for them: the range to ask for, and those that the answer is of.

    Each alone where ``counts_own`` says that a partition's own messages are counted. Else what the store has is, so
    its partitions are asked for once, together: none of them has more, and all of them have no more.
    """
    together: dict[tuple[str, int, int], list[Slice]] = {}
    for piece in ranges:
        of = piece.partition if counts_own(piece.partition) else piece.partition.store
        together.setdefault(of, []).append(piece)
    return [
        (Slice(pieces[0].partition, min(piece.start for piece in pieces), max(piece.end for piece in pieces)), pieces)
        for pieces in together.values()
    ]


def split(ranges: Sequence[Slice], minimum: int, most: int | None = None) -> list[Slice]:
    """Cut ``ranges`` so that at least ``minimum`` remain where that is possible, longest ones first into most pieces.

    None of them holds more than ``most`` messages. Cut by position, which costs no question to a server; with
    partitions of similar traffic the pieces hold similar numbers of messages (of a store with n partitions, an n-th of
    what lies between the positions). Order is kept: pieces of one partition follow each other.
    """
    records = [_records(piece) for piece in ranges]
    pieces = share(minimum, records) if len(ranges) < minimum else [1] * len(ranges)
    if most is not None:
        pieces = [max(count, -(-among // most)) for count, among in zip(pieces, records, strict=True)]
    result: list[Slice] = []
    for piece, count, parts in zip(ranges, records, pieces, strict=True):
        edges = [piece.start + INDEX_RECORD_BYTES * (count * part // parts) for part in range(parts)] + [piece.end]
        result.extend(Slice(piece.partition, edges[part], edges[part + 1]) for part in range(parts))
    return result


def packed(ranges: Sequence[Slice], most: int) -> list[list[Slice]]:
    """``ranges``, one a partition, by tasks: neighbours share one while they hold about ``most`` messages or fewer.

    Order is kept, and a longer range has a task of its own.
    """
    sharing = Counter(piece.partition.store for piece in ranges)
    tasks: list[list[Slice]] = []
    held = 0
    for piece in ranges:
        count = _records(piece) // sharing[piece.partition.store]
        if not tasks or held + count > most:
            tasks.append([])
            held = 0
        tasks[-1].append(piece)
        held += count
    return tasks


def _records(piece: Slice) -> int:
    return (piece.end - piece.start + INDEX_RECORD_BYTES - 1) // INDEX_RECORD_BYTES


def share(limit: int, waiting: Sequence[int]) -> list[int]:
    """Divide ``limit`` messages over partitions that have ``waiting`` messages of their own: how many each gives.

    In proportion to what waits, so that partitions of one stream drain at the same pace in event time: with equal
    shares a short partition would run ahead, drag the watermark with it and make the others' records late. Nobody
    with something waiting gets nothing while ``limit`` allows one each.

    Never more than ``limit`` in sum, never more than waits, all of ``limit`` if that much waits. Deterministic.
    """
    total = sum(waiting)
    if total <= limit:
        return list(waiting)
    exact = [limit * count for count in waiting]  # in units of 1 / total
    granted = [amount // total for amount in exact]
    by_fraction = sorted(range(len(waiting)), key=lambda index: (-(exact[index] % total), index))
    for index in by_fraction[: limit - sum(granted)]:
        granted[index] += 1
    left_out = [index for index, count in enumerate(waiting) if count > 0 and granted[index] == 0]
    if limit >= sum(count > 0 for count in waiting):
        for index in left_out:
            granted[granted.index(max(granted))] -= 1
            granted[index] = 1
    return granted
