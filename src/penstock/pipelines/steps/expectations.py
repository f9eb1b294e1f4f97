"""Expectations: conditions that rows should meet, counted for each batch, with an action for rows that do not.

An expect step adds its name to the column ``_checks`` of each live row, and the names of the expectations that the row
violates. The counts of these names are taken in the pass that writes the batch, and compared with the limits
(``spec.expectations``) before the batch is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf

from penstock.errors import shortened
from penstock.pipelines.rows import alive, mark_dead
from penstock.pipelines.spec.pipeline import SinkPlan
from penstock.pipelines.spec.steps import Expectation
from penstock.pipelines.steps.expressions import add_conditions

__all__ = ["CHECKS", "VIOLATED", "add_checks", "check_counts", "checks_of", "expect_step"]

CHECKS = "_checks"
VIOLATED = "expectation.violated"
"""Code of the dead letters."""
_PREFIX = "check:"


def expect_step(rows: DataFrame, name: str, expectations: Sequence[Expectation]) -> DataFrame:
    """Check live ``rows``, and mark those that violate an expectation; the first action that is not ``keep`` counts.

    An expression that is null or fails is violated.
    """
    holds = [f"_holds{n}" for n in range(len(expectations))]
    tried = add_conditions(rows, {column: each.expression for column, each in zip(holds, expectations, strict=True)})
    violated = [~sf.coalesce(sf.col(column), sf.lit(False)) for column in holds]
    names = [
        sf.when(is_violated, sf.lit(f"{name}.{each.name}"))
        for is_violated, each in zip(violated, expectations, strict=True)
    ]
    marked = add_checks(tried, alive(), name, names)
    for is_violated, each in zip(violated, expectations, strict=True):
        if each.on_violation == "dead_letter":
            reason = sf.lit(f"expectation {each.name!r} is violated: {shortened(each.expression)}")
            marked = mark_dead(marked, name, [(VIOLATED, sf.when(is_violated, reason))])
        elif each.on_violation == "drop":
            dropped = sf.when(alive() & is_violated, sf.lit(name)).otherwise(sf.col("_filtered"))
            marked = marked.withColumn("_filtered", dropped)
    return marked.drop(*holds)


def add_checks(rows: DataFrame, checked: Column, name: str, names: Sequence[Column]) -> DataFrame:
    """Add the step ``name`` and ``names``, each null or a violated expectation, to ``_checks`` of ``checked`` rows."""
    before = sf.col(CHECKS) if CHECKS in rows.columns else sf.expr("CAST(NULL AS ARRAY<STRING>)")
    earlier = sf.coalesce(before, sf.expr("CAST(array() AS ARRAY<STRING>)"))
    found = sf.concat(earlier, sf.array_compact(sf.array(sf.lit(name), *names)))
    return rows.withColumn(CHECKS, sf.when(checked, found).otherwise(before))


def check_counts(rows: DataFrame, plan: SinkPlan) -> list[Column]:
    """Return aggregates that count the names in ``_checks`` of ``rows``, for :func:`checks_of`."""
    if CHECKS not in rows.columns:
        return []
    steps = [step.name for step in plan.steps if step.checks]
    names = (*steps, *plan.expectations)
    return [sf.count_if(sf.array_contains(CHECKS, name)).alias(f"{_PREFIX}{name}") for name in names]


def checks_of(found: Row) -> dict[str, int]:
    """Return the counts by name in ``found``, a row with the aggregates of :func:`check_counts`."""
    return {
        name.removeprefix(_PREFIX): int(count) for name, count in found.asDict().items() if name.startswith(_PREFIX)
    }
