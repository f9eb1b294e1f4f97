"""Packet identifiers are free, not zero, and go round."""

from __future__ import annotations

from penstock.mqtt.engine.inflight import Inflight


def test_identifiers() -> None:
    inflight: Inflight[str] = Inflight()
    first = inflight.free_id()
    inflight[first] = "a"
    assert (first, inflight.free_id()) == (1, 2)
    inflight._last = 65_534
    assert [inflight.free_id() for _ in range(3)] == [65_535, 2, 3], "1 is taken, 0 does not exist"


def test_identifiers_in_a_row() -> None:
    inflight: Inflight[str] = Inflight()
    assert (inflight.free_ids(5), inflight.free_id(), inflight.free_ids(2)) == (1, 6, 7)
    inflight[10] = "taken"
    assert inflight.free_ids(3) == 0, "9, 10, 11: one is taken"
    assert inflight.free_ids(1) == 9
    inflight._last = 65_533
    assert inflight.free_ids(3) == 0, "they do not go round within a row"
    assert inflight.free_ids(2) == 65_534
