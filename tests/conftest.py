"""Settings of all suites: deterministic property tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A job that a shell started in the background ignores SIGINT, and so would every program that tests end with Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "penstock", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")

pytest_plugins = ["tests.compiled", "tests.interop.etcd_fixtures", "tests.object_storage"]
