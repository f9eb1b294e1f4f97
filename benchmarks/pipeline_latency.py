"""Latency of a pipeline at a steady rate, from TubeMQ beside Kafka, with 0 to 8 steps.

A record contains its send time, and its latency ends when a reader can see its row: when the version of the Delta table
with its file is written. The pipelines run in one Spark session, and start a batch as soon as the last one has ended.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Settings
from benchmarks.pipeline_load import KAFKA, PENSTOCK, Peers, Topic, peers, pipeline_file, run_pipeline
from penstock.pipelines.run.driver import pipeline_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["latencies", "pipeline_latency"]

RATE = 1_000
STEPS = (0, 1, 2, 4, 8)
PARTITIONS = 4
WARM_S, LEAST_S, START_S = 5.0, 10.0, 600.0
SCHEMA = "sent DOUBLE"
FORMAT = "csv"
TRIGGER = "20 milliseconds"


def pipeline_latency(settings: Settings) -> list[Figure]:
    """p50 and p99 in ms by the number of steps."""
    seconds = max(LEAST_S, settings.seconds)
    cases = [(steps, turn) for steps in STEPS for turn in range(settings.repeats)]
    # Each run has topics of its own, so that it does not read the records of another one.
    topics = {case: Topic(f"steady_{case[0]}_{case[1]}", PARTITIONS) for case in cases}
    figures: dict[tuple[int, str, str], Figure] = {}
    with peers(list(topics.values())) as ready:
        spark = pipeline_session("benchmarks", "local[2]", None, delta=False)
        try:
            for (steps, _), topic in topics.items():
                for server in (PENSTOCK, KAFKA):
                    taken = _run(spark, ready, server, topic.name, steps, seconds)
                    cuts = statistics.quantiles(taken, n=100)
                    for name, at in (("p50", 49), ("p99", 98)):
                        words = f"{RATE:,} records/s, {steps} step{'s' if steps != 1 else ''}, {name}"
                        figure = figures.setdefault((steps, server, name), Figure(words, server, "ms"))
                        figure.runs.append(cuts[at] * 1000)
        finally:
            spark.stop()
    return sorted(figures.values(), key=lambda figure: figure.case)


def _run(spark: SparkSession, ready: Peers, server: str, topic: str, steps: int, seconds: float) -> list[float]:
    """Return the latency in seconds of each record that was sent in ``seconds`` after the first batches."""
    address = ready.node["tube_master"] if server == PENSTOCK else f"kafka://{ready.kafka}"
    lasts = str(START_S + WARM_S + seconds)
    feed = [sys.executable, "-m", "benchmarks.steady", address, topic, str(RATE), lasts]
    with tempfile.TemporaryDirectory() as name:
        folder, stop = Path(name), threading.Event()
        source = ready.source(server, topic)
        file = pipeline_file(source, ready.node["mqtt"], SCHEMA, folder, steps=steps, payload=FORMAT, trigger=TRIGGER)
        log = folder / "table0" / "_delta_log"
        running = threading.Thread(target=run_pipeline, args=(spark, file, folder, stop))
        with subprocess.Popen(feed) as feeding:
            running.start()
            try:
                _wait_for(log / f"{2:020}.json", running)
                began = time.time() + WARM_S
                time.sleep(WARM_S + seconds)
                _wait_for_end(log, began + seconds, running)
            finally:
                feeding.kill()
                stop.set()
                running.join()
        return [took for sent, took in latencies(folder / "table0") if began <= sent < began + seconds]


def _wait_for(path: Path, running: threading.Thread) -> None:
    limit = time.monotonic() + START_S
    while not path.exists():
        if not running.is_alive() or time.monotonic() > limit:
            raise SystemExit(f"the pipeline has not written {path.name} after {START_S:g} s")
        time.sleep(0.05)


def _wait_for_end(log: Path, until: float, running: threading.Thread) -> None:
    """Wait until the newest version of the table has a record that was sent a second after ``until``."""
    limit = time.monotonic() + START_S
    while max((sent for sent, _ in _rows(max(log.glob("*.json")))), default=0.0) < until + 1:
        if not running.is_alive() or time.monotonic() > limit:
            raise SystemExit("the pipeline has not written the last records")
        time.sleep(0.2)


def latencies(table: Path) -> list[tuple[float, float]]:
    """Return the send time of each row of a Delta table, and the seconds until its version was written."""
    return [row for version in sorted((table / "_delta_log").glob("*.json")) for row in _rows(version)]


def _rows(version: Path) -> Iterator[tuple[float, float]]:
    import pyarrow.parquet as pq

    written = version.stat().st_mtime
    for line in version.read_text(encoding="utf-8").splitlines():
        added = json.loads(line).get("add")
        if added is not None and added["dataChange"]:  # not a file of a compaction
            column = pq.ParquetFile(version.parent.parent / added["path"]).read(["sent"]).column("sent")
            yield from ((sent, written - sent) for sent in column.to_numpy().tolist())
