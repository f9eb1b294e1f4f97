"""A pipeline on a Spark standalone cluster of a master and two workers, on loopback.

As the page says, out of Spark's Python package:

    spark-class org.apache.spark.deploy.master.Master --host 127.0.0.1 --port 7077
    spark-class org.apache.spark.deploy.worker.Worker spark://127.0.0.1:7077 --cores 1 --memory 1g
    penstock pipeline submit pipeline.yaml --spark-master spark://127.0.0.1:7077
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.processes import Cluster, Driver, until

FILE = """\
name: spread
source: {{topics: ["spread"], master: "{master}", options: {{maxOffsetsPerTrigger: 150}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL"}}
  - name: once
    dedupe: {{within: 1 day}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
"""
RECORDS = 1_500


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sums_hold_when_an_executor_is_killed(node: Node, tmp_path: Path) -> None:
    node.create_topic("spread", 2)
    lake, state = tmp_path / "lake", tmp_path / "state"
    file = tmp_path / "p.yaml"
    file.write_text(FILE.format(master=node.master, broker=node.mqtt, lake=lake))
    for part in (0, 1):
        messages = [b'{"n": %d}' % n if n % 100 else b"broken" for n in range(part, RECORDS, 2)]
        node.append("spread", [(part, Record(m, id=f"{part}-{i}")) for i, m in enumerate(messages)])
    with Cluster(tmp_path) as cluster:
        # The line that submit prints, run by it: spark-submit in client mode.
        given = ("--spark-master", cluster.url, f"--python={sys.executable}")
        command = ("submit", *given, f"--state-dir={state}", "--once")
        small = [f"spark.{name}=1" for name in ("sql.shuffle.partitions", "executor.cores")]
        conf = [
            *small,
            "spark.executor.memory=512m",
            "spark.driver.host=127.0.0.1",
            "spark.driver.bindAddress=127.0.0.1",
        ]
        with Driver(tmp_path, file, *(word for text in conf for word in ("--conf", text)), command=command) as driver:
            driver.await_event("batch", 2)
            killed = cluster.executors()
            assert len(killed) == 2
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: set(cluster.executors()) - set(killed) != set(), "another executor", alive=lambda: None)
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
    rows = [n for path in files(lake / "rows") for n in pq.ParquetFile(path).read(["_id"])["_id"].to_pylist()]
    letters = [n for path in files(lake / "dead") for n in pq.ParquetFile(path).read(["id"])["id"].to_pylist()]
    assert (len(rows), len(set(rows))) == (RECORDS - RECORDS // 100, RECORDS - RECORDS // 100)
    assert len(letters) == len(set(letters)) == RECORDS // 100
    pipeline = load(file)
    (account,) = reconcile(pipeline, state, source_count(pipeline, state))
    assert (account.off, account.unknown) == ((), ())
    assert (account.counts.read, account.counts.out, account.counts.dead) == (RECORDS, len(rows), len(letters))
    assert driver.events[-1] == {"event": "stopped", "pipeline": "spread"}
