"""The tube as the source of a pipeline: a stream for its queries, and any batch of it again, exactly."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.checkpoint import Offsets
from penstock.pipelines.durable import read_json, write_json
from penstock.pipelines.lag import TIMEOUT_MS
from penstock.pipelines.model import Source
from penstock.spark.cluster import Tube, count_rows
from penstock.spark.marks import marks_of, with_marks
from penstock.spark.offsets import from_json, to_json
from penstock.spark.options import SourceOptions, canonical_names

__all__ = ["TubeSource"]

FIRST_LOOK_MS = 10_000
"""Before Spark is started: a wrong address or topic is told at once, a node that is just starting is waited for."""


class TubeSource:
    """What a pipeline reads. ``starts`` is the directory that keeps where each query began."""

    def __init__(self, source: Source, starts: Path) -> None:
        self.options = canonical_names(source.all_options())
        self.checked = SourceOptions.parse(self.options)
        self._starts = starts

    def open(self) -> Tube:
        """The tube, for questions that nobody waits long for."""
        return Tube.of(self.checked, timeout_ms=TIMEOUT_MS)

    def check(self) -> None:
        """Look whether the tube answers and has the topics.

        Raises:
            UnavailableError: no master answers.
            ConfigError: a topic does not exist.
        """
        with Tube.of(self.checked, timeout_ms=min(self.checked.timeout_ms, FIRST_LOOK_MS)) as tube:
            tube.partitions(self.checked.topics)

    def start(self, query: str) -> Offsets:
        """Where ``query`` began, or begins now: decided once and kept.

        A checkpoint notes where batches end, not where the first one starts, so "earliest" would come to mean
        something else as soon as retention moves on, and the first batch could not be read or counted again.
        """
        path = self._starts / f"{query}.json"
        try:
            return dict(read_json(path))
        except FileNotFoundError:
            pass
        with Tube.of(self.checked) as tube:
            bounds = tube.bounds(tube.partitions(self.checked.topics))
            start = to_json(tube.positions(self.checked.for_stream(), bounds, "startingOffsets"))
        write_json(path, start)
        return start

    def stream(self, spark: SparkSession, query: str) -> DataFrame:
        """The stream of ``query``, from where it began; a query with a checkpoint goes on from there."""
        options = self.options | {"startingOffsets": json.dumps(self.start(query))}
        return spark.readStream.format("tubemq").options(**options).load()

    def batch(self, spark: SparkSession, start: Offsets, end: Offsets) -> DataFrame | None:
        """The records in ``[start, end)``, the same each time; None where there are none.

        A partition that only ``end`` has begins where it ends: the source notes it one batch before it reads it.
        """
        begin, stop = from_json(start), from_json(end)
        ends = {
            partition: position for partition, position in stop.items() if begin.get(partition, position) < position
        }
        if not ends:
            return None
        starts = with_marks(to_json({partition: begin[partition] for partition in ends}), marks_of(start))
        left_out = {"subscribe", "maxOffsetsPerTrigger", "startingOffsets"}
        options = {name: value for name, value in self.options.items() if name not in left_out} | {
            "assign": json.dumps({topic: list(named) for topic, named in to_json(ends).items()}),
            "startingOffsets": json.dumps(starts),
            "endingOffsets": json.dumps(to_json(ends)),
        }
        return spark.read.format("tubemq").options(**options).load()

    def count(self, start: Offsets, end: Offsets) -> int:
        """How many records are in ``[start, end)``, counted by the brokers."""
        return count_rows(self.options, start, end)
