"""A pipeline from TubeMQ next to the same one from Kafka: 1 to 16 partitions; with four, 0 to 8 steps or 1 to 8 tables.

The sources are compared with all records in the topic, as one batch, in one Spark session that has run each pipeline
before. Each run has its rows per second and, because these depend on what else runs on the machine, the processor time
of its processes. See ``pipeline_load`` for the load and for the hand-written query.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, Settings
from benchmarks.pipeline_load import (
    FLIGHTS,
    KAFKA,
    PENSTOCK,
    Peers,
    Topic,
    fill,
    flights,
    of_pipeline,
    peers,
    pipeline_file,
    run_pipeline,
)
from benchmarks.spark_job import from_kafka, write_rows
from penstock.pipelines.run.driver import pipeline_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pipeline_partitions", "pipeline_steps", "pipeline_tables"]

RECORDS = 100_000
PARTITIONS, STEPS, TABLES = (1, 2, 4, 8, 16), (0, 1, 2, 4, 8), (1, 2, 4, 8)
USUAL = Topic("flights", 4)
HAND_WRITTEN = "Kafka, hand-written"
CPU = "CPU s/M rows"
SAMPLE_S = 0.5


def pipeline_partitions(settings: Settings) -> list[Figure]:
    """Rows a second, and processor seconds for a million rows, of all processes and of each kind."""
    topics = [Topic(f"flights{count}", count) for count in PARTITIONS]
    figures: list[Figure] = []
    with _session(topics) as (spark, ready):
        for topic in topics:
            runs = _pipelines(spark, ready, topic)
            runs[HAND_WRITTEN] = partial(write_rows, spark, from_kafka(ready.kafka, topic.name), FLIGHTS)
            name = f"{topic.partitions} partition{'s' if topic.partitions > 1 else ''}"
            figures += _measure(settings, ready, name, runs, by_kind=True)
    return figures


def pipeline_steps(settings: Settings) -> list[Figure]:
    """Rows a second, and processor seconds of all processes for a million rows, with several steps in a row."""
    figures: list[Figure] = []
    with _session([USUAL]) as (spark, ready):
        for steps in STEPS:
            runs = _pipelines(spark, ready, USUAL, steps=steps)
            figures += _measure(settings, ready, f"{steps} step{'s' if steps != 1 else ''}", runs)
    return figures


def pipeline_tables(settings: Settings) -> list[Figure]:
    """The same with several tables."""
    figures: list[Figure] = []
    with _session([USUAL]) as (spark, ready):
        for tables in TABLES:
            runs = _pipelines(spark, ready, USUAL, tables=tables)
            figures += _measure(settings, ready, f"{tables} table{'s' if tables > 1 else ''}", runs)
    return figures


@contextmanager
def _session(topics: Sequence[Topic]) -> Iterator[tuple[SparkSession, Peers]]:
    """A session of Spark with both servers, which have the records in each of ``topics``."""
    with peers(topics) as ready:
        for topic in topics:
            for server in (PENSTOCK, KAFKA):
                fill(ready, server, topic, lambda: flights(RECORDS))
        spark = pipeline_session("benchmarks", "local[2]", {"spark.jars": ready.spark_jars}, delta=False)
        try:
            yield spark, ready
        finally:
            spark.stop()


def _pipelines(spark: SparkSession, ready: Peers, topic: Topic, **load: Any) -> dict[str, Callable[[Path], None]]:
    """Return a run of the pipeline from each server; its argument is an empty folder for its files."""

    def run(server: str, folder: Path) -> None:
        source = ready.source(server, topic.name)
        run_pipeline(spark, pipeline_file(source, ready.node["mqtt"], FLIGHTS, folder, **load), folder)

    return {server: partial(run, server) for server in (PENSTOCK, KAFKA)}


def _measure(
    settings: Settings, ready: Peers, case: str, runs: Mapping[str, Callable[[Path], None]], *, by_kind: bool = False
) -> list[Figure]:
    """Run each server in turn, after a run of each that is not measured."""
    kinds: Sequence[str] = ("server", "JVM", "Python") if by_kind else ()
    found = {
        server: [Figure(case, server, "rows/s"), Figure(case, server, CPU)]
        + [Figure(f"{case}: {kind}", server, CPU) for kind in kinds]
        for server in runs
    }
    for turn in range(settings.repeats + 1):
        for server, run in runs.items():
            rate, spent = _run(ready, run)
            if turn == 0:
                continue
            used = of_pipeline(spent, PENSTOCK if server == PENSTOCK else KAFKA)
            values = [rate, sum(used.values()), *(used[kind] for kind in kinds)]
            for figure, value in zip(found[server], values, strict=True):
                figure.runs.append(value)
    return [figures[n] for n in range(len(kinds) + 2) for figures in found.values()]


def _run(ready: Peers, run: Callable[[Path], None]) -> tuple[float, dict[str, float]]:
    """Return the rows per second, and the processor seconds for a million rows by kind of process."""
    with tempfile.TemporaryDirectory() as folder:
        cpu, ended = ready.cpu(os.getpid()), threading.Event()

        def sample() -> None:  # for the processes that end with the run
            while not ended.wait(SAMPLE_S):
                cpu.sample()

        sampling = threading.Thread(target=sample)
        sampling.start()
        started = time.perf_counter()
        try:
            run(Path(folder))
            took = time.perf_counter() - started
        finally:
            ended.set()
            sampling.join()
        cpu.sample()
    return RECORDS / took, {kind: seconds / RECORDS * 1e6 for kind, seconds in cpu.spent().items()}
