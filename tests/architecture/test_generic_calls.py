"""The hot functions of the compiled core call CPython's generic protocol no more often than their budget says."""

from __future__ import annotations

import json

import pytest

from penstock import compiled
from tools import generic_calls


def test_hot_functions_make_no_more_generic_calls() -> None:
    if compiled.form() != "compiled":
        pytest.skip(f"the core is not compiled: {compiled.why_interpreted()}")
    counts = generic_calls.count(compiled.build_folder(generic_calls.ROOT / "src" / "penstock"))
    budget: dict[str, int] = json.loads(generic_calls.BUDGET.read_text())
    grown = {name: (budget.get(name, 0), calls) for name, calls in counts.items() if calls > budget.get(name, 0)}
    assert not grown, f"more generic calls than the budget, (budget, found): {grown}"
