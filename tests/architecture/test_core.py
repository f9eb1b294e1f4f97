"""Differences between mypyc and CPython that the core must avoid."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock
from penstock.compiled import core_modules

PACKAGE = Path(penstock.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_handlers_of_one_function_name_errors_of_different_types_differently() -> None:
    """A compiled function has one variable for a name, with the type of its first handler.

    An error of another type raises TypeError in its handler, if the first type is a class of the core.
    """
    found = []
    for module in core_modules(PACKAGE):
        for function in ast.walk(ast.parse((PACKAGE / module).read_text())):
            types: dict[str, set[str]] = {}
            if isinstance(function, FUNCTIONS):
                for handler in ast.walk(function):
                    if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
                        types.setdefault(handler.name, set()).add(ast.unparse(handler.type))
            found += [f"{module}: {function.name}: {name}" for name, kinds in types.items() if len(kinds) > 1]  # type: ignore[attr-defined]
    assert not found
