"""The check of the statements and their tests finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tools import conformance

EXISTING = frozenset({"a.py::test_a", "a.py::test_b", *(f"a.py::test_c[{n}]" for n in range(300))})


def rows() -> conformance.Rows:
    """Rows that are right, with a test each."""
    return {
        statement: {"who": "server", "requirement": "do it", "tests": [f"a.py::test_c[{n}]"]}
        for n, statement in enumerate(conformance.numbered())
    }


def test_the_statements_are_all_there_and_have_tests() -> None:
    """Ids of tests are compared with what pytest collects when the page is written; that is checked there."""
    given = conformance.load()
    assert list(given) == conformance.numbered()
    assert len(given) == 251
    assert not [statement for statement, row in given.items() if not row.get("tests")]


def test_rows_that_are_right() -> None:
    assert conformance.problems(rows(), set(EXISTING)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"MQTT-3.1.0-1": None}, "MQTT-3.1.0-1: it is missing"),
        ({"MQTT-9.9.9-9": {"who": "server", "requirement": "x", "tests": ["a.py::test_a"]}}, "has no such statement"),
        ({"MQTT-3.1.0-1": {"who": "server", "requirement": "x", "tests": ["a.py::test_z"]}}, "no test a.py::test_z"),
        ({"MQTT-3.1.0-1": {"who": "server", "requirement": "x"}}, "needs either tests"),
        ({"MQTT-3.1.0-1": {"who": "x", "requirement": "x", "tests": ["a.py::test_a"]}}, "has no party or requirement"),
        (
            {f"MQTT-3.1.2-{n}": {"who": "both", "requirement": "x", "tests": ["a.py::test_a"]} for n in range(1, 7)},
            "a.py::test_a: checks 6 statements, 5 at most",
        ),
    ],
    ids=["missing", "unknown", "no such test", "no test", "nobody", "too many"],
)
def test_rows_that_are_not(change: dict[str, dict[str, Any] | None], problem: str) -> None:
    given = rows()
    for statement, row in change.items():
        if row is None:
            del given[statement]
        else:
            given[statement] = row
    (found,) = conformance.problems(given, set(EXISTING))
    assert problem in found
