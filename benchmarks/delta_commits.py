"""A Delta table with a commit each second and maintenance every ten minutes: files, log, and time to open it.

The commits are those of a run's batches, through the writer of the sink, without Spark. Nothing waits: before each
maintenance the files of the table become ten minutes older. The time inside the log cannot be changed, so combined
files are removed at once instead of after a retention. ``fsync`` is left out, which would be most of the time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from benchmarks.figures import Figure, Settings
from penstock.pipelines.sinks import maintenance
from penstock.pipelines.sinks.delta import DeltaWriter
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA

__all__ = ["delta_commits"]

HOUR_S = 3_600
COMMITS = 6 * HOUR_S
FILES = 4
EVERY_S = 600
_FIELDS: list[dict[str, object]] = [
    {"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("n", "seconds")
]


def delta_commits(settings: Settings) -> list[Figure]:
    """Files, bytes of the log, and milliseconds to open the table after each hour, in order.

    Raises:
        RuntimeError: the table does not have each row once.
    """
    case = f"{COMMITS:,} commits of {FILES} small files, after each hour"
    units = ("files", "log files", "log bytes", "ms to open", "ms/commit")
    figures = {unit: Figure(case, "penstock", unit) for unit in units}
    del settings  # one run, and nothing is durable
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(os, "fsync", return_value=None),
        mock.patch.object(maintenance, "_SHORTEST_H", 0),
    ):
        table = Path(folder) / "table"
        writer = DeltaWriter(table, "rows", "query")
        began = time.perf_counter()
        for batch in range(COMMITS):
            _commit(writer, batch)
            if (batch + 1) % EVERY_S:
                continue
            maintenance.maintain(table, retention_h=0, target_bytes=1 << 27, log_retention_h=2, in_use=True)
            if not (batch + 1) % HOUR_S:
                took_ms = (time.perf_counter() - began) * 1_000
                _measure(table, figures)
                figures["ms/commit"].runs.append(took_ms / HOUR_S)
                began = time.perf_counter()
            _age(table, EVERY_S)
        rows = Counter(DeltaTable(table).to_pyarrow_table()["n"].to_pylist())
        if rows != dict.fromkeys(range(COMMITS), FILES):
            raise RuntimeError(f"the table has {rows.total()} rows of {COMMITS * FILES}, or other ones")
    return list(figures.values())


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


def _measure(table: Path, figures: dict[str, Figure]) -> None:
    began = time.perf_counter()
    DeltaTable(table)
    figures["ms to open"].runs.append((time.perf_counter() - began) * 1_000)
    log = [entry.stat().st_size for entry in (table / "_delta_log").iterdir()]
    figures["log files"].runs.append(len(log))
    figures["log bytes"].runs.append(sum(log))
    figures["files"].runs.append(sum("_delta_log" not in file.parts for file in table.rglob("*.parquet")))


def _age(table: Path, seconds: float) -> None:
    for file in table.rglob("*"):
        if file.is_file():
            at = file.stat().st_mtime - seconds
            os.utime(file, (at, at))
