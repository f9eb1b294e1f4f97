"""What the tests ask of the modules' syntax trees.

Each is parsed once and not kept: together they have a million nodes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["SOURCE", "Source", "modules", "read"]

SOURCE = Path(__file__).resolve().parents[2] / "src"

_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Source(NamedTuple):
    """Facts of one module."""

    imports: list[tuple[int, str]]
    """Line and name of each import."""
    at_import: set[str]
    """What is imported when the module is: not what only types need, nor what a function imports when it runs."""
    attributes: set[str]
    """Names of the attributes that it uses."""
    defined: set[str]
    """Public functions and classes at the top level."""
    declared: list[str] | None
    """``__all__``."""
    bound: set[str]
    """Every name that it binds."""


@cache
def modules() -> list[tuple[str, Path]]:
    """Return the name and the path of every module below ``src`` that is not generated."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if ".proto" not in name:
            found.append((name, path))
    return found


@cache
def read(path: Path) -> Source:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {n.name for n in tree.body if isinstance(n, _DEFINITIONS) and not n.name.startswith("_")}
    source = Source([], set(_at_import(tree.body)), set(), defined, _declared(tree), set(defined))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                source.bound.add(node.id)
        elif isinstance(node, ast.Attribute):
            source.attributes.add(node.attr)
        elif isinstance(node, _IMPORTS):
            source.imports.extend((node.lineno, name) for name in _names(node, path))
            source.bound.update(alias.asname or alias.name for alias in node.names)
    return source


def _names(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        return (alias.name for alias in node.names)
    assert node.level == 0, f"{path}:{node.lineno}: relative import"
    assert node.module is not None
    return (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If):
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            yield from _at_import(node.orelse if typing_only else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from _at_import(node.body)


def _declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None
