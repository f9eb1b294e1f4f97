"""Many seeds: what is reported."""

from __future__ import annotations

import pytest

from tests.simulation import seeds
from tests.simulation.seeds import report_seeds


def endless(seed: int) -> str | None:
    while seed == 2:
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001 - as code of production does, for an internal error
            continue
    return None


def test_a_seed_that_does_not_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "SEED_S", 0.2)
    told: list[str] = []
    assert report_seeds(endless, [0, 1], None, "two seeds", told.append)
    assert not report_seeds(endless, range(4), None, "four seeds", told.append)
    summary, failure = told
    assert summary == "two seeds"
    assert failure.startswith("seed 2: it did not end within 0.2 s of processor time:")
    assert "in endless" in failure
