"""Rejected words: their number may only fall."""

from __future__ import annotations

import json
import re

from tests.docs.pages import ROOT
from tools import language


def test_the_number_of_rejected_words_does_not_grow() -> None:
    """After a change that removes some, ``python -m tools.language --write`` stores the lower numbers."""
    allowed = json.loads(language.BASELINE.read_text(encoding="utf-8"))
    found = language.counts(language.hits())
    grown = {area: (allowed.get(area, 0), count) for area, count in found.items() if count > allowed.get(area, 0)}
    assert not grown, f"more rejected words than before (before, now): {grown}; python -m tools.language --list"


def test_the_glossary_has_each_term_once() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| (?!term\b|---)([^|]+?) \|", page, re.MULTILINE)
    assert len(terms) > 40
    assert len(terms) == len(set(terms))
    for line in page.splitlines():
        if line.startswith("| "):
            assert line.count("|") == 4, line
