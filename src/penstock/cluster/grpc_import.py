"""gRPC without the messages that it prints: its calls raise the errors, and what it prints names lines of its sources.

It reads the variable when it is imported. Processes that this one starts do not inherit the variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["grpc"]

_VARIABLE: Final = "GRPC_VERBOSITY"


@contextmanager
def _silent() -> Iterator[None]:
    is_set = _VARIABLE in os.environ
    os.environ.setdefault(_VARIABLE, "NONE")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_VARIABLE]


with _silent():
    import grpc
