"""The ``tubemq`` source in Spark: penstock's broker and Apache's, beside Kafka with Spark's own connector, and Parquet.

Every server runs on the cores that Spark runs on. Rows are read into nothing; a drain is a stream with ``availableNow``
and a limit a trigger. Parquet is what the same rows cost from a file. Peers that cannot be had are left out, with the
reason on standard error.
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
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.kafka_peer.broker import KafkaPeer, kafka, prepare
from benchmarks.tube import MESSAGES, fill
from penstock.errors import PenstockError
from tests.interop.tube_java import jars as tube_jars
from tests.interop.tube_java.server import JavaTube

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

__all__ = ["spark_source"]

SIZES = (100, 1024)
ROUNDS = {100: 10, 1024: 3}
"""How many times MESSAGES are written of each size."""
TRIGGERS = 5
"""Micro-batches of a drain."""
APACHE, KAFKA, PARQUET = "Apache TubeMQ", "Kafka", "Parquet"


class Source(NamedTuple):
    """A format with its options; ``limit`` names the option that bounds a micro-batch. None: it cannot be drained."""

    format: str
    options: Mapping[str, str]
    limit: str | None = "maxOffsetsPerTrigger"


def spark_source(settings: Settings) -> list[Figure]:
    """Rows a second of a batch read and of a drain, 100 B and 1 KiB."""
    from penstock.spark import session

    topics = [f"s{size}" for size in SIZES]
    figures: list[Figure] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = stack.enter_context(servers.penstock("memory", topics=topics))
        apache = stack.enter_context(_apache(topics, folder))
        peer = _kafka_jars()
        broker = None if peer is None else stack.enter_context(kafka(peer))
        spark = session("benchmarks", conf={} if peer is None else {"spark.jars": peer.spark_jars})
        stack.callback(spark.stop)
        for size, topic in zip(SIZES, topics, strict=True):
            rows = ROUNDS[size] * MESSAGES
            sources = _filled(spark, topic, size, ready["tube_master"], apache, broker)
            sources[PARQUET] = _stored(spark, sources["penstock"], folder / topic)
            batches: dict[str, Callable[[], float]] = {
                name: partial(_batch, spark, source, rows) for name, source in sources.items()
            }
            drains: dict[str, Callable[[], float]] = {
                name: partial(_drain, spark, source, rows) for name, source in sources.items() if source.limit
            }
            for run in batches.values():
                run()  # the first one starts Python workers and compiles
            figures += alternate(settings, f"Spark batch read, {rows} rows of {size} B", "rows/s", batches)
            figures += alternate(settings, f"drain in {TRIGGERS} batches, {rows} rows of {size} B", "rows/s", drains)
    return figures


def _filled(
    spark: SparkSession, topic: str, size: int, master: str, apache: JavaTube | None, broker: str | None
) -> dict[str, Source]:
    """The servers, each with the rows in ``topic``."""
    for _ in range(ROUNDS[size]):
        uvloop.run(fill(master, topic, size, warm=False))
    sources = {"penstock": Source("tubemq", {"tubemq.master": master, "subscribe": topic})}
    if apache is not None:
        for _ in range(ROUNDS[size]):
            uvloop.run(fill(apache.masters, topic, size, warm=False))
        options = {"tubemq.master": apache.masters, "tubemq.http": apache.web, "subscribe": topic}
        sources[APACHE] = Source("tubemq", options)
    if broker is not None:
        options = {"kafka.bootstrap.servers": broker}
        made = spark.range(0, ROUNDS[size] * MESSAGES, 1, 3).selectExpr(f"unhex(repeat('00', {size})) AS value")
        made.write.format("kafka").options(**options, topic=topic).save()
        sources[KAFKA] = Source("kafka", options | {"subscribe": topic, "startingOffsets": "earliest"})
    return sources


def _stored(spark: SparkSession, source: Source, path: Path) -> Source:
    _loaded(spark.read, source).write.parquet(str(path))
    return Source("parquet", {"path": str(path)}, limit=None)


def _loaded(reader: DataFrameReader, source: Source) -> DataFrame:
    return reader.format(source.format).options(**source.options).load()


def _batch(spark: SparkSession, source: Source, rows: int) -> float:
    """Rows a second of reading everything into nothing."""
    started = time.perf_counter()
    _loaded(spark.read, source).write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started)


def _drain(spark: SparkSession, source: Source, rows: int) -> float:
    """Rows a second of a stream that reads everything, a part a trigger, and ends."""
    assert source.limit is not None
    options = {**source.options, "startingOffsets": "earliest", source.limit: str(rows // TRIGGERS)}
    with tempfile.TemporaryDirectory() as folder:
        reader: DataStreamReader = spark.readStream.format(source.format).options(**options)
        started = time.perf_counter()
        query = (
            reader.load()
            .writeStream.format("noop")
            .option("checkpointLocation", folder)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return rows / (time.perf_counter() - started)


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
