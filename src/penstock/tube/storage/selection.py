"""Which messages of a partition a read takes: those whose key code matches, up to so many bytes and messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set

import numpy as np

from penstock.tube.storage.segment import PartitionPart

__all__ = ["Chosen", "choose"]


class Chosen:
    """Places in a partition part, rising. ``full``: a limit stopped there, go on at the ordinal ``reached``."""

    __slots__ = ("full", "places", "reached")

    def __init__(self, places: range | list[int], reached: int, *, full: bool) -> None:
        self.places = places
        self.reached = reached
        self.full = full

    def __len__(self) -> int:
        return len(self.places)


def choose(
    part: PartitionPart,
    first: int,
    stop: int,
    keys: Set[int] | None,
    room: int,
    most: int,
    started: bool,  # noqa: FBT001 - positional on the hot path
) -> tuple[Chosen, int]:
    """What of the places ``[first, stop)`` is read: the matching ones, up to ``room`` bytes and ``most`` messages.

    The very first message of a read (``started`` false) is taken whatever its size.
    """
    ends = part.ends
    before = ends[first - 1] if first else 0
    if keys is None:
        last = min(bisect_right(ends, before + room, first, stop), first + most)
        if last == first and not started and most > 0:
            last = first + 1
        taken = ends[last - 1] - before if last > first else 0
        reached = part.ordinals[last - 1] + 1 if last > first else part.ordinals[first]
        return Chosen(range(first, last), reached, full=last < stop), taken
    window = np.frombuffer(part.keys, np.int32, stop - first, first * 4)
    matching = np.flatnonzero(np.isin(window, list(keys))) + first
    del window
    if not len(matching):
        return Chosen([], 0, full=False), 0
    all_ends = np.frombuffer(part.ends, np.uint64)
    sizes = all_ends[matching].astype(np.int64) - np.where(matching > 0, all_ends[matching - 1].astype(np.int64), 0)
    del all_ends
    sums = np.cumsum(sizes)
    count = min(int(np.searchsorted(sums, room, side="right")), most)
    if count == 0 and not started and most > 0:
        count = 1
    places: list[int] = matching[:count].tolist()
    reached = part.ordinals[places[-1]] + 1 if places else part.ordinals[first]
    return Chosen(places, reached, full=count < len(matching)), int(sums[count - 1]) if count else 0
