"""The state directory of a pipeline of an earlier version is continued, in the session of the suite."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import driver
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec import loader
from tests.end_to_end.nodes import RunningNode
from tests.spark.pipelines import Shared
from tests.stored_directories import CONFIG, PIPELINE, extract, names, reading

OLDEST = next(name for name in names() if name.endswith("-stopped"))


def column(table: Path, name: str) -> list[Any]:
    return sorted(value for file in files(table) for value in pq.ParquetFile(file).read([name])[name].to_pylist())


@pytest.mark.timeout(600)
def test_a_pipeline_of_the_oldest_version_continues_exactly_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command, and of each version: tests/end_to_end/test_stored_directories.py, every night."""
    extract(OLDEST, tmp_path)
    # It was written with paths relative to the directory; Java of the suite is in another one.
    for path in (tmp_path / "state").rglob("*.json"):
        path.write_text(path.read_text().replace('"lake/', f'"{tmp_path}/lake/'))
    monkeypatch.setattr(driver, "session", lambda *_args, **_options: Shared(spark))
    with RunningNode(tmp_path, CONFIG) as node:
        node.out("mqtt", "pub", "plant/telemetry", "--lines", stdin=f"{reading(12)}\n{reading(13)}\n".encode())
        text = PIPELINE.format(master=node.ready["tube_master"], broker=node.ready["mqtt"])
        pipeline = loader.parse(text.replace("path: lake/", f"path: {tmp_path}/lake/"), name="p.yaml")
        state = tmp_path / "state"
        options = running.RunOptions(available_now=True)
        running.run(pipeline, state=state, options=options, emit=lambda _: None, stop=threading.Event())
        assert column(tmp_path / "lake/rows", "celsius") == [float(number) for number in range(14)]
        assert column(tmp_path / "lake/dead", "value") == [b"not JSON", b"once"]
        accounts = reconcile(pipeline, state, source_count(pipeline, state))
        assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 2
    # A dedupe of an earlier version keeps its state where it was, on Java's heap; a new one uses RocksDB.
    offsets = state / "checkpoints/rows/offsets"
    newest = max((entry for entry in offsets.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name))
    assert ".HDFSBackedStateStoreProvider" in newest.read_text()
