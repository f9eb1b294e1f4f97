"""The state store from Spark: rows enriched by 100,000 keys, rows written back. Case ``keys``: without Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import uvloop

from benchmarks import servers
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.keys import KEYS, VALUE, WRITTEN, write
from penstock.spark.statestore.lookup import with_lookup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["stores"]

TASKS = 2
_KEY = "format_string('limits/%06d', id) AS key"


def stores(settings: Settings, spark: SparkSession) -> list[Figure]:
    """Measure keys per second: looked up from the store, from the cache of a worker, and written by the sink."""
    figures: list[Figure] = []
    with servers.penstock("memory", statestore={"extensions": ["mget", "batch"]}) as ready:
        url = f"mqtt://{ready['mqtt']}"
        uvloop.run(write(url, [b"limits/%06d" % number for number in range(KEYS)]))
        keys = spark.range(0, KEYS, 1, TASKS).selectExpr(_KEY)

        def enriched(refresh_ms: int) -> float:
            return _rate(with_lookup(keys, "key", "limit", url, refresh_ms=refresh_ms), KEYS)

        enriched(0)  # the first run starts Python workers and connects them
        enriched(600_000)
        runners = {
            "penstock": lambda: enriched(0),
            "kept values": lambda: enriched(600_000),
            "no lookup": lambda: _rate(keys, KEYS),
        }
        figures += alternate(settings, f"enrich in Spark, {KEYS:,} keys", "rows/s", runners)
    with servers.penstock(settings.durability, statestore={"extensions": ["batch"]}) as ready:
        url = f"mqtt://{ready['mqtt']}"
        rows = spark.range(0, WRITTEN, 1, TASKS).selectExpr(_KEY, f"'{VALUE.decode()}' AS value")

        def written() -> float:
            started = time.perf_counter()
            rows.write.format("aio-statestore").mode("append").option("statestore.broker", url).save()
            return WRITTEN / (time.perf_counter() - started)

        case = f"write back from Spark, {WRITTEN:,} keys, {settings.durability}"
        figures += alternate(settings, case, "rows/s", {"penstock": written})
    return figures


def _rate(rows: DataFrame, count: int) -> float:
    """Return the rows per second of reading and discarding."""
    started = time.perf_counter()
    rows.write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - started)
