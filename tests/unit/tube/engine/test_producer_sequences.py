"""Sequences of idempotent producers in a broker: bounds, expiry, snapshots."""

from __future__ import annotations

from penstock.tube.engine.broker.producer_sequences import FORGOTTEN_MS, ProducerSequences

PLACE = ("demo", 10_001)


def test_a_snapshot_brings_back_what_was_stored() -> None:
    first = ProducerSequences(1000)
    first.stored(PLACE, 7, 41, 1000)
    first.stored(PLACE, 7, 40, 900)
    first.stored(("demo", 2), 7, 1, 1000)
    assert first.changed == {("demo", 1), ("demo", 0)}
    rows = first.snapshot("demo", 1)
    assert rows == [(10_001, 7, 41, 1000)]
    second = ProducerSequences(1000)
    second.restore("demo", rows)
    assert (second.expected(PLACE, 7, 0), second.expected(("demo", 2), 7, 0)) == (42, 0)


def test_silent_producers_are_forgotten() -> None:
    known = ProducerSequences(1000)
    known.stored(PLACE, 1, 5, 0)
    known.stored(PLACE, 2, 5, 10)
    known.changed.clear()
    known.expire(FORGOTTEN_MS + 5)
    assert (known.expected(PLACE, 1, 0), known.expected(PLACE, 2, 0), len(known)) == (0, 6, 1)
    assert known.changed == {("demo", 1)}


def test_the_number_of_producers_is_bounded() -> None:
    known = ProducerSequences(100)
    for n in range(1, 500):
        known.stored(PLACE, n, 0, n)
    assert len(known) <= 100
    assert known.expected(PLACE, 499, 0) == 1
    assert known.expected(PLACE, 1, 0) == 0


def test_a_removed_topic_is_forgotten() -> None:
    known = ProducerSequences(1000)
    known.stored(PLACE, 1, 5, 0)
    known.stored(("other", 0), 1, 5, 0)
    known.forget_topic("demo")
    assert (len(known), known.changed, known.expected(PLACE, 1, 0)) == (1, {("other", 0)}, 0)
