"""A pipeline next to a hand-written query: JSON records from the log into Parquet tables, as one batch each.

The hand-written query parses with ``from_json`` and writes one table with Spark's Parquet sink: no dead letters, no
ledger, no exact commit. The pipeline parses strictly and writes 1, 3 and 8 tables that share a query. All run in one
Spark session, which has run each of them before.
"""

from __future__ import annotations

import asyncio
import compileall
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from benchmarks import servers
from benchmarks.figures import Figure, Run, Settings, alternate
from benchmarks.machine import CpuByKind, cpu_of_tree
from benchmarks.pipeline_load import FLIGHTS, flights, pipeline_file, run_pipeline
from benchmarks.spark_job import from_tube, write_rows
from penstock.tube.producer import Producer
from penstock.tube.record import Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_pipeline", "spark_start"]

RECORDS = 200_000
START_RECORDS = 1_000
START_LIMIT_S = 120
SAMPLE_S = 0.2
TOPIC = "flights"
SINKS = (1, 3, 8)


def spark_start(settings: Settings) -> list[Figure]:
    """Seconds from the start of a command to its first committed batch: of the hand-written job, and of a pipeline.

    The package is compiled to bytecode before, as pip does when it installs it: without it, and with
    ``PYTHONDONTWRITEBYTECODE``, each process of a checkout compiles the modules of penstock that it imports.
    """
    compileall.compile_dir(str(Path(penstock.__file__).parent), quiet=1)
    with servers.penstock("memory", topics=[TOPIC]) as ready:
        asyncio.run(_fill(ready["tube_master"], START_RECORDS))

        def job(folder: Path) -> tuple[list[str], Path]:
            arguments = ["benchmarks.spark_job", ready["tube_master"], TOPIC, FLIGHTS, str(folder)]
            return arguments, folder / "state" / "commits" / "0"

        def pipeline(folder: Path) -> tuple[list[str], Path]:
            file, state = folder / "benchmark.yaml", folder / "state"
            file.write_text(_file(ready, 1, folder), encoding="utf-8")
            arguments = ["penstock.cli", "pipeline", "run", str(file), "--once", "--state-dir", str(state)]
            return arguments, state / "checkpoints" / "sink0" / "commits" / "0"

        runs = {"hand-written": partial(_started, job), "penstock": partial(_started, pipeline)}
        return alternate(settings, f"start to the first batch, {START_RECORDS:,} records, local[2]", "s", runs)


def _started(command: Callable[[Path], tuple[list[str], Path]]) -> Run:
    """Run a Python module with arguments until the path that it returns exists.

    The processor time is that until then of all its processes: Python, Java and the workers.

    Raises:
        RuntimeError: the command ended without this path, or took longer than ``START_LIMIT_S``.
    """
    with tempfile.TemporaryDirectory() as name:
        arguments, commit = command(Path(name))
        started = sampled = time.perf_counter()
        with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL) as process:
            spent = CpuByKind(process.pid, {})
            try:
                while not commit.exists():
                    took = time.perf_counter() - started
                    if time.perf_counter() - sampled > SAMPLE_S:
                        spent.sample()
                        sampled = time.perf_counter()
                    if took > START_LIMIT_S or (process.poll() is not None and not commit.exists()):
                        raise RuntimeError(
                            f"{arguments[0]} has not written {commit} after {took:.0f} s: status {process.returncode}"
                        )
                    time.sleep(0.01)
                took = time.perf_counter() - started
                spent.sample()
                process.wait(timeout=START_LIMIT_S)
            finally:
                process.kill()
        return Run(took, sum(spent.spent().values()) * 1e6)


def spark_pipeline(settings: Settings) -> list[Figure]:
    """Rows a second of a hand-written query and of pipelines with several sinks."""
    from penstock.spark import session

    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock("memory", topics=[TOPIC]))
        asyncio.run(_fill(ready["tube_master"], RECORDS))
        spark = session("benchmarks", "local[2]")
        stack.callback(spark.stop)
        runs = {
            "hand-written": partial(_timed, partial(write_rows, spark, from_tube(ready["tube_master"], TOPIC), FLIGHTS))
        }
        for sinks in SINKS:
            name = "penstock" if sinks == 1 else f"{sinks} tables"
            runs[name] = partial(_timed, partial(_pipeline, spark, ready, sinks))
        for run in runs.values():
            run()  # the first one starts Python workers and compiles
        return alternate(settings, f"{RECORDS:,} JSON records into Parquet, local[2]", "rows/s", runs)


async def _fill(master: str, count: int) -> None:
    async with Producer(master) as producer:
        records = (Record(value, key=b"%d" % (n % 64)) for n, value in enumerate(flights(count)))
        await producer.send_all(TOPIC, records)


def _timed(work: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        spent, started = cpu_of_tree(), time.perf_counter()
        work(Path(folder))
        return Run(RECORDS / (time.perf_counter() - started), (cpu_of_tree() - spent) / RECORDS * 1e6)


def _pipeline(spark: SparkSession, ready: dict[str, Any], sinks: int, folder: Path) -> None:
    run_pipeline(spark, _file(ready, sinks, folder), folder)


def _file(ready: dict[str, Any], sinks: int, folder: Path) -> str:
    source = {"topics": [TOPIC], "master": ready["tube_master"]}
    return pipeline_file(source, ready["mqtt"], FLIGHTS, folder, tables=sinks)
