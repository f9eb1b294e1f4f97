"""Settings of all suites: deterministic property tests, and garbage collection without what lives to the end."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import none

# A job that a shell started in the background ignores SIGINT, and so would every program that tests end with Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "penstock", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")

pytest_plugins = ["tests.compiled", "tests.processor_time", "tests.interop.etcd_fixtures", "tests.object_storage"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude modules and collected tests from garbage collection.

    They are millions of objects that live to the end: every full collection would visit them, and a test that counts
    objects would count them first.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        # Hypothesis makes a generator of random numbers at the first property test, and warns unless something refers
        # to it. With Python 3.14 this is a dictionary that would be excluded below.
        given(none())(lambda _: None)()
        gc.collect()
        gc.freeze()
        gc.enable()


_KEPT_AFTER = 500
_finished = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Exclude reports of tests and modules that tests have imported, too: in the suite unit they are so many that a
    full collection, which some tests ask for, takes half a second."""
    if next(_finished) % _KEPT_AFTER == 0:
        gc.collect()
        gc.freeze()
