"""No comprehension hides a variable that an inner function takes from an outer one.

CPython 3.12 and newer compile a comprehension into its function. If its variable has the name of a variable that the
function only passes on to an inner function, the inner one gets a NameError (python/cpython#121377, #156664)::

    def outer(name):
        def function(names):
            def inner():
                return name  # NameError
            return inner, [name for name in names]

The tests run on 3.11, which computes the right value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

from tests.architecture.sources import SOURCE

COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 and newer compile comprehensions into their functions"
)


def hidden(code: CodeType) -> Iterator[tuple[int, str]]:
    """Line and name of the variables of comprehensions that their function passes on."""
    for child in code.co_consts:
        if isinstance(child, CodeType):
            if child.co_name in COMPREHENSIONS:
                own = {*child.co_varnames, *child.co_cellvars}
                yield from ((child.co_firstlineno, name) for name in sorted(own.intersection(code.co_freevars)))
            yield from hidden(child)


def code_of(path: Path) -> CodeType:
    """The code of a module: its bytecode on disk, if that is up to date."""
    code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    assert code is not None
    return code


def test_no_comprehension_hides_a_variable_that_is_passed_on() -> None:
    found = [
        (str(path.relative_to(SOURCE)), *place)
        for path in sorted(SOURCE.rglob("*.py"))
        for place in hidden(code_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("[name for name in names]", [(5, "name")]),
        ("{name: 1 for _, name in names}", [(5, "name")]),
        ("{(name, each) for each in names}", []),
        ("sum(name for name in names)", []),  # a generator expression has its own function
    ],
)
def test_the_variables_that_are_found(expression: str, found: list[tuple[int, str]]) -> None:
    lines = ["def outer(name):", " def function(names):", "  def inner():", "   return name", f"  return {expression}"]
    assert list(hidden(compile("\n".join(lines), "source", "exec"))) == found
