"""The figures of a tree: levels, upward imports, circles, importers; its diagram."""

from __future__ import annotations

from pathlib import Path

from tools import structure

FILES = {
    "penstock/__init__.py": "",
    "penstock/low.py": "class Same: ...\n",
    "penstock/middle.py": (
        "from typing import TYPE_CHECKING\nfrom . import low\nif TYPE_CHECKING:\n    from penstock.high import Same\n"
    ),
    "penstock/high.py": "class Same: ...\ndef late():\n    import penstock.middle\n",
}


def test_imports_for_types_count(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    modules = structure.read(tmp_path)
    assert {name: module.imports for name, module in modules.items()} == {
        "penstock": set(),
        "penstock.low": set(),
        "penstock.middle": {"penstock.low", "penstock.high"},
        "penstock.high": {"penstock.middle"},
    }
    assert structure.levels(modules) == {"penstock": 0, "penstock.low": 0, "penstock.middle": 1, "penstock.high": 2}
    assert structure.circles(modules) == [["penstock.high", "penstock.middle"]]
    # Modules, lines, levels, imports, upward imports, modules of each circle.
    assert structure.figures(modules, "penstock") == (4, 8, 3, 3, 1, "2")
    assert structure.importers(modules)["penstock.middle"] == 1


def test_implied_imports_are_not_drawn() -> None:
    imports = {"top": {"middle", "low"}, "middle": {"low"}, "low": set[str](), "a": {"b", "low"}, "b": {"a"}}
    assert structure.without_shortcuts(imports) == {
        "top": {"middle"},
        "middle": {"low"},
        "low": set(),
        "a": {"b", "low"},
        "b": {"a"},
    }
