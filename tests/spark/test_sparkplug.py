"""Sparkplug messages in a run: births of an earlier batch, for sinks that share a query and for windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.sinks.table import files
from penstock.tube.record import Record
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 3}}}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: messages
    parse: {{format: sparkplug}}
  - name: each
    explode: {{column: metrics, as: metric}}
  - name: metrics
    flatten: {{columns: [metric], prefix: false}}
sinks:
  - name: rows
    from: metrics
    table: {{path: "{lake}/rows"}}
  - name: other
    from: metrics
    console: {{rows: 100}}
"""
HOURS = """\
  - name: hours
    window: {{time: timestamp, duration: 1 hour, watermark: 1 hour, by: [name], aggregates: {{n: count(*)}}}}
sinks:
"""
HOURLY = """\
  - name: hourly
    from: hours
    console: {{rows: 100}}
"""
WITH_WINDOWS = FILE.replace("sinks:\n", HOURS) + HOURLY
"""Also with a query of its own, which needs as much processor time again."""
SESSION = json.loads((Path(__file__).parents[1] / "vectors" / "sparkplug" / "messages.json").read_text())["session"]
pytestmark = pytest.mark.timeout(600)


def message(kind: str, name: str) -> Record:
    topic = f"spBv1.0/plant/{kind}/press" + ("/pump" if kind.startswith("D") else "")
    return Record(bytes.fromhex(SESSION[name]), key=b"plant/press", topic=topic, id=f"{kind}-{name}")


@pytest.mark.parametrize(
    "text", [pytest.param(FILE, id="rows"), pytest.param(WITH_WINDOWS, id="rows, windows", marks=pytest.mark.nightly)]
)
def test_aliases_are_resolved_by_births_of_an_earlier_batch(setup_of: Callable[..., Setup], text: str) -> None:
    setup = setup_of(text)
    setup.send(message("DDATA", "DDATA"), message("NBIRTH", "NBIRTH"), message("DBIRTH", "DBIRTH"))
    setup.send(message("NDATA", "NDATA"), message("NDATA", "NULL"))
    setup.run()
    found = [
        tuple(row.values())
        for file in files(setup.lake / "rows")
        for row in pq.ParquetFile(file).read(["message_type", "device_id", "name"]).to_pylist()
    ]
    born = ("bdSeq", "Node Control/Rebirth", "Temperature", "Offset", "Count", "Name", "Table", "Motor")
    assert sorted(found, key=str) == sorted(
        [
            *(("NBIRTH", None, name) for name in born),
            ("DBIRTH", "pump", "Level"),
            *(("NDATA", None, name) for name in ("Temperature", "Offset", "Name")),
        ],
        key=str,
    )
    (letter,) = setup.dead()
    assert (letter["code"], letter["step"]) == ("sparkplug.no_birth", "messages")
    sinks = {sink.name for sink in setup.pipeline.sinks}
    for sink in sinks:
        totals = [(entry.read, entry.exploded, entry.dead) for entry in setup.ledger.entries(sink) if entry.read]
        assert totals == [(3, 7, 1), (2, 1, 0)]
    if "hourly" not in sinks:
        return
    windows = [json.loads(row) for event in setup.events if event["event"] == "rows" for row in event["rows"]]
    assert {row["name"]: row["n"] for row in windows if "window_start" in row} == {
        **dict.fromkeys((*born, "Level"), 1),
        **dict.fromkeys(("Temperature", "Offset", "Name"), 2),
    }
