"""What every suite shares: deterministic property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "penstock", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")
