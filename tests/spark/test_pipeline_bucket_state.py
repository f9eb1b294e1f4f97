"""Pipelines with everything in a bucket: checkpoints, ledger, dead letters and tables, over killed drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.pipelines.ledger.dead_letters import letters
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.delta import load as load_delta
from penstock.pipelines.spec.loader import load
from penstock.spark.environment import jars
from penstock.spark.files.object_storage import storage_path
from penstock.tube.record import Record
from tests.object_storage import CREDENTIALS, ObjectStorage
from tests.spark.node import Node
from tests.spark.processes import Driver
from tests.tools import skip_or_fail

FILE = """\
name: {name}
source: {{topics: ["{name}"], master: "{master}", options: {{maxOffsetsPerTrigger: 50}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{url}/dead"}}
steps:
  - {{name: parsed, parse: {{schema: "k STRING NOT NULL, n INT NOT NULL"}}}}
  - {{name: once, dedupe: {{within: 1 day}}}}
sinks:
  - {{name: rows, from: once, table: {{path: {url}/rows}}}}
  - {{name: plain, from: parsed, table: {{path: {url}/plain}}}}
  - {{name: newest, from: parsed, table: {{path: {url}/newest, mode: merge, keys: [k], order_by: n}}}}
"""
RECORDS, BROKEN, KEYS = 150, 50, 7


@pytest.fixture(autouse=True)
def needs_jars() -> None:
    if not jars.is_s3a_set_up():
        skip_or_fail("the jars of s3a are not set up: `make jars` does")


def send(node: Node, name: str, records: int = RECORDS) -> list[int]:
    """Send numbers and broken records to a new topic; return the numbers."""
    node.create_topic(name, 2)
    for part in (0, 1):
        made = [
            Record(b"broken" if n % BROKEN == 0 else b'{"k": "%d", "n": %d}' % (n % KEYS, n), id=str(n))
            for n in range(part, records, 2)
        ]
        node.append(name, [(part, record) for record in made])
    return [n for n in range(records) if n % BROKEN]


def check_exact(url: str, file: Path, expected: list[int], records: int = RECORDS) -> None:
    for table in ("rows", "plain"):
        found: list[Any] = load_delta(storage_path(f"{url}/{table}")).to_pyarrow_table()["n"].to_pylist()
        assert sorted(found) == expected
    newest = load_delta(storage_path(f"{url}/newest")).to_pyarrow_table().select(["k", "n"]).to_pylist()
    assert {row["k"]: row["n"] for row in newest} == {str(n % KEYS): n for n in expected}
    assert len(newest) == KEYS
    pipeline = load(file)
    assert pipeline.dead_letters is not None
    dead = [int(letter.id) for letter in letters(pipeline.dead_letters.location)]
    assert sorted(dead) == [*range(0, records, BROKEN)]
    state = storage_path(f"{url}/state")
    for account in reconcile(pipeline, state, source_count(pipeline, state)):
        assert (account.off, account.unknown, account.counts.read) == ((), (), records)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_rows_are_exact_after_the_driver_was_killed(node: Node, object_storage: ObjectStorage, tmp_path: Path) -> None:
    url = object_storage.url
    expected = send(node, "bucketstate")
    file = tmp_path / "p.yaml"
    file.write_text(FILE.format(name="bucketstate", master=node.master, broker=node.mqtt, url=url))
    events = tmp_path / "events"
    events.mkdir()
    conf = ["enabled=true", "compress=false", f"dir={events.as_uri()}"]
    logged = [word for each in conf for word in ("--conf", f"spark.eventLog.{each}")]
    with Driver(tmp_path, file, "--state-dir", f"{url}/state", "--once", "--wait", "60s", *logged) as driver:
        driver.await_event("batch", 2)
        driver.kill()
        # Responses of the storage are lost: to the run, to Spark, and to the executors.
        object_storage.fail("lost", path="/state/", count=4, skip=6)
        driver.start()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    assert object_storage.repair() == 4
    check_exact(url, file, expected)
    # Spark reads the credentials from the environment, and writes them nowhere.
    written = "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert "fs.s3a.endpoint" in written
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in written
