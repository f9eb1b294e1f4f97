"""Memory of a pipeline that runs for 3,000 batches: one table, and counts in event-time windows into the state store.

The command runs as a user starts it. Its processes are Spark's JVM, the driver's Python process and the Python workers;
the memory of each is its share of the pages (PSS), the live heap is measured after a collection of all garbage. The
share of files, mostly libraries, is larger while fewer processes on the machine use them: the part that belongs to no
file is measured, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import servers
from benchmarks.figures import Figure, Settings
from benchmarks.machine import family, kind_of
from penstock.spark.environment.java import find_java

__all__ = ["memory_by_kind", "spark_batches"]

BATCHES = (500, 1_000, 1_500, 2_000, 2_500, 3_000)
RATE = 100
"""Records per second: each batch has some."""
BATCH_LIMIT_S = 10.0
"""Maximum time for a batch, on average."""
TOPIC = "steady"
FILE = """\
name: benchmark_batches
source: {{topics: [{topic}], master: "{master}"}}
statestore: {{broker: "mqtt://{mqtt}"}}
trigger: 20 milliseconds
steps:
  - name: parsed
    parse: {{format: csv, schema: "sent DOUBLE NOT NULL"}}
  - name: timed
    map: {{compute: {{at: timestamp_micros(cast(sent * 1000000 AS BIGINT))}}}}
  - name: minutes
    window: {{time: at, duration: 1 minute, watermark: 1 minute, aggregates: {{n: count(*)}}}}
sinks:
  - name: rows
    from: timed
    table: {{path: "{folder}/rows"}}
  - name: counts
    from: minutes
    statestore: {{entries: [{{key: "benchmark/{{window_start}}", value: [n]}}]}}
"""
_USED = re.compile(r"used (\d+)K")
_PSS = re.compile(r"^Pss(_Anon|):\s+(\d+) kB$", re.MULTILINE)


def spark_batches(_settings: Settings) -> list[Figure]:
    """Memory in MB after so many batches of the table, of each kind of process."""
    jcmd = find_java().home / "bin" / "jcmd"
    if not jcmd.exists():
        raise SystemExit("spark-batches: the heap is measured with jcmd: install a JDK")
    figures: list[Figure] = []
    with servers.penstock("memory", topics=[TOPIC]) as ready, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, state = folder / "benchmark.yaml", folder / "state"
        file.write_text(
            FILE.format(topic=TOPIC, master=ready["tube_master"], mqtt=ready["mqtt"], folder=folder), encoding="utf-8"
        )
        limit_s = str(BATCHES[-1] * BATCH_LIMIT_S)
        feed = [sys.executable, "-m", "benchmarks.steady", ready["tube_master"], TOPIC, str(RATE), limit_s]
        run = [sys.executable, "-m", "penstock.cli", "pipeline", "run", str(file), "--state-dir", str(state)]
        with (
            subprocess.Popen(feed) as feeding,
            subprocess.Popen(run, stdout=subprocess.DEVNULL) as running,
        ):
            try:
                for count in BATCHES:
                    _wait_for_batch(state / "checkpoints" / "rows" / "commits", count, running)
                    found = {**memory_by_kind(running.pid), "live heap": _live_heap(running.pid, jcmd)}
                    for kind, mb in found.items():
                        figures.append(Figure(f"after {count:,} batches, {kind}", "penstock", "MB", [mb]))
                        print(f"{count} batches: {kind} {mb:.1f} MB", file=sys.stderr, flush=True)
            finally:
                feeding.kill()
                running.terminate()
    return figures


def _wait_for_batch(commits: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + count * BATCH_LIMIT_S
    while not (commits / str(count - 1)).exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"no batch {count}: status {process.returncode}")
        time.sleep(0.02)


def memory_by_kind(pid: int) -> dict[str, float]:
    """Return the memory in MB by kind of process, with and without files; ``pid`` is the driver's."""
    kinds: dict[str, int] = {}
    for process in family(pid):
        try:
            kind = kind_of(process, pid)
            parts = _PSS.findall(Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii"))
        except OSError:  # it has ended
            continue
        for part, kb in parts:  # none of a process that is ending
            name = f"{kind} without files" if part else kind
            kinds[name] = kinds.get(name, 0) + int(kb)
    return {kind: kb / 1024 for kind, kb in kinds.items()}


def _live_heap(pid: int, jcmd: Path) -> float:
    """Return the MB of the objects of the JVM that are in use."""
    java = next(str(process) for process in family(pid) if kind_of(process, pid) == "JVM")
    subprocess.run([jcmd, java, "GC.run"], check=True, stdout=subprocess.DEVNULL)
    heap = subprocess.run([jcmd, java, "GC.heap_info"], check=True, capture_output=True, text=True).stdout
    used = _USED.search(heap)
    assert used is not None, heap
    return int(used[1]) / 1024
