"""What a source of a pipeline must be able to do while it runs: a stream, any batch of it again, and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.sources.lag import Lag
from penstock.pipelines.state.checkpoint import Offsets

__all__ = ["Meter", "Reader", "Way"]


class Way(NamedTuple):
    """The way of records from the source ``name`` into the query ``query``.

    ``directory`` is where the source may keep what it needs to read a range of this way again.
    """

    query: str
    name: str
    directory: Path


class Meter(Protocol):
    """How far queries are behind, measured when asked: see ``lag.LagMeter``."""

    def start(self) -> None:
        """Begin; ``end`` ends it."""

    def ask(self, ends: Mapping[str, Offsets]) -> None:
        """Measure the lag of queries that have come to ``ends``, by name; ``of`` has it a little later."""

    def of(self, sink: str) -> Lag | None:
        """The newest lag under that name; None where it is not known."""

    def end(self, ends: Mapping[str, Offsets]) -> None:
        """Measure for the last time, here."""


class Reader(Protocol):
    """One source. Offsets are its own: stream -> partition -> position. ``doubts``: what a replay may lack."""

    doubts: list[str]

    def check(self) -> None:
        """Look whether it can be read, before Spark is started."""

    def start(self, way: Way) -> Offsets:
        """Where a query that begins now begins."""

    def stream(self, spark: SparkSession, way: Way, start: Offsets) -> DataFrame:
        """The rows (``rows.rows_of``) from ``start`` on; a query with a checkpoint goes on from there."""

    def batch(self, spark: SparkSession, way: Way, start: Offsets, end: Offsets) -> DataFrame | None:
        """The rows in ``[start, end)``, the same each time; None where there are none."""

    def empty(self, spark: SparkSession) -> DataFrame:
        """No rows, with the columns that there are otherwise."""

    def count(self, way: Way, start: Offsets, end: Offsets) -> int:
        """How many records are in ``[start, end)``, told by the source itself."""

    def meter(self, clock: Callable[[], int]) -> Meter:
        """Measures how far queries are behind this source; ``clock`` gives ms since 1970."""
