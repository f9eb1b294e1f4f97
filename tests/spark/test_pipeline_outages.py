"""Outages of a pipeline's dependencies: no record is lost, duplicated or left behind, as its ledger confirms."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.reconcile import QueryReconciliation, reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec import loader
from penstock.tube.record import Record
from tests.end_to_end.nodes import RunningNode
from tests.spark.pipelines import Setup
from tests.spark.processes import until


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RunningNode]:
    """A node beside that of the suite, which may be killed."""
    directory = tmp_path / "other"
    directory.mkdir()
    with RunningNode(directory) as running:
        yield running


def record(n: int, place: str = "p") -> Record:
    return Record(json.dumps({"place": place, "n": n}).encode(), id=f"m{n}")


def books(setup: Setup) -> list[QueryReconciliation]:
    return reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))


def done(setup: Setup, sink: str, read: int) -> Callable[[], bool]:
    return lambda: setup.ledger.counts(sink).read == read


POISON = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 5000}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - {{name: parsed, parse: {{schema: "place STRING NOT NULL, n INT NOT NULL"}}}}
  - {{name: once, dedupe: {{within: 1 day}}}}
  - name: limited
    enrich: {{key: "{name}/{{place}}", as: limits, schema: high DOUBLE, missing: dead_letter, refresh: 1 millisecond}}
  - {{name: share, map: {{compute: {{share: "limits.high / (n - 2250)"}}}}}}
sinks:
  - {{name: rows, table: {{path: "{lake}/rows"}}}}
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_poison_every_thousand_records_is_kept_and_goes_through_once_mended(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(POISON, 1)
    setup.node.set_keys({f"{setup.topic}/p": b'{"high": 5}'})
    broken = {n: Record(b'{"place": "p", "n": "%d"}' % n, id=f"m{n}") for n in range(0, 5_000, 1_000)}
    unknown = {n: record(n, "new") for n in range(500, 5_000, 1_000)}
    setup.send(*((broken | unknown).get(n) or record(n) for n in range(5_000)))
    setup.run()
    letters = list(dead_letters.letters(setup.lake / "dead"))
    codes = {"parse": {"m" + str(n) for n in broken}, "lookup": {"m" + str(n) for n in unknown}, "map": {"m2250"}}
    assert {x.id for x in letters if x.code == "schema.mismatch"} == codes["parse"]
    assert {x.id for x in letters if x.code == "lookup.missing"} == codes["lookup"]
    assert {x.id for x in letters if x.code == "expression.failed"} == codes["map"]
    assert len(letters) == 11
    (account,) = books(setup)
    assert (account.off, account.unknown) == ((), ())
    assert (account.counts.read, account.counts.out, account.counts.dead, account.counts.letters) == (
        5_000,
        4_989,
        11,
        11,
    )

    # Mended: the key is there, the schema takes what came, the expression divides by nothing. The letters of steps
    # behind the dedupe, which knows their ids, go through it as well.
    setup.node.set_keys({f"{setup.topic}/new": b'{"high": 7}'})
    changed = json.loads(setup.pipeline.model_dump_json(by_alias=True, exclude_none=True))
    changed["steps"][0]["parse"]["schema"] = "place STRING NOT NULL, n STRING NOT NULL"
    # The table keeps its types.
    changed["steps"][3]["map"]["compute"] = {"share": "limits.high", "n": "CAST(n AS INT)"}
    setup.pipeline = loader.parse(json.dumps(changed), name="p.yaml")
    assert asyncio.run(dead_letters.redrive(setup.lake / "dead", letters, setup.pipeline, setup.state)) == 11
    setup.run()
    assert setup.rows() == sorted(f"m{n}" for n in range(5_000))
    (account,) = books(setup)
    assert (account.off, account.unknown) == ((), ())
    assert (account.counts.read, account.counts.out, account.counts.dead, account.counts.duplicates) == (
        5_011,
        5_000,
        11,
        0,
    )


SINK = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 20}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
steps:
  - {{name: parsed, parse: {{schema: "place STRING NOT NULL, n INT NOT NULL"}}}}
sinks:
  - {{name: sent, tubemq: {{topic: out, master: "OTHER_MASTER", value: [n]}}}}
  - {{name: told, mqtt: {{topic: "out/{{n}}", broker: "OTHER_BROKER", retain: true, value: n}}}}
  - {{name: rows, table: {{path: "{lake}/rows"}}}}
"""
OUTAGES = [pytest.param(0.0, id="short"), pytest.param(60.0, id="a minute")]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("outage_s", OUTAGES)
def test_sinks_that_are_down_get_everything_once_they_are_back(
    setup_of: Callable[..., Setup], other: RunningNode, outage_s: float
) -> None:
    """By day one sink fails in the process of the run: test_pipeline_shared.py."""
    other.out("tube", "topic", "create", "out", "--partitions", "1")
    there = SINK.replace("OTHER_MASTER", other.ready["tube_master"])
    setup = setup_of(there.replace("OTHER_BROKER", f"mqtt://{other.ready['mqtt']}"), 1)
    setup.send(*(record(n) for n in range(50)))
    with setup.running() as run:
        alive = _ended(setup, run)
        for sink in ("sent", "told"):
            until(done(setup, sink, 50), f"the first records in {sink}", alive=alive)
        other.kill()
        setup.send(*(record(n) for n in range(50, 100)))
        # The table does not wait for the other sinks.
        until(done(setup, "rows", 100), "the table to go on", alive=alive)
        until(
            lambda: {e["sink"] for e in setup.events if e["event"] == "retry"} == {"sent", "told"},
            "both sinks to be tried again",
            alive=alive,
        )
        threading.Event().wait(outage_s)
        other.start()
        for sink in ("sent", "told"):
            until(done(setup, sink, 100), f"the others in {sink}", alive=alive)
    got = other.rows("tube", "consume", "out", "--count", "100")
    assert sorted(json.loads(message["value"])["n"] for message in got) == list(range(100))
    retained = other.rows("mqtt", "sub", "out/#", "--count", "100", "--timeout", "120")
    assert sorted(int(message["payload"]) for message in retained) == list(range(100))
    assert setup.rows() == sorted(f"m{n}" for n in range(100))
    assert [(account.off, account.unknown, account.counts.read) for account in books(setup)] == [((), (), 100)] * 3


def _ended(setup: Setup, run: Future[None]) -> Callable[[], str | None]:
    return lambda: f"the run ended: {setup.events[-3:]}" if run.done() else None


LOOKUP = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 20}}}}
statestore: {{broker: "OTHER_BROKER"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - {{name: parsed, parse: {{schema: "place STRING NOT NULL, n INT NOT NULL"}}}}
  - {{name: once, dedupe: {{within: 1 day}}}}
  - name: kept
    enrich: {{LOOK, unavailable: dead_letter}}
  - {{name: passed, from: once, enrich: {{LOOK, unavailable: pass}}}}
  - {{name: waited, from: once, enrich: {{LOOK, unavailable: fail}}}}
sinks:
  - {{name: rows, from: kept, table: {{path: "{lake}/rows"}}}}
  - {{name: passed, from: passed, table: {{path: "{lake}/passed"}}}}
  - {{name: waited, from: waited, table: {{path: "{lake}/waited"}}}}
""".replace("LOOK", 'key: "limits/{{place}}", as: limits, schema: high DOUBLE, wait: 1 second, refresh: 1 millisecond')


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("outage_s", [0.0, 60.0])
def test_while_the_store_of_lookups_is_down_each_policy_is_followed(
    setup_of: Callable[..., Setup], other: RunningNode, outage_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.out("kv", "set", "limits/p", '{"high": 5}')
    setup = setup_of(LOOKUP.replace("OTHER_BROKER", f"mqtt://{other.ready['mqtt']}"), 1)
    if not outage_s:
        # The lease runs out in the short outage, too.
        monkeypatch.setattr("penstock.pipelines.run.write_back.LEASE_MS", 2_000)
    setup.send(*(record(n) for n in range(50)))
    with setup.running() as run:
        alive = _ended(setup, run)
        for sink in ("rows", "passed", "waited"):
            until(done(setup, sink, 50), f"the first records in {sink}", alive=alive)
        other.kill()
        setup.send(*(record(n) for n in range(50, 100)))
        for sink in ("rows", "passed"):
            until(done(setup, sink, 100), f"{sink} to go on", alive=alive)
        until(lambda: _said(setup, "reacquiring it"), "the lease to run out", alive=alive)
        assert setup.ledger.counts("waited").read < 100
        threading.Event().wait(outage_s)
        other.start()
        until(lambda: _said(setup, "no other run has held it"), "the lease to be taken back", alive=alive)
        until(done(setup, "waited", 100), "what waited for the store", alive=alive)
    tokens = {e["fencing_token"] for e in setup.events if e["event"] == "batch"}
    assert len(tokens) == 1, "the token is that of the whole run"
    lost = {x.id for x in dead_letters.letters(setup.lake / "dead")}
    assert lost == {f"m{n}" for n in range(50, 100)}
    assert {x.code for x in dead_letters.letters(setup.lake / "dead")} == {"lookup.unavailable"}
    assert setup.rows() == sorted(f"m{n}" for n in range(50))
    assert _limits(setup.lake / "passed") == {f"m{n}": 5.0 if n < 50 else None for n in range(100)}
    assert _limits(setup.lake / "waited") == {f"m{n}": 5.0 for n in range(100)}
    letters = list(dead_letters.letters(setup.lake / "dead"))
    assert asyncio.run(dead_letters.redrive(setup.lake / "dead", letters, setup.pipeline, setup.state)) == 50
    setup.run()
    assert _limits(setup.lake / "rows") == {f"m{n}": 5.0 for n in range(100)}
    # For the other sinks, which had them, the letters are copies.
    sums = {account.sink: (account.off, account.counts.out, account.counts.duplicates) for account in books(setup)}
    assert sums == {"rows": ((), 100, 0), "passed": ((), 100, 50), "waited": ((), 100, 50)}


def _said(setup: Setup, text: str) -> bool:
    return any(text in e["text"] for e in setup.events if e["event"] == "warning")


def _limits(table: Path) -> dict[str, Any]:
    rows = [row for file in files(table) for row in pq.ParquetFile(file).read().to_pylist()]
    assert len(rows) == len({row["_id"] for row in rows})
    return {row["_id"]: row["limits"] and row["limits"]["high"] for row in rows}
