"""ARCHITECTURE.md is what the source is: its diagram, the files that it names, and one of its lists followed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.architecture.copies import ROOT, copy_tree, run_in
from tools import structure

TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

COLUMNS = 160
LINES = 70
"""A screen."""

CIRCLES: list[int] = []
"""Modules in each circle of imports, imports for type checking included: there is none."""

NEW_LIMIT = '''\
    max_tested: Annotated[int, Interval(ge=2, le=8)] = 7
    """A limit that this test adds."""
'''


@pytest.fixture(scope="module")
def modules() -> dict[str, structure.Module]:
    return structure.read()


def test_the_diagram_shows_the_imports(modules: dict[str, structure.Module]) -> None:
    drawn = structure.FENCE.search(TEXT)
    assert drawn is not None
    assert drawn.group() == structure.diagram(modules), "run: python -m tools.structure --write"


def test_packages_do_not_import_each_other_in_circles(modules: dict[str, structure.Module]) -> None:
    imports = structure.package_imports(modules)
    order: set[str] = set()
    while ready := {name for name, targets in imports.items() if name not in order and targets <= order}:
        order |= ready
    assert order == set(imports)


def test_the_number_of_import_cycles_does_not_grow(modules: dict[str, structure.Module]) -> None:
    assert [len(circle) for circle in structure.circles(modules)] == CIRCLES


@pytest.mark.parametrize(("table", "least"), [("places", 15), ("symptoms", 30)])
def test_the_files_in_the_tables_exist(table: str, least: int) -> None:
    rows = TEXT[TEXT.index(f"<!-- {table}:") :].split("\n## ")[0]
    named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9-]*(?:\.py|\.md)?)`", rows)
    assert len(named) > least
    bases = (ROOT / "src" / "penstock", ROOT)
    assert [name for name in named if not any((base / name).exists() for base in bases)] == []


def test_the_page_fits_on_two_screens() -> None:
    lines = [max(1, math.ceil(len(line) / COLUMNS)) for line in TEXT.splitlines()]
    assert sum(lines) <= 2 * LINES


def test_a_limit_is_one_field(tmp_path: Path) -> None:
    """A field of ``BrokerLimits`` is an option of the node with bounds and a description, and is in the reference."""
    copy_tree(tmp_path, "src", "tools", "examples")
    limits = tmp_path / "src" / "penstock" / "mqtt" / "engine" / "model" / "limits.py"
    head, fields = limits.read_text(encoding="utf-8").split("    max_connections:", 1)
    limits.write_text(f"{head}{NEW_LIMIT}    max_connections:{fields}", encoding="utf-8")
    program = (
        "import pydantic\n"
        "from penstock.node.config.mqtt import MqttLimits\n"
        "from tools import reference\n"
        "print(MqttLimits().max_tested, MqttLimits(max_tested=8).max_tested)\n"
        "for wrong in (1, 9):\n"
        "    try:\n"
        "        MqttLimits(max_tested=wrong)\n"
        "    except pydantic.ValidationError as error:\n"
        "        print(error.errors()[0]['type'])\n"
        "print(reference.configuration().partition('`max_tested`')[2][:200].replace('\\n', ' '))\n"
    )
    shown = run_in(tmp_path, program).splitlines()
    assert shown[:3] == ["7 8", "greater_than_equal", "less_than_equal"]
    assert "A limit that this test adds." in shown[3]
