"""As-of joins with the changes of the state store: the value at the time of the row, the same in a repeated batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.tube.record import Record
from tests.spark.node import CAPTURE_TOPIC
from tests.spark.pipelines import Setup
from tests.spark.test_pipeline_shared import undo

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, line STRING NOT NULL, at TIMESTAMP"}}
  - name: made
    enrich:
      key: "{name}/{{line}}"
      as: recipe
      schema: id INT
      missing: dead_letter
      as_of: {{time: at, topic: CAPTURE}}
  - name: named
    map: {{compute: {{recipe_id: recipe.id}}, drop: [recipe]}}
sinks:
  - name: rows
    from: named
    table: {{path: "{lake}/rows"}}
  - name: halved
    from: named
    table: {{path: "{lake}/halved", format: parquet}}
""".replace("CAPTURE", CAPTURE_TOPIC)
HOURS = """\
  - name: hours
    window:
      {{time: at, duration: 1 hour, watermark: 2 days, max_ahead: 3 days, by: [recipe_id], aggregates: {{c: count(*)}}}}
sinks:
"""
COUNTS = """\
  - name: counts
    from: hours
    console: {{rows: 1000}}
"""
WITH_WINDOWS = FILE.replace("sinks:\n", HOURS) + COUNTS
"""Also with a query of its own, which needs as much processor time again."""
SHARED = ("rows", "halved")
pytestmark = pytest.mark.timeout(900)


def recipes(table: Path) -> dict[int, int]:
    found = [row for file in files(table) for row in pq.ParquetFile(file).read(["n", "recipe_id"]).to_pylist()]
    assert len({row["n"] for row in found}) == len(found)
    return {row["n"]: row["recipe_id"] for row in found}


class Plant:
    """A pipeline, and the keys of its lines."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.numbers = 0

    def set(self, line: str, recipe: int | None) -> datetime:
        """Change the recipe of ``line``; return a time after it."""
        key, before = f"{self.setup.topic}/{line}", self.setup.node.capture.stats.captured
        if recipe is None:
            self.setup.node.delete(key)
        else:
            self.setup.node.set_keys({key: json.dumps({"id": recipe}).encode()})
        self.setup.node.wait_captured(before + 1)
        time.sleep(0.005)
        after = datetime.now(UTC)
        time.sleep(0.005)
        return after

    def send(self, line: str, at: datetime | None) -> int:
        n, self.numbers = self.numbers, self.numbers + 1
        value = {"n": n, "line": line, "at": None if at is None else at.isoformat()}
        self.setup.send(Record(json.dumps(value).encode(), key=b"k", id=f"m{n}"))
        return n

    def check(self, expected: dict[int, int], reasons: list[str]) -> None:
        for sink in SHARED:
            assert recipes(self.setup.lake / sink) == expected
        assert sorted(letter["reason"] for letter in self.setup.dead()) == sorted(reasons)
        for found in reconcile(
            self.setup.pipeline, self.setup.state, source_count(self.setup.pipeline, self.setup.state)
        ):
            assert (found.off, found.unknown) == ((), ())
            assert found.counts.read == self.numbers

    def check_windows(self, expected: int) -> None:
        """Check the number of rows in the windows, of the last state of each."""
        if len(self.setup.pipeline.sinks) == len(SHARED):
            return
        last: dict[Any, int] = {}
        for event in self.setup.events:
            if event["event"] == "rows" and event["sink"] == "counts":
                for row in map(json.loads, event["rows"]):
                    last[row["window_start"], row["recipe_id"]] = row["c"]
        assert sum(last.values()) == expected


@pytest.mark.parametrize(
    "text", [pytest.param(FILE, id="rows"), pytest.param(WITH_WINDOWS, id="rows, windows", marks=pytest.mark.nightly)]
)
def test_a_row_has_the_value_at_its_time_and_a_repeated_batch_the_same(
    setup_of: Callable[..., Setup], text: str
) -> None:
    plant = Plant(setup_of(text))
    setup, topic = plant.setup, plant.setup.topic
    begin = datetime.now(UTC)
    later = begin + timedelta(hours=20)
    first = plant.set("a", 1)
    second = plant.set("a", 2)
    plant.set("b", 7)
    gone = plant.set("b", None)
    expected = {plant.send("a", first): 1, plant.send("a", later): 2, plant.send("a", second): 2}
    for line, at in (("a", begin - timedelta(hours=1)), ("b", gone), ("c", second), ("a", None)):
        plant.send(line, at)
    setup.run()
    reasons = [letter["reason"] for letter in setup.dead()]
    assert sorted(reason.partition(" at ")[0] for reason in reasons) == sorted(
        [
            f"the state store had no key {topic}/a",
            f"the state store had no key {topic}/b",
            f"the state store had no key {topic}/c",
            f"the value of key {topic}/a is unknown: the event time is null",
        ]
    )
    assert {letter["code"] for letter in setup.dead()} == {"lookup.missing"}
    plant.check(expected, reasons)
    plant.check_windows(3)
    # A run that ended when one of two sinks that share a query had finished: what was decided for the batch
    # holds for both, whatever has changed before it is repeated. The next batch knows the change.
    undo(setup, "rows", table=True, ledger=True)
    plant.set("a", 10)
    expected[plant.send("a", later)] = 10
    setup.run()
    plant.check(expected, reasons)
    plant.check_windows(4)
