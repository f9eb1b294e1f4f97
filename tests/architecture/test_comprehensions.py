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
from collections.abc import Iterable, Iterator
from symtable import Function, SymbolTable, symtable

import pytest

from tests.architecture.sources import SOURCE

COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp")

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the symbol tables of Python 3.12 and newer have no comprehensions"
)


def hidden(table: SymbolTable) -> Iterator[tuple[int, str]]:
    """Line and name of the variables of comprehensions that their function passes on."""
    children = table.get_children()
    comprehensions = [child for child in children if isinstance(child, Function) and child.get_name() in COMPREHENSIONS]
    if comprehensions:
        passed_on = set(free(table))
        for each in comprehensions:
            own = set(each.get_locals())
            yield from ((each.get_lineno(), name) for name in sorted(own & passed_on))
    for child in children:
        yield from hidden(child)


def free(table: SymbolTable) -> Iterable[str]:
    """Names that ``table`` takes from an outer function."""
    if not table.is_nested():
        return ()
    # Each symbol of a table takes as long as all its children.
    if isinstance(table, Function):
        return table.get_frees()
    return [symbol.get_name() for symbol in table.get_symbols() if symbol.is_free()]


def test_no_comprehension_hides_a_variable_that_is_passed_on() -> None:
    found = [
        (str(path.relative_to(SOURCE)), *place)
        for path in sorted(SOURCE.rglob("*.py"))
        for place in hidden(symtable(path.read_text(encoding="utf-8"), str(path), "exec"))
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
    assert list(hidden(symtable("\n".join(lines), "source", "exec"))) == found
