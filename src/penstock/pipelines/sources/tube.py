"""TubeMQ topics as sources of a pipeline, including MQTT messages that a rule copies to one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.catalyst import make_thread_safe
from penstock.pipelines.sources.reader import TIMEOUT_MS, LagMeter, QueryInput
from penstock.pipelines.sources.rows import header_names, source_rows, told_of_capture
from penstock.pipelines.spec.sources import SOURCE, StateStoreSource, TubeOptions
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.durable import read_json, write_json
from penstock.pipelines.state_dir.replay import Span
from penstock.spark.tube.offsets import (
    Bounds,
    Positions,
    Times,
    TopicPartition,
    check_kept,
    from_json,
    marks_of,
    to_json,
    with_marks,
)
from penstock.spark.tube.options import COLUMNS, HEADERS, SourceOptions, canonical_names
from penstock.spark.tube.source import spark_schema
from penstock.spark.tube.tube_client import TubeClient, count_rows

__all__ = ["TubeSourceReader"]

FIRST_LOOK_MS = 10_000
"""Timeout of the check before Spark starts: long enough for a node that is just starting."""


class TubeSourceReader:
    """TubeMQ topics under the name ``name``. With a ``span`` the source ends, at offsets that are stored in ``starts``.

    Positions are shown as those of groups whose names begin with ``group``, unless the source names another, and end
    with the query and the source; not those of a span. ``headers``: whether the rows keep all headers of a record.
    """

    def __init__(
        self,
        name: str,
        source: TubeOptions,
        starts: Path,
        span: Span | None = None,
        *,
        group: str = "",
        headers: bool = True,
    ) -> None:
        self._columns = (*COLUMNS, *((HEADERS,) if headers else ()), *(f"header.{n}" for n in header_names(source)))
        self.options = canonical_names(source.all_options() | {"columns": ",".join(self._columns)})
        self.checked = SourceOptions.parse(self.options)
        self.doubts: list[str] = []
        """Data that a replay may lack, found when it begins."""
        self._name = name
        self._source = source
        self._starts = starts
        self._span = span
        self._group = self.options.get("tubemq.group", self.options.get("groupIdPrefix", group))

    def open(self) -> TubeClient:
        """Open a client with a short timeout."""
        return TubeClient.of(self.checked, timeout_ms=TIMEOUT_MS)

    def check(self) -> None:
        """Check that TubeMQ answers and has the topics.

        Raises:
            UnavailableError: no master answers.
            ConfigError: a topic does not exist.
        """
        with TubeClient.of(self.checked, timeout_ms=min(self.checked.timeout_ms, FIRST_LOOK_MS)) as tube:
            source = self._source
            with told_of_capture(source.tube_topic) if isinstance(source, StateStoreSource) else nullcontext():
                tube.partitions(self.checked.topics)

    def start(self, input_: QueryInput) -> Offsets:
        """Offsets that ``startingOffsets``, or the span, means now."""
        with TubeClient.of(self.checked) as tube:
            bounds = tube.bounds(tube.partitions(self.checked.topics))
            wanted = self.checked.for_stream() if self._span is None else self._span.begin
            positions = tube.positions(wanted, bounds, "startingOffsets")
        if self._span is not None:
            self._look_for_gaps(positions, bounds)
        return to_json(positions)

    def end(self) -> Offsets | None:
        """Return the end offsets of the span, or None: resolved once and stored, as "latest" and times change."""
        if self._span is None:
            return None
        path = self._starts / ("_end.json" if self._name == SOURCE else f"_end-{self._name}.json")
        try:
            return dict(read_json(path))
        except FileNotFoundError:
            pass
        with TubeClient.of(self.checked) as tube:
            bounds = tube.bounds(tube.partitions(self.checked.topics))
            positions = tube.positions(self._span.end, bounds, "endingOffsets")
            for partition, position in positions.items():
                check_kept(position, Bounds(0, bounds[partition].end), partition)
        end = to_json(positions)
        write_json(path, end)
        return end

    def bounds(self, tube: TubeClient) -> dict[TopicPartition, Bounds]:
        """The readable range now: from the earliest stored offset to the end of the log, or of the span."""
        bounds = tube.bounds(tube.partitions(self.checked.topics, max_age_s=TIMEOUT_MS / 1000))
        end = self.end()
        if end is None:
            return bounds
        last = from_json(end)
        return {p: Bounds(b.oldest, min(b.end, last[p])) for p, b in bounds.items() if p in last}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """The stream from ``start`` on."""
        parts = [self._group, input_.query, *([input_.name] if input_.name != SOURCE else [])]
        shown = self._group and self._span is None
        options = self.options | {
            "startingOffsets": json.dumps(start),
            "tubemq.group": "-".join(parts) if shown else "",
        }
        end = self.end()
        if end is not None:
            options |= {"endingOffsets": json.dumps(end)}
        make_thread_safe(spark, "tubemq")
        return self._rows(spark.readStream.format("tubemq").options(**options).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
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
        return self._rows(spark.read.format("tubemq").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(self._columns)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Number of records in ``[start, end)``, counted by the brokers."""
        return count_rows(self.options, start, end)

    def meter(self, clock: Callable[[], int]) -> LagMeter:
        """Measures how far queries are behind."""
        return LagMeter(self.open, self.bounds, clock)

    def _look_for_gaps(self, positions: Positions, bounds: Mapping[TopicPartition, Bounds]) -> None:
        """Positions that are gone are an error; of a time before the oldest record nobody knows what it had."""
        assert self._span is not None
        for partition, position in positions.items():
            if self.checked.fail_on_data_loss:
                check_kept(position, bounds[partition], partition)
            if isinstance(self._span.begin, Times) and position == bounds[partition].oldest > 0:
                self.doubts.append(
                    f"{partition}: the log begins at position {position} now; what it had of the time before that "
                    "retention has removed, and the replay lacks it"
                )

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)
