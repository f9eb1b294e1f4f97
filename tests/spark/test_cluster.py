"""A pipeline on a Spark standalone cluster of a master and two workers, on loopback.

As the page says, out of Spark's Python package:

    spark-class org.apache.spark.deploy.master.Master --host 127.0.0.1 --port 7077
    spark-class org.apache.spark.deploy.worker.Worker spark://127.0.0.1:7077 --cores 1 --memory 1g
    penstock pipeline submit pipeline.yaml --spark-master spark://127.0.0.1:7077
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
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


SLOW = """\
import os
import time


def transform(batch):
    for n in batch["n"].to_pylist():
        if n % 200 == 7:
            try:
                os.close(os.open(f"MARKS/{n}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            # The first attempt only: Spark starts another one on the other worker, which overtakes it.
            time.sleep(20)
    return {"twice": [2 * n for n in batch["n"].to_pylist()]}
"""
OVERTAKEN = """\
name: overtaken
source: {{topics: ["overtaken"], master: "{master}", options: {{maxOffsetsPerTrigger: 100}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, time TIMESTAMP NOT NULL"}}
  - name: doubled
    python: {{file: slow.py, schema: "twice INT NOT NULL"}}
  - name: minutes
    window: {{time: time, duration: 1 minute, watermark: 1 hour, aggregates: {{n: count(*), sum: sum(twice)}}}}
sinks:
  - {{name: rows, from: doubled, table: {{path: "{lake}/rows"}}}}
  - {{name: plain, from: doubled, table: {{path: "{lake}/plain", format: parquet}}}}
  - {{name: copies, from: doubled, tubemq: {{topic: overtaken_copies, value: [n, twice]}}}}
  - {{name: minutes, from: minutes, statestore: {{entries: [{{key: "overtaken/{{window_start}}", value: [n, sum]}}]}}}}
"""
COPIED = 600


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_rows_are_exact_with_speculative_tasks_and_a_decommissioned_worker(
    node: Node, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    node.create_topic("overtaken", 2)
    node.create_topic("overtaken_copies", 2)
    lake, state, marks, log = (tmp_path / name for name in ("lake", "state", "marks", "log"))
    for directory in (marks, log):
        directory.mkdir()
    file = tmp_path / "p.yaml"
    file.write_text(OVERTAKEN.format(master=node.master, broker=node.mqtt, lake=lake))
    (tmp_path / "slow.py").write_text(SLOW.replace("MARKS", str(marks)))
    for part in (0, 1):
        records = [
            Record(json.dumps({"n": n, "time": f"2024-05-01T00:{n // 60:02}:{n % 60:02}Z"}).encode(), id=f"m{n}")
            for n in range(part, COPIED, 2)
        ]
        node.append("overtaken", [(part, record) for record in records])
    conf = [
        *(f"spark.{name}=1" for name in ("sql.shuffle.partitions", "executor.cores")),
        "spark.executor.memory=512m",
        "spark.driver.host=127.0.0.1",
        # Of a stage with one task, too, if it takes longer than five seconds.
        *("spark.speculation=true", "spark.speculation.task.duration.threshold=5s", "spark.speculation.interval=100ms"),
        *("spark.decommission.enabled=true", "spark.storage.decommission.enabled=true"),
        *("spark.eventLog.enabled=true", f"spark.eventLog.dir=file:{log}"),
        *("spark.eventLog.compress=false", "spark.eventLog.rolling.enabled=false"),
    ]
    options = [f"--state-dir={state}", "--once", *(word for text in conf for word in ("--conf", text))]
    with (
        Cluster(tmp_path, options="-Dspark.decommission.enabled=true", hosts=True) as cluster,
        Driver(tmp_path, file, *options, f"--spark-master={cluster.url}") as driver,
    ):
        driver.await_event("batch", 2, sink="rows")
        before = cluster.executors()
        assert len(before) == 2
        cluster.decommission()
        until(lambda: len(cluster.executors()) == 1, "the executor of the worker to end", alive=driver.trouble)
        driver.await_event("batch", 4, sink="rows")
        cluster.add_worker()
        until(lambda: len(cluster.executors()) == 2, "an executor on the new worker", alive=lambda: None)
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    (events,) = log.iterdir()
    found = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    speculative = [e for e in found if e["Event"] == "SparkListenerTaskEnd" and e["Task Info"]["Speculative"]]
    won = [event for event in speculative if event["Task End Reason"]["Reason"] == "Success"]
    removed = [e["Removed Reason"] for e in found if e["Event"] == "SparkListenerExecutorRemoved"]
    numbers = list(range(COPIED))
    pipeline = load(file)
    for sink in ("rows", "plain"):
        table = pa.concat_tables(pq.ParquetFile(path).read(["n", "twice"]) for path in files(lake / sink))
        assert sorted(map(tuple, table.to_pandas().itertuples(index=False))) == [(n, 2 * n) for n in numbers], sink
    copies = [json.loads(value) for value in node.values("overtaken_copies")]
    assert sorted((copy["n"], copy["twice"]) for copy in copies) == [(n, 2 * n) for n in numbers]
    for minute in range(COPIED // 60):
        inside = range(60 * minute, 60 * minute + 60)
        value = json.loads(node.get(f"overtaken/2024-05-01T00:{minute:02}:00Z") or b"null")
        assert value == {"n": 60, "sum": 2 * sum(inside)}
    for account in reconcile(pipeline, state, source_count(pipeline, state)):
        assert (account.off, account.unknown, account.counts.read) == ((), (), COPIED)
    text = f"{len(speculative)} speculative tasks, {len(won)} of them first; executors removed: {removed}"
    print(text)
    request.node.user_properties.append(("summary", text))
    assert won
    assert any("decommission" in reason for reason in removed)
