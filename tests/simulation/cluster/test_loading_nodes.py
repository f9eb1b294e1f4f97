"""Two whole nodes of which one loads snapshots, with many seeds: no seed breaks a rule, and planted bugs do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import pytest

from tests.simulation.cluster.mutations import Plant
from tests.simulation.cluster.snapshot_mutations import PLANTS, seeds_needed
from tests.simulation.cluster.snapshot_run import LOADING_NODES, simulate
from tests.simulation.seeds import passed, printed_elsewhere, results_of

FIRST = 15
SEEDS = 6
"""In these seeds each kind of fault occurs."""
NIGHTLY_SEEDS = 10_000
NIGHTLY_BLOCK = 10
"""A run with little processor time ends some of them."""


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each seed has a limit of its processor time
@pytest.mark.parametrize("first", range(0, NIGHTLY_SEEDS, NIGHTLY_BLOCK))
def test_none_of_many_seeds_breaks_a_rule(
    pool: Executor, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", passed(LOADING_NODES.report, range(first, first + NIGHTLY_BLOCK), pool))


def test_a_seed_does_the_same_in_another_process_and_in_the_other_form() -> None:
    here = simulate(7)
    assert printed_elsewhere(simulate.__module__, "simulate(7)", PENSTOCK_CORE="interpreted") == f"{here}\n"
    assert here.trace != simulate(8).trace


def test_a_seed_breaks_no_rule_and_does_what_it_should(pool: Executor) -> None:
    results = results_of(simulate, range(FIRST, FIRST + SEEDS), pool)
    for result in results:
        assert result.loads > 0
        assert result.answered > 50
        assert result.acknowledged > 50
        assert result.delivered > 50
    assert sum(result.loads for result in results) > 2 * SEEDS
    assert sum(result.takeovers for result in results) > SEEDS
    happened = {fault for result in results for fault in result.faults}
    for kind in ("away", "fresh", "sender: ", "receiver: ", "slow "):
        assert any(fault.startswith(kind) for fault in happened), kind


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant) -> None:
    seed, reason = seeds_needed(plant)
    assert seed is not None, reason
