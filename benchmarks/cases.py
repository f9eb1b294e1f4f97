"""The cases: what is measured, how often, beside which peer. Each run is one number; peers take turns with penstock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from benchmarks import servers
from benchmarks.connections import connections_possible, memory_of_connections
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.keys import keys
from benchmarks.mqtt import mqtt
from benchmarks.statestore import state_store
from benchmarks.tube import fill, tube

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["CASES", "Figure", "Settings"]


def connections(settings: Settings) -> list[Figure]:
    """Resident memory per idle plain connection, 9,999 of them, without and with a subscription; peer Mosquitto.

    A new process for each run: what the last one freed would be used again.
    """
    count = connections_possible(9_999)  # and one more that says whether the broker still answers

    def ours(*, subscribe: bool) -> float:
        with servers.penstock("memory") as ready:
            return memory_of_connections(ready["mqtt"], int(ready["pid"]), count, subscribe=subscribe)

    def theirs(*, subscribe: bool) -> float:
        with servers.mosquitto_process() as (address, pid):
            return memory_of_connections(address, pid, count, subscribe=subscribe)

    figures = []
    for words, subscribe in (("", False), (" with a subscription", True)):
        runners = {"penstock": partial(ours, subscribe=subscribe), "mosquitto": partial(theirs, subscribe=subscribe)}
        figures += alternate(settings, f"{count} idle connections{words}", "bytes/connection", runners)
    return figures


def spark_source(settings: Settings) -> list[Figure]:
    """Rows a second of a batch read into nothing, 100 B; beside it the same rows from Parquet."""
    import tempfile

    from penstock.spark import session

    with servers.penstock("memory", topics=["demo"]) as ready, tempfile.TemporaryDirectory() as folder:
        for _ in range(4):
            uvloop.run(fill(ready["tube_master"], "demo", 100))
        spark = session("benchmarks")
        source = (
            spark.read.format("tubemq").option("tubemq.master", ready["tube_master"]).option("subscribe", "demo").load()
        )
        source.write.parquet(f"{folder}/rows")
        stored = spark.read.parquet(f"{folder}/rows")
        rows = stored.count()
        runners = {
            "penstock": partial(rows_per_second, source, rows),
            "Parquet": partial(rows_per_second, stored, rows),
        }
        for run in runners.values():
            run()
        figures = alternate(settings, f"Spark batch read, {rows} rows of 100 B", "rows/s", runners)
        spark.stop()
    return figures


def rows_per_second(frame: DataFrame, rows: int) -> float:
    """Read the whole frame into nothing."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started)


CASES: dict[str, Callable[[Settings], list[Figure]]] = {
    "mqtt": mqtt,
    "connections": connections,
    "statestore": state_store,
    "tube": tube,
    "spark": spark_source,
    "keys": keys,
}
