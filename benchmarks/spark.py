"""Spark's connectors: the ``tubemq`` source on penstock's broker and on Apache's, next to Kafka with Spark's own.

Servers share the cores with Spark. Rows are read and discarded; a drain is a stream with ``availableNow`` and a limit
per trigger. ``Parquet`` is the cost of the same rows from a file, the ceiling the cost of a Python source without a
server and without decoding. Unavailable peers are skipped, with the reason on standard error.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import uvloop

from benchmarks import servers
from benchmarks.figures import Figure, Run, Settings, alternate
from benchmarks.kafka_peer.broker import KafkaPeer, kafka, prepare
from benchmarks.machine import cpu_of_tree
from benchmarks.spark_store import stores
from benchmarks.spark_stream import LEAST_S, START_S, WARM_S, from_clock, from_kafka, from_tube, rate, streams
from benchmarks.tube_loads import MESSAGES, fill
from penstock.errors import PenstockError
from tests.interop.tube_java import jars as tube_jars
from tests.interop.tube_java.server import JavaTube

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

__all__ = ["CEILING", "ROUNDS", "SIZES", "Source", "batch", "filled", "register", "spark_source", "spark_stream"]

SIZES = (100, 1024)
ROUNDS = {100: 20, 1024: 8}
"""Number of times that MESSAGES are written for each size, because a job has a fixed cost of tenths of a second."""
ROUNDS_APACHE = {100: 6, 1024: 2}
"""The same for Apache's server, which accepts them more slowly."""
TRIGGERS = 5
"""Micro-batches of a drain."""
APACHE, KAFKA, PARQUET, CEILING = "Apache TubeMQ", "Kafka", "Parquet", "ceiling"
STEADY = "steady"
"""The topic of the streams."""


class Source(NamedTuple):
    """A format with its options; ``limit`` is the option that limits a micro-batch. None: the source cannot be
    drained."""

    format: str
    options: Mapping[str, str]
    rows: int
    limit: str | None = "maxOffsetsPerTrigger"


class _Setting(NamedTuple):
    """A session of Spark with the servers that it reads."""

    spark: SparkSession
    master: str
    apache: JavaTube | None
    jars: KafkaPeer | None
    broker: str | None
    folder: Path


@contextmanager
def _setting(topics: list[str]) -> Iterator[_Setting]:
    from penstock.spark import session

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = stack.enter_context(servers.penstock("memory", topics=topics))
        apache = stack.enter_context(_apache(topics, folder))
        jars = _kafka_jars()
        broker = None if jars is None else stack.enter_context(kafka(jars))
        spark = session("benchmarks", conf={} if jars is None else {"spark.jars": jars.spark_jars})
        stack.callback(spark.stop)
        register(spark)
        yield _Setting(spark, ready["tube_master"], apache, jars, broker, folder)


def spark_source(settings: Settings) -> list[Figure]:
    """Measure rows per second of a batch read and of a drain, and the state store."""
    topics = [f"s{size}" for size in SIZES]
    figures: list[Figure] = []
    with _setting(topics) as (spark, master, apache, _, broker, folder):
        for size, topic in zip(SIZES, topics, strict=True):
            rows = ROUNDS[size] * MESSAGES
            sources = filled(spark, topic, size, master, apache, broker)
            sources[PARQUET] = _stored(spark, sources["penstock"], folder / topic)
            sources[CEILING] = Source("ceiling", {"rows": str(rows), "size": str(size)}, rows, limit=None)
            batches: dict[str, Callable[[], Run]] = {
                name: partial(batch, spark, source) for name, source in sources.items()
            }
            drains: dict[str, Callable[[], Run]] = {
                name: partial(_drain, spark, source) for name, source in sources.items() if source.limit
            }
            for run in batches.values():
                run()  # the first run starts Python workers and compiles
            figures += alternate(settings, f"Spark batch read, {size} B", "rows/s", batches)
            figures += alternate(settings, f"drain in {TRIGGERS} batches, {size} B", "rows/s", drains)
        figures += stores(settings, spark)
    return figures


def spark_stream(settings: Settings) -> list[Figure]:
    """Measure the latency of streams, and the duration of their micro-batches."""
    with _setting([STEADY]) as (spark, master, apache, jars, broker, _):
        lasts = WARM_S + LEAST_S + START_S + settings.seconds
        sources = {"penstock": from_tube(master, STEADY, lasts)}
        if apache is not None:
            sources[APACHE] = from_tube(apache.masters, STEADY, lasts, **{"tubemq.http": apache.web})
        if jars is not None and broker is not None:
            kafka_options = {"kafka.bootstrap.servers": broker, "topic": STEADY}
            spark.sql("SELECT 'there it is' AS value").write.format("kafka").options(**kafka_options).save()
            sources[KAFKA] = from_kafka(jars, broker, STEADY, lasts)
        sources[CEILING] = from_clock()
        sources["rate source"] = rate()
        return streams(settings, spark, sources)


def register(spark: SparkSession) -> None:
    """Register the ceiling, pickled by value, so that workers need not import the benchmarks."""
    from pyspark import cloudpickle

    from benchmarks import ceiling

    cloudpickle.register_pickle_by_value(ceiling)
    spark.dataSource.register(ceiling.Ceiling)


def filled(
    spark: SparkSession, topic: str, size: int, master: str, apache: JavaTube | None, broker: str | None
) -> dict[str, Source]:
    """Yield the servers, each with the rows in ``topic``."""
    rows = ROUNDS[size] * MESSAGES
    for _ in range(ROUNDS[size]):
        uvloop.run(fill(master, topic, size))
    sources = {"penstock": Source("tubemq", {"tubemq.master": master, "subscribe": topic}, rows)}
    if apache is not None:
        for _ in range(ROUNDS_APACHE[size]):
            uvloop.run(fill(apache.masters, topic, size))
        options = {"tubemq.master": apache.masters, "tubemq.http": apache.web, "subscribe": topic}
        sources[APACHE] = Source("tubemq", options, ROUNDS_APACHE[size] * MESSAGES)
    if broker is not None:
        options = {"kafka.bootstrap.servers": broker}
        made = spark.range(0, rows, 1, 3).selectExpr(f"unhex(repeat('00', {size})) AS value")
        made.write.format("kafka").options(**options, topic=topic).save()
        sources[KAFKA] = Source("kafka", options | {"subscribe": topic, "startingOffsets": "earliest"}, rows)
    return sources


def _stored(spark: SparkSession, source: Source, path: Path) -> Source:
    _loaded(spark.read, source).write.parquet(str(path))
    return Source("parquet", {"path": str(path)}, source.rows, limit=None)


def _loaded(reader: DataFrameReader, source: Source) -> DataFrame:
    return reader.format(source.format).options(**source.options).load()


def _timed(work: Callable[[], object], rows: int) -> Run:
    spent, started = cpu_of_tree(), time.perf_counter()
    work()
    return Run(rows / (time.perf_counter() - started), (cpu_of_tree() - spent) / rows * 1e6)


def batch(spark: SparkSession, source: Source) -> Run:
    """Return the rows per second of reading and discarding all rows."""
    found = _loaded(spark.read, source)
    return _timed(lambda: found.write.format("noop").mode("overwrite").save(), source.rows)


def _drain(spark: SparkSession, source: Source) -> Run:
    """Return the rows per second of a stream that reads all rows, a part per trigger, and ends."""
    assert source.limit is not None
    options = {**source.options, "startingOffsets": "earliest", source.limit: str(source.rows // TRIGGERS)}
    with tempfile.TemporaryDirectory() as folder:
        stream = spark.readStream.format(source.format).options(**options).load()
        writer = stream.writeStream.format("noop").option("checkpointLocation", folder).trigger(availableNow=True)
        return _timed(lambda: writer.start().awaitTermination(), source.rows)


@contextmanager
def _apache(topics: list[str], folder: Path) -> Iterator[JavaTube | None]:
    try:
        found = tube_jars.prepare()
    except pytest.skip.Exception as reason:
        print(f"spark: {APACHE} is not measured: {reason}", file=sys.stderr)
        yield None
        return
    server = JavaTube(found, folder / "apache", topics, [], heap="1g")
    try:
        server.ready()
        yield server
    finally:
        server.close()


def _kafka_jars() -> KafkaPeer | None:
    try:
        return prepare()
    except PenstockError as reason:
        print(f"spark: {KAFKA} is not measured: {reason.what}", file=sys.stderr)
        return None
