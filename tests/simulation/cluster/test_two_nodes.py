"""Two nodes of a cluster, simulated with many seeds: no seed breaks a rule, and planted bugs do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import pytest

from tests.simulation.cluster.mutations import PLANTS, Plant, seeds_needed
from tests.simulation.cluster.run import FAULTS, TWO_NODES, simulate
from tests.simulation.seeds import passed, printed_elsewhere, results_of

SEEDS = 20
"""The code of clusters is interpreted in both forms of the core."""
NIGHTLY_SEEDS = 20_000
NIGHTLY_BLOCK = 250


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each seed has a limit of its processor time
@pytest.mark.parametrize("first", range(0, NIGHTLY_SEEDS, NIGHTLY_BLOCK))
def test_none_of_many_seeds_breaks_a_rule(
    pool: Executor, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", passed(TWO_NODES.report, range(first, first + NIGHTLY_BLOCK), pool))


def test_a_seed_does_the_same_in_another_process() -> None:
    here = simulate(7)
    assert printed_elsewhere(simulate.__module__, "simulate(7)") == f"{here}\n"
    assert here.trace != simulate(8).trace


def test_a_seed_breaks_no_rule_and_does_what_it_should(pool: Executor) -> None:
    results = results_of(simulate, range(SEEDS), pool)
    for result in results:
        assert result.answered > 100
        assert result.elections > 0
    assert sum(result.elections for result in results) > 30
    assert {fault for result in results for fault in result.faults} >= set(FAULTS)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant) -> None:
    seed, reason = seeds_needed(plant)
    assert seed is not None, reason
