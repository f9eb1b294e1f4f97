"""A pytest plugin for the run on compiled modules (``-p tests.compiled``): they must be compiled, and what cannot be
tested on them is skipped with its reason.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from tools import compile as compiler

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_sessionstart"]

_SKIPPED = {
    "tests/unit/mqtt/engine/test_timers.py": "interpreted classes cannot inherit from compiled ones",
}
"""By the beginning of their names."""
_SUFFIXES = tuple(EXTENSION_SUFFIXES)


def _is_compiled(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and spec.origin.endswith(_SUFFIXES)


def pytest_sessionstart() -> None:
    """Refuse to run where a module that should be compiled is not."""
    package = compiler.ROOT / "src" / "penstock"
    names = [f"penstock.{file.removesuffix('.py').replace('/', '.')}" for file in compiler.modules(package)]
    missing = [name for name in names if not _is_compiled(name)]
    if missing or not names:
        raise pytest.UsageError(f"not compiled: {', '.join(missing) or 'anything'}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what stands in ``_SKIPPED``."""
    for item in items:
        for name, reason in _SKIPPED.items():
            if item.nodeid.startswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))


_setattr = pytest.MonkeyPatch.setattr


def _patch(patches: pytest.MonkeyPatch, target: Any, *given: Any, **options: Any) -> None:
    """Skip the test that would change a constant or a class of a compiled module: they are built in where used."""
    if isinstance(target, str):
        module = target.rpartition(".")[0]
    else:
        module = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", "")
    if module.startswith("penstock.") and _is_compiled(module):
        pytest.skip(f"{module} has its constants built in")
    _setattr(patches, target, *given, **options)


def pytest_configure() -> None:
    """Have every patch looked at."""
    pytest.MonkeyPatch.setattr = _patch  # type: ignore[assignment, method-assign]
