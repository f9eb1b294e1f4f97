"""One thing wrong with a pipeline file."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Problem"]


class Problem(NamedTuple):
    """Where in the file, what stands there, and what was expected instead."""

    location: tuple[str | int, ...]
    value: object
    expected: str
