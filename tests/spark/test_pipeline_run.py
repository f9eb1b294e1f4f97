"""A pipeline against a real tube and state store: exact counts, crashes between sink and checkpoint, stops."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError, DataLossError, PenstockError, UnavailableError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.letter_states import LetterState, letter_states, set_state, status_of
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import driver, lease
from penstock.pipelines.run import run as running
from penstock.pipelines.run.lease import lease_holder
from penstock.pipelines.run.write_back import WriteBack
from penstock.pipelines.sinks.table import files, read
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP, lease_key, run_key
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import incompatible_sinks
from penstock.pipelines.state_dir.replay import existing_replay, plan_replay
from penstock.spark.statestore.writes import write_rows
from penstock.tube.record import Record
from tests.otlp import otlp_receiver
from tests.spark.node import Node
from tests.spark.pipelines import Setup

HEAD = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 100}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "branch STRING NOT NULL, time TIMESTAMP NOT NULL, flow DOUBLE NOT NULL"}}
  - name: plausible
    filter: flow >= 0
  - name: once
    dedupe: {{within: 1 day}}
"""
HOURS = """\
  - name: once_in_time
    from: plausible
    dedupe: {{on: event}}
  - name: hours
    window:
      time: time
      duration: 1 hour
      watermark: 1 hour
      by: [branch]
      aggregates: {{n: count(*), lowest: min(flow)}}
"""
TABLE = """\
sinks:
  - name: rows
    from: once
    table: {{path: "{lake}/rows"}}
"""
ALARMS = """\
  - name: alarms
    from: hours
    statestore:
      order_by: window_start
      entries:
        - {{key: "{name}/{{branch}}/{{window_start}}", when: n = 1, value: [n, lowest]}}
"""
FILE = HEAD + HOURS + TABLE + ALARMS
ROWS = HEAD + TABLE
"""For what a second query does not change: it would need as much processor time again."""
MIDNIGHT = datetime(2022, 3, 20, tzinfo=UTC)
pytestmark = pytest.mark.timeout(600)
"""Each test starts several queries; beside other work on a small machine that takes minutes."""


def message(name: str, minute: int, flow: float = 100.0) -> Record:
    time = (MIDNIGHT + timedelta(minutes=minute)).isoformat()
    value = json.dumps({"branch": "b", "time": time, "flow": flow}).encode()
    return Record(value, key=b"k", id=name)


@pytest.fixture
def setup(setup_of: Callable[..., Setup]) -> Setup:
    return setup_of(FILE, 1)


@pytest.fixture
def rows_alone(setup_of: Callable[..., Setup]) -> Setup:
    return setup_of(ROWS, 1)


def test_every_record_ends_in_one_place_and_late_ones_are_counted(setup: Setup) -> None:
    setup.send(*(message(f"m{n}", n) for n in range(0, 600, 10)))
    low = message("low", 605, 5.0)
    low.headers.append(("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    setup.send(message("m10", 10), b"nope", low, message("minus", 606, -1.0))
    with otlp_receiver() as receiver:
        setup.run(traces=receiver.url)
        spans = receiver.wait(2)
    assert {span.name for span in spans} == {"process rows", "process alarms"}
    assert sum(span.attributes["messaging.batch.message_count"] for span in spans) == 2 * 64
    assert {link for span in spans for link in span.links} == {("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")}
    setup.send(message("late", 30), message("m20", 20), message("after", 700))
    setup.run()
    names = [f"m{n}" for n in range(0, 600, 10)]
    assert setup.rows() == sorted([*names, "low", "late", "after"])
    (letter,) = setup.dead()
    assert letter["value"] == b"nope"
    assert letter["step"] == "parsed"
    assert letter["reason"] == "the payload is not JSON"
    sums = setup.ledger.counts("rows")
    assert (sums.read, sums.out, sums.dead, sums.filtered, sums.duplicates) == (67, 63, 1, 1, 2)
    # The second copy of m20 is as late as the reading that was held up: the watermark passed both.
    windows = setup.ledger.counts("alarms")
    assert (windows.read, windows.dead, windows.filtered, windows.late) == (67, 1, 1, 2)
    status = json.loads(setup.node.get(run_key(setup.topic)) or b"")
    kinds = {name: sorted(sink["state_by_kind"]) for name, sink in status["progress"]["sinks"].items()}
    assert kinds == {"rows": ["dedupe"], "alarms": ["dedupe", "window"]}


def test_alarms_are_set_fenced_and_deleted_when_a_window_is_normal_again(setup: Setup) -> None:
    key = f"{setup.topic}/b/2022-03-20T10:00:00Z"
    setup.send(message("low", 605, 5.0))
    setup.run()
    assert setup.node.get(key) == b'{"n":1,"lowest":5.0}'
    setup.send(message("other", 606, 4.0))
    setup.run()
    assert setup.node.get(key) is None
    tokens = {entry.fencing_token for entry in setup.ledger.entries("alarms")}
    assert tokens == {event["fencing_token"] for event in setup.events if event["event"] == "started"}
    assert len(tokens) == 2


def test_a_file_that_changed_is_followed_or_refused(setup: Setup, node: Node, new_topic: Callable[..., str]) -> None:
    other = new_topic(1)
    places = {"name": setup.topic, "topic": setup.topic, "master": node.master, "broker": node.mqtt}

    def run(*changes: tuple[str, str], file: str = ROWS) -> None:
        text = file.format(lake=setup.lake, **places)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        setup.pipeline = loader.parse(text, name="p.yaml")
        setup.run()

    setup.send(*(message(f"m{n}", n) for n in range(3)))
    run(file=FILE)
    # Another topic is read from its first record on, and counted from there.
    node.append(other, [(0, message(f"o{n}", n)) for n in range(2)])
    run((f'["{setup.topic}"]', f'["{setup.topic}", "{other}"]'))
    assert setup.rows() == ["m0", "m1", "m2", "o0", "o1"]
    # What was taken out and is put back continues where it ended.
    setup.send(message("m3", 3))
    run()
    assert setup.rows() == ["m0", "m1", "m2", "m3", "o0", "o1"]
    for account in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (account.off, account.unknown) == ((), ())
    # Nobody could read a table with two types in one column.
    with pytest.raises(ConfigError, match=r"column 'flow' is FLOAT now, in '.*rows' it is DOUBLE"):
        run(("flow DOUBLE", "flow FLOAT"))
    setup.send(message("m4", 4))
    table = TABLE.format(lake=setup.lake)
    changed = (table, "sinks:\n"), ("flow DOUBLE", "flow FLOAT")
    with pytest.raises(ConfigError, match=r"its window's aggregate min\(flow\) changed") as raised:
        run(*changed, file=FILE)
    assert "was: DOUBLE; is: FLOAT" in str(raised.value)
    # Types that the file does not determine are compared by Spark.
    layout.shape(setup.state, "alarms").unlink()
    with pytest.raises(ConfigError, match="state of its dedupe, windows and join has columns of other") as raised:
        run(*changed, file=FILE)
    assert "give the sink a new name" in str(raised.value)


STATE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING NOT NULL, time TIMESTAMP NOT NULL, v INT"}}
  - name: hours
    window: {{time: time, duration: 1 hour, watermark: 1 hour, by: [place], aggregates: {{found: AGGREGATE}}}}
sinks:
  - {{name: seen, console: {{}}}}
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("aggregate", "old", "new"),
    [
        ("max(v)", "INT", "BIGINT"),
        ("min(v)", "DOUBLE", "FLOAT"),
        ("sum(v)", "INT", "BIGINT"),
        ("sum(v)", "INT", "DOUBLE"),
        ("avg(v)", "INT", "DOUBLE"),
        ("count(v)", "INT", "STRING"),
    ],
)
def test_spark_refuses_the_types_that_the_plan_refuses(
    setup_of: Callable[..., Setup], aggregate: str, old: str, new: str
) -> None:
    setup = setup_of(STATE.replace("AGGREGATE", aggregate).replace("v INT", f"v {old}"), 1)
    if changed_type(setup, old, new):
        with pytest.raises(ConfigError, match="state of its dedupe, windows and join has columns of other types"):
            setup.run()
    else:
        setup.run()
        assert setup.ledger.counts("seen").read == 2


@pytest.mark.nightly
def test_the_plan_refuses_a_type_with_which_spark_misreads_the_state(setup_of: Callable[..., Setup]) -> None:
    """Spark averages small decimals as integers, so that the state has the same columns as with another type."""
    setup = setup_of(STATE.replace("AGGREGATE", "avg(v)"), 1)
    assert changed_type(setup, "INT", "DECIMAL(9,2)")
    setup.run()
    *_, rows = [event["rows"] for event in setup.events if event["event"] == "rows"]
    assert [json.loads(row)["found"] for row in rows] == [0.505]  # of 1 and 1


def changed_type(setup: Setup, old: str, new: str) -> bool:
    """Run with the type ``old``, change it to ``new`` and forget the old one; return whether the plan refuses it."""
    value = b'{"place": "p", "time": "2022-03-20T10:00:00Z", "v": 1}'
    setup.send(Record(value, id="m0"))
    setup.run()
    setup.pipeline = loader.parse(setup.text.replace(f"v {old}", f"v {new}"), name="p.yaml")
    is_refused = bool(incompatible_sinks(setup.pipeline, setup.state))
    layout.shape(setup.state, "seen").unlink()
    setup.send(Record(value, id="m1"))
    return is_refused


@pytest.mark.nightly
def test_a_crash_between_sink_and_checkpoint_doubles_nothing(setup: Setup) -> None:
    setup.send(*(message(f"m{n}", n) for n in range(50)), b"nope")
    setup.run()
    before = setup.rows(), setup.dead(), setup.ledger.counts("rows"), setup.ledger.counts("alarms").read
    for sink in ("rows", "alarms"):
        setup.forget_the_last_commit(sink)
    setup.run()
    assert (setup.rows(), setup.dead(), setup.ledger.counts("rows"), setup.ledger.counts("alarms").read) == before


@pytest.mark.nightly
def test_a_crash_before_the_commit_log_overwrites_the_batch(setup: Setup, spark: SparkSession) -> None:
    given = setup.pipeline.model_dump(by_alias=True)
    given["sinks"][0]["table"]["format"] = "parquet"
    setup.pipeline = Pipeline.model_validate(given)
    setup.send(*(message(f"m{n}", n) for n in range(50)))
    setup.run()
    before = setup.rows()
    table = setup.lake / "rows"
    batch = next(e.batch for e in setup.ledger.entries("rows") if e.out)
    # Batches after it are empty, so that this is the first one with rows to be repeated.
    (table / "_commits" / f"rows-{batch}.json").unlink()
    (table / "writer=rows" / f"batch={batch}" / "part-half.parquet").write_bytes(b"PAR1")
    while (last := setup.forget_the_last_commit("rows")) > batch:
        offsets = setup.state / "checkpoints" / "rows" / "offsets"
        (offsets / str(last)).unlink()
        (offsets / f".{last}.crc").unlink(missing_ok=True)
    setup.run()
    assert setup.rows() == before
    assert read(spark, table).count() == 50


def test_records_that_the_dedupe_leaves_out_are_a_loss(rows_alone: Setup, new_topic: Callable[..., str]) -> None:
    setup, two = rows_alone, new_topic(2)
    short = setup.pipeline.model_dump(by_alias=True)
    short["source"] |= {"topics": [two], "options": {"maxOffsetsPerTrigger": 20}}
    short["steps"][2]["dedupe"]["within"] = "1 millisecond"
    setup.pipeline = Pipeline.model_validate(short)
    for partition in (0, 1):
        messages = [message(f"p{partition}-{n}", n) for n in range(50)]
        setup.node.append(two, [(partition, m) for m in messages])
    with pytest.raises(DataLossError, match="sink 'rows'"):
        setup.run()


@pytest.mark.nightly
def test_copies_are_dropped_over_a_restart(setup: Setup) -> None:
    setup.send(message("a", 1), message("b", 2))
    setup.run()
    setup.send(message("b", 2), message("c", 3))
    setup.run()
    assert setup.rows() == ["a", "b", "c"]
    assert setup.ledger.counts("rows").duplicates == 1


def test_a_topic_that_is_created_again_is_not_continued_silently(rows_alone: Setup) -> None:
    """Its log is longer than the offset in the checkpoint, which is of another one."""
    setup = rows_alone
    setup.send(*(message(f"a{n}", n) for n in range(3)))
    setup.run()
    setup.node.delete_topic(setup.topic)
    setup.node.create_topic(setup.topic, 1)
    setup.send(*(message(f"b{n}", n) for n in range(5)))
    with pytest.raises(PenstockError, match=r"offset 84 belongs to a log that was replaced") as caught:
        setup.run()
    assert "deleted and created again" in str(caught.value.why)
    assert len(setup.rows()) == 3

    accepted = setup.pipeline.model_dump(by_alias=True)
    accepted["source"]["options"]["failOnDataLoss"] = "false"
    setup.pipeline = Pipeline.model_validate(accepted)
    setup.run()
    assert sorted(setup.rows()) == sorted([*(f"a{n}" for n in range(3)), *(f"b{n}" for n in range(5))])
    (found,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert found.off == ()
    assert "was replaced" in found.unknown[0]


def test_an_interrupted_run_ends_between_batches(setup: Setup) -> None:
    setup.send(*(message(f"m{n}", n) for n in range(150)))
    stop = threading.Event()

    class StopAfterFirst(list[dict[str, Any]]):
        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "batch":
                stop.set()

    setup.events = StopAfterFirst()
    setup.run(stop, available_now=False)
    assert [e["event"] for e in setup.events if e["event"].startswith("stop")] == ["stopping", "stopped"]
    assert setup.events[-1]["event"] == "stopped"
    for sink in ("rows", "alarms"):
        entries = setup.ledger.entries(sink)
        commits = setup.state / "checkpoints" / sink / "commits"
        assert all((commits / str(entry.batch)).exists() for entry in entries)
    setup.run()
    assert len(setup.rows()) == len(set(setup.rows())) == 150
    assert setup.ledger.counts("alarms").read == 150


def test_a_run_is_stopped_remotely_and_a_second_run_learns_the_lease_holder(rows_alone: Setup) -> None:
    setup = rows_alone
    setup.send(*(message(f"m{n}", n) for n in range(150)))
    name, broker = setup.pipeline.name, setup.node.mqtt
    results: list[lease.StopResult] = []
    refused: list[str] = []

    def elsewhere() -> None:
        second = Setup(setup.node, setup.topic, setup.lake / "second", ROWS)
        try:
            second.run(wait_s=0.0)
        except UnavailableError as error:
            refused.append(str(error))
        results.append(lease.stop_run(broker, name, timeout_s=60.0, answer_s=10.0, on_requested=lambda _: None))

    class ElsewhereAfterFirst(list[dict[str, Any]]):
        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "batch" and event["sink"] == "rows" and event["batch"] == 1:
                thread.start()

    thread = threading.Thread(target=elsewhere)
    setup.events = ElsewhereAfterFirst()
    setup.run(available_now=False, progress_s=0.01)
    thread.join()
    run = setup.events[0]["run"]
    assert f"run {run} (host " in refused[0]
    assert results == [lease.StopResult(run, clean=True)]
    assert setup.events[-1]["event"] == "stopped"
    progress = [event["sinks"] for event in setup.events if event["event"] == "progress"]
    last = progress[-1]["rows"]
    assert (last["read"], last["lag_records"], last["waiting_records"]) == (150, 0, 0)
    assert last["batch_s"] > 0
    assert last["state_rows"] == 150
    # Only RocksDB has files; the checkpoint says that it keeps this query's state.
    assert last["state_disk_bytes"] is not None
    entries = (setup.state / "checkpoints/rows/offsets").glob("[0-9]*")
    assert all(".RocksDBStateStoreProvider" in entry.read_text() for entry in entries)
    holder = lease_holder(broker, name, 10.0)
    assert holder.run is None
    assert holder.record is not None
    assert (holder.record.run, holder.record.state, holder.record.progress["sinks"]["rows"]["out"]) == (
        run,
        lease.STOPPED,
        150,
    )


def test_a_stretch_is_replayed_twice_beside_the_run_with_equal_rows(setup: Setup, tmp_path: Path) -> None:
    setup.send(*(message(f"m{n}", n) for n in range(40)), message("m3", 3), b"nope")
    (first,) = setup.node.append(setup.topic, [(0, message("begin", 41))])
    setup.send(*(message(f"n{n}", n) for n in range(150)), message("n3", 3), b"nope")
    (last,) = setup.node.append(setup.topic, [(0, message("end", 42))])
    live = WriteBack(setup.node.mqtt, setup.pipeline.name)
    live.connect()
    try:
        # The run of the pipeline holds its lease meanwhile.
        live.acquire(10.0)
        tables = []
        for name in ("a", "b"):
            begin, end = (json.dumps({setup.topic: {"1:0": position}}) for position in (first, last))
            replay = plan_replay(setup.pipeline, tmp_path / name, begin, end, live=False)
            running.run(
                replay.pipeline,
                state=replay.state,
                options=running.RunOptions(available_now=True, span=replay.span, lease=replay.lease, wait_s=0.0),
                emit=setup.events.append,
                stop=threading.Event(),
            )
            again, state, _ = existing_replay(setup.pipeline, tmp_path / name)
            (account,) = reconcile(again, state, source_count(again, state))
            assert (account.off, account.unknown) == ((), ())
            assert (account.counts.read, account.counts.out, account.counts.dead, account.counts.duplicates) == (
                153,
                151,
                1,
                1,
            )
            path = tmp_path / name / "tables" / "rows"
            rows = [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]
            tables.append(sorted(rows, key=lambda row: (row["_topic"], row["_partition"], row["_offset"])))
        assert tables[0] == tables[1]
        assert [row["_id"] for row in tables[0]] == ["begin", *(f"n{n}" for n in range(150))]
        assert [e["sinks"] for e in setup.events if e["event"] == "started"] == [["rows"], ["rows"]]
        assert setup.rows() == []
    finally:
        live.close()


def test_a_table_of_another_checkpoint_is_refused(rows_alone: Setup, tmp_path: Path) -> None:
    setup = rows_alone
    setup.send(message("a", 1))
    setup.run()
    setup.state = tmp_path / "other-state"
    with pytest.raises(PenstockError, match="wrote with another checkpoint"):
        setup.run()


def test_the_books_balance_and_a_dead_letter_is_driven_through_again(rows_alone: Setup) -> None:
    setup = rows_alone
    setup.send(message("a", 1), Record(b'{"branch": "b"', key=b"k", id="broken", headers=[("site", "north")]))
    setup.run()
    assert [x["id"] for x in setup.dead()] == ["broken"]
    (letter,) = dead_letters.letters(setup.lake / "dead")
    assert asyncio.run(dead_letters.redrive(setup.lake / "dead", [letter], setup.pipeline, setup.state)) == 1
    assert dead_letters.redriven(setup.lake / "dead") == {letter.coordinates}
    setup.run()
    # It failed once more, and is a letter of its own with the same id.
    again = [x for x in dead_letters.letters(setup.lake / "dead") if x.coordinates != letter.coordinates]
    assert [(x.id, x.key, x.value) for x in again] == [("broken", b"k", b'{"branch": "b"')]
    marks = {REDRIVE: b"1", REDRIVE_STEP: b"parsed"}
    assert dict(again[0].headers) == {"id": b"broken", "site": b"north", **marks}
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    assert (account.counts.read, account.counts.out, account.counts.dead) == (3, 1, 2)


@pytest.mark.nightly
def test_a_corrected_record_is_written_once_by_the_run_and_by_a_replay(setup: Setup, tmp_path: Path) -> None:
    setup.send(message("a", 1), Record(b'{"branch": "b"', id="broken"))
    setup.run()
    dead = setup.lake / "dead"
    (letter,) = dead_letters.letters(dead)
    set_state(dead, [letter], LetterState.CORRECTED, message("broken", 2).value)
    assert asyncio.run(dead_letters.redrive(dead, [letter], setup.pipeline, setup.state)) == 1
    setup.run()
    assert setup.rows() == ["a", "broken"]
    assert status_of(letter_states(dead), letter).state is LetterState.REDRIVEN
    replay = plan_replay(setup.pipeline, tmp_path / "replay", None, None, live=False)
    options = running.RunOptions(
        available_now=True, span=replay.span, lease=replay.lease, redriven=dead_letters.redriven_copies(dead)
    )
    running.run(replay.pipeline, state=replay.state, options=options, emit=setup.events.append, stop=threading.Event())
    again, state, _ = existing_replay(setup.pipeline, tmp_path / "replay")
    (account,) = reconcile(again, state, source_count(again, state))
    assert (account.off, account.unknown) == ((), ())
    # The broken record is left out, since the replay reads its corrected copy.
    sums = account.counts
    assert (sums.read, sums.out, sums.dead, sums.filtered) == (3, 2, 0, 1)


def test_an_error_in_a_batch_ends_the_run_with_its_own_words(
    rows_alone: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.pipelines.sinks.delta import DeltaWriter

    def fail(*_: object) -> int:
        raise PenstockError("the disk is full", hint="make room")

    monkeypatch.setattr(DeltaWriter, "commit", fail)
    rows_alone.send(message("a", 1))
    with pytest.raises(PenstockError, match=r"sink 'rows': the disk is full"):
        rows_alone.run()


def write(run: WriteBack, *changes: tuple[str, str | None]) -> int:
    keys, values = zip(*changes, strict=True)
    rows = {"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.string())}
    return write_rows(run.target("sink", 0), [pa.RecordBatch.from_pydict(rows)], 0)


def test_a_second_run_waits_and_the_first_is_fenced_off_once_it_took_over(node: Node) -> None:
    first, second = WriteBack(node.mqtt, "fenced"), WriteBack(node.mqtt, "fenced")
    third = WriteBack(node.mqtt, "fenced")
    try:
        for store in (first, second, third):
            store.connect()
        first.acquire(10.0)
        with pytest.raises(UnavailableError, match="was not acquired"):
            second.acquire(0.5)
        assert write(first, ("fenced/a", "1"), ("fenced/a", None), ("fenced/b", "1")) == 3
        assert node.get("fenced/b") == b"1"
        # As if it had expired while the first was paused.
        node.delete(lease_key("fenced"))
        third.acquire(10.0)
        assert third.token > first.token
        write(third, ("fenced/b", "3"))
        holder = lease_holder(node.mqtt, "fenced", 10.0)
        assert (holder.run, holder.left_ms is not None) == (third.run_id, True)
        # A prefix fences keys that nobody has written, too.
        assert third.fence(["fenced/own/"]) == ["fenced/own/"]
        old = "does not hold its lease"
        with pytest.raises(PenstockError, match=old):
            write(first, ("fenced/own/y", "late"))
        assert node.get("fenced/own/y") is None
        write(third, ("fenced/own/y", "3"))
        with pytest.raises(PenstockError, match=old):
            write(first, ("fenced/b", "late"))
        assert node.get("fenced/b") == b"3"
        assert first.lost.wait(60)
    finally:
        for store in (first, second, third):
            store.close()


def test_a_missing_topic_is_reported_before_spark_starts(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "session", None)
    text = FILE.format(name="early", topic="nowhere", master=node.master, broker=node.mqtt, lake=tmp_path)
    with pytest.raises(ConfigError, match="topic 'nowhere' does not exist"):
        running.run(
            loader.parse(text, name="p.yaml", environment={}),
            state=tmp_path / "state",
            emit=lambda _: None,
            stop=threading.Event(),
        )
