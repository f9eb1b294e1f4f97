"""Sinks that read Kafka share a query: state directories of versions with a query for each sink, and runs that end, or
lose their lease, between any two steps. Without Spark and Kafka."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import StorageError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry
from penstock.pipelines.run.queries import BatchBarrier, BatchCounts, RunContext, ledger_entry
from penstock.pipelines.run.shared import QueryBuilder, SharedBatches, SharedQuery, grouped, is_before
from penstock.pipelines.sinks.delivery import NO_LETTERS, OnePassCounts, Targets
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.pipeline import plan, query_groups
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets, parse_offsets, prepare_shared
from penstock.pipelines.state_dir.layout import TRANSIENT, first_json, remove_tree
from penstock.spark.kafka.source import KafkaLog
from tests.unit.pipelines.files import parse

FILE = """\
name: p
source: {format: kafka, bootstrap: ["h:1"], topics: [plant]}
steps: [{name: parsed, parse: {schema: "x INT"}}]
sinks:
  - {name: rows, from: parsed, table: {path: lake/rows}}
  - {name: alarms, from: parsed, table: {path: lake/alarms}}
"""
PIPELINE = parse(FILE)
PLANS = {found.sink.name: found for found in plan(PIPELINE)}
FIRST, SECOND = "1:0:n", "2:0:n"
"""Fencing tokens of two runs."""
Step = Callable[[], None]


class Killed(BaseException):
    """The process ended."""


def at(end: int) -> Offsets:
    return {"plant": {"0": end}}


def entry(end: int) -> str:
    return f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(at(end))}'


class Tables:
    """The tables of the sinks: each has the batches of each query once, as those of Delta and Parquet."""

    def __init__(self) -> None:
        self._batches: set[tuple[str, int]] = set()
        self.rows: dict[str, Counter[int]] = {name: Counter() for name in PLANS}

    def write(self, sink: str, checkpoint: Checkpoint, batch: int) -> int:
        start, end = checkpoint.range(batch)
        records = range((start or at(0))["plant"]["0"], end["plant"]["0"])
        if (checkpoint.query_id(), batch) not in self._batches:
            self._batches.add((checkpoint.query_id(), batch))
            self.rows[sink].update(records)
        return len(records)


class Directory:
    """A state directory, and the runs that use it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.tables = Tables()
        self.ledger = Ledger(layout.ledger(state))
        self.checkpoints = {name: Checkpoint(layout.checkpoint(state, name)) for name in PLANS}

    def end_of(self, sink: str) -> int:
        """Return the end of the last finished batch."""
        finished = self.checkpoints[sink].position().finished
        return 0 if finished is None else parse_offsets(finished).end["plant"]["0"]

    def run_alone(self, token: str, *ends: dict[str, int]) -> None:
        """Run a query for each sink, as versions before decision 158: Spark plans and commits its batches."""
        for wanted in ends:
            for sink, checkpoint in self.checkpoints.items():
                checkpoint.create()
                position = checkpoint.position()
                if position.begun is not None:
                    self._batch(sink, position.batch, token)
                if self.end_of(sink) < wanted[sink]:
                    batch = checkpoint.position().batch
                    checkpoint.begin(batch, entry(wanted[sink]))
                    self._batch(sink, batch, token)

    def _batch(self, sink: str, batch: int, token: str) -> None:
        checkpoint = self.checkpoints[sink]
        read = self.tables.write(sink, checkpoint, batch)
        start, end = checkpoint.range(batch)
        counts, targets = BatchCounts(read, 0, 0), self._context(token).targets
        self.ledger.write(
            ledger_entry(
                PLANS[sink], checkpoint, targets, batch, start or at(0), end, read, counts, out=read, checks={}
            )
        )
        checkpoint.commit(batch)

    def run_shared(self, token: str, *ends: int) -> list[tuple[str, ...]]:
        """Run the sinks in as few queries as possible; return the sinks of the queries at the end."""
        context = self._context(token)
        groups: list[tuple[str, ...]] = []
        for number, end in enumerate((*ends, ends[-1])):
            for name, checkpoint in self.checkpoints.items():
                self.ledger.check_end(name, checkpoint)
            positions = {name: checkpoint.position() for name, checkpoint in self.checkpoints.items()}
            found = grouped(
                positions,
                {name: context.source.start(name) for name in PLANS},
                lambda behind, ahead: is_before(at(self.end_of(behind)), at(self.end_of(ahead))),
            )
            groups = [group.sinks for group in found]
            for group in found:
                path = self.state / "shared" / f"{token[0]}-{number}-{group.sinks[0]}{TRANSIENT}"
                remove_tree(path)
                query = Query(
                    [PLANS[name] for name in group.sinks],
                    [self.checkpoints[name] for name in group.sinks],
                    group,
                    path,
                    cast("Any", None),
                    context,
                    [{} for _ in group.sinks],
                )
                query.batches.__class__ = Batches
                for member in query.batches.members:
                    member.writer = cast("Any", Writer(self.tables, member.name, member.checkpoint))
                query.run(end)
        return groups

    def _context(self, token: str) -> RunContext:
        found = SimpleNamespace(token=token, begin=lambda *_: None)
        targets = Targets(PIPELINE, cast("Any", found), None, cast("Any", None), self.state)
        start = {name: layout.starts(self.state) / f"{name}.json" for name in PLANS}
        source = SimpleNamespace(
            start=lambda sink: first_json(start[sink], at(0)),
            count=lambda _sink, first, last: last["plant"]["0"] - first["plant"]["0"],
        )
        nothing = cast("Any", None)
        return RunContext(
            cast("Any", source), self.ledger, BatchBarrier(), lambda _: None, nothing, targets, cast("Any", found)
        )

    def check(self, end: int) -> None:
        """Check that each sink has each record up to ``end`` once, and that its ledger says so."""
        for sink, checkpoint in self.checkpoints.items():
            assert self.tables.rows[sink] == dict.fromkeys(range(end), 1), sink
            entries = self.ledger.entries(sink)
            assert [each.batch for each in entries] == list(range(len(entries)))
            assert [each.start for each in entries] == [at(0), *(each.end for each in entries[:-1])]
            assert (entries[-1].end, self.ledger.counts(sink).read) == (at(end), end)
            assert (checkpoint.position().begun, self.end_of(sink)) == (None, end)


class Query(SharedQuery):
    def rebuild(self) -> None:
        """There are no rows."""

    def run(self, end: int) -> None:
        """Run the batch that was begun, and one to ``end``, with the checkpoint that Spark would write."""
        prepare_shared(self.checkpoint.path, self._group.finished, self._group.begun)
        batch = self.checkpoint.position().batch
        rows = cast("Any", SimpleNamespace(sparkSession=None))
        rows.coalesce = lambda _: rows
        if self._group.begun is not None:
            self.batches(rows, batch)
            self.checkpoint.commit(batch)
            batch += 1
        before = self.checkpoint.planned(batch - 1).end if batch else at(0)
        if before["plant"]["0"] < end:
            self.checkpoint.begin(batch, entry(end))
            self.batches(rows, batch)


class Batches(SharedBatches):
    def _written(self, _rows: Any, due: Any, _numbers: Any, _errors: Any) -> Any:
        return [(member, None) for member in due]


class Writer:
    def __init__(self, tables: Tables, sink: str, checkpoint: Checkpoint) -> None:
        self._tables, self._sink, self._checkpoint = tables, sink, checkpoint

    def deliver(self, _spark: object, batch: int, _found: object) -> OnePassCounts:
        count = self._tables.write(self._sink, self._checkpoint, batch)
        return OnePassCounts(count, 0, 0, count, NO_LETTERS, {}, 0)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost here: see ``test_power_loss``."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def steps(step: Step) -> Iterator[None]:
    """Call ``step`` before each durable change that a run makes to its sinks."""

    def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(this: Any, *given: Any) -> Any:
            # Nothing depends on the checkpoint of a shared query.
            if isinstance(this, Checkpoint) and this.path.name.endswith(TRANSIENT):
                return call(this, *given)
            step()
            return call(this, *given)

        return made

    with pytest.MonkeyPatch.context() as patches:
        for kind, names in ((Checkpoint, ("begin", "commit")), (Ledger, ("write",)), (Tables, ("write",))):
            for name in names:
                patches.setattr(kind, name, stepping(getattr(kind, name)))
        yield


def killed_at(last: int | None) -> tuple[Step, list[int]]:
    """Return a step function that kills the process at the step ``last``, and the steps so far."""
    done: list[int] = []

    def step() -> None:
        if len(done) == last:
            raise Killed
        done.append(len(done))

    return step, done


APART = ({"rows": 5, "alarms": 4}, {"rows": 9, "alarms": 8})
"""Ends of the batches of queries of their own."""


def earlier(directory: Directory, token: str) -> None:
    directory.run_alone(token, *APART)


def shared(directory: Directory, token: str) -> None:
    directory.run_shared(token, 6, 9)


def finished_by_an_earlier_version(directory: Directory) -> None:
    directory.run_alone(SECOND, {"rows": 20, "alarms": 20})


def finished_shared(directory: Directory) -> None:
    assert directory.run_shared(SECOND, 20, 20) == [("rows", "alarms")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(earlier, finished_shared, id="upgrade"),
        pytest.param(shared, finished_by_an_earlier_version, id="downgrade"),
        pytest.param(shared, finished_shared, id="shared"),
    ],
)
def test_a_directory_is_continued_exactly_once_wherever_the_run_before_ended(
    tmp_path: Path, before: Callable[[Directory, str], None], after: Callable[[Directory], None]
) -> None:
    step, done = killed_at(None)
    with steps(step):
        before(Directory(tmp_path / "whole"), FIRST)
    assert len(done) == 16
    for last in range(len(done)):
        directory = Directory(tmp_path / str(last))
        with steps(killed_at(last)[0]), pytest.raises(Killed):
            before(directory, FIRST)
        after(directory)
        directory.check(20)


@pytest.mark.parametrize("first", [earlier, shared])
def test_a_run_that_has_lost_its_lease_changes_nothing(tmp_path: Path, first: Callable[[Directory, str], None]) -> None:
    """It was paused at any step, while the next run, which shares a query, has finished all batches."""
    step, done = killed_at(None)
    with steps(step):
        first(Directory(tmp_path / "whole"), FIRST)
    refused = 0
    for last in range(len(done)):
        directory, paused, resumed = Directory(tmp_path / str(last)), threading.Event(), threading.Event()
        taken = threading.get_ident()
        errors: list[BaseException] = []
        count = 0

        def pause() -> None:
            nonlocal count
            if threading.get_ident() != taken:
                if count == last:
                    paused.set()
                    assert resumed.wait(60)
                count += 1

        def old_run() -> None:
            try:
                first(directory, FIRST)
            except (StorageError, AssertionError) as error:
                errors.append(error)
            finally:
                paused.set()

        with steps(pause):
            thread = threading.Thread(target=old_run)
            thread.start()
            assert paused.wait(60)
            directory.run_shared(SECOND, 20, 20)
            tokens = token_of_each_batch(directory)
            resumed.set()
            thread.join(60)
            assert not thread.is_alive()
        directory.check(20)
        assert token_of_each_batch(directory) == tokens
        assert all(isinstance(error, StorageError) for error in errors), errors
        refused += bool(errors)
    assert refused > len(done) / 2


def token_of_each_batch(directory: Directory) -> dict[str, list[str]]:
    return {sink: [each.fencing_token for each in directory.ledger.entries(sink)] for sink in PLANS}


def test_sinks_of_kafka_share_a_query() -> None:
    assert [[found.sink.name for found in group] for group in query_groups(PIPELINE)] == [["rows", "alarms"]]


def test_a_sink_behind_is_found_near_without_reading_what_is_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is made every two seconds, in the thread that supervises all queries."""

    def refuse(*_: object) -> None:
        raise AssertionError("Kafka was asked")

    monkeypatch.setattr(KafkaLog, "__init__", refuse)
    directory = Directory(tmp_path)
    start = {"plant": {"0": 100, "1": 100}}
    for sink, end in (("rows", 50_000), ("alarms", 10_099)):
        first_json(layout.starts(tmp_path) / f"{sink}.json", start)
        found = directory.checkpoints[sink]
        found.create()
        found.begin(0, f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps({"plant": {"0": end, "1": end}})}')
        found.commit(0)
    targets = SimpleNamespace(store=SimpleNamespace(token=FIRST))
    context: Any = SimpleNamespace(ledger=directory.ledger, source=Sources(PIPELINE, tmp_path), targets=targets)
    builder = QueryBuilder(PIPELINE, cast("Any", None), tmp_path, context)
    # 79,802 offsets between them, in batches of at least 10,000.
    assert builder.is_near("alarms", "rows", times=8)
    assert not builder.is_near("alarms", "rows", times=7)
    assert not builder.is_near("rows", "alarms", times=8)
    context.ledger.write(cast("Any", large_batch("rows")))
    assert builder.is_near("alarms", "rows")


def large_batch(sink: str) -> LedgerEntry:
    return LedgerEntry(
        sink=sink, batch=0, start=at(0), end=at(80_000), read=80_000, out=80_000, dead=0, filtered=0, duplicates=0,
        late=0, late_watermark_ms=0, watermark_ms=0, fencing_token=FIRST,
    )  # fmt: skip
