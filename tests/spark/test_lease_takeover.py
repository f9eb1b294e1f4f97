"""A driver that is paused for longer than its lease does not disturb the run that took over when it resumes."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.processes import Driver, until

FILE = """\
name: taken-over
source: {{topics: ["taken_over"], master: "{master}", options: {{maxOffsetsPerTrigger: 40}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
steps:
  - name: parsed
    parse: {{schema: "place STRING NOT NULL, n INT NOT NULL"}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
  - name: last
    statestore:
      order_by: n
      fence_prefixes: ["taken-over/"]
      entries: [{{key: "taken-over/{{place}}", value: [n]}}]
"""
PLACES = 7


def records(first: int, last: int) -> list[tuple[int, Record]]:
    return [
        (0, Record(json.dumps({"place": f"p{n % PLACES}", "n": n}).encode(), id=f"m{n}")) for n in range(first, last)
    ]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_that_was_paused_past_its_lease_writes_nothing(node: Node, tmp_path: Path) -> None:
    node.create_topic("taken_over", 1)
    lake, state = tmp_path / "lake", tmp_path / "state"
    file = tmp_path / "p.yaml"
    file.write_text(FILE.format(master=node.master, broker=node.mqtt, lake=lake))
    options = [f"--state-dir={state}", "--spark-master=local[1]"]
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Driver(tmp_path / "old", file, *options), Driver(tmp_path / "new", file, *options)

    def values() -> list[bytes | None]:
        return [node.get(f"taken-over/p{place}") for place in range(PLACES)]

    def committed() -> dict[str, bytes]:
        """The log of the table, and every file that it names."""
        found = {str(path): path.read_bytes() for path in (lake / "rows" / "_delta_log").glob("*.json")}
        return found | {str(path): path.read_bytes() for path in files(lake / "rows")}

    with contextlib.ExitStack() as drivers:
        drivers.enter_context(old)
        old.await_event("started")
        node.append("taken_over", records(0, 400))
        old.await_event("batch", 2, sink="last")
        # In the middle of the work: ten batches a sink are to be done.
        old.send(signal.SIGSTOP)
        drivers.enter_context(new)
        waiting = new.await_event("waiting")
        assert old.process is not None
        assert (waiting["holder"], waiting["pid"]) == (old.events[0]["run"], old.process.pid)
        new.await_event("started")
        node.append("taken_over", records(400, 420))
        last = [
            json.dumps({"n": max(n for n in range(420) if n % PLACES == p)}).replace(" ", "") for p in range(PLACES)
        ]
        expected = [text.encode() for text in last]
        until(lambda: values() == expected, "the new run to have done all", alive=new.trouble)
        until(lambda: _rows(lake) == 420, "the new run to have written the table", alive=new.trouble)
        before = committed()

        old.send(signal.SIGCONT)
        assert old.wait() == 1, "it lost its lease"
        # What it still had to send has been refused or has ended with it by now.
        assert values() == expected
        assert committed() == before
        said = old.log.read_text()
        assert "lost its lease" in said or "belongs to a later run" in said
        node.append("taken_over", records(420, 421))
        until(lambda: _rows(lake) == 421, "the new run to go on", alive=new.trouble)
        new.terminate()
        assert new.wait() == 0
    pipeline = load(file)
    accounts = reconcile(pipeline, state, source_count(pipeline, state))
    assert [(account.off, account.unknown, account.counts.read) for account in accounts] == [((), (), 421)] * 2


def _rows(lake: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.ParquetFile(file).metadata.num_rows for file in files(lake / "rows"))
