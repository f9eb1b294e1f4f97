"""What cannot be tested on the compiled core is skipped there; the suite ``interpreted`` runs it.

A test that replaces a constant or a class of a compiled module would change nothing: they are built in where they are
used. A test whose class inherits from one of the core cannot be defined.
"""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock import compiled
from tools.suites import PYTEST

__all__ = ["pytest_configure", "pytest_ignore_collect", "pytest_report_header"]

_INHERIT = ("tests/unit/mqtt/engine/test_timers.py",)
"""Their classes inherit from classes of the core."""
_SUFFIXES = tuple(EXTENSION_SUFFIXES)
_setattr = pytest.MonkeyPatch.setattr


def pytest_report_header() -> str:
    why = compiled.why_interpreted()
    return f"penstock core: {compiled.form()}" + (f" ({why})" if why else "")


def pytest_ignore_collect(collection_path: os.PathLike[str]) -> bool | None:
    """Leave out what cannot be defined on the compiled core."""
    if compiled.form() == "compiled" and os.fspath(collection_path).endswith(_INHERIT):
        return True
    return None


def _is_compiled(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # an attribute of a module, as in "penstock.cli.main.time"
        return False
    return spec is not None and spec.origin is not None and spec.origin.endswith(_SUFFIXES)


def _patch(patches: pytest.MonkeyPatch, target: Any, *given: Any, **options: Any) -> None:
    if isinstance(target, str):
        module = target.rpartition(".")[0]
    else:
        module = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", "")
    if module.startswith("penstock.") and _is_compiled(module):
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        if not any(Path(test).is_relative_to(path) for path in PYTEST["interpreted"]):
            pytest.fail(f"{module} is compiled, and no suite runs {test} interpreted: add it to tools/suites.py")
        pytest.skip(f"{module} is compiled: what it uses is built in; tested by the suite 'interpreted'")
    _setattr(patches, target, *given, **options)


def pytest_configure() -> None:
    """Where continuous integration requires everything, the compiled core is among it."""
    if os.environ.get("PENSTOCK_REQUIRE") == "all" and os.environ.get("PENSTOCK_CORE", "") != "interpreted":
        why = compiled.why_interpreted()
        if why:
            raise pytest.UsageError(f"the core is not compiled: {why}")
    if compiled.form() == "compiled":
        pytest.MonkeyPatch.setattr = _patch  # type: ignore[method-assign, assignment]
