"""Pipelines that are graphs: several sources, ways that part and meet, late records beside the windows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.tube.record import Record
from tests.spark.pipelines import Setup

MIDNIGHT = datetime(2022, 3, 20, tzinfo=UTC)
SCHEMA = "name STRING NOT NULL, at TIMESTAMP, x DOUBLE NOT NULL"
FILE = f"""\
name: {{name}}
sources:
  live: {{{{topics: ["{{topic}}"], master: "{{master}}"}}}}
  history: {{{{format: files, path: "{{lake}}/in/*.csv", skip_lines: 1, max_files: 2}}}}
  bought: {{{{format: files, content: delta, path: "{{lake}}/bought"}}}}
statestore: {{{{broker: "{{broker}}"}}}}
trigger: 50 milliseconds
dead_letters: {{{{path: "{{lake}}/dead"}}}}
steps:
  - {{{{name: parsed, from: live, parse: {{{{schema: "{SCHEMA}"}}}}}}}}
  - {{{{name: old, from: history, parse: {{{{format: csv, schema: "{SCHEMA}"}}}}}}}}
  - name: scaled
    map: {{{{rename: {{{{name: label}}}}, compute: {{{{name: label, x: "1 * x"}}}}, drop: [label]}}}}
  - {{{{name: delta, from: bought, parse: {{{{schema: "{SCHEMA}"}}}}}}}}
  - {{{{name: all, concat: [parsed, scaled, delta]}}}}
  - {{{{name: low, filter: x < 10}}}}
  - {{{{name: high, from: all, filter: x >= 10}}}}
  - {{{{name: marked, map: {{{{compute: {{{{high: "true"}}}}}}}}}}}}
  - {{{{name: both, concat: [low, marked]}}}}
sinks:
  - {{{{name: rows, table: {{{{path: "{{lake}}/rows"}}}}}}}}
"""


def at(minute: int) -> str:
    return (MIDNIGHT + timedelta(minutes=minute)).isoformat()


def message(name: str, x: float, minute: int = 0) -> Record:
    return Record(json.dumps({"name": name, "at": at(minute), "x": x}).encode(), id=name)


def table(path: Path) -> list[dict[str, Any]]:
    return [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]


def commit(table: Path, version: int, *names: str) -> None:
    """A version of a Delta table that is partitioned by ``x``, a file for each of ``names``."""
    actions: list[dict[str, Any]] = []
    if version == 0:
        fields = [{"name": name, "type": kind} for name, kind in (("name", "string"), ("x", "double"))]
        actions += [
            {"protocol": {"minReaderVersion": 1}},
            {"metaData": {"schemaString": json.dumps({"fields": fields})}},
        ]
    (table / "_delta_log").mkdir(parents=True, exist_ok=True)
    for x, name in enumerate(names, 1):
        pq.write_table(pa.table({"name": [name], "at": [MIDNIGHT]}), table / f"{name}.parquet")
        added = {"path": f"{name}.parquet", "modificationTime": x, "partitionValues": {"x": f"{x * 8}.0"}}
        actions.append({"add": added | {"dataChange": True}})
    text = "\n".join(map(json.dumps, actions))
    (table / "_delta_log" / f"{version:020}.json").write_text(text)


@pytest.mark.timeout(600)
def test_sources_are_joined_and_ways_part_and_meet_again(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(FILE)
    csv = setup.lake / "in"
    csv.mkdir(parents=True)
    setup.send(message("live1", 5.0), message("live2", 50.0), b"nope")
    (csv / "a.csv").write_text(f"name,at,x\nold1,{at(1)},1\nold2,{at(2)},20\n,{at(3)},3\n")
    (csv / "b.csv").write_text(f"name,at,x\nold3,{at(4)},4")
    (csv / ".hidden.csv").write_text("name,at,x\nhidden,,6\n")
    commit(setup.lake / "bought", 0, "bought1", "bought2")
    setup.run()
    # Each broken record is one letter, though it was read on both ways.
    letters = {(x.source, x.step, x.code): x for x in dead_letters.letters(setup.lake / "dead")}
    assert set(letters) == {
        ("live", "parsed", "parse.not_json"),
        ("history", "old", "schema.null"),
    }
    assert len(list(dead_letters.letters(setup.lake / "dead"))) == 2
    null = letters["history", "old", "schema.null"]
    assert null.value == f",{at(3)},3".encode()
    assert (null.topic, null.offset) == (str(csv / "a.csv"), (csv / "a.csv").read_bytes().index(b"," + at(3).encode()))
    # A crash before the last commits doubles nothing; a letter of a file is read again, beside a new file.
    setup.forget_the_last_data("rows")
    asyncio.run(dead_letters.redrive(setup.lake / "dead", [null], setup.pipeline, setup.state))
    (csv / "c.csv").write_text(f"name,at,x\nold4,{at(1)},6\n")
    commit(setup.lake / "bought", 1, "bought3")
    setup.run()
    low = {"live1": 5.0, "old1": 1.0, "old3": 4.0, "old4": 6.0, "bought1": 8.0, "bought3": 8.0}
    high = {"live2": 50.0, "old2": 20.0, "bought2": 16.0}
    found = [(row["name"], row["x"], row["high"]) for row in table(setup.lake / "rows")]
    assert sorted(found) == sorted(
        [(name, x, None) for name, x in low.items()] + [(name, x, True) for name, x in high.items()]
    )
    again = [
        x
        for x in dead_letters.letters(setup.lake / "dead")
        if x.source == "history" and x.coordinates != null.coordinates
    ]
    assert [(x.id, x.code, x.value) for x in again] == [(null.id, "schema.null", null.value)]
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    # 3 + 6 + 3 records, on two ways.
    sums = account.counts
    assert (sums.read, sums.out, sums.dead, sums.filtered, sums.duplicates, sums.letters) == (24, 9, 6, 9, 0, 3)
    (csv / "a.csv").write_text("other")
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert "has changed since it was first read" in account.unknown[0]


LATE = f"""\
name: {{name}}
source: {{{{topics: ["{{topic}}"], master: "{{master}}"}}}}
statestore: {{{{broker: "{{broker}}"}}}}
trigger: 50 milliseconds
dead_letters: {{{{path: "{{lake}}/dead"}}}}
steps:
  - {{{{name: parsed, parse: {{{{schema: "{SCHEMA}"}}}}}}}}
  - {{{{name: sound, filter: "100 / x > 0"}}}}
  - name: hours
    window:
      {{{{time: at, duration: 1 hour, watermark: 1 hour, emit: closed,
        aggregates: {{{{n: count(*), s: sum(1 / (x - 7))}}}}}}}}
  - {{{{name: many, filter: n > 1}}}}
sinks:
  - {{{{name: rows, table: {{{{path: "{{lake}}/windows"}}}}}}}}
  - {{{{name: late, from: hours.late, table: {{{{path: "{{lake}}/late"}}}}}}}}
  - {{{{name: told, from: hours.late, statestore: {{{{max_bytes: 9, entries: [{{{{key: told}}}}]}}}}}}}}
  - {{{{name: panel, from: hours, mqtt: {{{{topic: panel, max_bytes: 9}}}}}}}}
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_late_records_have_a_sink_of_their_own(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(LATE)
    # Dated a century ahead it would move the watermark past everything. The second partition is idle throughout.
    odd = [message(name, x, 5) for name, x in (("zero", 0.0), ("minus", -1.0), ("seven", 7.0))]
    century = 100 * 365 * 24 * 60
    odd += [message("future", 1.0, century), message("unset", 1.0, -century)]
    setup.send(*(message(f"m{n}", 1.0, 10 * n) for n in range(60)), *odd)
    setup.run()
    setup.send(
        message("late1", 1.0, 30), message("late1", 1.0, 30), message("late2", 2.0, 40), message("m60", 1.0, 600)
    )
    setup.run()
    assert sorted(row["name"] for row in table(setup.lake / "late")) == ["late1", "late2", "unset"]
    assert {row["n"] for row in table(setup.lake / "windows")} == {6}
    # The query of windows keeps the letters itself, as there is no other.
    letters = list(dead_letters.letters(setup.lake / "dead"))
    assert sorted((x.id, x.step, x.code) for x in letters if x.step != "sink:panel") == [
        ("future", "hours", "event.ahead"),
        ("late1", "sink:told", "sink.size"),
        ("late2", "sink:told", "sink.size"),
        ("seven", "hours", "expression.failed"),
        ("unset", "sink:told", "sink.size"),
        ("zero", "sound", "expression.failed"),
    ]
    # A window that its sink refuses is kept, too.
    windows = [x for x in letters if x.step == "sink:panel"]
    assert {(x.code, x.source, json.loads(x.value)["n"]) for x in windows} == {("sink.size", "hours", 6)}
    sums = setup.ledger.counts("rows")
    assert (sums.read, sums.late, sums.dead, sums.filtered) == (69, 3, 6, 1)
    counts = setup.ledger.counts("panel")
    assert (counts.letters, counts.letters_by_step) == (len(windows), {"sink:panel": len(windows)})
    setup.forget_the_last_data("rows")
    setup.run()
    assert sorted(row["name"] for row in table(setup.lake / "late")) == ["late1", "late2", "unset"]
    for account in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (account.off, account.unknown) == ((), ())


def test_a_missing_directory_is_reported_before_spark_starts(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(FILE)
    with pytest.raises(ConfigError, match="the directory does not exist"):
        setup.run()


CHANGES = """\
name: {name}
source: {{format: statestore, tube_topic: statestore_changes, master: "{master}", keys: "graph/[ab]*"}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - {{name: parsed, parse: {{schema: "x DOUBLE NOT NULL"}}}}
sinks:
  - {{name: rows, table: {{path: "{lake}/rows"}}}}
"""


@pytest.mark.timeout(600)
def test_state_store_changes_are_a_source(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(CHANGES)
    before = setup.node.capture.stats.captured
    setup.node.set_keys({"graph/a": b'{"x": 1}', "graph/c": b'{"x": 2}', "graph/b=,%": b"nope"}, writer="setter")
    setup.node.set_keys({"graph/a": b'{"x": 3}'}, ttl_ms=600_000)
    setup.node.delete("graph/a")
    setup.node.wait_captured(before + 5)
    setup.run()
    rows = sorted(table(setup.lake / "rows"), key=lambda row: row["x"])
    assert [(row["state_key"], row["operation"], row["x"]) for row in rows] == [
        ("graph/a", "SET", x) for x in (1.0, 3.0)
    ]
    assert rows[0]["writer"] == "setter"
    assert rows[0]["version"] < rows[1]["version"]
    assert (rows[0]["expires_at"], rows[1]["expires_at"] is None) == (None, False)
    (letter,) = dead_letters.letters(setup.lake / "dead")
    assert (letter.code, letter.value, letter.key) == ("parse.not_json", b"nope", b"graph/b=,%")
    with pytest.raises(ConfigError, match="only the node may write to the topic of its changes"):
        asyncio.run(dead_letters.redrive(setup.lake / "dead", [letter], setup.pipeline, setup.state))
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
