"""Streams at 1,000 messages per second: from the producer into ``foreachBatch``, and the fixed cost of a micro-batch.

The latency of a message ends when the driver has its row. The send time is in the timestamp of a Kafka record, and in
the body of penstock's records. Spark's own rate source shows Spark's share of the cost of a micro-batch, the ceiling
that of a source in Python without a server.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException

from benchmarks.figures import Figure, Settings
from penstock.spark.environment.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from benchmarks.kafka_peer.broker import KafkaPeer

__all__ = ["Steady", "from_clock", "from_kafka", "from_tube", "rate", "streams"]

RATE = 1_000
WARM_S = 3.0
"""Seconds at the start of a run that are not measured."""
LEAST_S = 5.0
DRAIN_S = 1.0
"""Seconds in which the last messages arrive."""
START_S = 60.0
_SENT = "cast(cast(value AS string) AS double)"
"""The send time, in the body of a message."""
MOST_REPEATS = 3
"""Each run takes ten seconds or more, and thousands of messages."""


class Steady(NamedTuple):
    """A source that gets ``RATE`` messages per second while ``feed`` runs; ``sent`` is the send time in seconds since
    1970."""

    format: str
    options: Mapping[str, str]
    feed: Sequence[str]
    sent: str | None


def from_tube(masters: str, topic: str, seconds: float, **options: str) -> Steady:
    """A TubeMQ topic, to which penstock's producer sends."""
    feed = [sys.executable, "-m", "benchmarks.steady", masters, topic, str(RATE), str(seconds)]
    given = {"tubemq.master": masters, "subscribe": topic, **options}
    return Steady("tubemq", given, feed, _SENT)


def from_kafka(peer: KafkaPeer, address: str, topic: str, seconds: float) -> Steady:
    """A Kafka broker, to which its own load generator sends immediately."""
    java = str(find_java().home / "bin" / "java")
    feed = [java, "-Xmx256m", "-cp", f"{peer.broker}/*", "org.apache.kafka.tools.ProducerPerformance"]
    feed += ["--topic", topic, "--num-records", str(int(RATE * seconds)), "--record-size", "100"]
    feed += ["--throughput", str(RATE), "--producer-props", f"bootstrap.servers={address}", "linger.ms=0"]
    given = {"kafka.bootstrap.servers": address, "subscribe": topic}
    return Steady("kafka", given, feed, "cast(timestamp AS double)")


def from_clock() -> Steady:
    """A source in Python without a server, whose messages are made when they are read."""
    return Steady("ceiling", {}, (), _SENT)


def rate() -> Steady:
    """Spark's own generator: no server, no Python; it has no send times."""
    return Steady("rate", {"rowsPerSecond": str(RATE), "numPartitions": "2"}, (), None)


def streams(settings: Settings, spark: SparkSession, sources: Mapping[str, Steady]) -> list[Figure]:
    """Measure the latency of a message (ms: p50, p99) and the duration of a micro-batch (ms), alternating between
    sources. A first run of each is not counted: Java compiles what a micro-batch needs for about a minute, and a stream
    runs for days."""
    names = {
        kind: f"{words}, {RATE:,} messages/s"
        for kind, words in (("p50", "end to end, p50"), ("p99", "end to end, p99"), ("batch", "a micro-batch, p50"))
    }
    figures = {
        (kind, server): Figure(case, server, "ms")
        for kind, case in names.items()
        for server, source in sources.items()
        if kind == "batch" or source.sent is not None
    }
    for source in sources.values():
        _run(spark, source, LEAST_S)
    for _ in range(min(settings.repeats, MOST_REPEATS)):
        for server, source in sources.items():
            taken, batches = _run(spark, source, max(LEAST_S, settings.seconds))
            figures["batch", server].runs.append(statistics.median(batches))
            if source.sent is not None:
                cuts = statistics.quantiles(taken, n=100)
                figures["p50", server].runs.append(cuts[49] * 1000)
                figures["p99", server].runs.append(cuts[98] * 1000)
    return list(figures.values())


def _run(spark: SparkSession, source: Steady, seconds: float) -> tuple[list[float], list[float]]:
    """Return the latency of each message in seconds, and the duration in ms of each micro-batch with rows except the
    first."""
    taken: list[tuple[float, float]] = []

    def collect(rows: DataFrame, _: int) -> None:
        found = rows.selectExpr(source.sent or "value").collect()
        now = time.time()
        taken.extend((row[0], now - row[0]) for row in found)

    with tempfile.TemporaryDirectory() as folder:
        stream = spark.readStream.format(source.format).options(**source.options).load()
        query = stream.writeStream.foreachBatch(collect).option("checkpointLocation", folder).start()
        feed = subprocess.Popen(source.feed, stdout=subprocess.DEVNULL) if source.feed else None
        try:
            deadline = time.monotonic() + START_S
            while not taken:  # the query and the producer are starting
                if time.monotonic() > deadline or not query.isActive:
                    raise SystemExit(f"no row of {source.format} came: {query.exception()}")
                time.sleep(0.05)
            began = time.time() + WARM_S
            time.sleep(WARM_S + seconds + DRAIN_S)
        finally:
            if feed is not None:
                feed.kill()
                feed.wait()
                with suppress(PySparkException):  # the error that ended it is reported above
                    query.processAllAvailable()  # Spark stops without errors between batches
            query.stop()
        batches = [float(p.durationMs["triggerExecution"]) for p in query.recentProgress if p.numInputRows]
    return [took for sent, took in taken if began <= sent < began + seconds], batches[len(batches) // 3 :]
