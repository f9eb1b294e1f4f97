"""Deadbands: what was last reported is known to the next batch and the next run, and to a repeated batch as before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP, run_key
from penstock.tube.record import Record
from tests.spark.pipelines import Setup
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


def reported(setup: Setup) -> dict[int, int]:
    """Return how often each row is in the table."""
    found = (pq.ParquetFile(file).read(["n"])["n"].to_pylist() for file in files(setup.lake / "rows"))
    return Counter(int(str(n)) for numbers in found for n in numbers)


def check(setup: Setup, numbers: set[int], *, filtered: int) -> None:
    assert reported(setup) == dict.fromkeys(numbers, 1)
    assert [letter["code"] for letter in setup.dead()] == ["event.no_time"]
    (found,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (found.off, found.unknown) == ((), ())
    assert (found.counts.out, found.counts.filtered) == (len(numbers), filtered)


def test_only_changes_are_reported_across_runs_and_repeated_batches(setup_of: Callable[..., Setup]) -> None:
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
