"""Versions of a clock that was ahead get new ones: in order, together, and at the present."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.repair import Renumbering

NOW = 1_000_000

_versions = st.builds(Hlc, st.integers(NOW - 5, NOW + 5) | st.integers(0, 10 * NOW), st.integers(0, 3), st.just("S"))


@given(st.lists(_versions, min_size=1, max_size=30))
def test_order_and_equality_stay_and_nothing_is_far_ahead(versions: list[Hlc]) -> None:
    new = Renumbering(versions, NOW)
    for one in versions:
        assert new.version(one).wall_ms <= NOW + 2
        assert one.wall_ms > NOW or new.version(one) == one
        for other in versions:
            assert (new.version(one) < new.version(other)) is (one < other)
    assert len(Renumbering(map(new.version, versions), NOW + 2)) == 0, "a second repair finds nothing"


def test_a_lock_and_the_keys_that_it_protects_stay_together() -> None:
    lock = Record(b"lock", b"me", Hlc(9 * NOW, 7, "StateStore"))
    key = Record(b"key", b"v", Hlc(9 * NOW + 1, 1, "StateStore"), fence=lock.version)
    old = Record(b"old", b"v", Hlc(5, 1, "StateStore"), fence=Hlc(4, 1, "StateStore"), expires_at=77)
    new = Renumbering([lock.version, key.version, old.version], NOW)
    moved = new.record(key, NOW)
    assert moved.fence == new.record(lock, NOW).version
    assert moved.version > new.record(lock, NOW).version > old.version
    assert new.record(old, NOW) == old
    assert len(new) == 2
    logged = Change(b"key", key, key.version, writer="c")
    logged.trace = [("traceparent", "00-1")]
    change = new.change(logged, NOW)
    assert (change.version, change.record, change.writer, change.trace) == (moved.version, moved, "c", logged.trace)
    assert new.change(Change(b"lock", None, lock.version), NOW).record is None


def test_a_key_lives_no_longer_than_it_was_set_for() -> None:
    wall = 9 * NOW
    record = Record(b"k", b"", Hlc(wall, 1, "S"), expires_at=wall + 500)
    new = Renumbering([record.version], NOW)
    assert new.record(record, NOW).expires_at == NOW + 500, "the clock of its expiry was ahead, too"
    assert new.record(record, wall + 100).expires_at == wall + 500, "that clock has gone on"
