"""Simulating many seeds, of one node or two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple, TypeVar

from tests.simulation.history import Violation

__all__ = ["Report", "SeededSimulation", "passed", "printed_elsewhere", "report_seeds", "results_of"]

ROOT = Path(__file__).resolve().parents[2]
SEED_S: Final = 300.0
"""Processor time of one seed after which it does not end: most need less than 5 s. A time limit in seconds would depend
on what else the machine does."""

R = TypeVar("R")
Report = Callable[..., bool]
"""``report(seeds, pool, tell=...)``: simulates seeds, tells the result, and returns whether no rule was broken."""


class TimeLimitError(SystemExit):
    """A seed has used its processor time. As every ``SystemExit``, it leaves a loop of asyncio at once."""


@contextmanager
def limited_processor_time(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError, with the stack, when the block has used so much processor time of this process; in the
    main thread."""

    def end(_number: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame, limit=8))
        raise TimeLimitError(f"it did not end within {seconds:g} s of processor time:\n{stack}")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again each second, if something catches the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _failure_in_time(failure: Callable[[int], object], seed: int) -> object:
    try:
        with limited_processor_time(SEED_S):
            return failure(seed)
    except TimeLimitError as error:
        return f"seed {seed}: {error}"


def report_seeds(
    failure: Callable[[int], object],
    seeds: Sequence[int],
    pool: Executor | None,
    summary: str,
    tell: Callable[[str], None],
) -> bool:
    """Run ``seeds``, in ``pool`` if given; False at the first for which ``failure`` returns one, which is told.

    ``summary`` is told if none fails. A seed that does not end within :data:`SEED_S` has failed.
    """
    failure = partial(_failure_in_time, failure)
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
