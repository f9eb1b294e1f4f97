"""Deadbands: what was last reported is known to the next batch and the next run, and to a repeated batch as before."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP, run_key
from penstock.pipelines.state_dir.deadbands import Comparison, Limit, Reading
from penstock.pipelines.state_dir.replay import plan_replay
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until
from tests.spark.test_pipeline_shared import undo

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: readings
    parse:
      schema: n INT NOT NULL, machine STRING, at TIMESTAMP, celsius DOUBLE, sum DECIMAL(9, 2), running BOOLEAN
  - name: known
    filter: n < 100
  - name: changes
    deadband:
      by: [machine]
      time: at
      columns: {{celsius: 0.5, sum: 10 %, running: change}}
      max_interval: 10 minutes
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
"""
pytestmark = pytest.mark.timeout(900)


def send(
    setup: Setup,
    n: int,
    machine: str | None,
    minute: int | None,
    celsius: float | None,
    *,
    redriven_from: str | None = None,
    **more: Any,
) -> None:
    at = None if minute is None else f"2026-03-01T06:{minute:02}:00Z"
    value = {"n": n, "machine": machine, "at": at, "celsius": celsius, "sum": 1.0, "running": True, **more}
    headers: list[tuple[str, str | bytes]] = []
    if redriven_from is not None:
        headers += [(REDRIVE, "1"), (REDRIVE_STEP, redriven_from)]
    setup.send(Record(json.dumps(value).encode(), key=b"k", id=f"m{n}", headers=headers))


def numbers(table: Path) -> dict[int, int]:
    """Return how often each row is in ``table``."""
    found = (pq.ParquetFile(file).read(["n"])["n"].to_pylist() for file in files(table))
    return Counter(int(str(n)) for rows in found for n in rows)


def reported(setup: Setup) -> dict[int, int]:
    return numbers(setup.lake / "rows")


def check(setup: Setup, numbers: set[int], *, filtered: int) -> None:
    assert reported(setup) == dict.fromkeys(numbers, 1)
    assert [letter["code"] for letter in setup.dead()] == ["event.no_time"]
    (found,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (found.off, found.unknown) == ((), ())
    assert (found.counts.out, found.counts.filtered) == (len(numbers), filtered)


def test_only_changes_are_reported_across_runs_and_repeated_batches(
    setup_of: Callable[..., Setup], tmp_path: Path
) -> None:
    setup = setup_of(FILE)
    send(setup, 0, "press", 1, 20.0)
    # In the order of their times, not of the log: this row is the last one.
    send(setup, 1, "press", 5, 20.9)
    send(setup, 2, "press", 2, 20.4)
    send(setup, 3, "pump", 2, 20.4)
    send(setup, 4, None, 2, 20.4)
    send(setup, 5, None, 3, 20.4, sum=1.1)
    send(setup, 6, None, 4, 20.4, sum=1.11)
    send(setup, 7, "press", None, 99.0)
    send(setup, 100, "press", 3, 99.0)
    setup.run()
    expected = {0, 1, 3, 4, 6}
    check(setup, expected, filtered=3)
    send(setup, 8, "press", 14, 20.8)
    send(setup, 9, "press", 15, 20.8)
    send(setup, 10, "pump", 3, 20.4, running=False)
    send(setup, 11, "pump", 4, None, running=False)
    # A copy of a row that the sink had refused passes, because the row was reported; one of this step is compared.
    send(setup, 12, "press", 16, 20.8, redriven_from="sink:rows")
    send(setup, 13, "press", 16, 20.8, redriven_from="changes")
    setup.run()
    expected |= {9, 10, 11, 12}
    check(setup, expected, filtered=5)
    # Killed before and after the table has the batch.
    for table in (True, False):
        undo(setup, "rows", table=table, ledger=True)
        setup.run()
        check(setup, expected, filtered=5)
    sink = json.loads(setup.node.get(run_key(setup.topic)) or b"")["progress"]["sinks"]["rows"]
    assert (sink["state_rows"], sink["state_by_kind"]["deadband"]["rows"]) == (3, 3)
    state = setup.state / "checkpoints" / "rows" / "deadbands" / "changes"
    assert {path.name for path in state.rglob("*.arrow")} <= {f"{batch:020}.arrow" for batch in range(4)}
    assert all(len(list(path.iterdir())) <= 2 for path in state.iterdir() if path.is_dir())

    # A replay of a part begins with an empty state; the record that was redriven from the sink passes, as before.
    part = (json.dumps({setup.topic: {"1:0": 28 * at, "1:1": 0}}) for at in (9, 14))
    replay = plan_replay(setup.pipeline, tmp_path / "replay", *part, live=False)
    options = running.RunOptions(available_now=True, span=replay.span, lease=replay.lease)
    running.run(replay.pipeline, state=replay.state, options=options, emit=setup.events.append, stop=threading.Event())
    assert numbers(tmp_path / "replay" / "tables" / "rows") == dict.fromkeys((8, 10, 11, 12), 1)
    assert setup.ledger.counts("rows").out == len(expected)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_drivers(node: Node, new_topic: Callable[..., str], tmp_path: Path) -> None:
    """Rows of random walks are reported as by one comparison of all of them, wherever drivers are killed."""
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    rounds = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "4"))
    # Of their own for each thread, so that the seed gives the same rows and the same pauses again.
    dice, pauses, stop = random.Random(seed), random.Random(seed), threading.Event()
    setup = Setup(
        node, new_topic(2), tmp_path, FILE.replace("{{celsius: 0.5, sum: 10 %, running: change}}", "{{celsius: 0.5}}")
    )
    file = tmp_path / "p.yaml"
    file.write_text(setup.text.replace("n < 100", "n >= 0"))
    sent: list[Reading] = []
    values = dict.fromkeys((f"machine {n}" for n in range(20)), 20.0)

    def keep_sending() -> None:
        while not stop.wait(0.05):
            records = []
            for machine in dice.sample(sorted(values), 5):
                values[machine] += dice.uniform(-0.4, 0.4)
                at = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=len(sent))
                value = {"n": len(sent), "machine": machine, "at": at.isoformat(), "celsius": values[machine]}
                sent.append(Reading((machine,), len(sent) * 1_000_000, 0, (values[machine],)))
                records.append(Record(json.dumps(value).encode(), id=f"m{len(sent)}"))
            setup.send(*records)

    thread = threading.Thread(target=keep_sending)
    thread.start()
    conf = "--conf=spark.sql.shuffle.partitions=200"
    try:
        with Driver(tmp_path, file, f"--state-dir={setup.state}", "--spark-master=local[2]", conf) as driver:
            for _ in range(rounds):
                until(partial(driver.has_batch, len(driver.events)), "a batch after the last kill")
                time.sleep(pauses.uniform(0.0, 2.0))
                driver.kill()
                driver.start()
            until(partial(driver.has_batch, len(driver.events)), "a batch after the last kill")
            stop.set()
            thread.join()
            until(lambda: setup.ledger.counts("rows").read == len(sent), "all rows")
            driver.terminate()
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
    finally:
        stop.set()
    pipeline = load(file)
    comparison = Comparison((Limit(0.5, relative=False),), max_interval_us=600_000_000)
    expected = [n for n, is_reported in enumerate(comparison.reported({}, sent)) if is_reported]
    assert reported(setup) == dict.fromkeys(expected, 1)
    (found,) = reconcile(pipeline, setup.state, source_count(pipeline, setup.state))
    assert (found.off, found.unknown) == ((), ())
    state = setup.state / "checkpoints" / "rows" / "deadbands" / "changes"
    assert len([path for path in state.iterdir() if path.is_dir()]) <= 20
    print(f"{len(sent)} rows, {len(expected)} reported, {found.counts.batches} batches, {rounds} kills")
