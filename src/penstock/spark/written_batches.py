"""Batches of a query that a server has, which commits each with its number."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["WrittenBatches"]


class WrittenBatches(NamedTuple):
    """The last batch with rows that a query has written, and the number of rows of it and of all batches since
    ``first``: a server may remove what it knows of earlier ones."""

    batch: int
    rows: int
    total: int
    first: int = 0
