"""Everything of a pipeline in a bucket of versitygw, on two workers: driver, executor and storage are killed -9.

State directory, checkpoints, ledger, dead letters and tables are objects; the machines share no file system.
"""

from __future__ import annotations

import os
import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.object_storage import CREDENTIALS
from tests.spark.node import Node
from tests.spark.processes import Cluster, Driver, until
from tests.spark.test_chaos import supervised
from tests.spark.test_pipeline_bucket_state import FILE, check_exact, needs_jars, send
from tests.versitygw import BUCKET, VersityGateway

VICTIMS = ("driver", "executor", "storage")
ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "6"))
RECORDS = 1_000
PAUSE_S = (1.0, 8.0)
DOWN_S = 3.0

__all__ = ["needs_jars"]


def kill(victim: str, driver: Driver, cluster: Cluster, storage: VersityGateway) -> None:
    match victim:
        case "driver":
            driver.kill()
            driver.start()
        case "executor":
            cluster.kill_executor()
        case _:
            storage.kill()
            threading.Event().wait(DOWN_S)
            storage.start()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_rows_are_exact_after_kills_of_driver_executor_and_storage(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice = random.Random(seed)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "storage").mkdir()
    with VersityGateway(tmp_path / "storage") as storage:
        settings = {"AWS_ENDPOINT_URL": storage.endpoint, "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
        for name, value in (CREDENTIALS | settings | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/chaos"
        expected = send(node, "bucketchaos", RECORDS)
        file = tmp_path / "p.yaml"
        file.write_text(FILE.format(name="bucketchaos", master=node.master, broker=node.mqtt, url=url))
        small = ["spark.sql.shuffle.partitions=1", "spark.executor.memory=512m"]
        with Cluster(tmp_path) as cluster:
            options = [f"--state-dir={url}/state", f"--spark-master={cluster.url}"]
            driver = Driver(tmp_path, file, *options, *(word for text in small for word in ("--conf", text)))
            with driver, supervised(driver) as lock:
                driver.await_event("batch", 1, sink="rows")

                def batch_since(done: int) -> bool:
                    return any(event["event"] == "batch" for event in driver.events[done:])

                def is_over() -> bool:
                    # A repeated batch is reported again.
                    read = dict.fromkeys(("rows", "plain", "newest"), 0)
                    batches = {(e["sink"], e["batch"]): e["read"] for e in driver.events if e["event"] == "batch"}
                    for (sink, _), count in batches.items():
                        read[sink] += count
                    return min(read.values()) >= RECORDS

                victims = [*VICTIMS, *(dice.choice(VICTIMS) for _ in range(ROUNDS - len(VICTIMS)))]
                dice.shuffle(victims)
                for victim in victims:
                    threading.Event().wait(dice.uniform(*PAUSE_S))
                    if is_over():
                        break
                    done = len(driver.events)
                    with lock:
                        kill(victim, driver, cluster, storage)
                    until(partial(batch_since, done), f"a batch after the {victim} was killed")
                    print(f"killed: {victim}")
                until(is_over, "all records to be read")
                with lock:
                    driver.terminate()
                    assert driver.wait() == 0, driver.log.read_text()[-3000:]
                    driver.process = None
        check_exact(url, file, expected, RECORDS)
