"""Nodes, simulated with many seeds: no seed breaks a rule, and planted bugs do."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor

import pytest

from penstock import compiled
from tests.simulation.history import Violation
from tests.simulation.mutations import (
    ANY_FORM,
    ENGINE,
    FOUND_BY,
    HTTP,
    LOG,
    MOST_SEEDS,
    seeds_needed,
    without_fsync,
)
from tests.simulation.run import OPERATIONS, Failure, failure, report, simulate
from tests.simulation.seeds import passed, printed_elsewhere

SEEDS = 200 if compiled.form() == "compiled" else MOST_SEEDS
"""Interpreted, a seed takes twice as long; ``MOST_SEEDS`` find each planted bug."""
BLOCK = 10
NIGHTLY_SEEDS = 20_000
NIGHTLY_BLOCK = 25


@pytest.mark.parametrize("first", range(BLOCK, SEEDS, BLOCK))  # those before: test_a_seed_does_what_it_should
def test_no_seed_breaks_a_rule(pool: Executor, first: int) -> None:
    if os.environ.get("PENSTOCK_CORE") == "interpreted":
        pytest.skip("simulated in the compiled form, by the suite 'faults'")
    passed(report, range(first, first + BLOCK), pool)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each seed has a limit of its processor time
@pytest.mark.parametrize("first", range(0, NIGHTLY_SEEDS, NIGHTLY_BLOCK))
def test_none_of_many_seeds_breaks_a_rule(
    pool: Executor, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", passed(report, range(first, first + NIGHTLY_BLOCK), pool))


def test_a_seed_has_the_same_trace_in_two_processes_and_in_both_forms_of_the_core() -> None:
    if os.environ.get("PENSTOCK_CORE") == "interpreted":
        pytest.skip("compared with the compiled form, by the suite 'faults'")
    both = "simulate(7).trace, simulate(8).trace"
    traces = {
        printed_elsewhere(simulate.__module__, both, PYTHONHASHSEED=hash_seed, PENSTOCK_CORE=core)
        for hash_seed, core in (("1", compiled.form()), ("2", "interpreted"))
    }
    one, other = simulate(7).trace, simulate(8).trace
    assert one != other
    assert traces == {f"{one} {other}\n"}


def test_a_seed_does_what_it_should(pool: Executor) -> None:
    if os.environ.get("PENSTOCK_CORE") == "interpreted":
        pytest.skip("simulated in the compiled form, by the suite 'faults'")
    results = list(pool.map(simulate, range(BLOCK)))  # raises Violation
    for result in results:
        assert result.answered > OPERATIONS * 0.2
        assert result.notified > 50
        assert result.acknowledged + result.refused > OPERATIONS * 0.2
        assert (result.refused > 100) == (result.seed % 5 == 4)
        assert result.delivered > 500
        assert result.stored > OPERATIONS * 0.2
        assert result.read >= 2 * result.stored
        assert result.administered > 10
        assert "power loss" in result.faults
        assert len(result.faults) >= 3, result
    assert sum(result.cuts for result in results) > 8
    assert {fault for result in results for fault in result.faults} == {
        "power loss",
        "cut",
        "pause",
        "clock step",
        "slow",
        "full",
        "failing",
    }


@pytest.mark.parametrize("plant", ANY_FORM + HTTP + LOG + ENGINE, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    if plant in ENGINE and compiled.form() != "interpreted":
        pytest.skip("the compiled core cannot be patched")
    if plant not in ENGINE and os.environ.get("PENSTOCK_CORE") == "interpreted":
        pytest.skip("found in the compiled form, by the suite 'faults'")
    seeds, reason = seeds_needed(plant, FOUND_BY.get(plant.__name__, 0))
    assert seeds, reason


def test_a_failing_seed_is_reported_with_a_short_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)
    failed = next(found for seed in range(8) if (found := failure(seed, search_s=10.0)) is not None)
    assert isinstance(failed, Failure)
    assert failed.operations < OPERATIONS // 2
    with pytest.raises(Violation):
        simulate(failed.seed, failed.operations)
    told: list[str] = []
    assert not report([failed.seed], tell=told.append)
    assert told[0].startswith(f"seed {failed.seed}, the first {failed.operations} operations of its schedule: ")
