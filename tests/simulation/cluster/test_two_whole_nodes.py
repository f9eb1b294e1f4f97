"""Two nodes with MQTT and the state store, simulated with many seeds: no seed breaks a rule, and planted bugs do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import pytest

from tests.simulation.cluster.mqtt_mutations import PLANTS, seeds_needed
from tests.simulation.cluster.mqtt_run import FAULTS, NEW_LOG, TWO_WHOLE_NODES, simulate
from tests.simulation.cluster.mutations import Plant
from tests.simulation.cluster.new_log import BEGUN
from tests.simulation.seeds import passed, printed_elsewhere, results_of

SEEDS = 4
NIGHTLY_SEEDS = 20_000
NIGHTLY_BLOCK = 20
"""A run with little processor time ends some of them."""


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each seed has a limit of its processor time
@pytest.mark.parametrize("first", range(0, NIGHTLY_SEEDS, NIGHTLY_BLOCK))
def test_none_of_many_seeds_breaks_a_rule(
    pool: Executor, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", passed(TWO_WHOLE_NODES.report, range(first, first + NIGHTLY_BLOCK), pool))


def test_a_seed_does_the_same_in_another_process_and_in_the_other_form() -> None:
    here = simulate(7)
    assert printed_elsewhere(simulate.__module__, "simulate(7)", PENSTOCK_CORE="interpreted") == f"{here}\n"
    assert here.trace != simulate(8).trace


def test_a_seed_breaks_no_rule_and_does_what_it_should(pool: Executor) -> None:
    results = results_of(simulate, range(SEEDS), pool)
    for result in results:
        if "restore" not in result.faults:  # the history may end with it
            assert result.answered > 50
            assert result.acknowledged > 50
            assert result.delivered > 100
        assert result.elections > 0
    assert sum(result.elections for result in results) > 2 * SEEDS
    assert len({fault for result in results for fault in result.faults} & set(FAULTS)) > len(set(FAULTS)) // 2


def test_after_a_restore_of_etcd_a_new_log_has_everything_that_was_acknowledged(pool: Executor) -> None:
    for result in results_of(partial(simulate, faults=(NEW_LOG,)), range(2), pool):
        assert BEGUN in result.faults
        assert result.answered > 50
        assert result.acknowledged > 50


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant) -> None:
    seed, reason = seeds_needed(plant)
    assert seed is not None, reason
