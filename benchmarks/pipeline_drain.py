"""A drain: one pipeline reads a topic of TubeMQ, then the same one a topic of Kafka, into a table each.

All records are in the topic before the command ``penstock pipeline run --once`` starts. The time is that of the whole
command. Its memory is sampled: the share of the pages (PSS) of each kind of process. At the end the table must have
each record once. The data of a server are deleted before the next one gets its data, so the disk needs little more than
one copy.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, Settings
from benchmarks.pipeline_load import KAFKA, PENSTOCK, Peers, Topic, fill, of_pipeline, peers, pipeline_file
from benchmarks.spark_batches import memory_by_kind
from penstock.cli.bench_pipeline import count_rows

__all__ = ["pipeline_drain", "waveforms"]

SIZE = 16_384
BATCH = 12_500
"""Records of a batch: 205 MB."""
TOPIC = Topic("waveforms", 4)
SCHEMA = "number BIGINT, machine STRING, peak DOUBLE, samples STRING"
CHECKSUM = {"map": {"compute": {"checksum": "crc32(samples)"}, "drop": ["samples"]}}
"""The table has the checksum of the samples instead of them: it measures reading and parsing, not the disk."""
TEXTS = 499
"""Different samples."""
SAMPLE_S = 2.0
KINDS = ("driver", "JVM", "workers")


def waveforms(count: int) -> Iterator[bytes]:
    """Yield JSON records of :data:`SIZE` bytes: a number, and samples as digits, which compress little."""
    made = random.Random(20)
    digits = "".join(made.choices("0123456789", k=2 * SIZE))
    texts = [digits[start : start + SIZE] for start in made.sample(range(SIZE), TEXTS)]
    for n in range(count):
        head = f'{{"number": {n}, "machine": "m{n % 64}", "peak": {n % 977 / 8}, "samples": "'
        yield f'{head}{texts[n % TEXTS][: SIZE - len(head) - 2]}"}}'.encode()


class _Drain(NamedTuple):
    """A drain: seconds, processor seconds by kind of process, and the samples of the memory in MB by kind."""

    took_s: float
    cpu_s: dict[str, float]
    memory: list[dict[str, float]]


def pipeline_drain(settings: Settings) -> list[Figure]:
    """MB/s, processor seconds, memory in the first and the last quarter, and the rows of the table."""
    records = math.ceil(settings.gigabytes * 1e9 / SIZE)
    size = records * SIZE / 1e9
    figures: list[Figure] = []
    for server in (PENSTOCK, KAFKA):
        with peers([TOPIC]) as ready, tempfile.TemporaryDirectory() as name:
            _say(f"{server}: {size:.1f} GB are produced")
            started = time.perf_counter()
            fill(ready, server, TOPIC, lambda: waveforms(records))
            _say(f"{server}: produced in {time.perf_counter() - started:.0f} s")
            drain = _drain(ready, server, Path(name))
            rows = count_rows(Path(name) / "table0", records)
            if rows.missing or rows.repeated:
                raise SystemExit(f"{server}: the table lacks {rows.missing} records, and has {rows.repeated} twice")
        case = f"drain of {size:.1f} GB"
        figures.append(Figure(case, server, "MB/s", [size * 1000 / drain.took_s]))
        figures.append(Figure(f"{case}: rows, each once", server, "rows", [float(records)]))
        cpu = of_pipeline(drain.cpu_s, server)
        cpu["all processes"] = sum(cpu.values())
        figures += [Figure(f"{case}: {kind}", server, "CPU s/GB", [spent / size]) for kind, spent in cpu.items()]
        quarter = max(1, len(drain.memory) // 4)
        parts = {"first": drain.memory[:quarter], "last": drain.memory[-quarter:]}
        for kind in KINDS:
            for part, samples in parts.items():
                values = [sample[kind] for sample in samples if kind in sample]
                figures.append(Figure(f"{case}: {kind}, {part} quarter", server, "MB", values))
    return sorted(figures, key=lambda figure: figure.case)


def _drain(ready: Peers, server: str, folder: Path) -> _Drain:
    """Run the pipeline until it has read all records. The last two seconds of processor time may be missing.

    Raises:
        RuntimeError: the command failed.
    """
    file = folder / "benchmark.yaml"
    source = ready.source(server, TOPIC.name, BATCH)
    file.write_text(pipeline_file(source, ready.node["mqtt"], SCHEMA, folder, first=CHECKSUM), encoding="utf-8")
    command = [sys.executable, "-m", "penstock.cli", "pipeline", "run", str(file), "--once"]
    memory: list[dict[str, float]] = []
    started = time.perf_counter()
    with subprocess.Popen([*command, "--state-dir", str(folder / "state")], stdout=subprocess.DEVNULL) as process:
        # What the servers used before is not part of the drain.
        cpu = ready.cpu(process.pid)
        while process.poll() is None:
            memory.append(memory_by_kind(process.pid))
            cpu.sample()
            if len(memory) % 30 == 0:
                _say(f"{server}: {time.perf_counter() - started:.0f} s, {memory[-1]}")
            time.sleep(SAMPLE_S)
    if process.returncode != 0:
        raise RuntimeError(f"the pipeline from {server} ended with status {process.returncode}")
    return _Drain(time.perf_counter() - started, cpu.spent(), [sample for sample in memory if sample])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
