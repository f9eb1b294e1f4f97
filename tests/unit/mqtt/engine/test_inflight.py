"""Packet identifiers are free, not zero, and go round."""

from __future__ import annotations

from penstock.mqtt.engine.model.inflight import Inflight


def test_identifiers() -> None:
    inflight: Inflight[str] = Inflight()
    first = inflight.free_id()
    inflight[first] = "a"
    assert (first, inflight.free_id()) == (1, 2)
    inflight._last = 65_534
    assert [inflight.free_id() for _ in range(3)] == [65_535, 2, 3], "1 is taken, 0 does not exist"
