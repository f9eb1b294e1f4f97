from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.spark.tube.offsets import Slice, TopicPartition, pack_tasks, share_limit, slices, split
from penstock.tube.codec.message import INDEX_RECORD_BYTES

A0, A1 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1)
STORE1 = TopicPartition("a", 1, 10_000)
OTHER = TopicPartition("a", 2, 0)

partitions = st.builds(
    TopicPartition, st.text(min_size=1, max_size=5), st.integers(0, 3), st.sampled_from([0, 1, 2, 10_000, 10_001])
)
positions = st.integers(0, 10**6).map(lambda record: record * INDEX_RECORD_BYTES)


def test_slices_are_what_lies_between() -> None:
    start = {A0: 28, A1: 56, OTHER: 0}
    assert slices(start, {A1: 84, A0: 28}) == [Slice(A1, 56, 84)]
    assert slices(start, start) == []
    # The repetition of a first batch may start after its end: nothing is read twice, nothing is refused.
    assert slices({A0: 56}, {A0: 28}) == []
    with pytest.raises(KeyError):
        slices({}, {A0: 28})


@given(
    st.dictionaries(partitions, st.tuples(positions, positions), min_size=1),
    st.integers(1, 12),
    st.none() | st.integers(10, 10**6),
)
def test_a_split_covers_the_same_ranges(
    ranges: dict[TopicPartition, tuple[int, int]], minimum: int, most: int | None
) -> None:
    whole = [Slice(p, min(pair), max(pair)) for p, pair in sorted(ranges.items()) if pair[0] != pair[1]]
    assume(most is None or sum(piece.end - piece.start for piece in whole) < 28 * 1000 * most)  # pieces are objects
    pieces = split(whole, minimum, most)
    records = sum((piece.end - piece.start) // INDEX_RECORD_BYTES for piece in whole)
    assert len(pieces) >= max(len(whole), min(minimum, records))
    if most is None:
        assert len(pieces) == max(len(whole), min(minimum, records))
    else:
        assert all(piece.end - piece.start <= INDEX_RECORD_BYTES * most for piece in pieces)
    assert all(piece.start < piece.end and piece.start % INDEX_RECORD_BYTES == 0 for piece in pieces)
    joined: list[Slice] = []
    for piece in pieces:
        if joined and joined[-1].partition == piece.partition:
            assert joined[-1].end == piece.start
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    assert joined == whole


def test_a_split_gives_long_ranges_more_pieces() -> None:
    pieces = split([Slice(A0, 0, 28 * 90), Slice(A1, 0, 28 * 10)], 5)
    assert [piece.partition for piece in pieces] == [A0, A0, A0, A0, A1]


@given(st.dictionaries(partitions, st.tuples(positions, positions)), st.integers(0, 10**6))
def test_tasks_hold_the_same_ranges_in_their_order(ranges: dict[TopicPartition, tuple[int, int]], most: int) -> None:
    whole = [Slice(p, min(pair), max(pair)) for p, pair in sorted(ranges.items()) if pair[0] != pair[1]]
    tasks = pack_tasks(whole, most)
    assert [piece for task in tasks for piece in task] == whole
    assert all(tasks)


def test_short_ranges_share_a_task() -> None:
    # Of 60 messages in a store with two partitions each has 30.
    short = [Slice(A0, 0, 28 * 60), Slice(A1, 0, 28 * 60), Slice(STORE1, 0, 28 * 40), Slice(OTHER, 0, 28 * 2)]
    assert pack_tasks(short, 102) == [short]
    assert pack_tasks(short, 70) == [short[:2], short[2:]]
    assert pack_tasks(short, 1) == [[piece] for piece in short]


@given(st.integers(1, 1000), st.lists(st.integers(0, 2000), max_size=20))
def test_shares(limit: int, waiting: list[int]) -> None:
    granted = share_limit(limit, waiting)
    assert len(granted) == len(waiting)
    assert sum(granted) == min(limit, sum(waiting))
    assert all(0 <= given <= count for given, count in zip(granted, waiting, strict=True))
    if limit >= sum(count > 0 for count in waiting):
        assert all(given > 0 for given, count in zip(granted, waiting, strict=True) if count)
    assert granted == share_limit(limit, waiting)


def test_shares_are_in_proportion_so_that_event_time_stays_together() -> None:
    assert share_limit(110, [1000, 100]) == [100, 10]
    assert share_limit(10, [5, 5]) == [5, 5]
    assert share_limit(3, [7, 0, 7]) == [2, 0, 1]
    assert share_limit(2, [1, 9, 1, 9]) == [0, 1, 0, 1]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 50))
def test_a_limit_drains_all_partitions_without_starving_any(waiting: list[int], limit: int) -> None:
    left, rounds = list(waiting), 0
    while sum(left):
        left = [count - given for count, given in zip(left, share_limit(limit, left), strict=True)]
        rounds += 1
    assert rounds == -(-sum(waiting) // limit)
