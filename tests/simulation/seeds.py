"""Simulating many seeds, of one node or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from tests.simulation.history import Violation

__all__ = ["Report", "passed", "report_seeds", "results_of"]

R = TypeVar("R")
Report = Callable[..., bool]
"""``report(seeds, pool, tell=...)``: simulates seeds, tells the result, and returns whether no rule was broken."""


def report_seeds(
    failure: Callable[[int], object],
    seeds: Sequence[int],
    pool: Executor | None,
    summary: str,
    tell: Callable[[str], None],
) -> bool:
    """Run ``seeds``, in ``pool`` if given; False at the first for which ``failure`` returns one, which is told.

    ``summary`` is told if none fails.
    """
    for failed in map(failure, seeds) if pool is None else pool.map(failure, seeds):
        if failed is not None:
            tell(str(failed))
            return False
    tell(summary)
    return True


def passed(report: Report, seeds: Sequence[int], pool: Executor) -> str:
    """Require that no seed fails; returns the summary."""
    told: list[str] = []
    assert report(seeds, pool, tell=told.append), told
    return told[0]


def results_of(simulate: Callable[[int], R], seeds: Sequence[int], pool: Executor) -> list[R]:
    """Return the results of ``seeds``, none of which breaks a rule."""
    simulated = [(seed, pool.submit(simulate, seed)) for seed in seeds]
    results = []
    for seed, result in simulated:
        try:
            results.append(result.result())
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from None
    return results
