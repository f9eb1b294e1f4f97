"""For the tests of applications: a real broker with a real state store, on a free port, with data of its own.

:class:`LocalNode` is for every test framework; the plugin of pytest offers it as the fixtures ``penstock_broker`` and
``penstock_statestore``. It is imported when it is used: pytest loads the plugin in every run.
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
