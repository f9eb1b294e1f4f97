"""`__all__` of every module is its public names, sorted, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.test_imports import modules


def defined(tree: ast.Module) -> set[str]:
    """Public functions and classes that the module defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def bound(tree: ast.Module) -> set[str]:
    """Every name that the module binds at its top level."""
    names = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=str)
def test_all_is_the_public_names(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = declared(tree)
    if path.name == "__init__.py" and names is None:
        assert not defined(tree), f"{module}: a package defines {defined(tree)} and has no __all__"
        return
    assert names is not None, f"{module} has no __all__"
    assert len(set(names)) == len(names), f"{module}: __all__ repeats a name"
    assert set(names) <= bound(tree), f"{module}: __all__ names what is not there: {set(names) - bound(tree)}"
    # A command's function is public for typer alone; everything else that others may use is listed.
    missing = set() if module.startswith("penstock.cli.") else defined(tree) - set(names)
    assert not missing, f"{module}: public but not in __all__: {missing}"
