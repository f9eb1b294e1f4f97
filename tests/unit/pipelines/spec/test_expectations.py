"""Expectations in a pipeline file: what is valid, what the plan says, and their limits."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.spec.description import as_data, as_text
from penstock.pipelines.spec.expectations import ExpectationCounts, check_limits, exceeded, expectation_counts
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.steps import Expectation
from tests.unit.pipelines.files import FILE, parse

STEP = """\
  - name: quality
    expect:
      - {name: plausible, expression: flow < 1000, on_violation: dead_letter}
      - {name: named, expression: branch IS NOT NULL, on_violation: drop}
      - {name: recent, expression: "time > '2020-01-01'"}
      - {name: positive, expression: flow >= 0, on_violation: fail, threshold: 0.25}
"""
BEFORE = "  - name: once\n"


def with_step(step: str = STEP) -> str:
    assert BEFORE in FILE
    return FILE.replace(BEFORE, step + BEFORE, 1)


def test_the_plan_says_what_happens_to_violations() -> None:
    found = parse(with_step())
    steps = {step["name"]: step for query in as_data(found)["queries"] for step in query["steps"]}
    assert steps["quality"]["kind"] == "expect"
    assert steps["quality"]["does"] == (
        "plausible: flow < 1000, otherwise a dead letter; named: branch IS NOT NULL, otherwise dropped; "
        "recent: time > '2020-01-01', otherwise kept and counted; "
        "positive: flow >= 0, otherwise kept, but a batch with more than 25 % stops the run"
    )
    assert steps["quality"]["leaves"] == {
        "rows that violate an expectation with drop": "counted as filtered",
        "rows that violate an expectation with dead_letter": "counted as dead, kept as dead letters by this query",
    }
    assert "expect plausible: flow < 1000" in as_text(found)


def test_only_dead_letter_makes_dead_letters() -> None:
    first = plan(parse(with_step()))[0]
    assert "quality" in first.makes_dead_letters
    assert list(first.expectations) == [f"quality.{name}" for name in ("plausible", "named", "recent", "positive")]
    kept = plan(parse(with_step(STEP.replace("dead_letter", "keep"))))[0]
    assert "quality" not in kept.makes_dead_letters


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flow < 1000", "flwo < 1000", r"option 'steps\[\d\].expect\[0\].expression': .*'flwo' does not exist"),
        ("flow < 1000", "flow <", r"option 'steps\[\d\].expect\[0\].expression': .*expected a SQL expression"),
        ("threshold: 0.25", "threshold: 1", "less than 1"),
        ("on_violation: drop", "on_violation: ignore", "'keep', 'drop', 'dead_letter' or 'fail'"),
        ("name: named", "name: plausible", "expected unique names of expectations, found 'plausible' twice"),
    ],
)
def test_mistakes_are_reported_with_their_location(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(with_step(STEP.replace(old, new)))


def test_windows_are_not_checked() -> None:
    with pytest.raises(ConfigError, match="expected only flatten, sql, map, filter steps after a window"):
        parse(FILE.replace("sinks:\n", STEP.replace("flow", "n") + "sinks:\n").replace("time >", "window_end >"))


def expectation(**given: object) -> Expectation:
    return Expectation.model_validate({"name": "e", "expression": "x > 0", **given})


@pytest.mark.parametrize(
    ("given", "violations", "stops"),
    [
        ({}, 10, False),
        ({"on_violation": "drop"}, 10, False),
        ({"on_violation": "fail"}, 0, False),
        ({"on_violation": "fail"}, 1, True),
        ({"on_violation": "fail", "threshold": 0.2}, 2, False),
        ({"on_violation": "fail", "threshold": 0.2}, 3, True),
        ({"on_violation": "drop", "threshold": 0.2}, 3, True),
        ({"threshold": 0}, 1, True),
    ],
)
def test_the_limit_is_a_share_of_the_rows_of_a_batch(given: dict[str, object], violations: int, *, stops: bool) -> None:
    named = {"quality.e": expectation(**given)}
    checks = {"quality": 10, "quality.e": violations}
    assert exceeded(named, checks) == (["quality.e"] if stops else [])
    assert expectation_counts(named, checks) == {"quality.e": ExpectationCounts(rows=10, violations=violations)}


def test_the_error_has_counts_condition_and_action() -> None:
    named = {"quality.e": expectation(on_violation="fail", threshold=0.2)}
    check_limits(named, 4, {})
    with pytest.raises(PenstockError) as caught:
        check_limits(named, 4, {"quality": 10, "quality.e": 3})
    assert str(caught.value) == (
        "expectation 'quality.e' is violated by 3 of 10 rows of batch 4\n"
        "  why: at most 0.2 of the rows of a batch may violate x > 0; the batch was not written\n"
        "  hint: correct the source, or the expectation, and start the pipeline again: it continues with this batch"
    )
