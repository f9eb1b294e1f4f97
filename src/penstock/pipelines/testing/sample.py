"""Rows of each step of a pipeline for the newest records of its sources, in one local Spark session, in batch form.

As in test cases, a batch has no watermark: a dedupe drops all duplicates among these records, and a window has only
these records, and Sparkplug messages only the births among them. Lookups read the state store of the pipeline. Nothing
is written, and no offset of a group changes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.errors import ConfigError
from penstock.pipelines.rows import alive, row_json, windows_as_rows
from penstock.pipelines.sources.changes import AsOfJoins
from penstock.pipelines.sources.readers import KafkaSourceReader, QueryInput, TubeSourceReader
from penstock.pipelines.spec.pipeline import Pipeline, path_to
from penstock.pipelines.spec.sources import KafkaSource, TubeOptions
from penstock.pipelines.spec.steps import Step
from penstock.pipelines.state_dir.changes import KNOWN_CHANGES
from penstock.pipelines.state_dir.schemas import SCHEMAS, BatchSchemas
from penstock.pipelines.steps.graph import build_stream
from penstock.pipelines.steps.lookups import store_lookup
from penstock.spark.error_causes import innermost_cause
from penstock.spark.kafka.source import KafkaLog, ranges
from penstock.spark.tube.offsets import before_end, to_json

__all__ = ["Rejection", "StepSample", "check_steps", "newest_values", "sample_steps"]


class Rejection(NamedTuple):
    """Rows that a step rejected for one reason."""

    code: str
    reason: str
    rows: int


class StepSample(NamedTuple):
    """Rows after a step: ``rows`` are the first of the ``live`` ones, with the columns of the pipeline.

    ``filtered`` and ``dead`` count the rows that this step or one before it excluded; ``rejections`` are its own.
    """

    step: str
    kind: str
    live: int
    filtered: int
    dead: int
    rows: list[dict[str, Any]]
    rejections: list[Rejection]


def check_steps(pipeline: Pipeline, names: Sequence[str]) -> list[Step]:
    """Return the steps ``names`` in file order, all without ``names``.

    Raises:
        ConfigError: a step does not exist, or a source is neither in TubeMQ nor in Kafka.
    """
    known = {step.name: step for step in pipeline.steps}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--step {name!r} is not a step of pipeline {pipeline.name!r}",
                option="--step",
                hint=f"use one of {', '.join(known)}" if known else "the file has no steps",
            )
    steps = [step for step in pipeline.steps if not names or step.name in names]
    for name in dict.fromkeys(source for step in steps for source in path_to(pipeline, step.name).inputs):
        if not isinstance(pipeline.inputs[name], TubeOptions | KafkaSource):
            raise ConfigError(
                f"source {name!r} of pipeline {pipeline.name!r} has no newest records: it does not read a log",
                option="source",
                hint="write some of its records as a test case: penstock pipeline test",
            )
    return steps


def sample_steps(
    spark: SparkSession, pipeline: Pipeline, steps: Sequence[Step], records: int, limit: int
) -> Iterator[StepSample]:
    """Yield what ``steps`` make of the newest ``records`` of each partition, with ``limit`` rows of each.

    Partitions of one broker share a store, so of a topic with several partitions some have fewer records.

    Raises:
        UnavailableError: the sources or the state store do not answer.
        ConfigError: a step cannot be built, or an expression fails.
    """
    sources: dict[str, DataFrame] = {}

    def source(name: str) -> DataFrame:
        if name not in sources:
            sources[name] = _newest(spark, pipeline, name, records).persist()
        return sources[name]

    try:
        with TemporaryDirectory(prefix="penstock-sample-") as temporary:
            state = Path(temporary)
            with_lookup = store_lookup(pipeline.statestore.url, state)
            joins = {s.name: s.enrich for s in pipeline.steps if s.enrich is not None and s.enrich.as_of is not None}
            if joins:
                known = AsOfJoins(pipeline, state, [], lambda: int(time.time() * 1000)).newest(joins)
                spark.sparkContext.setLocalProperty(KNOWN_CHANGES, json.dumps(known))
            spark.sparkContext.setLocalProperty(SCHEMAS, BatchSchemas.begin(state, (), ()).as_text())
            for step in steps:
                nodes, reads, _ = path_to(pipeline, step.name)
                try:
                    rows = build_stream(source, nodes, reads, with_lookup, births=[state / "births"])
                    window = next((node.step.name for node in nodes if node.step.window is not None), None)
                    yield _sample(rows if window is None else windows_as_rows(rows, window), step, limit)
                except PySparkException as error:
                    raise ConfigError(f"step {step.name!r} fails", why=innermost_cause(str(error))[1]) from error
    finally:
        for rows in sources.values():
            rows.unpersist()


def _newest(spark: SparkSession, pipeline: Pipeline, name: str, records: int) -> DataFrame:
    """Return rows for the newest records of the source ``name``."""
    source = pipeline.inputs[name]
    reader: KafkaSourceReader | TubeSourceReader
    if isinstance(source, KafkaSource):
        reader = KafkaSourceReader(name, source, Path())
        reader.check()
        starts, ends = reader.newest(records)
    else:
        assert isinstance(source, TubeOptions)
        reader = TubeSourceReader(name, source, Path())
        reader.check()
        with reader.open() as tube:
            bounds = reader.bounds(tube)
        starts = to_json(before_end(bounds, records))
        ends = to_json({partition: found.end for partition, found in bounds.items()})
    rows = reader.batch(spark, QueryInput("sample", name, Path()), starts, ends)
    return reader.empty(spark) if rows is None else rows.coalesce(1)


def newest_values(name: str, source: KafkaSource, records: int) -> Iterator[tuple[str, bytes]]:
    """Yield the values of the newest ``records`` of each partition of ``source`` with their places, without Spark.

    Offsets have gaps, so of some partitions there are fewer. Records without a value are left out.

    Raises:
        UnavailableError: Kafka did not answer.
        ConfigError: a topic does not exist.
        RefusedError: the connection was refused.
    """
    starts, ends = KafkaSourceReader(name, source, Path()).newest(records)
    with KafkaLog(source.read_options) as log:
        for place in ranges(starts, ends):
            for message in chain.from_iterable(log.read(place)):
                value = message.value()
                if value is not None:
                    yield f"{place.topic}:{place.partition}@{message.offset()}", bytes(value)


def _sample(rows: DataFrame, step: Step, limit: int) -> StepSample:
    line = row_json(rows, nulls=True)
    found = rows.select(
        sf.when(alive(), line).alias("line"),
        sf.col("_filtered").isNotNull().alias("is_filtered"),
        sf.col("_dead.step").alias("step"),
        sf.col("_dead.code").alias("code"),
        sf.col("_dead.reason").alias("reason"),
    ).collect()
    lines = [row["line"] for row in found if row["line"] is not None]
    dead = [row for row in found if row["step"] is not None]
    mine = Counter((row["code"], row["reason"]) for row in dead if row["step"] == step.name)
    return StepSample(
        step=step.name,
        kind=step.kind,
        live=len(lines),
        filtered=sum(row["is_filtered"] and row["step"] is None for row in found),
        dead=len(dead),
        rows=[json.loads(text) for text in lines[:limit]],
        rejections=[Rejection(code, reason, count) for (code, reason), count in mine.most_common()],
    )
