"""The benchmarks' page describes each case."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT


def test_the_page_has_a_row_for_each_case() -> None:
    # Read, not imported: the cases import Spark and every server.
    tree = ast.parse((ROOT / "benchmarks" / "cases.py").read_text(encoding="utf-8"))
    (cases,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "CASES"
    )
    assert isinstance(cases, ast.Dict)
    names = [key.value for key in cases.keys if isinstance(key, ast.Constant)]
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", page, re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)]
    assert sorted(rows) == sorted(map(str, names))
