"""Sinks whose targets acknowledge a batch before it is in the ledger, and a power loss at any moment: without Spark.

What is on the disk is modelled as for whole drivers (``tests/spark/test_pipeline_power_loss.py``). The targets are not
part of the machine that loses power. Those of Kafka, PostgreSQL and TubeMQ know the last batch of a query, and ignore
it if it is repeated; that of MQTT takes the messages once more.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.run.queries import BatchBarrier, RunContext
from penstock.pipelines.run.shared import SharedBatches, SharedQuery, grouped
from penstock.pipelines.sinks.delivery import NO_LETTERS, OnePassCounts, Targets
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets, prepare_shared
from penstock.pipelines.state_dir.layout import first_json
from tests.spark.power_loss import Unsynced
from tests.unit.pipelines.files import parse

FILE = """\
name: p
source: {topics: [t]}
steps: [{name: parsed, parse: {schema: "x INT"}}]
sinks:
  - {name: kafka, from: parsed, kafka: {bootstrap: ["h:1"], topic: out}}
  - {name: mqtt, from: parsed, mqtt: {topic: out}}
"""
PIPELINE = parse(FILE)
ENDS = (5, 9)
"""Ends of the log when a batch is planned."""


class PowerLoss(BaseException):
    """The machine has lost power."""


class Machine:
    """A disk whose power is lost at the step ``last``; a step is a call that changes the disk, or an answer."""

    def __init__(self, root: Path, patches: pytest.MonkeyPatch, last: int | None) -> None:
        self.unsynced = Unsynced(root)
        self.steps = 0
        self.answers: list[int] = []
        """The steps at which a server had acknowledged a batch."""
        self._last = last
        replaced: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("link", "replace", "mkdir")}
        patches.setattr(os, "fsync", self._fsync)
        for name, call in replaced.items():
            patches.setattr(os, name, self._naming(call, is_directory=name == "mkdir"))

    def step(self) -> None:
        if self.steps == self._last:
            raise PowerLoss
        self.steps += 1

    def _fsync(self, descriptor: int) -> None:
        self.step()
        self.unsynced.sync(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def _naming(self, call: Callable[..., Any], *, is_directory: bool) -> Callable[..., Any]:
        def made(*given: Any, **options: Any) -> None:
            self.step()
            call(*given, **options)
            self.unsynced.name(
                str(given[-2 if is_directory and len(given) > 1 else -1]), None if is_directory else str(given[0])
            )

        return made


class Target:
    """What the servers have: the records of each sink, and for ``kafka`` the batches of each query."""

    def __init__(self) -> None:
        self.records: dict[str, Counter[int]] = {"kafka": Counter(), "mqtt": Counter()}
        self.batches: set[tuple[str, int]] = set()

    def write(self, sink: str, query: str, batch: int, start: int, end: int) -> None:
        if sink == "kafka":
            if (query, batch) in self.batches:
                return
            self.batches.add((query, batch))
        self.records[sink].update(range(start, end))


class Sources:
    def __init__(self, state: Path) -> None:
        self._state = state

    def start(self, sink: str) -> Offsets:
        return first_json(layout.starts(self._state) / f"{sink}.json", {"t": {"1:0": 0}})

    def count(self, _sink: str, start: Offsets, end: Offsets) -> int:
        return end["t"]["1:0"] - start["t"]["1:0"]


class Rows:
    sparkSession = None  # noqa: N815 - as in Spark

    def coalesce(self, _number: int) -> Rows:
        return self


class Nothing:
    token = "1:0:n"

    def begin(self, *_: object) -> None:
        """No as-of joins."""


class Query(SharedQuery):
    def rebuild(self) -> None:
        """There are no rows."""


class Batches(SharedBatches):
    def _written(self, _rows: Any, due: Any, _numbers: Any, _errors: Any) -> Any:
        return [(member, None) for member in due]


def run(state: Path, target: Target, machine: Machine | None, monkeypatch: pytest.MonkeyPatch, *ends: int) -> None:
    """Run until the sinks have reached each of ``ends``, as a run does: each group of sinks in a query."""
    monkeypatch.setattr("penstock.pipelines.run.shared.SharedBatches", Batches)
    ledger, sources = Ledger(layout.ledger(state)), Sources(state)
    plans = {found.sink.name: found for found in plan(PIPELINE)}
    checkpoints = {name: Checkpoint(layout.checkpoint(state, name)) for name in plans}
    targets = Targets(PIPELINE, cast("Any", Nothing()), None, cast("Any", None), state)
    context = RunContext(
        cast("Any", sources), ledger, BatchBarrier(), lambda _: None, cast("Any", None), targets, cast("Any", Nothing())
    )
    for name, checkpoint in checkpoints.items():
        ledger.check_end(name, checkpoint)
    for number, end in enumerate(ends):
        positions = {name: checkpoint.position() for name, checkpoint in checkpoints.items()}
        for group in grouped(positions, {name: sources.start(name) for name in plans}, lambda *_: False):
            path = state / "shared" / f"{number}-{group.sinks[0]}.transient"
            query = Query(
                [plans[name] for name in group.sinks],
                [checkpoints[name] for name in group.sinks],
                group,
                path,
                cast("Any", None),
                context,
                [{} for _ in group.sinks],
            )
            for member in query.batches.members:
                member.writer = cast("Any", Writer(member.name, member.checkpoint, sources, target, machine))
            layout.remove_tree(path)
            query_ran(query, end)


def query_ran(query: SharedQuery, end: int) -> None:
    """Run the batch that was begun, and one to ``end``, with the checkpoint that Spark would write."""
    group, own = query._group, query.checkpoint
    prepare_shared(own.path, group.finished, group.begun)
    batch = own.position().batch
    if group.begun is not None:
        query.batches(cast("Any", Rows()), batch)
        own.commit(batch)
        batch += 1
    before = own.planned(batch - 1).end if batch else {"t": {"1:0": 0}}
    if before["t"]["1:0"] < end:
        own.begin(batch, f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps({"t": {"1:0": end}})}')
        query.batches(cast("Any", Rows()), batch)


class Writer:
    def __init__(
        self, sink: str, checkpoint: Checkpoint, sources: Sources, target: Target, machine: Machine | None
    ) -> None:
        self._sink, self._checkpoint, self._sources = sink, checkpoint, sources
        self._target, self._machine = target, machine

    def deliver(self, _spark: object, batch: int, _found: object) -> OnePassCounts:
        start, end = self._checkpoint.range(batch)
        first, last = (start or self._sources.start(self._sink))["t"]["1:0"], end["t"]["1:0"]
        self._target.write(self._sink, self._checkpoint.query_id(), batch, first, last)
        if self._machine is not None:
            self._machine.answers.append(self._machine.steps)
            self._machine.step()
        return OnePassCounts(last - first, 0, 0, last - first, NO_LETTERS, {}, 0)


def lost_at(root: Path, last: int | None) -> tuple[Machine, Target]:
    """Run with a power loss at the step ``last``, then run on; return the machine before it, and the servers."""
    target, state = Target(), root / "state"
    with pytest.MonkeyPatch.context() as patches:
        machine = Machine(root, patches, last)
        with suppress(PowerLoss):
            run(state, target, machine, patches, *ENDS)
    machine.unsynced.lose()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "fsync", lambda _: None)
        # Records have arrived meanwhile: a batch whose plan was lost has another end.
        run(state, target, None, patches, 12)
        for sink in target.records:
            ledger = Ledger(layout.ledger(state))
            assert ledger.counts(sink).read == 12
            assert [entry.end for entry in ledger.entries(sink)][-1] == {"t": {"1:0": 12}}
    return machine, target


def test_a_power_loss_after_the_answer_of_a_server_loses_nothing_and_repeats_only_messages_of_mqtt(
    tmp_path: Path,
) -> None:
    machine, target = lost_at(tmp_path / "none", None)
    assert set(target.records["mqtt"].values()) == {1}
    repeated = set()
    # Steps of one kind are at other distances than three.
    for last in sorted({*range(0, machine.steps, 3), *machine.answers}):
        _, target = lost_at(tmp_path / str(last), last)
        assert target.records["kafka"] == dict.fromkeys(range(12), 1), last
        assert target.records["mqtt"].keys() == set(range(12)), last
        repeated |= {number for number, times in target.records["mqtt"].items() if times > 1}
    assert repeated
