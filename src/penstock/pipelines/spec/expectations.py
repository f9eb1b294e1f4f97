"""Counts of expectations in a batch, and their limits, without Spark.

``checks`` are numbers of rows by name: that of an expect step for the rows that it checked, and ``<step>.<name>`` for
the rows that violate an expectation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.pipelines.spec.steps import Expectation

__all__ = ["ExpectationCounts", "check_limits", "exceeded", "expectation_counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationCounts:
    """Rows that an expect step checked, and those of them that violate one of its expectations."""

    rows: int = 0
    violations: int = 0

    def plus(self, other: ExpectationCounts) -> ExpectationCounts:
        """Return the sums."""
        return ExpectationCounts(rows=self.rows + other.rows, violations=self.violations + other.violations)


def expectation_counts(
    expectations: Mapping[str, Expectation], checks: Mapping[str, int]
) -> dict[str, ExpectationCounts]:
    """Return the counts of ``expectations`` (by ``<step>.<name>``) in a batch with ``checks``."""
    return {
        name: ExpectationCounts(rows=checks.get(name.partition(".")[0], 0), violations=checks.get(name, 0))
        for name in expectations
    }


def exceeded(expectations: Mapping[str, Expectation], checks: Mapping[str, int]) -> list[str]:
    """Return the names of the ``expectations`` that more rows of a batch violate than their limit permits."""
    counts = expectation_counts(expectations, checks)
    return [
        name
        for name, each in expectations.items()
        if each.limit is not None and counts[name].violations > each.limit * counts[name].rows
    ]


def check_limits(expectations: Mapping[str, Expectation], batch: int, checks: Mapping[str, int]) -> None:
    """Check the limits of ``expectations`` before ``batch`` is written.

    Raises:
        PenstockError: too many rows violate an expectation.
    """
    names = exceeded(expectations, checks)
    if not names:
        return
    name, each = names[0], expectations[names[0]]
    found = expectation_counts(expectations, checks)[name]
    most = f"at most {each.limit:.6g} of the rows of a batch" if each.limit else "no row"
    raise PenstockError(
        f"expectation {name!r} is violated by {found.violations} of {found.rows} rows of batch {batch}",
        why=f"{most} may violate {' '.join(each.expression.split())}; the batch was not written",
        hint="correct the source, or the expectation, and start the pipeline again: it continues with this batch",
    )
