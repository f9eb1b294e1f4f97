"""Every threat of the threat model has a test, and every test that a page names by file and function exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, page_paths

PAGE = ROOT / "docs" / "security" / "threat-model.md"
NAMED = re.compile(r"`((?:[\w-]+/)*test_\w+\.py)::(test_\w+)(?:\[[^`]*\])?`")
SECTIONS = [
    "Authentication",
    "Authorization",
    "Administration over HTTP",
    "Availability",
    "Files",
    "Secrets and logs",
    "Pipelines and Spark workers",
    "Clusters and Kafka",
    "Dependencies",
]


def rows(section: str) -> list[list[str]]:
    """Cells of the rows in the first table of a section, without its head."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_threat_has_a_test(section: str) -> None:
    found = rows(section)
    assert found
    for row in found:
        assert len(row) == 4, row
        assert re.fullmatch(rf"{NAMED.pattern}(, {NAMED.pattern})*", row[3]), row[3]


def test_tests_that_pages_name_by_function_exist() -> None:
    texts: dict[str, str] = {}
    missing = []
    for page in page_paths():
        for file, function in NAMED.findall(page.read_text(encoding="utf-8")):
            if file not in texts:
                path = ROOT / "tests" / file
                texts[file] = path.read_text(encoding="utf-8") if path.is_file() else ""
            if not re.search(rf"^ *(?:async )?def {function}\(", texts[file], re.MULTILINE):
                missing.append(f"{page.name}: {file}::{function}")
    assert missing == []
