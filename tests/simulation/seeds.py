"""Simulating many seeds, of one node or two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.simulation.history import Violation

__all__ = ["Report", "SeededSimulation", "passed", "printed_elsewhere", "report_seeds", "results_of"]

ROOT = Path(__file__).resolve().parents[2]

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


class SeededSimulation(NamedTuple):
    """A simulation of ``what``: ``simulate(seed, ...)`` raises Violation."""

    what: str
    simulate: Callable[..., object]

    def violation(self, seed: int, *options: object) -> str | None:
        """Run a seed; return the rule that it broke, or None."""
        try:
            self.simulate(seed, *options)
        except Violation as error:
            return str(error)
        return None

    def failure(self, seed: int) -> str | None:
        """Run a seed; return a report if it broke a rule, or None."""
        reason = self.violation(seed)
        return None if reason is None else f"seed {seed} of {self.what}: {reason}"

    def report(
        self, seeds: Sequence[int], pool: Executor | None = None, *, tell: Callable[[str], None] = print
    ) -> bool:
        """Run ``seeds``, in ``pool`` if given; False at the first that breaks a rule."""
        return report_seeds(self.failure, seeds, pool, f"{len(seeds)} seeds of {self.what}: no rule was broken", tell)


def printed_elsewhere(module: str, expression: str, **environment: str) -> str:
    """Return what a new process with these variables prints of an expression with ``simulate`` of a module."""
    command = [sys.executable, "-c", f"from {module} import simulate; print({expression})"]
    # Sets of strings have another order there.
    variables = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True).stdout


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
