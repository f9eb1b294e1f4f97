"""Time that does not jump."""

from __future__ import annotations

import time

import pytest

from penstock.runtime.io.clock import steady_clock


def test_setting_the_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    assert abs(before - time.time_ns() // 1_000_000) < 10_000
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert 0 <= clock() - before < 10_000
