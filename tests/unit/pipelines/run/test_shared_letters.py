"""Which sinks write the dead letters of shared steps, as queries of a run are built. Without Spark and Kafka."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.run import shared
from penstock.pipelines.run.shared import QueryBuilder
from penstock.pipelines.sinks.delivery import Targets
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, check_shapes
from penstock.pipelines.state_dir.layout import first_json
from tests.unit.pipelines.files import parse

HEAD = """\
name: p
source: {format: kafka, bootstrap: ["h:1"], topics: [plant]}
dead_letters: {path: lake/dead}
steps: [{name: parsed, parse: {schema: "x INT"}}]
sinks:
"""
Ends = dict[str, dict[str, int]]
TWO_SOURCES = """\
name: p
sources:
  plant: {format: kafka, bootstrap: ["h:1"], topics: [plant]}
  lab: {format: kafka, bootstrap: ["h:1"], topics: [lab]}
dead_letters: {path: lake/dead}
steps:
  - {name: parsed, from: plant, parse: {schema: "x INT"}}
  - {name: more, from: lab, parse: {schema: "x INT"}}
  - {name: all, concat: [parsed, more]}
sinks:
"""


def pipeline(*sinks: str, head: str = HEAD, reads: str = "parsed") -> Pipeline:
    return parse(
        head + "".join(f"  - {{name: {name}, from: {reads}, table: {{path: lake/{name}}}}}\n" for name in sinks)
    )


def at(offset: int) -> Ends:
    return {"plant": {"0": offset}}


class Runs:
    """Runs of pipelines on one state directory, none of which has Spark."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = state
        self.unsupported = ""
        self.letters: dict[str, Any] = {}
        monkeypatch.setattr(shared, "SharedQuery", self._query)
        monkeypatch.setattr(shared, "check_target", lambda *_: None)
        monkeypatch.setattr(shared, "is_supported", lambda name: name != self.unsupported)
        monkeypatch.setattr(shared, "build_query", lambda found, *_: SimpleNamespace(sinks=(found.sink.name,)))

    def _query(self, plans: Any, _checkpoints: Any, group: Any, *given: Any) -> Any:
        self.letters |= dict(zip(group.sinks, given[-1], strict=True))
        return SimpleNamespace(sinks=group.sinks, columns=lambda n: group.sinks[n])

    def finish(self, sink: str, *ends: Ends) -> None:
        """Let ``sink`` finish a batch."""
        checkpoint, batch = self.begin(sink, *ends)
        checkpoint.commit(batch)

    def begin(self, sink: str, *ends: Ends) -> tuple[Checkpoint, int]:
        """Let ``sink`` begin a batch with the ``ends`` of its sources."""
        checkpoint = Checkpoint(layout.checkpoint(self.state, sink))
        checkpoint.create()
        batch = checkpoint.position().batch
        checkpoint.begin(batch, "\n".join(["v1", '{"batchWatermarkMs":0}', *map(json.dumps, ends)]))
        return checkpoint, batch

    def build(self, found: Pipeline) -> QueryBuilder:
        token = "000000000000001:00001:node"
        for sink in found.sinks:
            start = {f"{name}/{name}": {"0": 0} for name in found.inputs} if len(found.inputs) > 1 else at(0)
            first_json(layout.starts(self.state) / f"{sink.name}.json", start)
        check_shapes(found, self.state)
        store = SimpleNamespace(token=token)
        dead = None if found.dead_letters is None else found.dead_letters.location
        targets = Targets(found, cast("Any", store), dead, cast("Any", None), self.state)
        ledger = SimpleNamespace(check_end=lambda *_: None, last=Ledger(layout.ledger(self.state)).last)
        context: Any = SimpleNamespace(ledger=ledger, source=Sources(found, self.state), targets=targets)
        builder = QueryBuilder(found, cast("Any", None), self.state, context)
        builder.queries()
        return builder

    def start(self, found: Pipeline) -> dict[str, list[tuple[str, Any]]]:
        """Start a run, and return the stored sinks of each step, with their start offsets."""
        self.build(found).store_letters()
        return self.stored()

    def stored(self) -> dict[str, list[tuple[str, Any]]]:
        path = layout.letter_writers(self.state)
        steps = json.loads(path.read_text())["steps"] if path.exists() else {}
        return {step: [(each["sink"], each["start"]) for each in writers] for step, writers in steps.items()}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    # No power is lost here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return Runs(tmp_path / "state", monkeypatch)


def test_a_sink_that_gets_a_query_of_its_own_writes_no_letters_of_the_others(runs: Runs) -> None:
    """Arrow cannot carry its rows, which is found only when its query is built."""
    runs.unsupported = "wide"
    runs.finish("rows", at(12))
    runs.finish("wide", at(15))
    runs.begin("wide", at(18))
    runs.finish("more", at(12))
    assert runs.start(pipeline("rows", "wide", "more")) == {"parsed": [("rows", {})]}
    assert [tuple(each) for each in runs.letters["rows"]["parsed"]] == [({}, None)]
    assert runs.letters["more"] == {"parsed": ()}


def test_queries_that_are_built_and_never_started_change_nothing(runs: Runs) -> None:
    """For example those of a version that is refused, while the run continues with the version before."""
    before = runs.start(pipeline("rows", "more"))
    runs.finish("rows", at(12))
    runs.finish("more", at(900_000))
    builder = runs.build(pipeline("new", "more"))
    assert runs.stored() == before == {"parsed": [("rows", {})]}
    builder.store_letters()
    assert runs.stored() == {"parsed": [("rows", {}), ("new", at(12)), ("more", at(900_000))]}


def test_sinks_that_are_all_new_write_their_letters_like_their_rows(runs: Runs) -> None:
    """They may read another log, in which the same offsets have other records."""
    runs.start(pipeline("rows", "more"))
    for name in ("rows", "more"):
        runs.finish(name, at(12))
    assert runs.start(pipeline("rows2", "more2")) == {"parsed": [("rows2", {})]}
    # If one of several is new, the letters of these records exist.
    runs.finish("rows2", at(20))
    runs.finish("more2", at(15))
    assert runs.start(pipeline("rows3", "more2")) == {"parsed": [("rows2", {}), ("rows3", at(20))]}


def test_a_removed_sink_with_other_sources_does_not_prevent_a_start(runs: Runs) -> None:
    runs.start(pipeline("rows", "more"))
    runs.finish("rows", at(12))
    runs.finish("a", {"plant": {"0": 3}}, {"lab": {"0": 4}})
    found = runs.start(pipeline("a", "b", head=TWO_SOURCES, reads="all"))
    assert found["parsed"] == [("rows", {}), ("a", {"plant/plant": {"0": 3}, "lab/lab": {"0": 4}})]
