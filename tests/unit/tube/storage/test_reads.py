"""The messages that a read returns from a partition, with and without filters, at its limits."""

from __future__ import annotations

from penstock.tube.storage.reads import select_messages
from penstock.tube.storage.segment import PartitionPart


def part(*messages: tuple[int, int, int]) -> PartitionPart:
    """Of (ordinal, size, key code)."""
    made = PartitionPart()
    total = 0
    for ordinal, size, key in messages:
        total += size
        made.ordinals.append(ordinal)
        made.ends.append(total)
        made.keys.append(key)
    return made


FOUR = part((2, 100, 7), (5, 100, 8), (6, 100, 7), (9, 100, 7))


def test_without_a_filter() -> None:
    chosen, taken = select_messages(FOUR, 0, 4, None, 1000, 10, started=False)
    assert (list(chosen.places), chosen.full, taken) == ([0, 1, 2, 3], False, 400)
    chosen, taken = select_messages(FOUR, 1, 4, None, 250, 10, started=False)
    assert (list(chosen.places), chosen.full, chosen.reached, taken) == ([1, 2], True, 7, 200)
    chosen, _ = select_messages(FOUR, 0, 4, None, 1000, 1, started=False)
    assert (list(chosen.places), chosen.full, chosen.reached) == ([0], True, 3)


def test_the_first_message_is_returned_regardless_of_its_size() -> None:
    for keys in (None, {7}):
        chosen, taken = select_messages(FOUR, 0, 4, keys, 10, 10, started=False)
        assert (list(chosen.places), chosen.full, taken) == ([0], True, 100)
        chosen, taken = select_messages(FOUR, 0, 4, keys, 10, 10, started=True)
        assert (len(chosen), chosen.full, chosen.reached, taken) == (0, True, 2, 0)


def test_with_a_filter() -> None:
    chosen, taken = select_messages(FOUR, 0, 4, {7}, 250, 10, started=False)
    assert (list(chosen.places), chosen.full, chosen.reached, taken) == ([0, 2], True, 7, 200)
    chosen, taken = select_messages(FOUR, 0, 4, {8}, 250, 10, started=False)
    assert (list(chosen.places), chosen.full, taken) == ([1], False, 100)
    chosen, taken = select_messages(FOUR, 0, 4, {9}, 250, 10, started=False)
    assert (len(chosen), chosen.full, taken) == (0, False, 0)
