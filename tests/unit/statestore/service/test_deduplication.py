"""Writes that are remembered, and for how long."""

from __future__ import annotations

import sys

import pytest

from penstock.statestore.service import deduplication
from penstock.statestore.service.deduplication import RecentWrites


def test_a_write_is_known_by_client_correlation_data_and_time_stamp() -> None:
    writes = RecentWrites()
    writes.note("a", b"1", b"5:7:n")
    writes.note("a", b"2", b"000000000000005:00007:n")
    for correlation in (b"1", b"2"):
        assert writes.has("a", correlation, b"5:7:n")
        assert writes.has("a", correlation, b"000000000000005:00007:n")
        assert not writes.has("a", correlation, b"5:8:n")
        assert not writes.has("b", correlation, b"5:7:n")
    assert not writes.has("a", b"3", b"5:7:n")


def test_one_without_a_time_stamp_is_not_known() -> None:
    writes = RecentWrites()
    writes.note("a", b"1", None)
    assert not writes.has("a", b"1", None)
    assert not writes.has("a", b"1", b"5:7:n")
    writes.note("a", b"2", b"5:7:n")
    assert not writes.has("a", b"2", None)


def test_the_last_ones_are_kept_and_no_more_than_twice_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication, "_GENERATION", 3)
    monkeypatch.setattr(deduplication, "_PACKED", 1)
    writes = RecentWrites()
    for number in range(10):
        writes.note("a", b"%d" % number, b"5:7:n")
        known = [other for other in range(10) if writes.has("a", b"%d" % other, b"5:7:n")]
        assert known == list(range(known[0], number + 1))
        assert min(number + 1, 3) <= len(known) <= 6


def test_remembered_writes_use_few_objects() -> None:
    """Small objects that live long keep the arenas of the allocator in which they are."""
    writes = RecentWrites()
    before = sys.getallocatedblocks()
    for number in range(20_000):
        writes.note(f"client {number}", b"correlation %d" % number, b"%015d:00007:n" % number)
    assert sys.getallocatedblocks() - before < 2_000
    assert writes.has("client 10000", b"correlation 10000", b"%015d:00007:n" % 10_000)
    assert writes.has("client 19999", b"correlation 19999", b"%015d:00007:n" % 19_999)
