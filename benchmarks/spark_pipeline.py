"""A pipeline next to a hand-written query: JSON records from the log into Parquet tables, as one batch each.

The hand-written query parses with ``from_json`` and writes one table with Spark's Parquet sink: no dead letters, no
ledger, no exact commit. The pipeline parses strictly and writes 1, 3 and 8 tables that share a query. All run in one
Spark session, which has run each of them before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import servers
from benchmarks.figures import Figure, Run, Settings, alternate
from benchmarks.machine import cpu_of_tree
from benchmarks.spark_job import write_rows
from penstock.pipelines.run import errors
from penstock.pipelines.run import run as running
from penstock.pipelines.spec import loader
from penstock.tube.producer import Producer
from penstock.tube.record import Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_pipeline", "spark_start"]

RECORDS = 200_000
START_RECORDS = 1_000
START_LIMIT_S = 120
TOPIC = "flights"
SINKS = (1, 3, 8)
_TEXTS = ("carrier", "flight", "tailnum", "origin", "dest", "gate", "status")
_NUMBERS = ("year", "month", "day", "dep_time", "arr_time", "air_time", "distance", "hour", "minute")
_FRACTIONS = ("dep_delay", "arr_delay", "fuel")
SCHEMA = ", ".join(
    [*(f"{n} STRING" for n in _TEXTS), *(f"{n} INT" for n in _NUMBERS), *(f"{n} DOUBLE" for n in _FRACTIONS)]
)


def spark_start(settings: Settings) -> list[Figure]:
    """Seconds from the start of a command to its first committed batch: of the hand-written job, and of a pipeline."""
    with servers.penstock("memory", topics=[TOPIC]) as ready:
        asyncio.run(_fill(ready["tube_master"], START_RECORDS))

        def job(folder: Path) -> tuple[list[str], Path]:
            arguments = ["benchmarks.spark_job", ready["tube_master"], TOPIC, SCHEMA, str(folder)]
            return arguments, folder / "state" / "commits" / "0"

        def pipeline(folder: Path) -> tuple[list[str], Path]:
            file, state = folder / "benchmark.yaml", folder / "state"
            file.write_text(_file(ready, 1, folder), encoding="utf-8")
            arguments = ["penstock.cli", "pipeline", "run", str(file), "--once", "--state-dir", str(state)]
            return arguments, state / "checkpoints" / "sink0" / "commits" / "0"

        runs = {"hand-written": partial(_started, job), "penstock": partial(_started, pipeline)}
        return alternate(settings, f"start to the first batch, {START_RECORDS:,} records, local[2]", "s", runs)


def _started(command: Callable[[Path], tuple[list[str], Path]]) -> Run:
    """Run a Python module with arguments until the path that it returns exists; the processor time is that to its end.

    Raises:
        RuntimeError: the command ended without this path, or took longer than ``START_LIMIT_S``.
    """
    with tempfile.TemporaryDirectory() as name:
        arguments, commit = command(Path(name))
        spent, started = cpu_of_tree(), time.perf_counter()
        with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL) as process:
            try:
                while not commit.exists():
                    took = time.perf_counter() - started
                    if took > START_LIMIT_S or (process.poll() is not None and not commit.exists()):
                        raise RuntimeError(
                            f"{arguments[0]} has not written {commit} after {took:.0f} s: status {process.returncode}"
                        )
                    time.sleep(0.01)
                took = time.perf_counter() - started
                process.wait(timeout=START_LIMIT_S)
            finally:
                process.kill()
        return Run(took, (cpu_of_tree() - spent) * 1e6)


def spark_pipeline(settings: Settings) -> list[Figure]:
    """Rows a second of a hand-written query and of pipelines with several sinks."""
    from penstock.spark import session

    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock("memory", topics=[TOPIC]))
        asyncio.run(_fill(ready["tube_master"], RECORDS))
        spark = session("benchmarks", "local[2]")
        stack.callback(spark.stop)
        runs = {"hand-written": partial(_timed, partial(write_rows, spark, ready["tube_master"], TOPIC, SCHEMA))}
        for sinks in SINKS:
            name = "penstock" if sinks == 1 else f"{sinks} tables"
            runs[name] = partial(_timed, partial(_pipeline, spark, ready, sinks))
        for run in runs.values():
            run()  # the first one starts Python workers and compiles
        return alternate(settings, f"{RECORDS:,} JSON records into Parquet, local[2]", "rows/s", runs)


async def _fill(master: str, count: int) -> None:
    async with Producer(master) as producer:
        await producer.send_all(TOPIC, _records(count))


def _records(count: int) -> Iterator[Record]:
    for n in range(count):
        fields: dict[str, Any] = {name: f"{name[:2]}{n * 7919 % 9973}" for name in _TEXTS}
        fields |= dict.fromkeys(_NUMBERS, n * 31 % 2400)
        fields |= dict.fromkeys(_FRACTIONS, n % 977 / 8)
        yield Record(json.dumps(fields).encode(), key=b"%d" % (n % 64))


def _timed(work: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        spent, started = cpu_of_tree(), time.perf_counter()
        work(Path(folder))
        return Run(RECORDS / (time.perf_counter() - started), (cpu_of_tree() - spent) / RECORDS * 1e6)


def _pipeline(spark: SparkSession, ready: dict[str, Any], sinks: int, folder: Path) -> None:
    with mock.patch.object(errors, "session", return_value=_Shared(spark)):
        running.run(
            loader.parse(_file(ready, sinks, folder), name="benchmark.yaml"),
            state=folder / "state",
            options=running.RunOptions(available_now=True),
            emit=lambda _: None,
            stop=threading.Event(),
        )


def _file(ready: dict[str, Any], sinks: int, folder: Path) -> str:
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
    return (
        text
        + "sinks:\n"
        + "".join(
            f'  - {{name: sink{n}, from: {f"step{n}" if n else "flights"}, table: {{path: "{folder}/table{n}"}}}}\n'
            for n in range(sinks)
        )
    )


class _Shared:
    """A session that a run does not stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)
