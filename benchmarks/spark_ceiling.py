"""Spark's batch read of the log next to its bounds: Spark with a source without a server, the reader without Spark.

The source without a server (``ceiling``) yields one Arrow batch of the same columns and rows repeatedly: the cost of a
row between a Python data source and Spark's sink. The reader without Spark creates the same Arrow batches from the same
records in one thread, and discards them: the cost of penstock's part of a row, with its broker.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from benchmarks import servers
from benchmarks.figures import Figure, Run, Settings, alternate
from benchmarks.machine import cpu_of_tree
from benchmarks.spark import CEILING, ROUNDS, SIZES, Source, batch, filled, register
from benchmarks.tube_loads import MESSAGES

__all__ = ["spark_ceiling"]


def spark_ceiling(settings: Settings) -> list[Figure]:
    """Measure rows per second of reading and discarding all rows, and processor time of all processes per row."""
    from penstock.spark import session

    figures: list[Figure] = []
    topics = [f"s{size}" for size in SIZES]
    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock("memory", topics=topics))
        spark = session("benchmarks", "local[2]")
        stack.callback(spark.stop)
        register(spark)
        for size, topic in zip(SIZES, topics, strict=True):
            rows = ROUNDS[size] * MESSAGES
            sources = filled(spark, topic, size, ready["tube_master"], None, None)
            sources[CEILING] = Source("ceiling", {"rows": str(rows), "size": str(size)}, rows, limit=None)
            runs = {name: partial(batch, spark, source) for name, source in sources.items()}
            runs["reader without Spark"] = partial(_read, ready["tube_master"], topic, rows)
            for run in runs.values():
                run()  # the first run starts Python workers and compiles
            figures += alternate(settings, f"Spark batch read, {size} B, local[2]", "rows/s", runs)
    return figures


def _read(master: str, topic: str, rows: int) -> Run:
    """Create Arrow batches of all records in this thread."""
    from penstock.spark.tube.arrow import record_batches
    from penstock.spark.tube.offsets import TopicPartition
    from penstock.tube.reader import RangeReader, partitions

    found = 0
    spent, started = cpu_of_tree(), time.perf_counter()
    for place in partitions(master, topic):
        with RangeReader(place.host, place.port) as reader:
            start, end = reader.bounds(topic, place.partition)
            messages = reader.read(topic, place.partition, start, end)
            for arrow in record_batches(TopicPartition(topic, place.broker_id, place.partition), messages):
                found += arrow.num_rows
    assert found == rows
    return Run(rows / (time.perf_counter() - started), (cpu_of_tree() - spent) / rows * 1e6)
