"""A stream of 10 million rows looked up in a million keys: the memory of Spark's Python workers stays the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.description import as_data
from penstock.pipelines.spec.loader import load
from penstock.statestore.client.client import StateStoreClient, Write
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.end_to_end.nodes import RunningNode
from tests.spark.processes import Driver, descendants, until

KEYS = int(os.environ.get("PENSTOCK_ENRICH_KEYS", "1000000"))
ROWS = int(os.environ.get("PENSTOCK_ENRICH_ROWS", "10000000"))
EACH = 100
"""Rows of a record: an array, which a step explodes."""
BATCHES = 50
SHOWN = 1_000
"""The rows of each key that is a multiple of this are in the table."""
GROWTH = 1.1
NODE = """
tube:
  topics:
    readings: {partitions: 2, stores: 2}
statestore:
  max_keys: 0
  extensions: [mget, batch]
"""
FILE = """\
name: enriched
source: {{topics: [readings], master: "{master}", options: {{maxOffsetsPerTrigger: {most}}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
steps:
  - {{name: parsed, parse: {{schema: "k ARRAY<INT> NOT NULL"}}}}
  - {{name: each, explode: {{column: k}}}}
  - {{name: looked_up, enrich: {{key: "reference/{{k}}", as: ref, schema: "n INT, name STRING", missing: fail}}}}
  - {{name: checked, expect: [{{name: own, expression: ref.n = k, on_violation: fail}}]}}
  - {{name: shown, filter: "k % {shown} = 0"}}
sinks:
  - {{name: rows, table: {{path: "{lake}/rows", format: parquet}}}}
"""


async def store_keys(broker: str) -> None:
    async with StateStoreClient.connect(broker, timeout_s=120) as store:
        for first in range(0, KEYS, 20_000):
            numbers = range(first, min(first + 20_000, KEYS))
            values = [(f"reference/{n}", json.dumps({"n": n, "name": f"machine {n}"})) for n in numbers]
            await store.write_many([Write.set(key, value) for key, value in values])


async def send(master: str, rows: list[int]) -> None:
    async with Producer(master, idempotent=True) as producer:
        for first in range(0, len(rows), 1_000 * EACH):
            starts = range(first, min(first + 1_000 * EACH, len(rows)), EACH)
            records = [Record(json.dumps({"k": rows[n : n + EACH]}).encode(), id=f"r{n}") for n in starts]
            await producer.send_all("readings", records)


def worker_megabytes(driver: int) -> float:
    """The resident memory in MB of the largest Python worker of Spark, without the pages that it shares; 0 if none."""
    found = [0.0]
    for pid in descendants(driver):
        with contextlib.suppress(OSError):
            program, _, words = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")
            if b"python" in program and (b"worker_daemon" in words or b"pyspark.daemon" in words):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                pages = [line.split() for line in text.splitlines() if line.startswith("Private_")]
                found.append(sum(int(size) for _, size, _ in pages) / 1024)
    return max(found)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_workers_use_the_same_memory_for_ten_million_rows(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    dice = random.Random(20)
    numbers = [dice.randrange(KEYS) for _ in range(ROWS)]
    (tmp_path / "node").mkdir()
    lake, state, file = tmp_path / "lake", tmp_path / "state", tmp_path / "enriched.yaml"
    with RunningNode(tmp_path / "node", NODE) as node:
        master, broker = node.ready["tube_master"], f"mqtt://{node.ready['mqtt']}"
        asyncio.run(store_keys(broker))
        asyncio.run(send(master, numbers))
        places = {"master": master, "broker": broker, "lake": lake, "shown": SHOWN}
        file.write_text(FILE.format(most=ROWS // EACH // BATCHES, **places))
        pipeline, ledger = load(file), Ledger(state / "ledger")
        (step,) = [step for step in as_data(pipeline)["queries"][0]["steps"] if step["name"] == "looked_up"]
        assert "by key lookup: each worker reads the distinct keys of its rows, since the key depends" in step["does"]
        started = time.monotonic()
        samples: list[tuple[int, float]] = []

        def is_over() -> bool:
            """Also take a sample each second."""
            assert driver.process is not None
            if time.monotonic() >= started + len(samples):
                read = sum(event["read"] for event in list(driver.events) if event["event"] == "batch")
                samples.append((read * EACH, worker_megabytes(driver.process.pid)))
            return driver.process.poll() is not None

        with Driver(tmp_path, file, f"--state-dir={state}", "--spark-master=local[2]", "--once") as driver:
            until(is_over, "the run to end", deadline_s=3_000)
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
        took_s = time.monotonic() - started
        (account,) = reconcile(pipeline, state, source_count(pipeline, state))
        assert (account.off, account.unknown) == ((), ())
    counts = ledger.counts("rows")
    checks = counts.expectations["checked.own"]
    assert (counts.read, checks.rows, checks.violations) == (ROWS // EACH, ROWS, 0)
    table = pa.concat_tables(pq.ParquetFile(path).read(["k"]) for path in files(lake / "rows"))
    shown: list[Any] = table["k"].to_pylist()
    assert sorted(shown) == sorted(n for n in numbers if n % SHOWN == 0)
    quarters = [
        max(size for rows, size in samples if part * ROWS <= 4 * rows <= (part + 1) * ROWS) for part in range(4)
    ]
    text = f"{ROWS:,} rows, {KEYS:,} keys, {took_s:.0f} s; largest worker in MB in each quarter: " + ", ".join(
        f"{size:.0f}" for size in quarters
    )
    print(text)
    request.node.user_properties.append(("summary", text))
    # The first quarter fills the cache of each worker.
    assert 0 < quarters[3] <= GROWTH * quarters[1]
