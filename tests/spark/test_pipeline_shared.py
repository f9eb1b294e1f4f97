"""Sinks without state share one query: each exactly once, whatever fails and wherever a run ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import errors, shared
from penstock.pipelines.run.lease import lease_holder
from penstock.pipelines.sinks import delivery
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.pipelines.state_dir.layout import read_json
from penstock.tube.record import Record
from tests.spark.node import SEGMENT_RECORDS
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 20}}}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL"}}
  - name: halves
    map: {{compute: {{half: "n / 2"}}}}
  - name: odd
    from: parsed
    filter: n % 2 = 1
sinks:
  - name: rows
    from: parsed
    table: {{path: "{lake}/rows"}}
  - name: halved
    from: halves
    table: {{path: "{lake}/halved", format: parquet}}
  - name: seen
    from: odd
    console: {{rows: 1000}}
"""
SINKS = ("rows", "halved", "seen")
SEEN = FILE[FILE.index("  - name: seen") :]
SEEN_FIRST = FILE.removesuffix(SEEN).replace("sinks:\n", f"sinks:\n{SEEN}")
"""The console has the dead letters of all sinks."""
pytestmark = pytest.mark.timeout(600)


def record(n: int) -> Record:
    return Record(json.dumps({"n": n}).encode(), key=b"k", id=f"m{n}")


@pytest.fixture
def setup(setup_of: Callable[..., Setup]) -> Setup:
    return setup_of(FILE)


def column(table: Path, name: str) -> list[Any]:
    return sorted(value for file in files(table) for value in pq.ParquetFile(file).read([name])[name].to_pylist())


def seen(setup: Setup) -> list[int]:
    """The rows of the console sink, of the last attempt of each batch."""
    batches = {event["batch"]: event["rows"] for event in setup.events if event["event"] == "rows"}
    return sorted(json.loads(row)["n"] for rows in batches.values() for row in rows)


def check(setup: Setup, numbers: range, dead: int = 0) -> None:
    """Every sink has every record once, and the ledger agrees with log and tables."""
    assert column(setup.lake / "rows", "n") == list(numbers)
    assert column(setup.lake / "halved", "half") == [n / 2 for n in numbers]
    assert seen(setup) == [n for n in numbers if n % 2]
    assert len(setup.dead()) == dead
    for found in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (found.off, found.unknown) == ((), ())
        assert found.counts.read == len(numbers) + dead


def groups(setup: Setup) -> list[list[str]]:
    found: list[list[str]] = [event["queries"] for event in setup.events if event["event"] == "started"][-1]
    return found


def positions(setup: Setup) -> set[tuple[str | None, str | None]]:
    return {Checkpoint(layout.checkpoint(setup.state, sink)).position().key for sink in SINKS}


def test_sinks_share_a_query_and_continue_it(setup: Setup) -> None:
    setup.send(*map(record, range(30)), b"nope")
    setup.run()
    assert groups(setup) == [list(SINKS)]
    check(setup, range(30), dead=1)
    (letter,) = setup.dead()
    assert (letter["step"], letter["value"]) == ("parsed", b"nope")
    assert read_json(layout.letter_writers(setup.state))["steps"] == {"parsed": [{"sink": "rows", "start": {}}]}
    assert len(positions(setup)) == 1
    setup.send(*map(record, range(30, 50)))
    setup.run()
    assert groups(setup) == [list(SINKS)]
    check(setup, range(50), dead=1)


def last_batch(setup: Setup, sink: str) -> int:
    return max(int(path.name) for path in (layout.checkpoint(setup.state, sink) / "offsets").glob("[0-9]*"))


def undo(setup: Setup, sink: str, *, table: bool, ledger: bool, begun: bool = False) -> None:
    """Remove what the last batch of ``sink`` wrote after a certain point: its commit always."""
    batch, checkpoint = last_batch(setup, sink), layout.checkpoint(setup.state, sink)
    (checkpoint / "commits" / str(batch)).unlink()
    if ledger:
        (setup.state / "ledger" / sink / f"{batch}.json").unlink()
    if table and (setup.lake / sink).exists():
        parquet = setup.lake / sink / "_commits" / f"{sink}-{batch}.json"
        newest = max((setup.lake / sink / "_delta_log").glob("*.json"), default=parquet)
        newest.unlink()
    if begun:
        (checkpoint / "offsets" / str(batch)).unlink()


def killed_between_the_stores_of_what_the_sinks_begin(setup: Setup) -> None:
    undo(setup, "rows", table=True, ledger=True)
    for sink in ("halved", "seen"):
        undo(setup, sink, table=True, ledger=True, begun=True)


def killed_before_anything_is_written(setup: Setup) -> None:
    for sink in SINKS:
        undo(setup, sink, table=True, ledger=True)


def killed_after_the_commit_of_the_first_table(setup: Setup) -> None:
    undo(setup, "rows", table=False, ledger=True)
    for sink in ("halved", "seen"):
        undo(setup, sink, table=True, ledger=True)


def killed_after_the_ledger_entry_of_the_first_sink(setup: Setup) -> None:
    undo(setup, "rows", table=False, ledger=False)
    for sink in ("halved", "seen"):
        undo(setup, sink, table=True, ledger=True)


def killed_after_the_first_sink(setup: Setup) -> None:
    for sink in ("halved", "seen"):
        undo(setup, sink, table=True, ledger=True)


def killed_after_the_ledger_entry_of_the_last_sink(setup: Setup) -> None:
    undo(setup, "seen", table=False, ledger=False)


HALFWAY = (killed_between_the_stores_of_what_the_sinks_begin, killed_after_the_commit_of_the_first_table)
OTHERS = (
    killed_before_anything_is_written,
    killed_after_the_ledger_entry_of_the_first_sink,
    killed_after_the_first_sink,
    killed_after_the_ledger_entry_of_the_last_sink,
)


@pytest.mark.parametrize(
    "kills", [pytest.param(HALFWAY, id="halfway"), pytest.param(OTHERS, id="others", marks=pytest.mark.nightly)]
)
def test_a_run_that_was_killed_at_any_point_continues_exactly_once(
    setup: Setup, kills: Sequence[Callable[[Setup], None]]
) -> None:
    sent = 10
    setup.send(*map(record, range(sent)))
    setup.run()
    for kill in kills:
        kill(setup)
        setup.send(*map(record, range(sent, sent + 5)))
        sent += 5
        setup.run()
        assert groups(setup) == [list(SINKS)], kill.__name__
        check(setup, range(sent))
        assert len(positions(setup)) == 1


@pytest.mark.nightly
def test_a_directory_with_a_query_for_each_sink_is_continued(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version left it: checkpoints that Spark wrote, at different offsets, one with a batch begun."""
    whole = setup.pipeline
    with monkeypatch.context() as alone:
        alone.setattr(shared, "query_groups", lambda pipeline: [(found,) for found in plan(pipeline)])
        setup.send(*map(record, range(30)))
        setup.run()
        assert groups(setup) == [[sink] for sink in SINKS]
        setup.pipeline = whole.model_copy(update={"sinks": whole.sinks[1:]})
        setup.send(*map(record, range(30, 45)))
        setup.run()
    assert len(positions(setup)) == 2
    setup.pipeline = whole
    setup.forget_the_last_commit("rows")
    setup.send(*map(record, range(45, 50)))
    setup.run()
    check(setup, range(50))
    setup.send(*map(record, range(50, 60)))
    setup.run()
    assert groups(setup) == [list(SINKS)]
    check(setup, range(60))


@pytest.mark.parametrize("batches", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_sink_that_fails_leaves_the_others_alone_and_joins_them_again(
    setup_of: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """It is the one that writes the dead letters of all sinks: another one does so while it fails."""
    setup = setup_of(SEEN_FIRST)
    sinks = ["seen", "rows", "halved"]
    stop = threading.Event()
    state = {"sent": 0, "dead": 0, "failing": False, "left": 0}
    printed = delivery.DELIVERY["console"]

    def write(writer: delivery.SinkWriter, sink: Sink, batch: delivery.SinkBatch) -> int:
        if state["failing"]:
            raise UnavailableError("the console does not answer", applied=False)
        return printed.write(writer, sink, batch)

    monkeypatch.setitem(cast("dict[str, Any]", delivery.DELIVERY), "console", printed._replace(write=write))
    monkeypatch.setattr(errors, "UNAVAILABLE", errors.UNAVAILABLE._replace(limit_s=600.0))

    def send(count: int) -> None:
        setup.send(*map(record, range(state["sent"], state["sent"] + count)), b"broken %d" % state["dead"])
        state["sent"] += count
        state["dead"] += 1

    class Events(list[dict[str, Any]]):
        """Sends records while batches are finished, and stops when the sink has joined the others and all is read."""

        letters = (0, 0)

        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "batch" and event["sink"] == "rows":
                if state["failing"]:
                    # It has begun one batch with the others.
                    behind = event["batch"] - setup.ledger.counts("seen").batches
                    if behind > 0:
                        self.letters = letters_without_the_failing_batch(setup)
                    state["failing"] = behind < batches - 1
                elif event["batch"] == 2:
                    state["failing"] = True
                # The last event may be that of another sink.
                if event["batch"] < 5 + batches and not stop.is_set():
                    send(5)
            if event["event"] == "queries":
                state["left"] += event["queries"] != [sinks]
            ledgers = [setup.ledger.counts(sink).read for sink in sinks]
            if state["left"] and self.queries() == [sinks] and ledgers == [state["sent"] + state["dead"]] * 3:
                stop.set()

        def queries(self) -> list[list[str]]:
            found: list[list[str]] = [event["queries"] for event in self if "queries" in event][-1]
            return found

    events = setup.events = Events()
    send(5)
    setup.run(stop, available_now=False, progress_s=0.5)
    check(setup, range(state["sent"]), state["dead"])
    assert sorted(letter["value"] for letter in setup.dead()) == sorted(b"broken %d" % n for n in range(state["dead"]))
    found, expected = events.letters
    assert found >= expected > 3
    assert len(positions(setup)) == 1
    assert [event for event in setup.events if event["event"] == "retry" and event["sink"] != "seen"] == []
    # While it failed, the others finished their batches.
    first = next(n for n, event in enumerate(setup.events) if event["event"] == "retry")
    again = next(n for n, event in enumerate(setup.events) if n > first and is_batch(event, "seen"))
    others = [event["batch"] for event in setup.events[first:again] if is_batch(event, "rows")]
    assert others == list(range(others[0], others[-1] + 1))
    assert others[-1] >= 2 + batches


def letters_without_the_failing_batch(setup: Setup) -> tuple[int, int]:
    """The number of dead letters while the console fails, and of those in the batches of the others: all but in that
    which it has begun."""
    failing = setup.ledger.counts("seen").batches
    # Read first: another batch may be finished now.
    expected = sum(entry.dead for entry in setup.ledger.entries("rows") if entry.batch != failing)
    return len(setup.dead()), expected


def test_a_sink_whose_records_were_deleted_fails_alone(
    setup_of: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes what a failing sink needs while the others continue; the same in the next run."""
    setup = setup_of(FILE.replace("maxOffsetsPerTrigger: 20", "maxOffsetsPerTrigger: 100"))
    state = {"sent": 0, "failing": True, "deleted": False}
    printed = delivery.DELIVERY["console"]

    def write(writer: delivery.SinkWriter, sink: Sink, batch: delivery.SinkBatch) -> int:
        if state["failing"]:
            raise UnavailableError("the console does not answer", applied=False)
        return printed.write(writer, sink, batch)

    monkeypatch.setitem(cast("dict[str, Any]", delivery.DELIVERY), "console", printed._replace(write=write))

    def send(count: int) -> None:
        setup.send(*map(record, range(state["sent"], state["sent"] + count)))
        state["sent"] += count

    stop = threading.Event()

    class Events(list[dict[str, Any]]):
        """Deletes records when the others have them, and stops when these have later ones."""

        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "batch" and is_read(setup, ("rows", "halved"), state["sent"]):
                if not state["deleted"]:
                    setup.node.expire_closed_segments()
                    state["deleted"], state["failing"] = True, False
                elif self.failures():
                    stop.set()
            if event["event"] == "sinks_failed":
                send(10)

        def failures(self) -> list[dict[str, Any]]:
            return [event for event in self if event["event"] == "sinks_failed"]

    events = setup.events = Events()
    # The newest segment, which retention keeps, has a quarter of its records.
    send(SEGMENT_RECORDS + SEGMENT_RECORDS // 4)
    setup.run(stop, available_now=False, progress_s=0.2)
    (failure,) = events.failures()
    assert failure["sinks"] == ["seen"]
    what, why, hint = failure["error"].splitlines()
    assert what.startswith("sink 'seen': ")
    # The words are those of the broker if the attempt has counted the records of the batch before it reads them.
    assert "is no longer stored" in what
    assert "retention removed" in why
    assert "accept the gap" in " ".join(hint.split())
    assert events[-1]["event"] == "stopped"
    last = next(event for event in reversed(events) if event["event"] == "progress")
    assert last["sinks"]["seen"]["failing_s"] > 0 == last["sinks"]["rows"]["failing_s"]
    # An attempt may have read its records before they were deleted.
    assert setup.ledger.counts("seen").read in (0, 100)
    assert column(setup.lake / "rows", "n") == list(range(state["sent"]))

    status = lease_holder(setup.pipeline.statestore.url, setup.pipeline.name, 60.0).record
    assert status is not None
    assert (status.state, status.why) == ("stopped", failure["error"])
    setup.events = []
    setup.send(record(state["sent"]))
    # A run of existing records ends with the error when the others have them.
    with pytest.raises(PenstockError, match=r"sink 'seen': .* is no longer stored") as caught:
        setup.run()
    assert is_read(setup, ("rows", "halved"), state["sent"] + 1)
    assert "retention removed" in str(caught.value.why)


def is_read(setup: Setup, sinks: Sequence[str], count: int) -> bool:
    return all(setup.ledger.counts(sink).read == count for sink in sinks)


def is_batch(event: dict[str, Any], sink: str) -> bool:
    return bool(event["event"] == "batch" and event["sink"] == sink)
