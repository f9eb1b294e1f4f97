"""Test support for applications: a real broker with a real state store, on a free port, with its own data.

:class:`LocalNode` works with every test framework; the pytest plugin provides it as the fixtures ``penstock_broker``
and ``penstock_statestore``. It is imported on first use, because pytest loads the plugin in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.local_node import LocalNode

__all__ = ["LocalNode"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("penstock.testing.local_node"), name)
