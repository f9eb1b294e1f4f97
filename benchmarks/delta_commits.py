"""A day of commits to a Delta table, one each second, with maintenance every ten minutes: files, log, time to open it.

The commits are those of a run's batches, through the writer of the sink, without Spark. Nothing waits: before each
maintenance the files of the table become ten minutes older. The time inside the log cannot be changed, so combined
files are removed at once instead of after a retention. ``fsync`` is left out, which would be most of the time.

A run ends after ``BUDGET_S`` seconds, and the next one continues with its table in the user's cache directory: the
figures are those of the hours so far. ``python -m benchmarks.delta_commits`` draws the stored results for the
documentation.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from benchmarks.figures import Figure, Settings
from benchmarks.tables import RESULTS
from penstock.pipelines.sinks import maintenance
from penstock.pipelines.sinks.delta import DeltaWriter
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA

__all__ = ["delta_commits"]

HOUR_S = 3_600
COMMITS = 24 * HOUR_S
FILES = 4
EVERY_S = 600
BUDGET_S = 2_400
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "delta-commits"
_UNITS = ("files", "log files", "log bytes", "CPU ms to open", "CPU ms/commit")
_OPENED = 9
_FIELDS: list[dict[str, object]] = [
    {"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("n", "seconds")
]


def delta_commits(settings: Settings) -> list[Figure]:
    """Files, bytes of the log, and processor time to open the table and for a commit after each hour, in order.

    Raises:
        RuntimeError: the table does not have each row once.
    """
    del settings  # one run, and nothing is durable
    until = time.monotonic() + BUDGET_S
    FOLDER.mkdir(parents=True, exist_ok=True)
    table, stored = FOLDER / "table", FOLDER / "progress.json"
    if not stored.exists():
        shutil.rmtree(table, ignore_errors=True)
        _store(stored, 0, 0.0, {unit: [] for unit in _UNITS})
    found = json.loads(stored.read_text(encoding="utf-8"))
    batch, runs = int(found["commits"]), found["runs"]
    with mock.patch.object(os, "fsync", return_value=None), mock.patch.object(maintenance, "_SHORTEST_H", 0):
        # The table did not become older between two runs of the benchmark.
        _age(table, found["at"] - time.time())
        writer = DeltaWriter(table, "rows", "query")
        spent_s = found["spent_s"]
        while batch < COMMITS and time.monotonic() < until:
            began = time.process_time()
            for each in range(batch, batch + EVERY_S):
                _commit(writer, each)
            batch += EVERY_S
            maintenance.maintain(table, retention_h=0, target_bytes=1 << 27, log_retention_h=2, in_use=True)
            spent_s += time.process_time() - began
            if not batch % HOUR_S:
                runs["CPU ms/commit"].append(spent_s * 1_000 / HOUR_S)
                spent_s = 0.0
                _measure(table, runs)
            _age(table, EVERY_S)
            _store(stored, batch, spent_s, runs)
        rows = Counter(DeltaTable(table).to_pyarrow_table()["n"].to_pylist())
    if rows != dict.fromkeys(range(batch), FILES):
        raise RuntimeError(f"the table has {rows.total()} rows of {batch * FILES}, or other ones")
    if batch >= COMMITS:
        shutil.rmtree(FOLDER)
    case = f"{batch:,} commits of {FILES} small files, after each hour"
    return [Figure(case, "penstock", unit, runs[unit]) for unit in _UNITS]


def _store(path: Path, commits: int, spent_s: float, runs: dict[str, list[float]]) -> None:
    made = path.with_suffix(".tmp")
    progress = {"commits": commits, "spent_s": spent_s, "at": time.time(), "runs": runs}
    made.write_text(json.dumps(progress), encoding="utf-8")
    made.replace(path)


def _commit(writer: DeltaWriter, batch: int) -> None:
    attempt = writer.new_attempt(batch)
    assert isinstance(attempt, Path)
    attempt.mkdir(parents=True)
    rows = pa.table({"n": [batch], "seconds": [batch]})
    names = [f"part{n}.parquet" for n in range(FILES)]
    with pq.ParquetWriter(attempt / names[0], rows.schema, store_schema=False) as file:
        file.add_key_value_metadata({SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": _FIELDS})})
        file.write(rows)
    for name in names[1:]:
        shutil.copyfile(attempt / names[0], attempt / name)
    writer.commit(batch, attempt, names, FILES)


def _measure(table: Path, runs: dict[str, list[float]]) -> None:
    opened = []
    for _ in range(_OPENED):
        began = time.process_time()
        DeltaTable(table)
        opened.append((time.process_time() - began) * 1_000)
    runs["CPU ms to open"].append(statistics.median(opened))
    log = [entry.stat().st_size for entry in (table / "_delta_log").iterdir()]
    runs["log files"].append(len(log))
    runs["log bytes"].append(sum(log))
    runs["files"].append(sum("_delta_log" not in file.parts for file in table.rglob("*.parquet")))


def _age(table: Path, seconds: float) -> None:
    for file in table.rglob("*"):
        if file.is_file():
            at = file.stat().st_mtime - seconds
            os.utime(file, (at, at))


def _draw(target: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same file for the same figures
    from matplotlib import pyplot as plt

    found = json.loads((RESULTS / "delta-commits.json").read_text(encoding="utf-8"))["figures"]
    runs = {figure["unit"]: figure["runs"] for figure in found}
    panels = (("files", "files of rows", 1), ("log bytes", "log, MB", 1e6), ("CPU ms to open", "to open, ms of CPU", 1))
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 2.4), layout="constrained")
    for axis, (unit, title, scale) in zip(axes, panels, strict=True):
        axis.plot(range(1, len(runs[unit]) + 1), [value / scale for value in runs[unit]], marker=".", color="#1f5fa8")
        axis.set(title=title, xlabel="hour", ylim=(0, 1.3 * max(runs[unit]) / scale), xlim=(0, COMMITS // HOUR_S))
        axis.grid(color="#dddddd", linewidth=0.5)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    _draw(Path(__file__).resolve().parents[1] / "docs" / "images" / "delta-commits.svg")
