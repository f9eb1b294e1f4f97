"""Every statement of MQTT 5.0 that binds a server has its tests, or the reason why it is not met yet."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
STATEMENTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "statements.json").read_text(encoding="utf-8")
)
"""Statement -> who must do it, what (in our words), and ``tests`` or ``not_yet``."""

EXPECTED = {
    "1.5": 5,
    "2.1": 1,
    "2.2": 5,
    "3.1": 33,
    "3.2": 16,
    "3.3": 38,
    "3.4": 3,
    "3.5": 3,
    "3.6": 4,
    "3.7": 3,
    "3.8": 11,
    "3.9": 4,
    "3.10": 7,
    "3.11": 4,
    "3.12": 1,
    "3.14": 9,
    "3.15": 4,
    "4.1": 2,
    "4.2": 1,
    "4.3": 19,
    "4.4": 2,
    "4.5": 1,
    "4.6": 2,
    "4.7": 8,
    "4.8": 4,
    "4.9": 3,
    "4.12": 6,
    "4.13": 2,
    "6.0": 3,
}
"""How many statements of Appendix B bind a server (or both sides), by section."""


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_"))


def test_every_statement_is_there() -> None:
    assert all(re.fullmatch(r"MQTT-\d+\.\d+\.\d+-\d+", statement) for statement in STATEMENTS)
    sections = Counter(".".join(statement.removeprefix("MQTT-").split(".")[:2]) for statement in STATEMENTS)
    assert sections == EXPECTED


def test_every_statement_is_shown_or_says_why_not() -> None:
    for statement, row in STATEMENTS.items():
        assert row["who"] in ("server", "both"), statement
        assert row["requirement"], statement
        assert bool(row.get("tests")) != bool(row.get("not_yet")), f"{statement}: tests, or why not yet"


def test_every_named_test_exists() -> None:
    for statement, row in STATEMENTS.items():
        for test in row.get("tests", ()):
            path, name = test.split("::")
            assert name in names_in(path), f"{statement}: there is no {test}"
