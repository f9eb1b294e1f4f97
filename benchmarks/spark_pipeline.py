"""A pipeline next to a hand-written query: JSON records from the log into Parquet tables, as one batch each.

The hand-written query parses with ``from_json`` and writes one table with Spark's Parquet sink: no dead letters, no
ledger, no exact commit. The pipeline parses strictly and writes 1, 3 and 8 tables that share a query. All run in one
Spark session, which has run each of them before.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import servers
from benchmarks.figures import Figure, Run, Settings, alternate
from benchmarks.machine import cpu_of_tree
from penstock.pipelines.run import errors
from penstock.pipelines.run import run as running
from penstock.pipelines.spec import loader
from penstock.tube.producer import Producer
from penstock.tube.record import Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_pipeline"]

RECORDS = 200_000
TOPIC = "flights"
SINKS = (1, 3, 8)
_TEXTS = ("carrier", "flight", "tailnum", "origin", "dest", "gate", "status")
_NUMBERS = ("year", "month", "day", "dep_time", "arr_time", "air_time", "distance", "hour", "minute")
_FRACTIONS = ("dep_delay", "arr_delay", "fuel")
SCHEMA = ", ".join(
    [*(f"{n} STRING" for n in _TEXTS), *(f"{n} INT" for n in _NUMBERS), *(f"{n} DOUBLE" for n in _FRACTIONS)]
)


def spark_pipeline(settings: Settings) -> list[Figure]:
    """Rows a second of a hand-written query and of pipelines with several sinks."""
    from penstock.spark import session

    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock("memory", topics=[TOPIC]))
        asyncio.run(_fill(ready["tube_master"]))
        spark = session("benchmarks", "local[2]")
        stack.callback(spark.stop)
        runs = {"hand-written": partial(_timed, partial(_query, spark, ready["tube_master"]))}
        for sinks in SINKS:
            name = "penstock" if sinks == 1 else f"{sinks} tables"
            runs[name] = partial(_timed, partial(_pipeline, spark, ready, sinks))
        for run in runs.values():
            run()  # the first one starts Python workers and compiles
        return alternate(settings, f"{RECORDS:,} JSON records into Parquet, local[2]", "rows/s", runs)


async def _fill(master: str) -> None:
    async with Producer(master) as producer:
        await producer.send_all(TOPIC, _records())


def _records() -> Iterator[Record]:
    for n in range(RECORDS):
        fields: dict[str, Any] = {name: f"{name[:2]}{n * 7919 % 9973}" for name in _TEXTS}
        fields |= dict.fromkeys(_NUMBERS, n * 31 % 2400)
        fields |= dict.fromkeys(_FRACTIONS, n % 977 / 8)
        yield Record(json.dumps(fields).encode(), key=b"%d" % (n % 64))


def _timed(work: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        spent, started = cpu_of_tree(), time.perf_counter()
        work(Path(folder))
        return Run(RECORDS / (time.perf_counter() - started), (cpu_of_tree() - spent) / RECORDS * 1e6)


def _query(spark: SparkSession, master: str, folder: Path) -> None:
    from pyspark.sql import functions as sf

    options = {"tubemq.master": master, "subscribe": TOPIC, "startingOffsets": "earliest"}
    rows = spark.readStream.format("tubemq").options(**options).load()
    rows = rows.select(sf.from_json(sf.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")
    writer = rows.writeStream.option("checkpointLocation", str(folder / "state")).trigger(availableNow=True)
    writer.format("parquet").option("path", str(folder / "rows")).start().awaitTermination()


def _pipeline(spark: SparkSession, ready: dict[str, Any], sinks: int, folder: Path) -> None:
    text = f"""\
name: benchmark_{sinks}
source: {{topics: [{TOPIC}], master: "{ready["tube_master"]}"}}
statestore: {{broker: "mqtt://{ready["mqtt"]}"}}
dead_letters: {{path: "{folder}/dead"}}
steps:
  - name: flights
    parse: {{schema: "{SCHEMA}"}}
"""
    text += "".join(f"  - {{name: step{n}, from: flights, filter: month <> {n}}}\n" for n in range(1, sinks))
    text += "sinks:\n"
    text += "".join(
        f'  - {{name: sink{n}, from: {f"step{n}" if n else "flights"}, table: {{path: "{folder}/table{n}"}}}}\n'
        for n in range(sinks)
    )
    with mock.patch.object(errors, "session", return_value=_Shared(spark)):
        running.run(
            loader.parse(text, name="benchmark.yaml"),
            state=folder / "state",
            options=running.RunOptions(available_now=True),
            emit=lambda _: None,
            stop=threading.Event(),
        )


class _Shared:
    """A session that a run does not stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)
