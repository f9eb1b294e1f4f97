"""The pages of measured figures have the results that are committed."""

from __future__ import annotations

import json

from benchmarks.__main__ import RESULTS
from benchmarks.tables import CAPACITY_PAGE, capacity_page, page


def test_pages_are_those_of_the_results() -> None:
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page(results)
    assert CAPACITY_PAGE.read_text(encoding="utf-8") == capacity_page(results)
