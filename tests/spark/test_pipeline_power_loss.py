"""Power is lost in the middle of a batch: nothing that a target has depends on a file that was not synced."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.tube.record import Record
from tests.spark.pipelines import Setup
from tests.spark.power_loss import Unsynced, recorded
from tests.spark.processes import Driver, descendants
from tests.spark.test_pipeline_deadband import numbers
from tests.spark.test_pipeline_shared import undo

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: readings
    parse: {{schema: "n INT NOT NULL, machine STRING, at TIMESTAMP, celsius DOUBLE"}}
  - name: once
    dedupe: {{within: 1 day}}
  - name: changes
    from: readings
    deadband: {{time: at, by: [machine], columns: {{celsius: 0.5}}}}
sinks:
  - name: rows
    from: once
    table: {{path: "{lake}/rows"}}
  - name: changes
    from: changes
    table: {{path: "{lake}/changes"}}
  - name: latest
    from: readings
    statestore: {{entries: [{{key: "{name}/latest", value: [n]}}]}}
"""
SINKS = ("rows", "changes", "latest")
ROUNDS = 4
pytestmark = [pytest.mark.timeout(1800), pytest.mark.nightly]


def record(n: int) -> Record:
    # Each value differs from the one before by less than the limit, so a report depends on all rows before it.
    at = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=n)
    value = {"n": n, "machine": "press", "at": at.isoformat(), "celsius": n * 0.3}
    return Record(json.dumps(value).encode(), key=b"k", id=f"m{n}")


def driver_of(setup: Setup, log: Path, *options: str) -> Driver:
    file = setup.state.with_name("p.yaml")
    file.write_text(setup.text)
    return Driver(file.parent, file, "--state-dir", str(setup.state), *options, prefix=recorded(log))


def check(setup: Setup, count: int) -> None:
    assert numbers(setup.lake / "rows") == dict.fromkeys(range(count), 1)
    assert numbers(setup.lake / "changes") == dict.fromkeys(range(0, count, 2), 1)
    assert json.loads(setup.node.get(f"{setup.topic}/latest") or b"") == {"n": count - 1}
    for found in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (found.off, found.unknown, found.counts.read) == ((), (), count)


def test_a_power_loss_within_a_batch_neither_loses_nor_repeats_rows(
    setup_of: Callable[..., Setup], tmp_path: Path
) -> None:
    setup = setup_of(FILE)
    log = tmp_path / "strace"
    setup.send(*map(record, range(4)))
    setup.run()
    check(setup, 4)
    setup.send(*map(record, range(4, 9)))
    with driver_of(setup, log, "--once") as driver:
        assert driver.wait() == 0, driver.log.read_text()
    check(setup, 9)
    # The sinks have the batch, but the run has not finished it. If its plan were lost, it would get another end.
    for sink in SINKS:
        undo(setup, sink, table=False, ledger=True)
    unsynced = Unsynced(tmp_path, log)
    unsynced.lose()
    setup.send(*map(record, range(9, 12)))
    setup.run()
    check(setup, 12)
    # Checkpoints, state and ledger: what a run needs only while it runs is not synced.
    kept = {
        Path(path).relative_to(setup.state).parts[0] for path in unsynced.names if path.startswith(str(setup.state))
    }
    assert kept <= {"shared"}


def test_rounds_of_power_loss_at_any_time(setup_of: Callable[..., Setup], tmp_path: Path) -> None:
    setup, sent = setup_of(FILE), 0
    for number in range(ROUNDS):
        log = tmp_path / f"strace-{number}"
        with driver_of(setup, log) as driver:
            ends = time.monotonic() + 2 + 4 * random.random()
            while not driver.events or driver.events[-1]["event"] != "batch" or time.monotonic() < ends:
                if not any(event["event"] == "batch" for event in driver.events):
                    ends = time.monotonic() + 2 + 4 * random.random()
                setup.send(*map(record, range(sent, sent + 3)))
                sent += 3
                time.sleep(0.1)
                assert driver.process is not None
                assert driver.process.poll() is None, driver.log.read_text()
            # All but strace, which ends after them and has recorded each call.
            assert driver.process is not None
            for pid in descendants(driver.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            driver.wait()
        Unsynced(tmp_path, log).lose()
    setup.run()
    check(setup, sent)
