"""Positions of groups: where a registration starts, what a get books, what a confirmation moves."""

from __future__ import annotations

import pytest

from penstock.tube.engine.broker.group_offsets import GroupOffsets

KEY = ("group", "topic", 0)
LOW, HIGH = 280, 2800


@pytest.mark.parametrize(
    ("stored", "read_status", "wanted", "start"),
    [
        (None, 0, None, LOW),
        (None, 1, None, HIGH),
        (None, 2, None, HIGH),
        (560, 0, None, 560),
        (560, 1, None, 560),
        (560, 2, None, HIGH),
        (560, 0, 840, 840),
        (560, 1, 840, 840),
        (560, 2, 840, HIGH),
        (None, 1, 840, 840),
        (560, 0, 855, 840),  # rounded down to a record
        (560, 0, 28, LOW),  # clamped
        (560, 0, 99_999, HIGH),
        (560, 0, -1, 560),
        (None, 0, -1, LOW),
        (560, 0, 0, LOW),
    ],
)
def test_a_registration_starts_at_the_expected_offset(
    stored: int | None, read_status: int, wanted: int | None, start: int
) -> None:
    offsets = GroupOffsets([] if stored is None else [(KEY, stored)])
    assert offsets.register(KEY, read_status, wanted, LOW, HIGH) == start
    assert offsets.committed(KEY) == start
    assert offsets.take_dirty() == ([] if stored == start else [(KEY, start)])


def test_every_registration_stores_a_position() -> None:
    offsets = GroupOffsets()
    offsets.register(KEY, 0, None, 0, 0)
    assert offsets.take_dirty() == [(KEY, 0)]
    assert offsets.take_dirty() == []


def get(
    offsets: GroupOffsets, walked: int, *, consumed: bool = False, empty: bool = False, manual: bool = False
) -> int:
    start, more = offsets.begin_get(KEY, LOW, HIGH, consumed=consumed, manual=manual)
    assert more
    offsets.end_get(KEY, walked, empty=empty, manual=manual)
    return start


def test_unconfirmed_is_delivered_again() -> None:
    offsets = GroupOffsets([(KEY, 560)])
    assert get(offsets, 280) == 560
    assert get(offsets, 56) == 560
    assert (offsets.committed(KEY), offsets.in_flight(KEY)) == (560, 56)
    assert get(offsets, 28, consumed=True) == 616
    assert offsets.committed(KEY) == 616


def test_commit_adds_what_is_in_flight_once() -> None:
    offsets = GroupOffsets([(KEY, 560)])
    get(offsets, 280)
    assert offsets.commit(KEY, consumed=True) == 840
    assert offsets.commit(KEY, consumed=True) == 840
    get(offsets, 280)
    assert offsets.commit(KEY, consumed=False) == 840
    assert offsets.commit(KEY, consumed=True) == 840


def test_a_walk_without_messages_commits_itself() -> None:
    offsets = GroupOffsets([(KEY, 560)])
    get(offsets, 280, empty=True)
    assert (offsets.committed(KEY), offsets.in_flight(KEY)) == (840, 0)


def test_manual_gets_walk_on_and_the_commit_adds_the_sum() -> None:
    offsets = GroupOffsets([(KEY, 560)])
    assert get(offsets, 280, manual=True) == 560
    assert get(offsets, 280, manual=True) == 840
    assert offsets.committed(KEY) == 560
    assert offsets.commit(KEY, consumed=True) == 1120


def test_a_get_at_the_end_or_outside_the_log_starts_at_a_valid_offset() -> None:
    offsets = GroupOffsets([(KEY, HIGH)])
    assert offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=False) == (HIGH, False)
    offsets = GroupOffsets([(KEY, HIGH + 280)])
    assert offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=False) == (HIGH, False)
    assert offsets.committed(KEY) == HIGH
    offsets = GroupOffsets([(KEY, 28)])
    assert offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=False) == (LOW, True)
    assert offsets.committed(KEY) == LOW


def test_losing_the_consumer_and_registering_again_let_go_what_is_in_flight() -> None:
    offsets = GroupOffsets([(KEY, 560)])
    get(offsets, 280)
    offsets.discard(KEY)
    assert offsets.commit(KEY, consumed=True) == 560
    get(offsets, 280)
    assert offsets.register(KEY, 0, None, LOW, HIGH) == 560
    assert offsets.in_flight(KEY) == 0


def test_a_removed_topic_takes_its_positions_with_it() -> None:
    other = ("group", "other", 0)
    offsets = GroupOffsets([(KEY, 560), (other, 28)])
    offsets.forget_topic("topic")
    assert offsets.take_dirty() == [(KEY, None)]
    assert offsets.committed(other) == 28
    offsets.set(other, 56)
    assert offsets.take_dirty() == [(other, 56)]


def test_commit_at_an_offset_keeps_what_is_behind_it_in_flight() -> None:
    offsets = GroupOffsets([(KEY, 280)])
    for delivered in (560, 840):
        offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=True)
        offsets.end_get(KEY, 280, empty=False, manual=True, delivered=delivered)
    assert offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=True) == (840, True), "reading goes on behind"
    assert offsets.commit_to(KEY, 308) == 308
    assert (offsets.committed(KEY), offsets.in_flight(KEY)) == (308, 532)
    assert offsets.commit_to(KEY, 280) == 308, "an older one changes nothing"
    assert offsets.commit_to(KEY, 868) is None, "not delivered yet"
    assert offsets.commit_to(KEY, 840) == 840
    offsets.discard(KEY)
    assert offsets.commit_to(KEY, 868) is None
    assert offsets.take_dirty() == [(KEY, 840)]


def test_commit_behind_the_last_message_takes_entries_of_others_with_it() -> None:
    offsets = GroupOffsets([(KEY, 280)])
    offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=True)
    offsets.end_get(KEY, 280, empty=False, manual=True, delivered=336)  # 336 to 560: of another partition
    offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=True)
    offsets.end_get(KEY, 280, empty=True, manual=True)  # and these
    assert offsets.commit_to(KEY, 308) == 308
    assert offsets.commit_to(KEY, 336) == 840
    offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=True)
    offsets.end_get(KEY, 280, empty=True, manual=True)
    assert offsets.committed(KEY) == 1120, "nothing waits for a confirmation, so the position follows"


def test_commit_at_an_offset_between_ordinary_gets() -> None:
    offsets = GroupOffsets([(KEY, 280)])
    offsets.begin_get(KEY, LOW, HIGH, consumed=False, manual=False)
    offsets.end_get(KEY, 280, empty=False, manual=False)
    assert offsets.commit_to(KEY, 308) == 308
    assert offsets.begin_get(KEY, LOW, HIGH, consumed=True, manual=False) == (560, True)
