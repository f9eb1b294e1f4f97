from __future__ import annotations

import pytest

from penstock.errors import DataLossError
from penstock.spark.tube.offsets import (
    MOST_ENDS,
    Bounds,
    LogEnds,
    TopicPartition,
    check_data_stored,
    from_json,
    marks_of,
    parse_offset_spec,
    resolve,
    to_json,
    with_marks,
)

A0, A1, B0 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1), TopicPartition("b", 2, 0)


def test_marks_stand_beside_their_positions() -> None:
    offset = with_marks(to_json({A0: 28, B0: 56}), {A0: 400, A1: 7, B0: 0})
    assert offset == {"a": {"1:0": 28, "1:0@data": 400}, "b": {"2:0": 56, "2:0@data": 0}}
    assert from_json(offset) == {A0: 28, B0: 56}
    assert marks_of(offset) == {A0: 400, B0: 0}
    # They may be given where a query starts, as progress reports have them.
    wanted = parse_offset_spec('{"a": {"1:0": 28, "1:0@data": 400, "1": 56}}', "startingOffsets")
    assert not isinstance(wanted, str)
    assert resolve(wanted, {A0: Bounds(0, 99), A1: Bounds(0, 99)}, "startingOffsets") == {A0: 28, A1: 56}
    assert marks_of(wanted) == {A0: 400}


def test_a_mark_is_of_the_last_end_that_was_seen_before() -> None:
    ends = LogEnds()
    ends.record({A0: Bounds(0, 280, 0, 1000), B0: Bounds(0, 280)})
    ends.record({A0: Bounds(0, 560, 100, 2000)})
    now = {A0: Bounds(28, 840, 150, 3000), A1: Bounds(0, 840, 150, 3000), B0: Bounds(0, 840)}
    ends.record(now)

    def mark(position: int) -> dict[TopicPartition, int]:
        return ends.marks({A0: position}, now)

    assert [mark(position) for position in (28, 280, 559, 560, 840)] == [
        {A0: 150}, {A0: 1000}, {A0: 1000}, {A0: 2000}, {A0: 3000},
    ]  # fmt: skip
    assert ends.marks({B0: 280}, now) == {}, "of a broker that tells no data there is none"
    # What the start says counts where it is better, and a position that stays keeps its own.
    assert ends.marks({A0: 300}, now, begin={A0: 290}, before={A0: 1200}) == {A0: 1200}
    assert ends.marks({A0: 560}, now, begin={A0: 560}, before={A0: 1200}) == {A0: 1200}
    assert ends.marks({A0: 28}, now, begin={A0: 28}, before={A0: 90}) == {A0: 90}


def test_remembered_log_ends_are_bounded() -> None:
    ends = LogEnds()
    for n in range(1, MOST_ENDS * 3):
        ends.record({A0: Bounds(0, n * 28, 0, n)})
    newest = MOST_ENDS * 3 - 1
    assert ends.marks({A0: newest * 28}, {}) == {A0: newest}
    early = ends.marks({A0: 28 * 50}, {})[A0]
    assert early <= 50, "never later than the truth"
    assert len(ends._seen[A0]) <= MOST_ENDS


def test_data_that_are_gone() -> None:
    bounds = Bounds(0, 560, 500, 900)
    check_data_stored(28, 500, bounds, A0)
    check_data_stored(28, None, bounds, A0)
    check_data_stored(28, 0, Bounds(0, 560), A0)
    with pytest.raises(DataLossError, match=r"'a' partition 1:0: data from offset 28 .*499.*500[\s\S]*failOnData"):
        check_data_stored(28, 499, bounds, A0)
